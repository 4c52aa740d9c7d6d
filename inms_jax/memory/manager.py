"""MemoryManager: register, begin a turn, match, write, fork, release. The one owner of pages and sequences.

Every operation is atomic and validates before it changes anything. Plans say where a step reads and writes; they are
committed after the step was dispatched. Knows nothing of the device, of text, or of who runs next.
"""

import functools
import secrets
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Concatenate, ParamSpec, TypeVar

from inms_jax.errors import ConfigError, InvalidRequestError, StateError
from inms_jax.memory import audit
from inms_jax.memory.events import KVEvent, KVEventKind
from inms_jax.memory.fingerprint import CacheIdentity, Fingerprints, HashFunction, keyed_blake2b
from inms_jax.memory.forking import fork
from inms_jax.memory.index import PrefixIndex
from inms_jax.memory.lifecycle import SequenceEvent, SequenceState
from inms_jax.memory.partition import Partition, move, require_no_plan
from inms_jax.memory.plan import DecodeSlot, PrefillChunk, Row, Span
from inms_jax.memory.pool import PagePool
from inms_jax.memory.stats import Admission, MatchResult, MemoryStats, PageInfo, SequenceHandle, TurnUsage
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope
from inms_jax.memory.turns import begin_turn, end_turn

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
        store = PageStore(PagePool(num_pages), index, caching=enable_prefix_caching)
        self._part = Partition(store, block_size=block_size, provisional_decode=provisional_decode)

    # Scopes

    @_atomic
    def open_scope(self, scope: Scope) -> None:
        """Let pages of this scope have keys; StateError when it is open already."""
        self._part.store.open_scope(scope)

    @_atomic
    def close_scope(self, scope: Scope) -> None:
        """Withdraw the keys of exactly this scope: cached pages go FREE now, held ones after their last holder."""
        self._part.store.close_scope(scope)

    # Sequences

    @_atomic
    def register(self, scope: Scope) -> SequenceHandle:
        """A new sequence that reads and writes as `scope`, which must be open."""
        self._part.require_open(scope)
        return self._part.add(scope, frozenset([scope])).handle

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
        seq = self._part.sequences.get(handle)
        return begin_turn(
            self._part, seq, context, max_new_tokens=max_new_tokens, new_scope=new_scope, branches=branches
        )

    @_atomic
    def match(self, handle: SequenceHandle) -> MatchResult:
        """Advance over blocks that the index holds. "wait": the next block is being computed by another sequence."""
        seq = self._part.in_prefill(handle)
        self._part.totals.hit_tokens += self._part.writer.advance_hits(seq)
        waits = seq.written < seq.context_length and self._part.writer.is_claimed(seq, seq.layout.block_at(seq.written))
        remaining = max(1, seq.context_length - seq.written)
        return MatchResult("wait" if waits else "ready", seq.cached_tokens, remaining)

    @_atomic
    def prefill(self, handle: SequenceHandle, budget: int) -> PrefillChunk:
        """Plan the next at most `budget` tokens; copies come before the writes.

        Ends before a block that the index holds or that another sequence computes; StateError when that is the
        first one (`match` says "wait"). A context that is held entirely gives its last token, written nowhere.
        """
        seq = self._part.in_prefill(handle)
        if budget < 1:
            raise InvalidRequestError(f"A prefill budget is at least 1 token, got {budget}.")
        self._part.totals.hit_tokens += self._part.writer.advance_hits(seq)
        return self._part.writer.plan_prefill(seq, budget, self._part.sequences)

    @_atomic
    def commit_prefill(self, handle: SequenceHandle, chunk: PrefillChunk) -> None:
        """The chunk's step was dispatched: its blocks may be read by others from now on."""
        seq = self._part.sequences.get(handle)
        self._part.totals.add(self._part.writer.commit_prefill(seq, chunk))
        if chunk.is_last:
            move(seq, SequenceEvent.PROMPT_DONE)

    @_atomic
    def decode(self, handle: SequenceHandle, token: int) -> DecodeSlot:
        """Plan the write of one generated token after everything written so far."""
        seq = self._part.sequences.get(handle)
        if seq.state is not SequenceState.ACTIVE:
            raise StateError(f"{seq.name} is {seq.state.value!r}: decode needs a prefilled prompt.")
        require_no_plan(seq)
        return self._part.writer.plan_decode(seq, token, self._part.sequences)

    @_atomic
    def commit_decode(self, handle: SequenceHandle) -> None:
        """The step that writes the planned token was dispatched."""
        seq = self._part.sequences.get(handle)
        self._part.totals.add(self._part.writer.commit_decode(seq))

    @_atomic
    def row(self, handle: SequenceHandle) -> Row:
        """The page table line of the sequence, with what was planned last."""
        return self._part.sequences.get(handle).row

    @_atomic
    def usage(self, handle: SequenceHandle) -> TurnUsage:
        """Tokens kept, hit and computed in the turn that runs or ran last."""
        return self._part.sequences.get(handle).usage

    @_atomic
    def end_turn(self, handle: SequenceHandle, *, keep: bool, history_len: int) -> None:
        """End the turn and give back what it reserved.

        keep=True: the turn is done and all it has written stays; tokens that do not become history are found by the
        next turn's comparison. keep=False: it failed or was aborted, at any point; what was planned but not
        committed is taken back, and of what was written the first `history_len` tokens stay.
        """
        end_turn(self._part, self._part.sequences.get(handle), keep=keep, history_len=history_len)

    @_atomic
    def fork(self, handle: SequenceHandle, scope: Scope, *, reserve_from_parent: bool = False) -> SequenceHandle:
        """A second sequence on the same pages; no page is copied until someone writes a shared one.

        The fork is between turns, with what its parent has written so far as history; CapacityError when the
        parent is in its turn and there is no page for the copy that it must make now. With `reserve_from_parent`
        it is a branch of the running turn (n > 1): it decodes on, on its share of what the turn reserved.
        """
        parent = self._part.sequences.get(handle)
        return fork(self._part, parent, scope, reserve_from_parent=reserve_from_parent).handle

    @_atomic
    def release(self, handle: SequenceHandle) -> None:
        """End a sequence, in any state. Its handle is stale from then on."""
        self._part.remove(self._part.sequences.get(handle))

    # Pressure

    @_atomic
    def drop(self, handle: SequenceHandle) -> None:
        """Give up the KV of a sequence that is between turns; its next turn computes it again."""
        seq = self._part.sequences.get(handle)
        if seq.in_turn:
            raise StateError(f"{seq.name} is {seq.state.value!r}: only sequences between turns are dropped.")
        self._part.drop(seq)

    @_atomic
    def evict_cached(self) -> int:
        """Free every cached page; the number freed."""
        return self._part.store.evict_all()

    @_atomic
    def clear(self) -> None:
        """Forget all KV that no turn needs: idle sequences are dropped, cached pages freed."""
        for seq in self._part.sequences:
            if not seq.in_turn:
                self._part.drop(seq)
        self._part.store.evict_all()
        self._part.store.index.events.add(KVEvent(KVEventKind.CLEARED))

    # Views

    @_atomic
    def stats(self) -> MemoryStats:
        return audit.statistics(self._part.store, self._part.sequences, self._part.totals)

    @_atomic
    def pages(self) -> list[PageInfo]:
        """Every page that is not free."""
        return audit.page_map(self._part.store, self._part.sequences)

    @_atomic
    def events(self, since: int = 0) -> tuple[KVEvent, ...]:
        """What happened to keyed pages after event number `since`."""
        return self._part.store.index.events.since(since)

    @_atomic
    def verify(self) -> None:
        """Raise StateError, with all the numbers, unless every invariant holds."""
        audit.verify(self._part.store, self._part.sequences)
