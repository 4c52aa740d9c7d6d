"""Which cached page goes first."""

import pytest

from inms_jax.memory.eviction import EvictionOrder
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.plan import Span
from tests.memory.people import EVERY, A, B, C, T
from tests.memory.simulation import Lab


def drain(order: EvictionOrder) -> list[int]:
    victims = []
    while order.pages():
        victims.append(order.next_victim())
        order.forget(victims[-1])
    return victims


def test_replaced_pages_go_first_then_those_found_by_nobody_then_the_others_each_oldest_first():
    order = EvictionOrder(100)
    for page in (1, 2):
        order.park(page)
        order.found(page)
        order.park(page)
    for page in (3, 4):
        order.park(page)
    for page in (5, 6):
        order.park(page, superseded=True)
    assert order.pages() == (5, 6, 3, 4, 1, 2)
    assert drain(order) == [5, 6, 3, 4, 1, 2]


def test_pages_found_long_ago_give_way_when_they_fill_their_share():
    order = EvictionOrder(10)
    for page in range(1, 10):
        order.found(page)
        order.park(page)
    order.park(20)
    assert order.pages() == (1, 20, 2, 3, 4, 5, 6, 7, 8, 9)


def test_a_page_that_lost_its_key_begins_anew():
    order = EvictionOrder(10)
    order.found(1)
    order.forget(1)
    order.park(1)
    order.found(2)
    order.park(2)
    assert order.pages() == (1, 2)


def test_a_victim_of_nothing_is_an_error():
    with pytest.raises(StopIteration):
        EvictionOrder(10).next_victim()


def once(m: Lab, scope, spans: list[Span]) -> int:
    """A sequence that comes, computes and goes; the number of tokens it computed."""
    handle = m.memory.register(scope)
    m.begin(handle, spans, new=0)
    computed = m.prompt(handle, spans)
    m.memory.end_turn(handle, keep=True, history_len=sum(len(span.tokens) for span in spans))
    m.memory.release(handle)
    m.memory.verify()
    return computed


def test_a_flood_of_texts_that_nobody_asks_for_twice_leaves_a_popular_prefix_where_it_is():
    m = Lab(num_pages=13, scopes=EVERY)
    popular = Span(tuple(range(16)), T, published=True)
    for scope in (A, B, C):
        once(m, scope, [popular, Span((99,), scope)])
    for n in range(1, 40):  # each passes through the pool once, all of it public, so cached when its reader has gone
        once(m, A, [Span(tuple(range(100 * n, 100 * n + 16)), T, published=True), Span((99,), A)])
    assert m.memory.stats().evictions > 30
    assert once(m, B, [popular, Span((99,), B)]) == 1


def test_a_text_that_only_one_asked_for_goes_before_one_that_two_asked_for():
    m = Lab(num_pages=10, scopes=EVERY)
    twice, one = (Span(tuple(range(k, k + 16)), T, published=True) for k in (0, 100))
    once(m, A, [twice, Span((99,), A)])
    once(m, B, [twice, Span((99,), B)])
    once(m, A, [one, Span((99,), A)])  # used last, found by nobody
    once(m, A, [Span(tuple(range(200, 204)), A)])
    once(m, C, [Span(tuple(range(300, 307)), C)])
    assert once(m, B, [twice, Span((99,), B)]) == 1
    assert once(m, B, [one, Span((99,), B)]) > 1


def test_the_private_tail_that_a_turn_replaced_is_the_first_victim_and_its_last_block_goes_first():
    m = Lab(num_pages=14, scopes=EVERY)
    once(m, B, [Span(tuple(range(500, 504)), T, published=True), Span((99,), B)])  # older than the tail
    a = m.memory.register(A)
    m.turn(a, [Span(tuple(range(12)), A)], A)
    tail = m.pages(a)[1:]
    m.turn(a, [Span((*range(4), *range(50, 58)), A)], A)  # the second block on is another text now
    for length, gone in ((32, tail[1:]), (36, tail)):  # 7 pages are free
        c = m.memory.register(C)
        words = [Span(tuple(range(600, 600 + length)), C)]
        m.begin(c, words, new=0)
        m.prompt(c, words)
        assert set(tail) - cached(m) == set(gone)
        m.memory.release(c)


def cached(m: Lab) -> set[int]:
    return {info.page for info in m.memory.pages() if info.state is PageState.CACHED}
