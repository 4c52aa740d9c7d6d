"""After an operation failed in the middle: bring what is counted back in line with what is held.

Operations check everything before they change anything, so this is for what nobody foresees: a bug, no memory on the
host, a key pressed. Tables of sequences and keys of the index are taken for true; states and references of pages, free
pages, books, orders of eviction and reservations follow from them. The sequence whose operation failed gives up its
pages and its turn, since nobody knows how far it came: its next turn computes them again. Nobody else loses anything.
"""

import logging
from collections import Counter

from inms_jax.memory.lifecycle import PageState, SequenceState
from inms_jax.memory.partition import Partition
from inms_jax.memory.reservation import rebook
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.store import PageStore

log = logging.getLogger("inms_jax")


def repair(part: Partition, failed: Sequence | None) -> None:
    """Repair a tenant whose operation, on `failed` if on one sequence, was broken off."""
    log.warning("an operation of tenant %r was broken off: what it had begun is taken back", part.tenant)
    part.forget_unfinished()
    for seq in list(part.sequences):
        if seq.state in (SequenceState.CLOSED, SequenceState.EXPIRED):
            _give_up(seq)
            part.forget(seq)
        elif seq is failed or not _is_whole(seq):
            _give_up(seq)
    _recount(part)
    store = part.store
    for book in (*store.pools.values(), *store.accounts.values()):
        book.clear()
    store.charge_anew()
    for seq in part.sequences:
        seq.booked, seq.booked_pages = Counter(), 0
        rebook(store, seq)
    _reorder(store)


def _is_whole(seq: Sequence) -> bool:
    used = seq.written if seq.pending is None else seq.pending.end
    return len(seq.pages) == seq.layout.blocks_before(used) and 0 <= seq.prefilled <= seq.written <= len(seq.tokens)


def _give_up(seq: Sequence) -> None:
    for node in seq.claims:
        node.claimant = None
    seq.claims.clear()
    seq.pages.clear()
    seq.body_pages.clear()
    seq.pending = None
    seq.written = seq.prefilled = seq.copy_reserved = seq.branch_reserved = 0
    seq.tokens = seq.tokens[:0]
    if seq.in_turn:
        seq.state = SequenceState.IDLE


def _recount(part: Partition) -> None:
    """References, readers and states of every page, from the tables and the index."""
    store, index = part.store, part.store.index
    plans = [seq.pending.plan for seq in part.sequences if seq.pending is not None]
    store.readers = dict(Counter(copy.source for plan in plans for copy in plan.copies))
    references = Counter(store.readers)
    for seq in part.sequences:
        references.update(seq.held)
    for page in list(store.owner):
        node = index.node_of(page)
        if node is not None and node.scope not in store.open_scopes:
            index.withdraw(page)
            node = None
        before = store.pool.state(page)
        if node is not None:
            after = PageState.SEALED if references[page] else PageState.CACHED
        elif references[page]:
            after = PageState.FILLING if before is PageState.FILLING else PageState.SUSPECT
        else:
            after = PageState.FREE
        if after is PageState.FREE:
            del store.owner[page]
        store.pool.force(page, after, references[page])


def _reorder(store: PageStore) -> None:
    """Cached pages, and no others, stand in the order of eviction of their tier."""
    cached = {page for page in store.owner if store.pool.state(page) is PageState.CACHED}
    for tier, order in store.index.orders.items():
        for page in set(order.pages()) - cached:
            order.forget(page)
        for page in cached - set(order.pages()):
            if store.owner[page].tier is tier:
                order.park(page)
