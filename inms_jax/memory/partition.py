"""Everything of one tenant: its pages, sequences, quotas and totals, and the checks that operations begin with.

No page is shared by two tenants, since keys contain the tenant, so no operation on one looks into another but to find
room. Knows nothing of who takes its lock, nor of what an operation is made of: see `turns`, `room`, `forking` and
`writing`.
"""

import threading
from collections.abc import Iterator, Mapping

from inms_jax.errors import CapacityError, ClosedError, ConfigError, StateError, VisibilityError
from inms_jax.memory.commons import Commons
from inms_jax.memory.lease import Expired
from inms_jax.memory.lifecycle import SEQUENCE_TRANSITIONS, SequenceEvent, SequenceState, advance
from inms_jax.memory.quota import Book, Quota
from inms_jax.memory.registry import Registry
from inms_jax.memory.reservation import rebook
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope, Tier
from inms_jax.memory.writing import Writer


class Partition:
    """What operations work on; changed under `lock` only. `peers`: all tenants by name, this one too.

    `gone`: nothing was left of it, and a tenant that comes under its name is another one.
    """

    def __init__(
        self,
        commons: Commons,
        registry: Registry,
        tenant: str,
        peers: dict[str, "Partition"],
        *,
        block_size: int,
        provisional_decode: bool,
    ) -> None:
        self.tenant = tenant
        self.peers = peers
        self.block_size = block_size
        self.store = commons.add_store(tenant)
        self.ledger = commons.ledger
        self.writer = Writer(self.store, provisional_decode=provisional_decode)
        self.sequences: dict[Sequence, None] = {}
        self.totals = self.store.totals
        self.commons = commons
        self.lock = threading.RLock()
        self.gone = False
        self._registry = registry
        # What the operation that runs now is about, and the sequences that it has made.
        self.working: Sequence | None = None
        self._unfinished: list[Sequence] = []
        self.declared = False
        # When it was last in use, by the clock that leases are measured with; None: nobody has said yet.
        self.used: int | float | None = None

    def tick(self) -> int:
        """The next moment."""
        return next(self.commons.clock)

    def settle(self) -> None:
        """Tell the ledger what the pools claim now."""
        self.ledger.settle(self.tenant, sum(book.claim for book in self.store.pools.values()))

    def claim(self, pages: int) -> None:
        """Claim `pages` in all before doing what needs them; Crowded when other tenants were faster."""
        if not self.ledger.claim(self.tenant, pages):
            self.commons.require_all()
            raise CapacityError(f"{self.tenant!r} cannot claim {pages} pages: {self.ledger.spare} more are left.")

    def add(self, scope: Scope, readable: frozenset[Scope]) -> Sequence:
        """A new sequence without pages."""
        seq = self._registry.add(scope, readable)
        self._unfinished.append(seq)
        self.sequences[seq] = None
        seq.last_used = self.tick()
        return seq

    def finish(self) -> None:
        """The operation came to its end: who asked for sequences has their handles."""
        self.working = None
        self._unfinished.clear()

    def forget_unfinished(self) -> None:
        """The operation did not: nobody has the handles of the sequences that it made."""
        for seq in self._unfinished:
            self.forget(seq)
        self._unfinished.clear()

    def forget(self, seq: Sequence, why: str | None = None) -> None:
        """Nobody can name a sequence any more, which has no pages. `why`: what they are told who try."""
        self._registry.remove(seq, why)
        self.sequences.pop(seq, None)

    # What it is

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the tenant is left."""
        return not (self.declared or self.sequences or self.store.open_scopes or self.store.owner)

    def set_quotas(self, quotas: Mapping[Tier, Quota], *, declared: bool = True) -> None:
        """Change the size of the pools. `declared` tenants stay when they are empty."""
        for tier, quota in quotas.items():
            book = self.store.pools[tier]
            self.ledger.reserve(quota.reserve - book.quota.reserve)
            book.quota = quota
        self.declared = declared
        self.settle()

    # Scopes

    def close_scope(self, scope: Scope) -> None:
        """Close a scope for all who hold it."""
        self.store.close_scope(scope)
        self._pass_charges_on()

    def hold_scope(self, scope: Scope, account: Scope, limit: int | None) -> None:
        """One holder more; see `MemoryManager.hold_scope`."""
        lineages = self.store.lineages
        if limit is not None and limit < 1:
            raise ConfigError(f"The limit of {account} must be at least 1 page, got {limit}.")
        if not lineages.held(scope):
            self.store.open_scope(scope)
        if limit is not None and account not in self.store.accounts:
            self.store.accounts[account] = Book(account_name(account), Quota(0, limit), is_pool=False)
        lineages.hold(scope, account)
        if limit is not None:
            self._pass_charges_on()

    def drop_scope(self, scope: Scope, account: Scope) -> None:
        """One holder less; see `MemoryManager.drop_scope`."""
        lineages = self.store.lineages
        payer = lineages.payer(scope)
        lineages.drop(scope, account)
        if not lineages.held(scope):
            self.store.close_scope(scope)
        if not lineages.holds_any(account):
            self.store.accounts.pop(account, None)
        if lineages.payer(scope) != payer:
            self._pass_charges_on()

    def _pass_charges_on(self) -> None:
        self.store.recharge()
        for seq in self.sequences:
            rebook(self.store, seq, payers_changed=True)

    # Operations

    def advance_hits(self, seq: Sequence) -> None:
        """Hold the blocks that the index has next."""
        self.totals.hit_tokens += self.writer.advance_hits(seq)

    def empty(self) -> int:
        """Free what no turn needs and nobody pinned; the number of pages freed."""
        before = len(self.store.owner)
        for seq in self.sequences:
            if seq.droppable:
                self.drop(seq)
        self.store.evict_all()
        return before - len(self.store.owner)

    def require_open(self, scope: Scope) -> None:
        """ClosedError unless `scope` is open."""
        if scope not in self.store.open_scopes:
            raise ClosedError(f"{scope} is not one of the {len(self.store.open_scopes)} open scopes.")

    def drop(self, seq: Sequence) -> None:
        """Give up the KV of a sequence that is between turns."""
        self.totals.dropped_sequences += bool(seq.pages)
        self.writer.truncate(seq, 0)

    def remove(self, seq: Sequence) -> None:
        """End a sequence, in any state."""
        self.writer.cancel(seq)
        move(seq, SequenceEvent.RELEASE)
        self.writer.truncate(seq, 0)
        rebook(self.store, seq)
        self.forget(seq)

    def sweep(self, now: int | float) -> Iterator[Expired | SequenceHandle]:
        """End the sequences whose lease is over, and the pauses that are; one in a turn is in use."""
        for seq in list(self.sequences):
            lease = seq.lease
            if seq.in_turn or seq.pinned:
                lease.renewed = now
                if seq.in_turn:
                    self.used = now
            elif lease.expired(now) and lease.ttl is not None:
                expired = Expired(seq.handle, seq.scope, now - lease.renewed, lease.ttl, len(set(seq.held)))
                move(seq, SequenceEvent.EXPIRE)
                self.totals.expired_sequences += 1
                self.writer.truncate(seq, 0)
                rebook(self.store, seq)
                self.forget(seq, f"{seq.name} was not used for {expired.age:.0f} s and its ttl is {expired.ttl:.0f} s.")
                yield expired
            elif seq.state is SequenceState.PAUSED and lease.pause_over(now):
                move(seq, SequenceEvent.RESUME)
                yield seq.handle

    def empty_if_idle(self, now: int | float, after: int | float) -> int:
        """Free what no turn needs, if nobody has used the tenant for so long; the number of pages freed."""
        if self.used is None:
            self.used = now
        return self.empty() if now - self.used >= after else 0


def account_name(account: Scope) -> str:
    """An account in a message."""
    if account.agent is not None:
        return f"agent {account.agent} of {account.group or account.tenant}"
    return f"group {account.group} of {account.tenant}"


def move(seq: Sequence, event: SequenceEvent) -> None:
    """Advance the state of a sequence; an illegal event raises StateError and changes nothing."""
    seq.state = advance(SEQUENCE_TRANSITIONS, seq.state, event, seq.name)


def require_prefill(seq: Sequence) -> None:
    """StateError unless the sequence is computing its prompt and has no step planned."""
    if seq.state is not SequenceState.PREFILL:
        raise StateError(f"{seq.name} is {seq.state.value!r}: there is nothing to prefill. Begin a turn first.")
    require_no_plan(seq)


def require_no_plan(seq: Sequence) -> None:
    """StateError when a step of the sequence is planned and not committed."""
    if seq.pending is not None:
        raise StateError(f"{seq.name} has a planned step to token {seq.pending.end}: commit it first.")


def require_same_group(seq: Sequence, scope: Scope) -> None:
    """VisibilityError when `scope` is of another tenant or group than the sequence."""
    if (seq.scope.tenant, seq.scope.group) != (scope.tenant, scope.group):
        raise VisibilityError(f"{seq.name} cannot go on as {scope}: tenant and group must stay the same.")
