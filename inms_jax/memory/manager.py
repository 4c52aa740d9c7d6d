"""MemoryManager: register, begin a turn, match, write, fork, release. The one owner of pages and sequences.

Every operation is atomic and validates before it changes anything. Plans say where a step reads and writes; they are
committed after the step was dispatched. Knows nothing of the device, of text, or of who runs next.
"""

import functools
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from inms_jax.errors import CapacityError, ClosedError, ConfigError, InvalidRequestError, StateError, VisibilityError
from inms_jax.memory import audit
from inms_jax.memory.admission import TurnPlan, check_readable, plan_turn, without_partial_page
from inms_jax.memory.events import KVEvent, KVEventKind
from inms_jax.memory.fingerprint import CacheIdentity, Fingerprints, HashFunction, keyed_blake2b
from inms_jax.memory.index import PrefixIndex
from inms_jax.memory.lifecycle import SEQUENCE_TRANSITIONS, SequenceEvent, SequenceState, advance
from inms_jax.memory.plan import DecodeSlot, PrefillChunk, Row, Span
from inms_jax.memory.pool import PagePool
from inms_jax.memory.registry import Registry
from inms_jax.memory.reservation import hand_over_copy, make_room, unreserved, without_copy
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import Admission, MatchResult, MemoryStats, PageInfo, SequenceHandle, TurnUsage
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope
from inms_jax.memory.writing import Writer

__all__ = ["MemoryManager", "PrefillChunk", "SequenceHandle"]

P = ParamSpec("P")
T = TypeVar("T")


