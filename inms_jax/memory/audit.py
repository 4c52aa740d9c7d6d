"""Looking at the memory as a whole: statistics, the page map, and the check of every invariant.

Reads pool, index and sequences; changes nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from inms_jax.errors import StateError
from inms_jax.memory.lifecycle import PageState
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
    fragment_tokens: int = 0
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
        fragment_tokens=totals.fragment_tokens,
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
        for page in dict.fromkeys(page for pages in seq.body_pages for page in pages):
            holders[page].append(seq.handle)
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
    sequences = list(sequences)
    _verify_counts(store)
    _verify_pages(store, sequences)
    reserved, available = sum(seq.reserved for seq in sequences), store.available
    if reserved > available:
        raise _broken(f"{reserved} pages are reserved, {available} are free or cached")
    for seq in sequences:
        _verify_sequence(store, seq)
    _verify_copies(store, sequences)


def _verify_counts(store: PageStore) -> None:
    pool, total = store.pool, store.pool.num_pages
    states = Counter(pool.state(page) for page in range(1, total))
    counted = {state: pool.count(state) for state in PageState}
    if any(states[state] != counted[state] for state in PageState):
        raise _broken(f"states of pages {dict(states)} are counted as {counted}")
    held = sum(states[state] for state in HELD)
    free, cached, fenced = states[PageState.FREE], states[PageState.CACHED], states[PageState.FENCED]
    if free + cached + held + fenced != total - 1:
        raise _broken(f"free {free} + cached {cached} + held {held} + fenced {fenced} is not total {total} - 1")
    free_pages, cached_pages = pool.free_pages(), store.index.order.pages()
    for name, pages, state in (("free", free_pages, PageState.FREE), ("cached", cached_pages, PageState.CACHED)):
        if set(pages) != {page for page in range(1, total) if pool.state(page) is state} or len(pages) != states[state]:
            raise _broken(f"the list of {name} pages is {pages}, {states[state]} pages are {name}")


def _verify_pages(store: PageStore, sequences: Iterable[Sequence]) -> None:
    references = Counter(store.readers)
    for seq in sequences:
        references.update(seq.held)
    for page in range(1, store.pool.num_pages):
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
