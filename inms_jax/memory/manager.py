"""MemoryManager: register, begin a turn, match, write, fork, release. The one owner of pages and sequences.

Every operation is atomic and validates before it changes anything. Plans say where a step reads and writes; they are
committed after the step was dispatched. Knows nothing of the device, of text, or of who runs next.
"""

import contextlib
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TypeVar

from inms_jax.errors import ClosedError, ConfigError, InvalidRequestError, StateError
from inms_jax.memory import audit
from inms_jax.memory.commons import Commons
from inms_jax.memory.events import KVEvent, KVEventKind
from inms_jax.memory.fingerprint import CacheIdentity, Fingerprints, HashFunction, keyed_blake2b
from inms_jax.memory.forking import fork
from inms_jax.memory.lease import Expired, Sweep, check_ttl
from inms_jax.memory.lifecycle import SequenceEvent, SequenceState
from inms_jax.memory.operations import Operations
from inms_jax.memory.partition import Partition, move, require_no_plan, require_prefill
from inms_jax.memory.plan import DecodeSlot, PrefillChunk, Row, Span
from inms_jax.memory.pool import PagePool
from inms_jax.memory.quota import Ledger, Quota, for_mode
from inms_jax.memory.room import room_for_reserves
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.shared_blocks import SharedBlock, shared_blocks
from inms_jax.memory.stats import Admission, MatchResult, MemoryStats, PageInfo, SequenceHandle, TurnUsage
from inms_jax.memory.tier import Scope, Tier
from inms_jax.memory.turns import begin_turn, end_turn
from inms_jax.memory.writing import Move

T = TypeVar("T")

__all__ = ["MemoryManager", "PrefillChunk", "SequenceHandle"]


