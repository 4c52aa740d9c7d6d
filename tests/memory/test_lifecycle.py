"""The tables of states: what is not in them raises and changes nothing, and the page that shows them is theirs."""

from pathlib import Path

import pytest

from inms_jax.errors import StateError
from inms_jax.memory.diagram import page
from inms_jax.memory.lifecycle import (
    PAGE_TRANSITIONS,
    SEQUENCE_TRANSITIONS,
    PageEvent,
    PageState,
    SequenceEvent,
    SequenceState,
    advance,
)
from inms_jax.memory.pool import PagePool
from inms_jax.memory.quota import Book, Quota

WAYS = {
    PageState.FREE: (),
    PageState.FILLING: (PageEvent.ALLOCATE,),
    PageState.SEALED: (PageEvent.ALLOCATE, PageEvent.SEAL),
    PageState.CACHED: (PageEvent.ALLOCATE, PageEvent.SEAL, PageEvent.LAST_HOLDER_LEFT),
    PageState.SUSPECT: (PageEvent.ALLOCATE, PageEvent.SEAL, PageEvent.WITHDRAW),
    PageState.FENCED: (PageEvent.ALLOCATE, PageEvent.RETIRE),
}
"""How a page comes into each state."""


@pytest.mark.parametrize("state", PageState)
@pytest.mark.parametrize("event", PageEvent)
def test_every_event_of_a_page_is_in_the_table_or_changes_nothing(state: PageState, event: PageEvent):
    pool, book = PagePool(3), Book("a pool", Quota(), is_pool=True)
    pool.recharge(1, (book,))
    for step in WAYS[state]:
        pool.move(1, step)
    before = dict(book.states)
    after = PAGE_TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(StateError, match=rf"Page 1 is '{state.value}': '{event.value}' is not possible now"):
            pool.move(1, event)
        assert book.states == before
        assert pool.state(1) is state
    else:
        pool.move(1, event)
        assert pool.state(1) is after
        assert book.states[after] == before[after] + 1


@pytest.mark.parametrize("state", SequenceState)
@pytest.mark.parametrize("event", SequenceEvent)
def test_every_event_of_a_sequence_is_in_the_table_or_raises(state: SequenceState, event: SequenceEvent):
    after = SEQUENCE_TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(StateError, match=f"'{event.value}' is not possible now"):
            advance(SEQUENCE_TRANSITIONS, state, event, "Sequence 1")
    else:
        assert advance(SEQUENCE_TRANSITIONS, state, event, "Sequence 1") is after


def test_every_page_can_become_free_again_and_a_closed_sequence_stays_closed():
    reached = {PageState.FREE}
    for _ in PageState:
        reached |= {state for (state, _), after in PAGE_TRANSITIONS.items() if after in reached}
    assert reached == set(PageState)
    for event in SequenceEvent:
        with pytest.raises(StateError, match="only nothing"):
            advance(SEQUENCE_TRANSITIONS, SequenceState.CLOSED, event, "Sequence 1")


def test_the_page_of_state_machines_is_drawn_from_the_tables():
    committed = Path(__file__).parents[2] / "docs/state_machines.md"
    assert committed.read_text() == page(), "run: python -m inms_jax.memory.diagram > docs/state_machines.md"
