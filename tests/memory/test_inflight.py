"""A page that a planned step reads or writes is nobody else's before the step is committed, whatever others do."""

import pytest

from inms_jax.errors import InmsError, StaleHandleError, StateError
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.plan import DecodeSlot, PrefillChunk, Span
from inms_jax.memory.stats import SequenceHandle
from tests.memory.people import EVERY, A, B, T
from tests.memory.simulation import Lab

SYSTEM = Span(tuple(range(100, 106)), T, published=True)


def fill(m: Lab) -> None:
    """Somebody takes every page that can be had."""
    for tokens in range(4 * m.memory.num_pages, 0, -4):
        handle = m.memory.register(B)
        try:
            if m.memory.begin_turn(handle, [Span(tuple(range(500, 500 + tokens)), B)], max_new_tokens=0).admitted:
                m.memory.prefill(handle, 10**6)
                return
        except InmsError:
            pass
        m.memory.release(handle)
    raise AssertionError("not one page could be had")


def others(m: Lab, other: SequenceHandle, what: str) -> None:
    """Something that frees pages; `other` holds the same ones as the sequence with the plan."""
    memory = m.memory
    if what == "expire":
        memory.lease(other, 1, 0)
        memory.sweep(10)
    elif what == "offload":
        memory.pause(other, None)
        memory.offload(other, m.download)
    elif what == "drop":
        memory.drop(other)
    else:
        memory.release(other)
        if what == "close scopes":
            memory.close_scope(A)
            memory.close_scope(T)
        elif what == "evict":
            memory.evict_cached()
        elif what == "clear":
            memory.clear()
        elif what == "empty":
            memory.empty(T.tenant)


def generations(m: Lab, pages: set[int]) -> dict[int, int]:
    pool = m.memory._commons.pool
    for page in pages:
        assert pool.references(page) > 0
        assert pool.state(page) in (PageState.FILLING, PageState.SEALED, PageState.SUSPECT)
    assert not pages & set(pool.free_pages())
    return {page: pool.generation(page) for page in pages}


@pytest.mark.parametrize("what", ["release", "drop", "close scopes", "evict", "clear", "empty", "expire", "offload"])
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_a_page_of_a_planned_step_is_not_reused_before_its_commit(step: str, what: str) -> None:
    m = Lab(scopes=EVERY, num_pages=20)
    a = m.memory.register(A)
    history = m.turn(a, [SYSTEM, Span((1, 2), A)], A)
    other = m.memory.fork(a, B)
    spans = [*history, Span((7,), A)]
    if step == "prefill":
        m.begin(a, spans)
        plan: PrefillChunk | DecodeSlot = m.memory.prefill(a, 9)
    else:
        m.memory.release(other)
        m.begin(a, spans, new=2)
        m.prompt(a, spans)
        other = m.memory.fork(a, B)
        plan = m.memory.decode(a, 8)
    (copied,) = plan.copies
    used = {copied.source, copied.destination, *m.memory.row(a).page.tolist()}
    before = generations(m, used)
    others(m, other, what)
    fill(m)
    assert generations(m, used) == before
    m.memory.verify()
    if isinstance(plan, PrefillChunk):
        m.memory.commit_prefill(a, plan)
    else:
        m.memory.commit_decode(a)
    m.memory.verify()
    pool = m.memory._commons.pool
    # Only complete blocks are offloaded: the other one still has the page that was copied.
    assert pool.references(copied.source) == (what == "offload")
    assert all(pool.references(page) for page in m.memory.row(a).page.tolist())


@pytest.mark.parametrize("end", ["end_turn", "release"])
def test_a_plan_that_was_taken_back_cannot_be_committed(end: str) -> None:
    m = Lab(scopes=EVERY)
    a = m.memory.register(A)
    m.begin(a, [SYSTEM, Span((1, 2), A)])
    chunk = m.memory.prefill(a, 5)
    if end == "release":
        m.memory.release(a)
    else:
        m.memory.end_turn(a, keep=False, history_len=0)
    before = m.memory.stats()
    with pytest.raises((StaleHandleError, StateError)):
        m.memory.commit_prefill(a, chunk)
    assert m.memory.stats() == before
    assert before.held == 0
    m.memory.verify()
