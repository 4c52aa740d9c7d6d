"""Fragments: shared text that a reader takes from where it was computed, directly after its root.

The first `link` tokens of a fragment are the reader's own, computed in its true context, and so are the ranges that are
*repaired*. The rest, in one or several *bodies*, is read from the pages of the *canonical* context (root, then the
fragment alone), whatever stands before it in the reader's. So a reader's own tokens are its context without the bodies,
and all else of the memory works on those. Pure arithmetic on spans and layouts; knows nothing of references or room.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from inms_jax.errors import InvalidRequestError, VisibilityError
from inms_jax.memory.fingerprint import encode
from inms_jax.memory.index import Node, PrefixIndex
from inms_jax.memory.layout import Layout, Piece, lay_out
from inms_jax.memory.plan import Row, Span
from inms_jax.memory.tier import Tier, can_read


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A body of one fragment in one context: `nodes` are the blocks that it is read from, in order.

    at: own tokens before the body. length: tokens of the body. position: where its first token stands in the context.
    shift: that, minus where this token stands in the canonical context. key: what KV after the body depends on.
    """

    at: int
    length: int
    position: int
    shift: int
    nodes: tuple[Node, ...]
    begin: Int32[np.ndarray, " M"]
    end: Int32[np.ndarray, " M"]
    stored: Int32[np.ndarray, " M"]
    key: bytes
    canonical: tuple[Span, ...]


def canonical_context(span: Span) -> tuple[Span, ...]:
    """Root and fragment: the context in which the body of a fragment is computed, once for all readers."""
    assert span.root is not None
    return (*span.root, span.in_place)


def check_fragment(span: Span) -> None:
    """Raise unless the fragment is public, longer than its link, and everything under it may be read with it."""
    label = "a fragment" if span.name is None else f"fragment {span.name!r}"
    if span.scope.tier is Tier.PRIVATE or not span.published:
        raise VisibilityError(f"{label} belongs to {span.scope}: only published text has a form that others may read.")
    for part in span.root or ():
        if part.root is not None or not part.published or not can_read(span.scope, part.scope):
            raise VisibilityError(f"{label} of {span.scope} cannot stand after a root that belongs to {part.scope}.")
    if not 0 <= span.link < len(span.array):
        raise InvalidRequestError(
            f"{label} has {len(span.array)} tokens and {span.link} link tokens: 0 to {len(span.array) - 1} are "
            "possible. A fragment that is computed in place entirely is an ordinary span."
        )
    done = span.link
    for start, end in span.repaired:
        if not done <= start < end <= len(span.array):
            raise InvalidRequestError(
                f"{label} has {len(span.array)} tokens and {span.link} link tokens: it cannot be repaired from {start} "
                f"to {end}. Ranges lie behind the link, in order, and do not overlap."
            )
        done = end
    if all(in_place for _, _, in_place in span.runs()):
        raise InvalidRequestError(f"{label} is repaired from end to end: as an ordinary span it costs no more.")


@dataclass(frozen=True, slots=True, eq=False)
class OwnText:
    """A context without the bodies of its fragments: `pieces` and `tokens` of what the reader computes itself."""

    pieces: tuple[Piece, ...]
    tokens: np.ndarray
    bodies: tuple[Body, ...]


def take_apart(context: Sequence[Span], index: PrefixIndex, block_size: int, *, caching: bool) -> OwnText:
    """Part a context into own text and bodies. A fragment that cannot have keys is computed in place."""
    pieces: list[Piece] = []
    arrays: list[np.ndarray] = []
    bodies: list[Body] = []
    own = position = 0
    for span in context:
        canonical = _canonical(span, index, block_size) if span.root is not None and caching else None
        if canonical is None:
            pieces.append(Piece(len(span.array), span.scope, span.published))
            arrays.append(span.array)
            own += len(span.array)
        else:
            for start, end, in_place in span.runs():
                if in_place:
                    pieces.append(Piece(end - start, span.scope, False, joins=True))
                    arrays.append(span.array[start:end])
                    own += end - start
                else:
                    bodies.append(_body(canonical, start, end, at=own, position=position + start))
        position += len(span.array)
    return OwnText(tuple(pieces), np.concatenate(arrays) if arrays else np.zeros(0, np.int32), tuple(bodies))


@dataclass(frozen=True, slots=True, eq=False)
class _Canonical:
    """A canonical context in blocks; `start` is where its fragment begins."""

    context: tuple[Span, ...]
    layout: Layout
    nodes: tuple[Node, ...]
    start: int


