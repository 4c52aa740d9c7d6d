"""Events of keyed pages."""

import random

from inms_jax.memory.events import EventLog, KVEvent, KVEventKind
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import Span
from tests.memory.people import EVERY, A, B, C, G, T
from tests.memory.simulation import Lab


def keyed(memory: MemoryManager) -> set[int]:
    return {info.page for info in memory.pages() if info.state in (PageState.SEALED, PageState.CACHED)}


def replay(memory: MemoryManager) -> set[int]:
    pages: set[int] = set()
    for number, event in enumerate(memory.events(), 1):
        assert event.number == number
        if event.kind is KVEventKind.STORED:
            assert event.page not in pages
            pages.add(event.page or 0)
        elif event.kind is KVEventKind.REMOVED:
            pages.remove(event.page or 0)
    return pages


def test_replaying_the_events_gives_the_keyed_pages_whatever_was_done():
    m = Lab(num_pages=12, scopes=EVERY)
    draw = random.Random(5)
    shared = [Span(tuple(range(k, k + 8)), scope, published=True) for k, scope in ((0, T), (20, G))]
    for n in range(60):
        scope = draw.choice([A, B, C])
        handle = m.memory.register(scope)
        own = Span(tuple(range(1000 * n, 1000 * n + draw.randint(1, 12))), scope)
        m.turn(handle, [*shared[: draw.randint(0, 2)], own], scope)
        m.memory.release(handle)
        assert replay(m.memory) == keyed(m.memory)
    assert {event.kind for event in m.memory.events()} == {KVEventKind.STORED, KVEventKind.REMOVED}
    m.memory.clear()
    assert replay(m.memory) == set()
    assert m.memory.events()[-1].kind is KVEventKind.CLEARED


def test_an_event_names_the_block_and_the_one_before_it():
    m = Lab(scopes=EVERY)
    m.turn(m.memory.register(A), [Span(tuple(range(8)), T, published=True), Span((9,), A)], A)
    first, second = m.memory.events()
    assert (first.parent, first.scope, first.num_tokens) == (None, T, 4)
    assert second.parent == first.fingerprint
    assert m.memory.events(since=1) == (second,)
    assert m.memory.events(since=2) == ()


def test_a_reader_sees_from_the_numbers_that_events_were_lost():
    log = EventLog(3)
    for _ in range(5):
        log.add(KVEvent(KVEventKind.CLEARED))
    assert [event.number for event in log.since(1)] == [3, 4, 5]
    assert [event.number for event in log.since(3)] == [4, 5]
