"""Looking at the memory as a whole: statistics, the page map, and the check of every invariant.

Reads pool, index and sequences; changes nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from inms_jax.errors import StateError
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.plan import NULL_PAGE
from inms_jax.memory.policy import MissReason
from inms_jax.memory.sequence import Pending, Sequence
from inms_jax.memory.stats import MemoryStats, PageInfo, SequenceHandle
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Tier

HELD = (PageState.FILLING, PageState.SEALED, PageState.SUSPECT)


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    kept_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    copies: int = 0
    dropped_sequences: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)

    def add(self, step: Pending) -> None:
        """Count a committed step."""
        self.computed_tokens += step.computed
        self.copies += len(step.plan.copies)
        self.misses.update(step.misses)


def statistics(store: PageStore, sequences: Iterable[Sequence], totals: Totals) -> MemoryStats:
    by_scope = Counter(store.owner.values())
    by_tier: Counter[Tier] = Counter()
    for scope, pages in by_scope.items():
        by_tier[scope.tier] += pages
    return MemoryStats(
        total=store.pool.num_pages,
        free=store.pool.count(PageState.FREE),
        cached=store.pool.count(PageState.CACHED),
        held=sum(store.pool.count(state) for state in HELD),
        fenced=store.pool.count(PageState.FENCED),
        reserved=sum(seq.reserved for seq in sequences),
        by_tier={tier: by_tier[tier] for tier in Tier},
        by_scope=dict(by_scope),
        kept_tokens=totals.kept_tokens,
        hit_tokens=totals.hit_tokens,
        computed_tokens=totals.computed_tokens,
        misses={reason: totals.misses[reason] for reason in MissReason},
        copies=totals.copies,
        evictions=store.evictions,
        dropped_sequences=totals.dropped_sequences,
    )


def page_map(store: PageStore, sequences: Iterable[Sequence]) -> list[PageInfo]:
    holders: defaultdict[int, list[SequenceHandle]] = defaultdict(list)
    used: Counter[int] = Counter()
    for seq in sequences:
        for start, end, page in zip(seq.layout.starts, seq.layout.ends, seq.pages, strict=False):
            holders[page].append(seq.handle)
            used[page] = max(used[page], min(end, seq.written) - start)
    infos = []
    for page, scope in sorted(store.owner.items()):
        node = store.index.node_of(page)
        infos.append(
            PageInfo(
                page=page,
                generation=store.pool.generation(page),
                state=store.pool.state(page),
                tier=scope.tier,
                scope=scope,
                references=store.pool.references(page),
                tokens_used=max(used[page], 0) if node is None else len(node.tokens) // 4,
                holders=tuple(holders[page]),
            )
        )
    return infos


def verify(store: PageStore, sequences: Iterable[Sequence]) -> None:
    """Conservation, reference counts, keys, reservations: StateError with the numbers when one is off."""
    pool, total = store.pool, store.pool.num_pages
    states = Counter(pool.state(page) for page in range(1, total))
    counted = {state: pool.count(state) for state in PageState}
    _check(states == Counter(counted), f"states of pages {dict(states)} are counted as {counted}")
    held = sum(states[state] for state in HELD)
    free, cached, fenced = states[PageState.FREE], states[PageState.CACHED], states[PageState.FENCED]
    _check(
        free + cached + held + fenced == total - 1,
        f"free {free} + cached {cached} + held {held} + fenced {fenced} is not total {total} - 1",
    )
    free_pages = pool.free_pages()
    _check(
        len(set(free_pages)) == len(free_pages) == free and NULL_PAGE not in free_pages,
        f"the free list {free_pages} has not the {free} free pages, each once",
    )
    references = Counter(store.readers)
    for seq in sequences:
        references.update(seq.pages)
    for page in range(1, total):
        _check(
            pool.references(page) == references[page],
            f"page {page} has {pool.references(page)} references, {references[page]} are in tables",
        )
        _check(
            (references[page] > 0) == (pool.state(page) in HELD),
            f"page {page} is {pool.state(page).value!r} with {references[page]} holders",
        )
        node = store.index.node_of(page)
        keyed = pool.state(page) in (PageState.SEALED, PageState.CACHED)
        _check(
            (node is not None and node.page == page and node.scope in store.open_scopes) == keyed,
            f"page {page} is {pool.state(page).value!r}, its key is {node}",
        )
        _check((page in store.owner) == (pool.state(page) is not PageState.FREE), f"owner of page {page}")
    cached_pages = store.index.cached_pages()
    _check(
        len(cached_pages) == cached and all(pool.state(page) is PageState.CACHED for page in cached_pages),
        f"pages {cached_pages} are in the order of eviction, {cached} are cached",
    )
    reserved = sum(seq.reserved for seq in sequences)
    _check(reserved <= free + cached, f"{reserved} pages are reserved, free {free} + cached {cached}")
    for seq in sequences:
        _verify_sequence(store, seq)
    _verify_copies(store, sequences)


def _verify_sequence(store: PageStore, seq: Sequence) -> None:
    used = seq.written if seq.pending is None else seq.pending.end
    blocks = seq.layout.blocks_before(used)
    _check(len(seq.pages) == blocks, f"{seq.name} holds {len(seq.pages)} pages for {blocks} blocks")
    _check(
        0 <= seq.prefilled <= seq.written <= len(seq.tokens),
        f"{seq.name}: {seq.prefilled} prefilled, {seq.written} written, {len(seq.tokens)} tokens",
    )
    _check(
        seq.in_turn or not (seq.claims or seq.pending or seq.copy_reserved or seq.branch_reserved),
        f"{seq.name} is {seq.state.value!r} and still has {len(seq.claims)} claims or a reservation",
    )
    _check(all(node.claimant == seq.handle.id for node in seq.claims), f"{seq.name} lost one of its claims")
    for page, scope in zip(seq.pages, seq.layout.scopes, strict=False):
        _check(
            store.owner[page].tier is scope.tier,
            f"{seq.name} uses page {page} of {store.owner[page]} for text of {scope}",
        )


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
        _check(
            have >= len(seqs) - one_in_place,
            f"page {page} will be written by {len(seqs)} of {holders} holders, with {have} pages for copies",
        )


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise StateError(f"Memory is inconsistent: {what}.")
