"""A second sequence on the pages of a first one: between turns, or as a branch of the turn that runs.

No page is copied here; who writes a shared one later copies it then. Knows nothing of contexts or the index.
"""

from inms_jax.errors import CapacityError, StateError
from inms_jax.memory.lifecycle import SequenceState
from inms_jax.memory.partition import Partition, require_no_plan, require_same_group
from inms_jax.memory.quota import Forecast
from inms_jax.memory.reservation import rebook, without_copy
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.tier import Scope


def fork(part: Partition, parent: Sequence, scope: Scope, *, reserve_from_parent: bool) -> Sequence:
    """See `MemoryManager.fork`."""
    require_same_group(parent, scope)
    require_no_plan(parent)
    return _branch(part, parent, scope) if reserve_from_parent else _twin(part, parent, scope)


def _twin(part: Partition, parent: Sequence, scope: Scope) -> Sequence:
    part.require_open(scope)
    must_copy = [] if parent.target is None else without_copy(part.sequences, parent.target)
    forecast = Forecast(part.ledger)
    if must_copy:
        block = parent.layout.block_at(parent.written)
        for book in part.store.books(parent.layout.scopes[block]):
            forecast.add(book, len(must_copy))
    missing = max([forecast.missing, *forecast.over().values()])
    if missing:
        if forecast.missing:
            part.commons.require_all()
        raise CapacityError(
            f"Cannot fork {parent.name} in its turn: {len(must_copy)} pages for copies are needed, "
            f"{len(must_copy) - missing} are available. Fork between turns or enlarge the pool."
        )
    part.claim(forecast.claim(part.store.pools.values()))
    child = _share(part, parent, scope)
    child.state = SequenceState.IDLE if parent.in_turn else parent.state
    for seq in must_copy:
        seq.copy_reserved = 1
        rebook(part.store, seq)
    return child


def _branch(part: Partition, parent: Sequence, scope: Scope) -> Sequence:
    tail = int(parent.target is not None)
    share = len(parent.layout.starts) - len(parent.pages) + tail
    if parent.state is not SequenceState.ACTIVE or parent.branch_reserved < share:
        raise StateError(
            f"{parent.name} is {parent.state.value!r} with {parent.branch_reserved} pages for branches: a branch "
            f"needs a prefilled prompt and {share} pages. Begin the turn with more branches."
        )
    child = _share(part, parent, scope)
    child.state, child.copy_reserved = parent.state, tail
    parent.branch_reserved -= share
    rebook(part.store, parent)
    rebook(part.store, child)
    return child


def _share(part: Partition, parent: Sequence, scope: Scope) -> Sequence:
    child = part.add(scope, parent.readable | {scope})
    child.layout, child.context_length = parent.layout, parent.context_length
    child.tokens, child.nodes, child.pages = parent.tokens.copy(), list(parent.nodes), list(parent.pages)
    child.written, child.prefilled = parent.written, parent.prefilled
    # A turn holds the bodies that it will reach later; a sequence between turns, those before what is written.
    child.bodies = parent.bodies
    child.body_pages = parent.body_pages[: sum(body.at < child.written for body in child.bodies)]
    for page in child.held:
        part.store.retain(page)
    return child