def _canonical(span: Span, index: PrefixIndex, block_size: int) -> _Canonical | None:
    """None when a block of it cannot be found by a key, because of a collision."""
    context = canonical_context(span)
    layout = lay_out([Piece(len(part.array), part.scope, True) for part in context], block_size)
    found = chain(layout, np.concatenate([part.array for part in context]), layout.length, index)
    nodes = tuple(node for node in found if node is not None)
    return _Canonical(context, layout, nodes, layout.length - len(span.array)) if len(nodes) == len(found) else None


def _body(canonical: _Canonical, start: int, end: int, *, at: int, position: int) -> Body:
    """The tokens from `start` to `end` of a fragment."""
    layout = canonical.layout
    first_token, past = canonical.start + start, canonical.start + end
    blocks = slice(layout.block_at(first_token), layout.blocks_before(past))
    starts = layout.start_array[blocks]
    nodes = canonical.nodes[blocks]
    return Body(
        at=at,
        length=end - start,
        position=position,
        shift=position - first_token,
        nodes=nodes,
        begin=np.maximum(np.int32(first_token) - starts, np.int32(0)).astype(np.int32),
        end=np.minimum(np.array(layout.ends[blocks], np.int32), np.int32(past)) - starts,
        stored=starts,
        key=encode(("body", nodes[-1].digest, start, end)),
        canonical=canonical.context,
    )


def chain(
    layout: Layout, tokens: np.ndarray, length: int, index: PrefixIndex, bodies: Sequence[Body] = ()
) -> list[Node | None]:
    """The nodes of the complete blocks among the first `length` own tokens; None from a collision on."""
    nodes: list[Node | None] = []
    data = memoryview(tokens[:length].tobytes())
    parent: Node | None = None
    for start, end, closed, owner in zip(layout.starts, layout.ends, layout.closed, layout.scopes, strict=True):
        if end > length or not closed:
            break
        if start == 0 or parent is not None:
            parent = index.intern(parent, owner, bytes(data[4 * start : 4 * end]), *between(bodies, start, end))
        nodes.append(parent)
    return nodes


def between(bodies: Sequence[Body], start: int, end: int) -> tuple[bytes, tuple[Node, ...]]:
    """What the key of block [start, end) says of bodies that stand directly before one of its tokens; their nodes."""
    if not bodies:
        return b"", ()
    inside = [body for body in bodies if start <= body.at < end]
    key = encode([part for body in inside for part in (body.at - start, body.key)])
    return key, tuple(body.nodes[-1] for body in inside)


def same_until(a: Sequence[Body], b: Sequence[Body]) -> int | None:
    """Own tokens before the first body in which two contexts differ; None when they have the same bodies."""
    for one, other in zip(a, b, strict=False):
        if (one.at, one.key) != (other.at, other.key):
            return min(one.at, other.at)
    left = (*a[len(b) :], *b[len(a) :])
    return left[0].at if left else None


def positions(bodies: Sequence[Body], own: np.ndarray) -> np.ndarray:
    """Where own tokens, given by number, stand in the whole context."""
    placed = own.copy()
    for body in bodies:
        placed[own >= body.at] += body.length
    return placed


def own_length(bodies: Sequence[Body], length: int) -> int:
    """How many of the first `length` tokens of the whole context are own ones."""
    return length - sum(min(body.length, max(0, length - body.position)) for body in bodies)


def row_with_bodies(
    layout: Layout, pages: Sequence[int], bodies: Sequence[Body], body_pages: Sequence[Sequence[int]], used: int
) -> Row:
    """The page table line of the first `used` own tokens and the bodies before them, in the order of the context.

    A page of own tokens with a body in its middle stands in the line twice, before and after it.
    """
    entries: list[tuple[int, int, int, int, int]] = []
    offset, ahead = 0, 0
    for block in range(layout.blocks_before(used)):
        start, end = layout.starts[block], min(layout.ends[block], used)
        low = start
        while ahead < len(bodies) and bodies[ahead].at < end:
            body = bodies[ahead]
            if body.at > low:
                entries.append((pages[block], low - start, body.at - start, start + offset, 0))
            columns = zip(body_pages[ahead], body.begin.tolist(), body.end.tolist(), body.stored.tolist(), strict=True)
            entries += [(page, first, last, stored, body.shift) for page, first, last, stored in columns]
            low, offset, ahead = body.at, offset + body.length, ahead + 1
        entries.append((pages[block], low - start, end - start, start + offset, 0))
    table = np.array(entries, np.int32).reshape(-1, 5).T
    moved = bool(table[4].any())
    page, begin, end_, position, shift = (np.ascontiguousarray(column) for column in table)
    return Row(page, begin, end_, position, shift if moved else None)


def first_shifted(bodies: Sequence[Body]) -> int | None:
    """Own tokens before the first body that is read at another position than it was written at."""
    return next((body.at for body in bodies if body.shift), None)
