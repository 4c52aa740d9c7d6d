"""The two ends of a turn: what it keeps, hits and sets aside when it begins, what it gives back when it ends.

Everything is worked out and checked before anything is changed. Knows nothing of what a step writes.
"""

from collections import Counter
from collections.abc import Sequence as Items

from inms_jax.errors import InvalidRequestError
from inms_jax.memory.admission import TurnPlan, check_readable, plan_turn, without_partial_page
from inms_jax.memory.fragment import own_length
from inms_jax.memory.lifecycle import SEQUENCE_TRANSITIONS, SequenceEvent, SequenceState, advance
from inms_jax.memory.partition import Partition, require_no_plan, require_same_group
from inms_jax.memory.plan import Span
from inms_jax.memory.reservation import hand_over_copy, rebook
from inms_jax.memory.room import make_room, require_possible
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import Admission, Shortage
from inms_jax.memory.tier import Scope


def begin_turn(
    part: Partition,
    seq: Sequence,
    context: Items[Span],
    *,
    max_new_tokens: int,
    new_scope: Scope | None,
    branches: int,
) -> Admission:
    """Start a turn, or say why it cannot start now; see `MemoryManager.begin_turn`."""
    after = advance(SEQUENCE_TRANSITIONS, seq.state, SequenceEvent.BEGIN, seq.name)
    if max_new_tokens < 0 or branches < 1:
        raise InvalidRequestError(
            f"max_new_tokens must be at least 0 and branches at least 1, got {max_new_tokens} and {branches}."
        )
    scope = seq.scope if new_scope is None else new_scope
    part.require_open(scope)
    require_same_group(seq, scope)
    check_readable(seq, context, scope)
    plan = plan_turn(
        seq,
        context,
        scope=scope,
        max_new_tokens=max_new_tokens,
        branches=branches,
        store=part.store,
        block_size=part.block_size,
    )
    require_possible(part, seq, plan)
    if plan.missing:
        reason = f"{len(plan.missing)} fragments have to be computed after their roots first"
        return Admission(False, plan.needed, part.ledger.spare, reason, missing=plan.missing)
    room = make_room(part, seq, plan)
    if room.short and plan.copy:
        plan = without_partial_page(seq, plan, part.store)
        room = make_room(part, seq, plan)
    if room.short:
        if room.short is not Shortage.MEMORY and not seq.refused:
            seq.refused = True
            part.totals.quota_refusals += 1
        return Admission(False, plan.needed, room.available, room.reason, short=room.short)
    for owner, other in room.dropped:
        if owner is not part:
            owner.drop(other)
            owner.settle()
    part.claim(room.claim)
    for owner, other in room.dropped:
        if owner is part:
            part.drop(other)
    _start(part, seq, plan, after)
    return Admission(True, plan.needed, room.available)


def end_turn(part: Partition, seq: Sequence, *, keep: bool, history_len: int) -> None:
    """End the turn and give back what it set aside; see `MemoryManager.end_turn`."""
    if history_len < 0:
        raise InvalidRequestError(f"history_len is at least 0, got {history_len}.")
    event = SequenceEvent.FINISH if keep else SequenceEvent.ABORT
    after = advance(SEQUENCE_TRANSITIONS, seq.state, event, seq.name)
    if keep:
        require_no_plan(seq)
    part.writer.cancel(seq)
    if keep:
        seq.offloaded.clear()
    hand_over_copy(part.store, part.sequences, seq)
    seq.state = after
    seq.copy_reserved = seq.branch_reserved = 0
    seq.last_used = part.tick()
    rebook(part.store, seq)
    part.writer.truncate(seq, seq.written if keep else own_length(seq.bodies, history_len))


def _start(part: Partition, seq: Sequence, plan: TurnPlan, state: SequenceState) -> None:
    body_pages = [pages for pages in plan.body_pages if pages is not None]
    for page in (*plan.hits, *(page for pages in body_pages for page in pages)):
        part.store.retain(page)
    for page in reversed(seq.held[plan.kept_pages :]):
        part.store.let_go(page, superseded=True)
    seq.pages = [*seq.pages[: plan.kept_pages], *plan.hits]
    seq.bodies, seq.body_pages = plan.bodies, body_pages
    seq.state, seq.scope, seq.readable = state, plan.scope, seq.readable | {plan.scope}
    seq.layout, seq.tokens, seq.nodes = plan.layout, plan.tokens, plan.nodes
    seq.displaced = plan.displaced
    seq.context_length = plan.context_length
    seq.written = seq.prefilled = plan.written
    seq.copy_reserved, seq.branch_reserved = plan.copy, plan.branch_pages
    seq.kept_tokens, seq.hit_tokens = plan.kept, plan.written - plan.kept
    seq.computed_tokens, seq.misses, seq.refused = 0, Counter(), False
    seq.last_used = part.tick()
    rebook(part.store, seq)
    part.writer.seal_blocks(seq, range(plan.kept_pages))
    part.totals.kept_tokens += seq.kept_tokens
    part.totals.hit_tokens += seq.hit_tokens
    part.totals.fragment_tokens += sum(body.length for body in seq.bodies)
