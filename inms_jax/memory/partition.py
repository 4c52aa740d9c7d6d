"""Pages, sequences and totals that change together, and the checks that every operation on them begins with.

Knows nothing of locks, nor of what an operation is made of: those are in `turns`, `forking` and `writing`.
"""

from inms_jax.errors import ClosedError, StateError, VisibilityError
from inms_jax.memory.audit import Totals
from inms_jax.memory.lifecycle import SEQUENCE_TRANSITIONS, SequenceEvent, SequenceState, advance
from inms_jax.memory.registry import Registry
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope
from inms_jax.memory.writing import Writer


class Partition:
    """What operations work on; changed under the manager's lock only."""

    def __init__(self, store: PageStore, *, block_size: int, provisional_decode: bool) -> None:
        self.block_size = block_size
        self.store = store
        self.writer = Writer(store, provisional_decode=provisional_decode)
        self.sequences = Registry()
        self.totals = Totals()
        self._clock = 0

    def tick(self) -> int:
        """The next moment; orders uses, measures nothing."""
        self._clock += 1
        return self._clock

    def add(self, scope: Scope, readable: frozenset[Scope]) -> Sequence:
        """A new sequence without pages."""
        seq = self.sequences.add(scope, readable)
        seq.last_used = self.tick()
        return seq

    def in_prefill(self, handle: SequenceHandle) -> Sequence:
        """The sequence, which must be computing its prompt and have no step planned."""
        seq = self.sequences.get(handle)
        if seq.state is not SequenceState.PREFILL:
            raise StateError(f"{seq.name} is {seq.state.value!r}: there is nothing to prefill. Begin a turn first.")
        require_no_plan(seq)
        return seq

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
        self.sequences.remove(seq)


def move(seq: Sequence, event: SequenceEvent) -> None:
    """Advance the state of a sequence; an illegal event raises StateError and changes nothing."""
    seq.state = advance(SEQUENCE_TRANSITIONS, seq.state, event, seq.name)


def require_no_plan(seq: Sequence) -> None:
    """StateError when a step of the sequence is planned and not committed."""
    if seq.pending is not None:
        raise StateError(f"{seq.name} has a planned step to token {seq.pending.end}: commit it first.")


def require_same_group(seq: Sequence, scope: Scope) -> None:
    """VisibilityError when `scope` is of another tenant or group than the sequence."""
    if (seq.scope.tenant, seq.scope.group) != (scope.tenant, scope.group):
        raise VisibilityError(f"{seq.name} cannot go on as {scope}: tenant and group must stay the same.")