class MemoryManager(Operations):
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
        pool_mode: str = "elastic",
        hash_function: HashFunction | None = None,
    ) -> None:
        if block_size < 1 or identity.block_size != block_size:
            raise ConfigError(
                f"block_size must be at least 1 and that of the cache identity, got {block_size} and "
                f"{identity.block_size}."
            )
        self.num_pages = num_pages
        self.pool_mode = pool_mode
        fingerprints = Fingerprints(identity, hash_function or keyed_blake2b(secrets.token_bytes(32)))
        commons = Commons(PagePool(num_pages), Ledger(num_pages - 1), fingerprints, enable_prefix_caching)
        super().__init__(commons, block_size=block_size, provisional_decode=provisional_decode)

    # Tenants and scopes

    def open_tenant(self, tenant: str, quotas: Mapping[Tier, Quota]) -> None:
        """Give a tenant pools of their own size before it opens its first scope; without this they have no limits.

        What it reserves is there at once, or CapacityError with the numbers. In `pool_mode="reserved"` a pool is
        limited to what it reserves.
        """
        quotas = {tier: for_mode(quotas.get(tier, Quota()), self.pool_mode) for tier in Tier}
        with self._all() as parts:
            if tenant in self._parts:
                raise StateError(f"Tenant {tenant!r} is open already.")
            for owner, seq in room_for_reserves(tenant, quotas.values(), self._commons.ledger, parts):
                owner.drop(seq)
                owner.settle()
            self._add_tenant(tenant, quotas)

    def close_tenant(self, tenant: str) -> None:
        """Give up what the tenant reserved and its limits. Its sequences go on until they are released."""
        with self._tenant(tenant) as part:
            part.set_quotas(dict.fromkeys(Tier, Quota()), declared=False)

    def open_scope(self, scope: Scope) -> None:
        """Let pages of this scope have keys; StateError when it is open already."""
        with self._tenant(scope.tenant, new=True) as part:
            part.store.open_scope(scope)

    def close_scope(self, scope: Scope) -> None:
        """Withdraw the keys of exactly this scope: cached pages go FREE now, held ones after their last holder."""
        with self._tenant(scope.tenant, new=True) as part:
            part.close_scope(scope)

    def hold_scope(self, scope: Scope, account: Scope | None = None, *, limit: int | None = None) -> None:
        """Open `scope` for the first that holds it; it stays open while anyone does, and the oldest holder pays.

        `account`: the group or agent that holds it, by its own scope. `limit`: the most pages that the account pays
        for, given when it first holds anything. A charge that is passed on may exceed it; then no page is added.
        """
        with self._tenant(scope.tenant, new=True) as part:
            part.hold_scope(scope, scope if account is None else account, limit)

    def drop_scope(self, scope: Scope, account: Scope | None = None) -> None:
        """One holder less: the next oldest pays from now on; after the last one the scope is closed."""
        with self._tenant(scope.tenant, new=True) as part:
            part.drop_scope(scope, scope if account is None else account)

    # Sequences

    def register(self, scope: Scope) -> SequenceHandle:
        """A new sequence that reads and writes as `scope`, which must be open."""
        with self._tenant(scope.tenant, new=True) as part:
            part.require_open(scope)
            return part.add(scope, frozenset([scope])).handle

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
        return self._with_room(
            handle,
            lambda part, seq: begin_turn(
                part, seq, context, max_new_tokens=max_new_tokens, new_scope=new_scope, branches=branches
            ),
        )

    def match(self, handle: SequenceHandle) -> MatchResult:
        """Advance over blocks that the index holds. "wait": the next block is being computed by another sequence."""
        with self._sequence(handle) as (part, seq):
            require_prefill(seq)
            part.advance_hits(seq)
            waits = seq.written < seq.context_length and part.writer.is_claimed(seq, seq.layout.block_at(seq.written))
            remaining = max(1, seq.context_length - seq.written)
            return MatchResult("wait" if waits else "ready", seq.cached_tokens, remaining)

    def prefill(self, handle: SequenceHandle, budget: int) -> PrefillChunk:
        """Plan the next at most `budget` tokens; copies come before the writes.

        Ends before a block that the index holds or that another sequence computes; StateError when that is the
        first one (`match` says "wait"). A context that is held entirely gives its last token, written nowhere.
        """
        if budget < 1:
            raise InvalidRequestError(f"A prefill budget is at least 1 token, got {budget}.")

        def plan(part: Partition, seq: Sequence) -> PrefillChunk:
            require_prefill(seq)
            part.advance_hits(seq)
            return part.writer.plan_prefill(seq, budget, part.sequences)

        return self._with_room(handle, plan)

    def commit_prefill(self, handle: SequenceHandle, chunk: PrefillChunk) -> None:
        """The chunk's step was dispatched: its blocks may be read by others from now on."""
        with self._sequence(handle) as (part, seq):
            part.totals.add(part.writer.commit_prefill(seq, chunk))
            if chunk.is_last:
                move(seq, SequenceEvent.PROMPT_DONE)

    def must_copy(self, handle: SequenceHandle) -> bool:
        """Whether the next token would be written to a page that others hold, as things are."""
        with self._sequence(handle) as (part, seq):
            return seq.target is not None and not part.store.writable(seq.target)

    def decode(self, handle: SequenceHandle, token: int) -> DecodeSlot:
        """Plan the write of one generated token after everything written so far."""

        def plan(part: Partition, seq: Sequence) -> DecodeSlot:
            if seq.state is not SequenceState.ACTIVE:
                raise StateError(f"{seq.name} is {seq.state.value!r}: decode needs a prefilled prompt.")
            require_no_plan(seq)
            return part.writer.plan_decode(seq, token, part.sequences)

        return self._with_room(handle, plan)

    def commit_decode(self, handle: SequenceHandle) -> None:
        """The step that writes the planned token was dispatched."""
        with self._sequence(handle) as (part, seq):
            part.totals.add(part.writer.commit_decode(seq))

    def row(self, handle: SequenceHandle) -> Row:
        """The page table line of the sequence, with what was planned last."""
        with self._sequence(handle) as (_, seq):
            return seq.row

    def usage(self, handle: SequenceHandle) -> TurnUsage:
        """Tokens kept, hit and computed in the turn that runs or ran last."""
        with self._sequence(handle) as (_, seq):
            return seq.usage

    def end_turn(self, handle: SequenceHandle, *, keep: bool, history_len: int) -> None:
        """End the turn and give back what it reserved.

        keep=True: the turn is done and all it has written stays; tokens that do not become history are found by the
        next turn's comparison. keep=False: it failed or was aborted, at any point; what was planned but not
        committed is taken back, and of what was written the first `history_len` tokens stay.
        """
        with self._sequence(handle) as (part, seq):
            end_turn(part, seq, keep=keep, history_len=history_len)

    def fork(self, handle: SequenceHandle, scope: Scope, *, reserve_from_parent: bool = False) -> SequenceHandle:
        """A second sequence on the same pages; no page is copied until someone writes a shared one.

        The fork is between turns, with what its parent has written so far as history; CapacityError when the
        parent is in its turn and there is no page for the copy that it must make now. With `reserve_from_parent`
        it is a branch of the running turn (n > 1): it decodes on, on its share of what the turn reserved.
        """
        return self._with_room(
            handle, lambda part, parent: fork(part, parent, scope, reserve_from_parent=reserve_from_parent).handle
        )

    def release(self, handle: SequenceHandle) -> None:
        """End a sequence, in any state. Its handle is stale from then on."""
        with self._sequence(handle) as (part, seq):
            part.remove(seq)

    # Pressure

    def pin(self, handle: SequenceHandle) -> None:
        """Keep the KV of a sequence until it is released: no turn of another makes it give up its pages."""
        with self._sequence(handle) as (_, seq):
            seq.pinned = True

    def drop(self, handle: SequenceHandle) -> None:
        """Give up the KV of a sequence that is between turns; its next turn computes it again."""
        with self._sequence(handle) as (part, seq):
            if seq.in_turn or seq.pinned or seq.state is SequenceState.PAUSED:
                what = "pinned" if seq.pinned else repr(seq.state.value)
                raise StateError(f"{seq.name} is {what}: only sequences between turns, not pinned, are dropped.")
            part.drop(seq)

    # Leases, pauses, host memory

    def lease(self, handle: SequenceHandle, ttl: int | float | None, now: int | float) -> None:
        """Let the sequence live until nobody has used it for `ttl` seconds; None, as at first, is without end."""
        check_ttl("a lease", ttl)
        with self._sequence(handle) as (part, seq):
            seq.lease.ttl, seq.lease.renewed = ttl, now
            part.used = now

    def renew(self, handle: SequenceHandle, now: int | float) -> None:
        """The sequence is in use."""
        with self._sequence(handle) as (part, seq):
            seq.lease.renewed = part.used = now

    def sweep(self, now: int | float, *, empty_after: int | float | None = None) -> Sweep:
        """End the sequences whose lease is over: their handles are stale, their pages are those of a released one.

        empty_after: tenants that nobody has used for so long are emptied, as by `empty`.
        """
        found: list[Expired | SequenceHandle] = []
        emptied: list[tuple[str, int]] = []
        for tenant in list(self._parts):
            with contextlib.suppress(ClosedError), self._tenant(tenant) as part:  # it may be gone meanwhile
                found += part.sweep(now)
                if empty_after is not None and (freed := part.empty_if_idle(now, empty_after)):
                    emptied.append((tenant, freed))
        return Sweep(
            tuple(one for one in found if isinstance(one, Expired)),
            tuple(one for one in found if isinstance(one, SequenceHandle)),
            tuple(emptied),
        )

    def pause(self, handle: SequenceHandle, until: int | float | None) -> None:
        """Keep the KV of a sequence between turns, whatever others need, until a sweep finds that it is `until`."""
        with self._sequence(handle) as (_, seq):
            move(seq, SequenceEvent.PAUSE)
            seq.lease.paused_until = until

    def resume(self, handle: SequenceHandle) -> None:
        """End a pause. The next turn ends it too."""
        with self._sequence(handle) as (_, seq):
            move(seq, SequenceEvent.RESUME)

    def offload(self, handle: SequenceHandle, download: Move) -> int:
        """Give up the private pages of a paused sequence after `download` has copied them; the number of them.

        `download` and `upload` take page ids and as many keys. Nothing is given up when it raises.
        """
        with self._sequence(handle) as (part, seq):
            return part.writer.offload(seq, download)

    def restore(self, handle: SequenceHandle, upload: Move) -> int:
        """Have `upload` fill pages with blocks that were offloaded, as far as this turn needs them next; tokens of
        them.
        """
        with self._sequence(handle) as (part, seq):
            require_prefill(seq)
            return part.writer.restore(seq, upload)

    def empty(self, tenant: str) -> int:
        """Free every page of a tenant that no turn needs and that is not pinned; the number freed."""
        with self._tenant(tenant) as part:
            return part.empty()

    def take_freed(self) -> tuple[int, ...]:
        """The pages that were freed since the last call, for an engine that wipes them; the first call begins to count.

        Wiped before the next write of any page, they hold nothing of their last owner when they are used again.
        """
        with self._all():
            freed, self._commons.pool.freed = self._commons.pool.freed, set()
            return tuple(sorted(freed or ()))

    def evict_cached(self) -> int:
        """Free every cached page; the number freed."""
        with self._all() as parts:
            return sum(part.store.evict_all() for part in parts)

    def clear(self) -> None:
        """Forget all KV that no turn needs: idle sequences are dropped, pinned ones too, cached pages freed."""
        with self._all() as parts:
            for part in parts:
                for seq in part.sequences:
                    if not seq.in_turn:
                        part.drop(seq)
                part.store.evict_all()
                part.settle()
            self._commons.events.add(KVEvent(KVEventKind.CLEARED))

    # Views

    def stats(self) -> MemoryStats:
        with self._all() as parts:
            return audit.statistics(self._commons, parts, self._past)

    def pages(self) -> list[PageInfo]:
        """Every page that is not free."""
        with self._all() as parts:
            return audit.page_map(parts)

    def shared_blocks(self) -> list[SharedBlock]:
        """The keyed GLOBAL and GROUP blocks, each after the one it follows."""
        with self._all() as parts:
            return shared_blocks([part.store.index for part in parts])

    def events(self, since: int = 0) -> tuple[KVEvent, ...]:
        """What happened to keyed pages after event number `since`."""
        return self._commons.events.since(since)

    def verify(self) -> None:
        """Raise StateError, with all the numbers, unless every invariant holds."""
        with self._all() as parts:
            audit.verify(self._commons, parts)
