"""Reservations, admission, eviction."""

import threading
import time

import pytest

from inms_jax.errors import CapacityError, ConfigError, StateError
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import Span
from tests.memory.people import EVERY, A, B, C, T
from tests.memory.simulation import Lab, identity


def lab(num_pages: int, **options) -> Lab:
    return Lab(num_pages=num_pages, scopes=EVERY, **options)


def text(scope, start: int, length: int) -> Span:
    return Span(tuple(range(start, start + length)), scope)


def test_a_turn_that_can_never_fit_is_refused_with_the_numbers():
    m = lab(4)
    a = m.memory.register(A)
    with pytest.raises(CapacityError, match="needs 4 pages of 4 tokens for 12 tokens of context, 1 new ones"):
        m.memory.begin_turn(a, [text(A, 0, 12)], max_new_tokens=1)
    assert m.memory.begin_turn(a, [text(A, 0, 11)], max_new_tokens=1).admitted


def test_a_turn_that_can_fit_later_waits_and_changes_nothing():
    m = lab(6)
    a, b = m.memory.register(A), m.memory.register(B)
    m.begin(a, [text(A, 0, 8)], new=4)
    before = m.memory.stats()
    admission = m.memory.begin_turn(b, [text(B, 0, 8)], max_new_tokens=4)
    assert (admission.admitted, admission.needed, admission.available) == (False, 3, 2)
    assert admission.reason == "3 pages are needed, 2 of 5 can be had now"
    assert m.memory.stats() == before
    m.prompt(a, [text(A, 0, 8)])
    m.memory.end_turn(a, keep=True, history_len=8)
    m.begin(b, [text(B, 0, 8)], new=4)


def test_unused_reservation_comes_back_at_the_end_of_the_turn():
    m = lab(10)
    a = m.memory.register(A)
    m.begin(a, [text(A, 0, 4)], new=20)
    assert m.memory.stats().reserved == 6
    m.prompt(a, [text(A, 0, 4)])
    assert m.memory.stats().reserved == 5
    m.memory.end_turn(a, keep=True, history_len=4)
    assert m.memory.stats().reserved == 0


def test_a_hit_shrinks_what_a_turn_needs_so_that_sharers_fit():
    m = lab(8)
    shared = Span(tuple(range(16)), T, published=True)
    a, b, c = (m.memory.register(s) for s in (A, B, C))
    m.begin(a, [shared, text(A, 50, 1)], new=1)
    m.prompt(a, [shared, text(A, 50, 1)])
    for handle, scope in ((b, B), (c, C)):
        admission = m.memory.begin_turn(handle, [shared, text(scope, 50, 1)], max_new_tokens=1)
        assert (admission.admitted, admission.needed) == (True, 1)
    m.memory.verify()


def test_cached_pages_go_before_the_kv_of_idle_sequences_and_the_longest_idle_first():
    m = lab(8)
    a, b, c = (m.memory.register(s) for s in (A, B, C))
    m.turn(c, [text(C, 0, 8)], C)
    m.memory.release(c)
    m.turn(a, [text(A, 0, 5)], A)
    m.turn(b, [text(B, 0, 5)], B)
    assert (m.memory.stats().cached, m.memory.stats().free) == (2, 1)
    c = m.memory.register(C)
    m.turn(c, [text(C, 90, 9)], C)
    assert (m.memory.stats().evictions, len(m.pages(a)), len(m.pages(b))) == (2, 2, 2)
    d = m.memory.register(C)
    m.begin(d, [text(C, 70, 7)], new=0)
    assert (m.pages(a), len(m.pages(b)), m.memory.stats().dropped_sequences) == ([], 2, 1)


def test_the_tail_of_a_chain_is_evicted_before_its_head():
    m = lab(6)
    a = m.memory.register(A)
    m.turn(a, [text(A, 0, 16)], A)
    m.memory.release(a)
    b = m.memory.register(B)
    m.turn(b, [text(B, 0, 9)], B)
    c = m.memory.register(A)
    assert m.memory.stats().evictions == 2
    m.memory.release(b)
    m.memory.close_scope(B)
    m.begin(c, [text(A, 0, 16)], new=0)
    assert m.memory.match(c).cached_tokens == 8


def test_a_conversation_that_fits_alone_is_not_refused_for_want_of_a_copy():
    m = lab(4)
    a = m.memory.register(A)
    m.turn(a, [text(A, 0, 8)], A)
    # keeps 6 tokens, the last two of them in a sealed page: a copy would need a fourth page
    spans = [text(A, 0, 6), text(A, 50, 2)]
    m.memory.begin_turn(a, spans, max_new_tokens=4)
    m.memory.verify()
    m.prompt(a, spans)


def test_five_agents_with_room_for_four_all_get_their_turns():
    m = lab(1 + 4 * 3)
    scopes = [A, B, C, *(s for s in EVERY if s.agent and s not in (A, B, C))]
    agents = [(m.memory.register(s), s) for s in scopes]
    histories = {handle: [text(s, 0, 5)] for handle, s in agents}
    for turn in range(4):
        for handle, scope in agents:
            histories[handle] = m.turn(handle, [*histories[handle], text(scope, 10 + turn, 1)], scope, answer=[3])
    assert m.memory.stats().dropped_sequences > 0


def test_a_released_scope_id_is_opened_once():
    m = lab(4)
    with pytest.raises(StateError, match="is open already"):
        m.memory.open_scope(A)
    m.memory.close_scope(A)
    with pytest.raises(StateError, match="not one of the 6 open scopes"):
        m.memory.close_scope(A)


def test_block_size_must_be_that_of_the_identity():
    with pytest.raises(ConfigError, match="got 8 and 4"):
        MemoryManager(num_pages=4, block_size=8, identity=identity(4))


def test_verify_names_what_is_inconsistent():
    m = lab(4)
    a = m.memory.register(A)
    m.turn(a, [text(A, 0, 3)], A)
    m.memory._commons.pool.retain(m.pages(a)[0])
    with pytest.raises(StateError, match="page 1 has 2 references, 1 are in tables"):
        m.memory.verify()


def test_threads_share_one_manager_without_losing_a_page():
    m = lab(200)
    shared = Span(tuple(range(20)), T, published=True)
    errors: list[BaseException] = []

    def work(scope, seed: int) -> None:
        try:
            for i in range(15):
                handle = m.memory.register(scope)
                assert m.memory.begin_turn(handle, [shared, text(scope, seed + i, 5)], max_new_tokens=2).admitted
                while True:
                    if m.memory.match(handle).status == "wait":
                        time.sleep(0)
                        continue
                    try:
                        chunk = m.memory.prefill(handle, 8)
                    except StateError:  # another thread claimed the block after `match`
                        continue
                    m.memory.commit_prefill(handle, chunk)
                    if chunk.is_last:
                        break
                m.memory.decode(handle, 1)
                m.memory.commit_decode(handle)
                m.memory.stats()
                fork = m.memory.fork(handle, scope)
                m.memory.end_turn(handle, keep=i % 2 == 0, history_len=3)
                m.memory.release(handle)
                m.memory.release(fork)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(scope, 100 * i)) for i, scope in enumerate((A, B, C, A))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    m.memory.verify()
    assert m.memory.stats().held == 0
