"""Forks, branches and copy-on-write."""

import pytest

from inms_jax.errors import CapacityError, StateError, VisibilityError
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope
from tests.memory.people import EVERY, A, B, T
from tests.memory.simulation import Lab

SYSTEM = Span(tuple(range(100, 106)), T, published=True)
A2 = Scope("acme#1", "team#1", "a#1/2")


def lab(**options) -> Lab:
    return Lab(scopes=[*EVERY, A2], **options)


def test_a_fork_copies_no_page():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, Span((1, 2, 3), A)], A, answer=[4, 5])
    held = m.memory.stats().held
    forks = [m.memory.fork(a, B) for _ in range(8)]
    assert m.memory.stats().held == held
    assert all(m.pages(fork) == m.pages(a) for fork in forks)
    assert {info.references for info in m.memory.pages()} == {9}
    m.memory.verify()


def test_the_first_to_write_a_shared_page_copies_it_and_the_other_sees_nothing_of_it():
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [SYSTEM, Span((1, 2), A)], A)
    b = m.memory.fork(a, B)
    tail = m.pages(a)[-1]
    spans = [*history, Span((7,), A2)]
    m.begin(a, spans, scope=A2)
    m.prompt(a, spans)
    assert m.memory.stats().copies == 1
    assert (m.pages(b)[-1], m.pages(a)[-1] == tail) == (tail, False)
    m.check(b, history)
    m.turn(b, [*history, Span((8,), B)], B, answer=[9])
    assert m.pages(b)[2] == tail
    m.check(a, spans)


def test_after_a_fork_neither_finds_the_later_text_of_the_other():
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [Span((1, 2, 3, 4), A)], A)
    b = m.memory.fork(a, B)
    later = tuple(range(20, 29))
    spans = [*history, Span(later, A2)]
    m.begin(a, spans, scope=A2)
    m.prompt(a, spans)
    m.begin(b, [*history, Span(later, B)])
    assert m.prompt(b, [*history, Span(later, B)]) == 9
    twin = m.memory.fork(a, A2)
    m.memory.drop(twin)
    m.begin(twin, spans)
    assert m.memory.match(twin).cached_tokens == 12
    m.memory.end_turn(b, keep=True, history_len=13)
    with pytest.raises(VisibilityError, match=r"which .*'b#1'.* may not read"):
        m.memory.begin_turn(b, spans, max_new_tokens=1)


def test_n_samples_need_n_minus_1_copies_of_the_tail():
    # context 6 = 4 + 2, 3 new tokens = 1 more page; 2 branches more: 2 * (tail copy + 1 page)
    m = lab(num_pages=1 + 3 + 4)
    a = m.memory.register(A)
    context = [Span((1, 2, 3, 4, 5, 6), A)]
    m.begin(a, context, new=3, branches=3)
    assert m.memory.stats().reserved == 3 + 4
    m.prompt(a, context)
    branches = [a, *(m.memory.fork(a, A, reserve_from_parent=True) for _ in range(2))]
    assert m.memory.stats().reserved == 1 + 4
    with pytest.raises(StateError, match=r"0 pages for branches: .* and 2 pages"):
        m.memory.fork(a, A, reserve_from_parent=True)
    contexts = [list(context) for _ in branches]
    for step in range(3):
        slots = [m.memory.decode(handle, 10 * step + i) for i, handle in enumerate(branches)]
        for i, spans in enumerate(contexts):
            spans.append(Span((10 * step + i,), A))
        m.apply_decode(branches, slots, contexts)
        for handle in branches:
            m.memory.commit_decode(handle)
        m.memory.verify()
        for handle, spans in zip(branches, contexts, strict=True):
            m.check(handle, spans)
        assert m.memory.stats().copies == 2
    # one shared page and two of each
    assert (m.memory.stats().held, m.memory.stats().free) == (7, 0)


def test_a_branch_that_ends_unwritten_leaves_a_copy_for_the_last_writer():
    m = lab(num_pages=1 + 2 + 1)
    a = m.memory.register(A)
    context = [Span((1, 2, 3, 4, 5, 6), A)]
    m.begin(a, context, new=2, branches=2)
    m.prompt(a, context)
    branch = m.memory.fork(a, A, reserve_from_parent=True)
    m.memory.end_turn(branch, keep=True, history_len=6)
    m.memory.verify()
    m.say(a, context, [7, 8], A)
    m.check(branch, context)


def test_a_fork_during_a_turn_needs_a_page_for_the_copy_that_follows():
    m = lab(num_pages=3)
    a = m.memory.register(A)
    m.begin(a, [Span((1, 2, 3, 4, 5), A)], new=1)
    m.prompt(a, [Span((1, 2, 3, 4, 5), A)])
    before = m.memory.stats()
    with pytest.raises(CapacityError, match="1 pages for copies are needed, 0 are available"):
        m.memory.fork(a, B)
    assert m.memory.stats() == before
    m.memory.verify()
    roomy = lab(num_pages=4)
    a = roomy.memory.register(A)
    roomy.begin(a, [Span((1, 2, 3, 4, 5), A)], new=1)
    roomy.prompt(a, [Span((1, 2, 3, 4, 5), A)])
    b = roomy.memory.fork(a, B)
    roomy.say(a, [Span((1, 2, 3, 4, 5), A)], [6], A)
    roomy.check(b, [Span((1, 2, 3, 4, 5), A)])


def test_the_pages_of_a_lineage_outlive_the_agent_that_wrote_them():
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [Span(tuple(range(9)), A)], A)
    b = m.memory.fork(a, B)
    m.memory.release(a)
    m.memory.close_scope(A)
    m.check(b, history)
    m.turn(b, [*history, Span((20,), B)], B, answer=[21])
    m.memory.release(b)
    m.memory.close_scope(B)
    assert m.memory.stats().free == m.memory.stats().total - 1


def test_a_cancelled_copy_is_not_relied_on():
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [Span((1, 2, 3, 4, 5, 6), A)], A)
    b = m.memory.fork(a, B)
    m.begin(a, [*history, Span((7,), A)])
    chunk = m.memory.prefill(a, 9)
    assert len(chunk.copies) == 1
    m.memory.end_turn(a, keep=False, history_len=6)
    m.memory.verify()
    m.check(a, history)
    assert len(m.pages(a)) == 1
    m.check(b, history)
    m.turn(a, [*history, Span((7,), A)], A)


def test_a_hit_gives_back_the_page_set_aside_for_a_copy():
    m = lab()
    a, other = m.memory.register(A), m.memory.register(A)
    history = m.turn(a, [Span((1, 2), A)], A)
    m.memory.fork(a, B)
    spans = [*history, Span((3, 4, 5), A)]
    m.begin(a, spans, new=0)
    assert m.memory.stats().reserved == 2
    m.turn(other, spans, A)
    assert m.memory.match(a).cached_tokens == 4
    assert m.memory.stats().reserved == 1
    m.prompt(a, spans)


def test_who_writes_in_place_after_all_gives_back_the_page_for_the_copy():
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [Span((1, 2), A)], A)
    b = m.memory.fork(a, B)
    m.begin(a, [*history, Span((3,), A)], new=1)
    assert m.memory.stats().reserved == 1
    m.memory.release(b)
    m.prompt(a, [*history, Span((3,), A)])
    assert (m.memory.stats().reserved, m.memory.stats().copies) == (0, 0)
    m.say(a, [*history, Span((3,), A)], [4], A)
    m.memory.end_turn(a, keep=True, history_len=4)
