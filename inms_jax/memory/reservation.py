"""Pages set aside: what running turns may still take, and who has a page for a copy.

The law: the sum of reservations is at most free + cached pages. A sequence whose next write goes to a page that it
may not write has one page for a copy; of k branches that alone share a page, k - 1 have one, since the last one
writes in place. Knows nothing of tokens.
"""

from collections.abc import Iterable

from inms_jax.memory.admission import TurnPlan
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.store import PageStore


def unreserved(store: PageStore, sequences: Iterable[Sequence]) -> int:
    """Pages that no running turn may claim."""
    return store.available - sum(seq.reserved for seq in sequences)


def make_room(
    store: PageStore, sequences: Iterable[Sequence], seq: Sequence, plan: TurnPlan
) -> tuple[int, list[Sequence]]:
    """Pages the turn could have, and the idle sequences to drop for that, the longest idle first. Changes nothing."""
    pinned = plan.retained
    cached_hits = sum(store.pool.references(page) == 0 for page in pinned)
    available = unreserved(store, sequences) - cached_hits
    left: dict[int, int] = {}

    def gained(pages: Iterable[int]) -> int:
        count = 0
        for page in pages:
            left[page] = left.get(page, store.pool.references(page)) - 1
            count += left[page] == 0 and page not in pinned
        return count

    available += gained(seq.held[plan.kept_pages :])
    idle = sorted(
        (other for other in sequences if other.pages and not other.in_turn and other is not seq),
        key=lambda other: other.last_used,
    )
    dropped: list[Sequence] = []
    for other in idle:
        if available >= plan.needed:
            break
        dropped.append(other)
        available += gained(other.held)
    return available, dropped


def without_copy(sequences: Iterable[Sequence], page: int) -> list[Sequence]:
    """Sequences that will write `page` in their turn and have no page set aside for a copy of it."""
    return [seq for seq in sequences if seq.target == page and not seq.copy_reserved]


def spend_copy(sequences: Iterable[Sequence], seq: Sequence, page: int) -> None:
    """Use up one page that was set aside for a copy of `page`: that of `seq`, or else of another branch on it."""
    if not seq.copy_reserved:
        # The others are one fewer now, so one of them will write in place and give its page for this copy.
        seq = next(other for other in sequences if other.target == page and other.copy_reserved)
    seq.copy_reserved = 0


def hand_over_copy(sequences: Iterable[Sequence], seq: Sequence) -> None:
    """A branch ends but stays on a shared page: who was to write it last, in place, must copy it now."""
    if seq.copy_reserved and seq.target is not None:
        for other in without_copy(sequences, seq.target)[:1]:
            other.copy_reserved = 1
