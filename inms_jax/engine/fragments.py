"""Which shared texts of a context are read as fragments, after which root, and why.

A decision follows from what was declared alone: modes, scopes, lengths, readers expected. It never looks at what is
cached or who else is there, or an agent's answers would depend on others. Knows nothing of pages.
"""

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope, Tier, can_read


class Mode(enum.StrEnum):
    """How a published text enters a context.

    PREFIX: computed in place and exact; at the head it is shared. FRAGMENT: away from the head it may be read from
    where it was computed once, directly after its root. DENSE: always computed in place, and never part of a root.
    """

    PREFIX = "prefix"
    FRAGMENT = "fragment"
    DENSE = "dense"


class Reason(enum.StrEnum):
    """Why a segment is, or is not, read as a fragment."""

    PLACED = "placed"
    PLACED_AFTER_BOS = "no_root"
    AT_ROOT = "at_root"
    TOO_SHORT = "too_short"
    FEW_READERS = "few_readers"
    LAST = "last"
    NO_BOS = "no_bos"
    CACHING_OFF = "disabled"
    PREFIX = "prefix"
    DENSE = "dense"
    PRIVATE = "private"

    @property
    def placed(self) -> bool:
        return self in (Reason.PLACED, Reason.PLACED_AFTER_BOS)


Choose = Callable[[Sequence[Span], Span, Sequence[Span], int], tuple[tuple[int, int], ...]]
"""From what stands before a fragment, the fragment, its root and a number of blocks to ranges of its tokens."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides besides the context.

    link_tokens: computed in place at the start of each fragment. repair_blocks: of each, computed in place too, chosen
    by `choose`. bos: what a fragment stands after when it has no root; None where the model has no such token, or where
    its quality gate says no.
    """

    block_size: int
    link_tokens: int
    bos: int | None
    caching: bool = True
    repair_blocks: int = 0
    choose: "Choose | None" = None


@dataclass(frozen=True, slots=True)
class Part:
    """One segment of a context: its tokens, how it is to enter, and the root declared for its scope.

    link_tokens, repair_blocks: of its own; None takes those of the rules.
    """

    span: Span
    mode: Mode = Mode.PREFIX
    readers: int = 2
    root: tuple[Span, ...] = ()
    link_tokens: int | None = None
    repair_blocks: int | None = None

    def in_place(self, rules: Rules) -> tuple[int, int]:
        """Link tokens and repaired blocks of this segment as a fragment."""
        link = rules.link_tokens if self.link_tokens is None else self.link_tokens
        return link, rules.repair_blocks if self.repair_blocks is None else self.repair_blocks


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one segment, for `agent.explain()` and the statistics."""

    name: str | None
    tier: Tier
    tokens: int
    mode: Mode
    reason: Reason
    root_tokens: int = 0
    link_tokens: int = 0
    repaired_tokens: int = 0


def decide(length: int, readers: int, rules: Rules, own: int | None = None) -> Reason:
    """Whether a fragment of `length` tokens with so many readers is worth a canonical form of its own.

    own: the tokens of it that each reader computes in place, by default the link tokens of the rules.
    """
    block, own = rules.block_size, rules.link_tokens if own is None else own
    if not rules.caching:
        return Reason.CACHING_OFF
    if readers < 2:
        return Reason.FEW_READERS
    # The canonical form takes whole pages, which is never less than the tokens it costs to compute.
    stored = -(-length // block) * block
    return Reason.PLACED if own < length and stored + readers * own <= readers * length else Reason.TOO_SHORT


def place(parts: Sequence[Part], rules: Rules) -> tuple[list[Span], list[Decision]]:
    """The spans of a context, fragments with their roots, and one decision for each."""
    head: list[Span] = []
    head_ended = False
    spans: list[Span] = []
    decisions: list[Decision] = []
    for number, part in enumerate(parts):
        span = part.span
        root: tuple[Span, ...] = ()
        link, repair = part.in_place(rules)
        reason = _reason_in_place(part)
        if part.mode is Mode.FRAGMENT and reason is None:
            visible = _visible(part.span.scope, head)
            root, reason = _root(part, visible, rules)
            if number == len(visible):
                reason = Reason.AT_ROOT
            elif number == len(parts) - 1:
                reason = Reason.LAST
            elif reason.placed:
                worth = decide(len(span.array), part.readers, rules, link + repair * rules.block_size)
                reason = reason if worth.placed else worth
        assert reason is not None
        head_ended = head_ended or part.mode is not Mode.PREFIX
        if not head_ended:
            head.append(span)
        decision = Decision(span.name, span.scope.tier, len(span.array), part.mode, reason)
        if reason.placed:
            repaired = _repaired(spans, span, root, link, repair, rules)
            span = span.after(root, link, repaired)
            decision = replace(
                decision,
                root_tokens=sum(len(one.array) for one in root),
                link_tokens=link,
                repaired_tokens=sum(end - start for start, end in repaired),
            )
        decisions.append(decision)
        spans.append(span)
    return spans, decisions


def _repaired(
    before: Sequence[Span], span: Span, root: Sequence[Span], link: int, count: int, rules: Rules
) -> tuple[tuple[int, int], ...]:
    """The ranges that are computed in place behind the link."""
    if count == 0 or rules.choose is None:
        return ()
    chosen = rules.choose(before, span, root, count)
    return tuple((max(start, link), end) for start, end in chosen if end > link)


def _reason_in_place(part: Part) -> Reason | None:
    if part.span.scope.tier is Tier.PRIVATE or not part.span.published:
        return Reason.PRIVATE
    return None if part.mode is Mode.FRAGMENT else Reason(part.mode.value)


def _visible(scope: Scope, head: Sequence[Span]) -> tuple[Span, ...]:
    """The longest head that every reader of `scope` may see."""
    seen = itertools.takewhile(lambda span: span.published and can_read(scope, span.scope), head)
    return tuple(seen)


def _root(part: Part, visible: tuple[Span, ...], rules: Rules) -> tuple[tuple[Span, ...], Reason]:
    """The visible head, else the root declared for the scope, else BOS alone."""
    if visible or part.root:
        return visible or part.root, Reason.PLACED
    if rules.bos is None:
        return (), Reason.NO_BOS
    return (Span((rules.bos,), Scope(part.span.scope.tenant), published=True),), Reason.PLACED_AFTER_BOS


class Explanation(tuple[Decision, ...]):
    """One decision for each segment of a context; as a text, a table with the tokens that each takes."""

    def __str__(self) -> str:
        head = ("segment", "tier", "tokens", "mode", "read", "why", "computed")
        rows = [head, *(_explained(number, decision) for number, decision in enumerate(self, start=1))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right = [name in ("tokens", "computed") for name in head]
        lines = (
            "  ".join(
                cell.rjust(width) if numeric else cell.ljust(width)
                for cell, width, numeric in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in rows
        )
        return "\n".join(lines)


def _explained(number: int, one: Decision) -> tuple[str, ...]:
    own = one.link_tokens + one.repaired_tokens if one.reason.placed else one.tokens
    read = f"after its root of {one.root_tokens}" if one.reason.placed else "in place"
    name = f"({number})" if one.name is None else one.name
    return name, one.tier.name, str(one.tokens), one.mode.value, read, one.reason.value, str(own)
