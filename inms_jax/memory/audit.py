"""Looking at the memory as a whole: statistics, the page map, and the check of every invariant.

Reads pool, index and sequences; changes nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

from inms_jax.errors import StateError
from inms_jax.memory.commons import Commons
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.partition import Partition
from inms_jax.memory.policy import MissReason
from inms_jax.memory.quota import HELD, Book
from inms_jax.memory.reservation import charged, set_aside
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import MemoryStats, PageInfo, SequenceHandle
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Tier
from inms_jax.memory.totals import Totals


def statistics(commons: Commons, parts: Items[Partition], past: Totals) -> MemoryStats:
    """Of all tenants that are, and in counts since the start those that were."""
    by_scope = Counter(scope for part in parts for scope in part.store.owner.values())
    by_tier: Counter[Tier] = Counter()
    for scope, pages in by_scope.items():
        by_tier[scope.tier] += pages
    books = [book for part in parts for book in part.store.pools.values()]
    totals = Totals()
    for counts in (past, *(part.totals for part in parts)):
        totals.include(counts)
    return MemoryStats(
        total=commons.pool.num_pages,
        free=commons.pool.num_free,
        cached=sum(book.cached for book in books),
        held=sum(book.held for book in books),
        fenced=sum(book.states[PageState.FENCED] for book in books),
        reserved=sum(book.reserved for book in books),
        by_tier={tier: by_tier[tier] for tier in Tier},
        by_scope=dict(by_scope),
        kept_tokens=totals.kept_tokens,
        hit_tokens=totals.hit_tokens,
        computed_tokens=totals.computed_tokens,
        fragment_tokens=totals.fragment_tokens,
        misses={reason: totals.misses[reason] for reason in MissReason},
        copies=totals.copies,
        evictions=totals.evictions,
        dropped_sequences=totals.dropped_sequences,
        quota_refusals=totals.quota_refusals,
        sequences=Counter(seq.state for part in parts for seq in part.sequences),
        offloaded=sum(len(seq.offloaded) for part in parts for seq in part.sequences),
        expired_sequences=totals.expired_sequences,
    )


def page_map(parts: Items[Partition]) -> list[PageInfo]:
    """Every page that is not free."""
    return sorted((info for part in parts for info in _pages(part)), key=lambda info: info.page)


def _pages(part: Partition) -> Iterator[PageInfo]:
    store = part.store
    holders: defaultdict[int, list[SequenceHandle]] = defaultdict(list)
    used: Counter[int] = Counter()
    for seq in part.sequences:
        for start, end, page in zip(seq.layout.starts, seq.layout.ends, seq.pages, strict=False):
            holders[page].append(seq.handle)
            used[page] = max(used[page], min(end, seq.written) - start)
        for page in dict.fromkeys(page for pages in seq.body_pages for page in pages):
            holders[page].append(seq.handle)
    for page, scope in store.owner.items():
        node = store.index.node_of(page)
        yield PageInfo(
            page=page,
            generation=store.pool.generation(page),
            state=store.pool.state(page),
            tier=scope.tier,
            scope=scope,
            references=store.pool.references(page),
            tokens_used=max(used[page], 0) if node is None else len(node.tokens) // 4,
            holders=tuple(holders[page]),
        )


def verify(commons: Commons, parts: Items[Partition]) -> None:
    """Conservation, reference counts, keys, reservations, quotas: StateError with the numbers when one is off."""
    _verify_counts(commons, parts)
    for part in parts:
        _verify_pages(part)
        _verify_books(part)
        for seq in part.sequences:
            _verify_sequence(part.store, seq)
        _verify_copies(part.store, part.sequences)
    claimed = sum(book.claim for part in parts for book in part.store.pools.values())
    reserves = sum(book.quota.reserve for part in parts for book in part.store.pools.values())
    ledger = commons.ledger
    if claimed != ledger.claimed or reserves != ledger.reserves or claimed > ledger.total:
        raise _broken(
            f"pools claim {claimed} pages and reserve {reserves} of {ledger.total}, the ledger says {ledger.claimed} "
            f"and {ledger.reserves}"
        )


def _verify_counts(commons: Commons, parts: Items[Partition]) -> None:
    pool, total = commons.pool, commons.pool.num_pages
    states = Counter(pool.state(page) for page in range(1, total))
    books = [book for part in parts for book in part.store.pools.values()]
    counted = {state: sum(book.states[state] for book in books) for state in PageState if state is not PageState.FREE}
    if any(states[state] != count for state, count in counted.items()):
        raise _broken(f"states of pages {dict(states)} are counted as {counted}")
    held = sum(states[state] for state in HELD)
    free, cached, fenced = states[PageState.FREE], states[PageState.CACHED], states[PageState.FENCED]
    if free + cached + held + fenced != total - 1:
        raise _broken(f"free {free} + cached {cached} + held {held} + fenced {fenced} is not total {total} - 1")
    owners = Counter(page for part in parts for page in part.store.owner)
    cached_pages = [page for part in parts for order in part.store.index.orders.values() for page in order.pages()]
    for name, pages, these in (
        ("free", pool.free_pages(), (PageState.FREE,)),
        ("cached", cached_pages, (PageState.CACHED,)),
        ("owned", list(owners.elements()), tuple(set(PageState) - {PageState.FREE})),
    ):
        expected = {page for page in range(1, total) if pool.state(page) in these}
        if set(pages) != expected or len(pages) != len(expected):
            raise _broken(f"the list of {name} pages is {sorted(pages)}, {len(expected)} pages are {name}")


def _verify_books(part: Partition) -> None:
    """What is charged and reserved is what pages and turns say, and within the limits of the pools."""
    store = part.store
    books = [*store.pools.values(), *store.accounts.values()]
    pages, reserved = Counter[tuple[Book, PageState]](), Counter[Book]()
    for page, owner in store.owner.items():
        if store.pool.books(page) != store.books(owner):
            raise _broken(f"page {page} of {owner} is charged to {[book.name for book in store.pool.books(page)]}")
        pages.update((book, store.pool.state(page)) for book in store.books(owner))
    for seq in part.sequences:
        booked = charged(store, set_aside(seq))
        if booked != seq.booked or booked.total() < seq.reserved:
            raise _broken(f"{seq.name} may take {seq.reserved} pages, {seq.booked_pages} are written down")
        reserved.update(booked)
    for book in books:
        if book.reserved != reserved[book] or any(book.states[s] != pages[book, s] for s in PageState):
            raise _broken(f"the book of {book.name} says {book.states} and {book.reserved} reserved")
        limit = book.quota.limit
        if book.is_pool and limit is not None and max(book.hard, book.used) > limit:
            raise _broken(f"{book.name} has {book.used} pages, {book.hard} of them hard, its limit is {limit}")


def _verify_pages(part: Partition) -> None:
    store = part.store
    references = Counter(store.readers)
    for seq in part.sequences:
        references.update(seq.held)
    for page in {*store.owner, *references, *store.index.keyed_pages()}:
        state, counted = store.pool.state(page), store.pool.references(page)
        if counted != references[page]:
            raise _broken(f"page {page} has {counted} references, {references[page]} are in tables")
        if (counted > 0) != (state in HELD):
            raise _broken(f"page {page} is {state.value!r} with {counted} holders")
        node = store.index.node_of(page)
        keyed = node is not None and node.page == page and node.scope in store.open_scopes
        if keyed != (state in (PageState.SEALED, PageState.CACHED)) or (node is not None) != keyed:
            raise _broken(f"page {page} is {state.value!r}, its key is {node}")
        if (page in store.owner) != (state is not PageState.FREE):
            raise _broken(f"page {page} is {state.value!r}, its owner is {store.owner.get(page)}")


def _verify_sequence(store: PageStore, seq: Sequence) -> None:
    used = seq.written if seq.pending is None else seq.pending.end
    blocks = seq.layout.blocks_before(used)
    if len(seq.pages) != blocks:
        raise _broken(f"{seq.name} holds {len(seq.pages)} pages for {blocks} blocks")
    if not 0 <= seq.prefilled <= seq.written <= len(seq.tokens):
        raise _broken(f"{seq.name}: {seq.prefilled} prefilled, {seq.written} written, {len(seq.tokens)} tokens")
    if not seq.in_turn and (seq.claims or seq.pending or seq.copy_reserved or seq.branch_reserved):
        raise _broken(f"{seq.name} is {seq.state.value!r} and still has a plan, claims or pages set aside")
    if any(node.claimant != seq.handle.id for node in seq.claims):
        raise _broken(f"{seq.name} lost one of its {len(seq.claims)} claims")
    for page, scope in zip(seq.pages, seq.layout.scopes, strict=False):
        if store.owner[page].tier is not scope.tier:
            raise _broken(f"{seq.name} uses page {page} of {store.owner[page]} for text of {scope}")
    needed = len(seq.bodies) if seq.in_turn else sum(body.at < seq.written for body in seq.bodies)
    if len(seq.body_pages) != needed:
        raise _broken(f"{seq.name} holds {len(seq.body_pages)} of {needed} bodies of fragments")
    for body, pages in zip(seq.bodies, seq.body_pages, strict=False):
        for node, page in zip(body.nodes, pages, strict=True):
            keyed = store.index.node_of(page)
            if store.owner[page] != node.scope or (keyed is not None and keyed is not node):
                raise _broken(f"{seq.name} reads page {page} of {store.owner[page]}, not the block of its fragment")


def _verify_copies(store: PageStore, sequences: Iterable[Sequence]) -> None:
    """Of the sequences that will write one page, all but one have a page for a copy; all, if others hold it too."""
    writers: defaultdict[int, list[Sequence]] = defaultdict(list)
    for seq in sequences:
        if seq.target is not None:
            writers[seq.target].append(seq)
    for page, seqs in writers.items():
        holders = store.pool.references(page) - store.readers.get(page, 0)
        one_in_place = holders == len(seqs) and store.pool.state(page) is PageState.FILLING
        have = sum(seq.copy_reserved for seq in seqs)
        if have < len(seqs) - one_in_place:
            raise _broken(f"page {page} is to be written by {len(seqs)} of {holders} holders, {have} can copy it")


def _broken(what: str) -> StateError:
    return StateError(f"Memory is inconsistent: {what}.")
