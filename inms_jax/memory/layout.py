"""Where a context is cut into blocks, and under which scope each block falls. Pure arithmetic on spans.

A page never mixes tiers: blocks end where the *effective* tier changes and at the end of each published span whose
effective tier is not PRIVATE; everything private is one stream that fills its blocks. The effective scope of a token
is the join of its own scope and all before it, since KV is a function of all of them. Knows nothing of pages or keys.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from inms_jax.memory.tier import Scope, Tier, join


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens as the layout sees it."""

    length: int
    scope: Scope
    published: bool
    joins: bool = False
    """Narrows the scope of what follows even without a token here: KV after it depends on text of its scope."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Blocks [starts[i], ends[i]) of a context; `closed` blocks can take no further token."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    closed: tuple[bool, ...]
    scopes: tuple[Scope, ...]
    runs: tuple[tuple[int, Scope], ...]
    start_array: Int32[np.ndarray, " M"]

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else 0

    def block_at(self, position: int) -> int:
        """The block that holds `position`; the number of blocks when it lies past the end."""
        if position >= self.length:
            return len(self.starts)
        return bisect_right(self.starts, position) - 1

    def blocks_before(self, position: int) -> int:
        """How many blocks hold a token before `position`."""
        return self.block_at(position - 1) + 1 if position > 0 else 0


def effective_scope(before: Scope | None, own: Scope) -> Scope:
    """The scope of KV computed from text of `before` and then text of `own`.

    Within one tenant and group a later private lineage takes over from an earlier one: that is what a fork does.
    Whether the reader may have both in its context is checked where contexts come in.
    """
    if before is None:
        return own
    private = before.tier is Tier.PRIVATE and own.tier is Tier.PRIVATE
    if private and (before.tenant, before.group) == (own.tenant, own.group):
        return own
    return join(before, own)


def lay_out(pieces: Sequence[Piece], block_size: int) -> Layout:
    """Cut a context into blocks.

    Raises ValueError when two scopes of the context have no common reader.
    """
    starts: list[int] = []
    ends: list[int] = []
    closed: list[bool] = []
    scopes: list[Scope] = []
    runs: list[tuple[int, Scope]] = []
    position = 0
    scope: Scope | None = None
    for piece in pieces:
        if piece.length == 0 and not piece.joins:
            continue
        after = effective_scope(scope, piece.scope)
        if scope is not None and closed and after.tier is not scope.tier:
            closed[-1] = True
        scope = after
        if piece.length == 0:
            continue
        end = position + piece.length
        if closed and not closed[-1]:
            position = ends[-1] = min(starts[-1] + block_size, end)
            closed[-1] = position - starts[-1] == block_size
            scopes[-1] = scope
        while position < end:
            starts.append(position)
            position = min(position + block_size, end)
            ends.append(position)
            closed.append(position - starts[-1] == block_size)
            scopes.append(scope)
        if runs and runs[-1][1] == scope:
            runs[-1] = (end, scope)
        else:
            runs.append((end, scope))
        if piece.published and scope.tier is not Tier.PRIVATE:
            closed[-1] = True
    return Layout(
        starts=tuple(starts),
        ends=tuple(ends),
        closed=tuple(closed),
        scopes=tuple(scopes),
        runs=tuple(runs),
        start_array=np.array(starts, np.int32),
    )


def displaced(pieces: Sequence[Piece], layout: Layout) -> tuple[tuple[int, int], ...]:
    """Where published text stands behind text of a narrower tier: [start, end) of each such piece."""
    found: list[tuple[int, int]] = []
    start = 0
    for piece in pieces:
        end = start + piece.length
        if piece.published and piece.length and layout.scopes[layout.block_at(start)].tier > piece.scope.tier:
            found.append((start, end))
        start = end
    return tuple(found)


def common_scope_prefix(a: Layout, b: Layout) -> int:
    """How many tokens from the start have the same effective scope in both."""
    common = 0
    for (end_a, scope_a), (end_b, scope_b) in zip(a.runs, b.runs, strict=False):
        if scope_a != scope_b:
            break
        common = min(end_a, end_b)
        if end_a != end_b:
            break
    return common
