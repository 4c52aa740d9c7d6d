"""Pages set aside: what running turns may still take, who has a page for a copy, and how room is made for more.

A sequence whose next write goes to a page that it may not write has one page for a copy; of k branches that alone
share a page, k - 1 have one, since the last one writes in place. Knows nothing of tokens.
"""

from collections import Counter
from collections.abc import Iterable

from inms_jax.memory.admission import TurnPlan
from inms_jax.memory.quota import Book
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope


def charged(store: PageStore, pages: Counter[Scope]) -> Counter[Book]:
    """Pages by owner as pages by book."""
    result: Counter[Book] = Counter()
    for scope, count in pages.items():
        for book in store.books(scope):
            result[book] += count
    return result


def set_aside(seq: Sequence) -> Counter[Scope]:
    """The owners of the pages that the running turn may still take."""
    owners: Counter[Scope] = Counter()
    if seq.in_turn:
        for scope in seq.layout.scopes[len(seq.pages) :]:
            owners[scope] += 1
        if seq.copy_reserved:
            owners[seq.layout.scopes[seq.layout.block_at(seq.written)]] += seq.copy_reserved
        if seq.branch_reserved:
            owners[seq.layout.scopes[-1]] += seq.branch_reserved
    return owners


def rebook(store: PageStore, seq: Sequence, *, payers_changed: bool = False) -> None:
    """Write down what the turn has set aside now. Within a turn only the number of pages changes, from one end."""
    if seq.reserved == seq.booked_pages and not payers_changed:
        return
    for book, pages in seq.booked.items():
        book.reserved -= pages
    seq.booked, seq.booked_pages = charged(store, set_aside(seq)), seq.reserved
    for book, pages in seq.booked.items():
        book.reserved += pages


class Leaving:
    """Which pages nobody would hold any more if sequences let go of theirs, one sequence after the other."""

    def __init__(self, wanted: Iterable[int]) -> None:
        self._wanted = set(wanted)
        self._left: dict[int, int] = {}

    def books(self, store: PageStore, pages: Iterable[int]) -> Counter[Book]:
        """What letting go of `pages` would free, by book."""
        freed: Counter[Book] = Counter()
        for page, times in Counter(pages).items():
            if page not in self._wanted and self._left.get(page, store.pool.references(page)) == times:
                freed.update(store.pool.books(page))
        return freed

    def let_go(self, store: PageStore, pages: Iterable[int]) -> None:
        for page in pages:
            self._left[page] = self._left.get(page, store.pool.references(page)) - 1


def needs(store: PageStore, plan: TurnPlan) -> Counter[Book]:
    """Hard pages that the turn adds: those it will take, and cached ones that it hits."""
    owners = Counter(plan.to_take)
    for page in plan.retained:
        if store.pool.references(page) == 0:
            owners[store.owner[page]] += 1
    return charged(store, owners)


def without_copy(sequences: Iterable[Sequence], page: int) -> list[Sequence]:
    """Sequences that will write `page` in their turn and have no page set aside for a copy of it."""
    return [seq for seq in sequences if seq.target == page and not seq.copy_reserved]


def spend_copy(store: PageStore, sequences: Iterable[Sequence], seq: Sequence, page: int) -> None:
    """Use up one page that was set aside for a copy of `page`: that of `seq`, or else of another branch on it."""
    if not seq.copy_reserved:
        # The others are one fewer now, so one of them will write in place and give its page for this copy.
        seq = next(other for other in sequences if other.target == page and other.copy_reserved)
    seq.copy_reserved = 0
    rebook(store, seq)


def hand_over_copy(store: PageStore, sequences: Iterable[Sequence], seq: Sequence) -> None:
    """A branch ends but stays on a shared page: who was to write it last, in place, must copy it now."""
    if seq.copy_reserved and seq.target is not None:
        for other in without_copy(sequences, seq.target)[:1]:
            seq.copy_reserved, other.copy_reserved = 0, 1
            rebook(store, seq)
            rebook(store, other)