def _atomic(
    method: Callable[Concatenate["MemoryManager", P], T],
) -> Callable[Concatenate["MemoryManager", P], T]:
    @functools.wraps(method)
    def locked(self: "MemoryManager", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class MemoryManager:
    """Pages of one pool for many sequences.

    `provisional_decode`: pages written by decode get no key and are computed again by the next turn's prefill.
    `hash_function` is for tests; by default keyed BLAKE2b under a random key.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        block_size: int,
        identity: CacheIdentity,
        enable_prefix_caching: bool = True,
        provisional_decode: bool = True,
        hash_function: HashFunction | None = None,
    ) -> None:
        if block_size < 1 or identity.block_size != block_size:
            raise ConfigError(
                f"block_size must be at least 1 and that of the cache identity, got {block_size} and "
                f"{identity.block_size}."
            )
        self.num_pages = num_pages
        self.block_size = block_size
        self._lock = threading.RLock()
        fingerprints = Fingerprints(identity, hash_function or keyed_blake2b(secrets.token_bytes(32)))
        index = PrefixIndex(fingerprints, num_pages=num_pages)
        self._store = PageStore(PagePool(num_pages), index, caching=enable_prefix_caching)
        self._writer = Writer(self._store, provisional_decode=provisional_decode)
        self._sequences = Registry()
        self._clock = 0
        self._totals = audit.Totals()

    # Scopes

    @_atomic
    def open_scope(self, scope: Scope) -> None:
        """Let pages of this scope have keys; StateError when it is open already."""
        self._store.open_scope(scope)

    @_atomic
    def close_scope(self, scope: Scope) -> None:
        """Withdraw the keys of exactly this scope: cached pages go FREE now, held ones after their last holder."""
        self._store.close_scope(scope)

    # Sequences

    @_atomic
    def register(self, scope: Scope) -> SequenceHandle:
        """A new sequence that reads and writes as `scope`, which must be open."""
        self._require_open(scope)
        return self._add(scope, frozenset([scope])).handle

    @_atomic
    def begin_turn(
        self,
        handle: SequenceHandle,
        context: Items[Span],
        *,
        max_new_tokens: int,
        new_scope: Scope | None = None,
        branches: int = 1,
    ) -> Admission:
        """Start a turn on the whole context: keep what still stands, retain hits, reserve the rest.

        `new_scope`: the scope of what is generated from now on (a new lineage after a fork). Raises CapacityError
        when the turn can never fit; returns `admitted=False`, with nothing changed, when it can later.
        """
        seq = self._sequences.get(handle)
        after = advance(SEQUENCE_TRANSITIONS, seq.state, SequenceEvent.BEGIN, seq.name)
        if max_new_tokens < 0 or branches < 1:
            raise InvalidRequestError(
                f"max_new_tokens must be at least 0 and branches at least 1, got {max_new_tokens} and {branches}."
            )
        scope = seq.scope if new_scope is None else new_scope
        self._require_open(scope)
        self._require_same_group(seq, scope)
        check_readable(seq, context, scope)
        plan = plan_turn(
            seq,
            context,
            scope=scope,
            max_new_tokens=max_new_tokens,
            branches=branches,
            store=self._store,
            block_size=self.block_size,
        )
        most = self.num_pages - 1
        if plan.total > most:
            raise CapacityError(
                f"{seq.name} needs {plan.total} pages of {self.block_size} tokens for {plan.context_length} tokens "
                f"of context, {max_new_tokens} new ones and {branches} branches: the pool has {most}. Shorten the "
                "context, lower max_tokens or enlarge the pool."
            )
        available, dropped = make_room(self._store, self._sequences, seq, plan)
        if available < plan.needed and plan.copy:
            plan = without_partial_page(seq, plan, self._store)
            available, dropped = make_room(self._store, self._sequences, seq, plan)
        if available < plan.needed:
            reason = f"{plan.needed} pages are needed, {available} of {most} can be had now"
            return Admission(False, plan.needed, available, reason)
        for other in dropped:
            self._drop(other)
        self._start(seq, plan, after)
        return Admission(True, plan.needed, available)

    @_atomic
    def match(self, handle: SequenceHandle) -> MatchResult:
        """Advance over blocks that the index holds. "wait": the next block is being computed by another sequence."""
        seq = self._in_prefill(handle)
        self._totals.hit_tokens += self._writer.advance_hits(seq)
        waits = seq.written < seq.context_length and self._writer.is_claimed(seq, seq.layout.block_at(seq.written))
        remaining = max(1, seq.context_length - seq.written)
        return MatchResult("wait" if waits else "ready", seq.cached_tokens, remaining)

    @_atomic
    def prefill(self, handle: SequenceHandle, budget: int) -> PrefillChunk:
        """Plan the next at most `budget` tokens; copies come before the writes.

        Ends before a block that the index holds or that another sequence computes; StateError when that is the
        first one (`match` says "wait"). A context that is held entirely gives its last token, written nowhere.
        """
        seq = self._in_prefill(handle)
        if budget < 1:
            raise InvalidRequestError(f"A prefill budget is at least 1 token, got {budget}.")
        self._totals.hit_tokens += self._writer.advance_hits(seq)
        return self._writer.plan_prefill(seq, budget, self._sequences)

    @_atomic
    def commit_prefill(self, handle: SequenceHandle, chunk: PrefillChunk) -> None:
        """The chunk's step was dispatched: its blocks may be read by others from now on."""
        seq = self._sequences.get(handle)
        self._totals.add(self._writer.commit_prefill(seq, chunk))
        if chunk.is_last:
            self._move(seq, SequenceEvent.PROMPT_DONE)

    @_atomic
    def decode(self, handle: SequenceHandle, token: int) -> DecodeSlot:
        """Plan the write of one generated token after everything written so far."""
        seq = self._sequences.get(handle)
        if seq.state is not SequenceState.ACTIVE:
            raise StateError(f"{seq.name} is {seq.state.value!r}: decode needs a prefilled prompt.")
        self._require_no_plan(seq)
        return self._writer.plan_decode(seq, token, self._sequences)

    @_atomic
    def commit_decode(self, handle: SequenceHandle) -> None:
        """The step that writes the planned token was dispatched."""
        seq = self._sequences.get(handle)
        self._totals.add(self._writer.commit_decode(seq))

    @_atomic
    def row(self, handle: SequenceHandle) -> Row:
        """The page table line of the sequence, with what was planned last."""
        seq = self._sequences.get(handle)
        used = seq.written if seq.pending is None else max(seq.written, seq.pending.end)
        blocks = seq.layout.blocks_before(used)
        starts = seq.layout.start_array[:blocks]
        ends = np.minimum(np.array(seq.layout.ends[:blocks], np.int32), np.int32(used)) - starts
        return Row(np.array(seq.pages[:blocks], np.int32), np.zeros(blocks, np.int32), ends, starts)

    @_atomic
    def usage(self, handle: SequenceHandle) -> TurnUsage:
        """Tokens kept, hit and computed in the turn that runs or ran last."""
        return self._sequences.get(handle).usage

    @_atomic
    def end_turn(self, handle: SequenceHandle, *, keep: bool, history_len: int) -> None:
        """End the turn and give back what it reserved.

        keep=True: the turn is done and all it has written stays; tokens that do not become history are found by the
        next turn's comparison. keep=False: it failed or was aborted, at any point; what was planned but not
        committed is taken back, and of what was written the first `history_len` tokens stay.
        """
        seq = self._sequences.get(handle)
        if history_len < 0:
            raise InvalidRequestError(f"history_len is at least 0, got {history_len}.")
        event = SequenceEvent.FINISH if keep else SequenceEvent.ABORT
        after = advance(SEQUENCE_TRANSITIONS, seq.state, event, seq.name)
        if keep:
            self._require_no_plan(seq)
        self._writer.cancel(seq)
        hand_over_copy(self._sequences, seq)
        seq.state = after
        seq.copy_reserved = seq.branch_reserved = 0
        seq.last_used = self._tick()
        self._writer.truncate(seq, seq.written if keep else history_len)

    @_atomic
    def fork(self, handle: SequenceHandle, scope: Scope, *, reserve_from_parent: bool = False) -> SequenceHandle:
        """A second sequence on the same pages; no page is copied until someone writes a shared one.

        The fork is between turns, with what its parent has written so far as history; CapacityError when the
        parent is in its turn and there is no page for the copy that it must make now. With `reserve_from_parent`
        it is a branch of the running turn (n > 1): it decodes on, on its share of what the turn reserved.
        """
        parent = self._sequences.get(handle)
        self._require_same_group(parent, scope)
        self._require_no_plan(parent)
        return (self._branch(parent, scope) if reserve_from_parent else self._twin(parent, scope)).handle

    @_atomic
    def release(self, handle: SequenceHandle) -> None:
        """End a sequence, in any state. Its handle is stale from then on."""
        seq = self._sequences.get(handle)
        self._writer.cancel(seq)
        self._move(seq, SequenceEvent.RELEASE)
        self._writer.truncate(seq, 0)
        self._sequences.remove(seq)

    # Pressure

    @_atomic
    def drop(self, handle: SequenceHandle) -> None:
        """Give up the KV of a sequence that is between turns; its next turn computes it again."""
        seq = self._sequences.get(handle)
        if seq.in_turn:
            raise StateError(f"{seq.name} is {seq.state.value!r}: only sequences between turns are dropped.")
        self._drop(seq)

    @_atomic
    def evict_cached(self) -> int:
        """Free every cached page; the number freed."""
        return self._store.evict_all()

    @_atomic
    def clear(self) -> None:
        """Forget all KV that no turn needs: idle sequences are dropped, cached pages freed."""
        for seq in self._sequences:
            if not seq.in_turn:
                self._drop(seq)
        self._store.evict_all()
        self._store.index.events.add(KVEvent(KVEventKind.CLEARED))

    # Views

    @_atomic
    def stats(self) -> MemoryStats:
        return audit.statistics(self._store, self._sequences, self._totals)

    @_atomic
    def pages(self) -> list[PageInfo]:
        """Every page that is not free."""
        return audit.page_map(self._store, self._sequences)

    @_atomic
    def events(self, since: int = 0) -> tuple[KVEvent, ...]:
        """What happened to keyed pages after event number `since`."""
        return self._store.index.events.since(since)

    @_atomic
    def verify(self) -> None:
        """Raise StateError, with all the numbers, unless every invariant holds."""
        audit.verify(self._store, self._sequences)

    # Inside

    def _add(self, scope: Scope, readable: frozenset[Scope]) -> Sequence:
        seq = self._sequences.add(scope, readable)
        seq.last_used = self._tick()
        return seq

    def _in_prefill(self, handle: SequenceHandle) -> Sequence:
        seq = self._sequences.get(handle)
        if seq.state is not SequenceState.PREFILL:
            raise StateError(f"{seq.name} is {seq.state.value!r}: there is nothing to prefill. Begin a turn first.")
        self._require_no_plan(seq)
        return seq

    def _require_no_plan(self, seq: Sequence) -> None:
        if seq.pending is not None:
            raise StateError(f"{seq.name} has a planned step to token {seq.pending.end}: commit it first.")

    def _require_open(self, scope: Scope) -> None:
        if scope not in self._store.open_scopes:
            raise ClosedError(f"{scope} is not one of the {len(self._store.open_scopes)} open scopes.")

    def _require_same_group(self, seq: Sequence, scope: Scope) -> None:
        if (seq.scope.tenant, seq.scope.group) != (scope.tenant, scope.group):
            raise VisibilityError(f"{seq.name} cannot go on as {scope}: tenant and group must stay the same.")

    def _move(self, seq: Sequence, event: SequenceEvent) -> None:
        seq.state = advance(SEQUENCE_TRANSITIONS, seq.state, event, seq.name)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _start(self, seq: Sequence, plan: TurnPlan, state: SequenceState) -> None:
        for page in plan.hits:
            self._store.retain(page)
        for page in reversed(seq.pages[plan.kept_pages :]):
            self._store.let_go(page, superseded=True)
        seq.pages = [*seq.pages[: plan.kept_pages], *plan.hits]
        seq.state, seq.scope, seq.readable = state, plan.scope, seq.readable | {plan.scope}
        seq.layout, seq.tokens, seq.nodes = plan.layout, plan.tokens, plan.nodes
        seq.context_length = plan.context_length
        seq.written = seq.prefilled = plan.written
        seq.copy_reserved, seq.branch_reserved = plan.copy, plan.branch_pages
        seq.kept_tokens, seq.hit_tokens = plan.kept, plan.written - plan.kept
        seq.computed_tokens, seq.misses = 0, Counter()
        seq.last_used = self._tick()
        self._writer.seal_blocks(seq, range(plan.kept_pages))
        self._totals.kept_tokens += seq.kept_tokens
        self._totals.hit_tokens += seq.hit_tokens

    def _twin(self, parent: Sequence, scope: Scope) -> Sequence:
        self._require_open(scope)
        must_copy = [] if parent.target is None else without_copy(self._sequences, parent.target)
        spare = unreserved(self._store, self._sequences)
        if len(must_copy) > spare:
            raise CapacityError(
                f"Cannot fork {parent.name} in its turn: {len(must_copy)} pages for copies are needed, {spare} are "
                "available. Fork between turns or enlarge the pool."
            )
        child = self._share(parent, scope)
        child.state = SequenceState.IDLE if parent.in_turn else parent.state
        for seq in must_copy:
            seq.copy_reserved = 1
        return child

    def _branch(self, parent: Sequence, scope: Scope) -> Sequence:
        tail = int(parent.target is not None)
        share = len(parent.layout.starts) - len(parent.pages) + tail
        if parent.state is not SequenceState.ACTIVE or parent.branch_reserved < share:
            raise StateError(
                f"{parent.name} is {parent.state.value!r} with {parent.branch_reserved} pages for branches: a branch "
                f"needs a prefilled prompt and {share} pages. Begin the turn with more branches."
            )
        child = self._share(parent, scope)
        child.state, child.copy_reserved = parent.state, tail
        parent.branch_reserved -= share
        return child

    def _share(self, parent: Sequence, scope: Scope) -> Sequence:
        child = self._add(scope, parent.readable | {scope})
        child.layout, child.context_length = parent.layout, parent.context_length
        child.tokens, child.nodes, child.pages = parent.tokens.copy(), list(parent.nodes), list(parent.pages)
        child.written, child.prefilled = parent.written, parent.prefilled
        for page in child.pages:
            self._store.retain(page)
        return child

    def _drop(self, seq: Sequence) -> None:
        self._totals.dropped_sequences += bool(seq.pages)
        self._writer.truncate(seq, 0)
