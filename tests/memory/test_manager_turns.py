"""The life of one sequence: turns, what is kept between them, aborts, handles."""

import pytest

from inms_jax.errors import InvalidRequestError, StaleHandleError, StateError, VisibilityError
from inms_jax.memory.plan import Span
from tests.memory.people import EVERY, A, D, G, T
from tests.memory.simulation import DECODE, PREFILL, Lab

SYSTEM = Span(tuple(range(100, 106)), T, published=True)


def lab(**options) -> Lab:
    return Lab(scopes=EVERY, **options)


def how(m: Lab, handle) -> list[int]:
    return m.device.read(m.memory.row(handle))[1]


def test_tokens_that_decode_wrote_are_prefilled_by_the_next_turn_in_place():
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [SYSTEM, Span((1, 2), A)], A, answer=[3, 4, 5])
    assert how(m, a) == [PREFILL] * 8 + [DECODE] * 3
    tail = m.pages(a)[2]
    spans = [*history, Span((6,), A)]
    m.begin(a, spans)
    assert m.memory.usage(a).kept_tokens == 8
    assert m.pages(a)[2] == tail
    assert m.prompt(a, spans) == 4
    assert how(m, a) == [PREFILL] * 12
    assert m.pages(a)[2] == tail
    assert m.memory.stats().copies == 0


def test_provisional_pages_have_no_fingerprint():
    m = lab()
    m.turn(m.memory.register(A), [Span((1, 2), A)], A, answer=[3, 4, 5])
    other = m.memory.register(A)
    m.begin(other, [Span((1, 2, 3, 4, 5), A)])
    assert m.memory.match(other).cached_tokens == 0


def test_outside_deterministic_mode_decode_pages_are_kept_and_shared():
    m = lab(provisional=False)
    a = m.memory.register(A)
    history = m.turn(a, [Span((1, 2), A)], A, answer=[3, 4, 5])
    other = m.memory.register(A)
    m.begin(other, [Span((1, 2, 3, 4, 5), A)])
    assert m.memory.match(other).cached_tokens == 4
    m.begin(a, [*history, Span((6,), A)])
    assert m.memory.usage(a).kept_tokens == 5


def test_a_generated_token_that_begins_a_block_takes_a_page():
    m = lab()
    a = m.memory.register(A)
    m.begin(a, [Span((1, 2, 3, 4), A)], new=5)
    m.prompt(a, [Span((1, 2, 3, 4), A)])
    assert (len(m.pages(a)), m.memory.stats().reserved) == (1, 2)
    slot = m.memory.decode(a, 9)
    assert (slot.position, slot.slot, slot.page) == (4, 0, m.pages(a)[1])
    assert m.memory.stats().reserved == 1


def test_generated_text_after_shared_text_goes_to_a_page_of_its_own():
    m = lab()
    a = m.memory.register(A)
    m.begin(a, [SYSTEM])
    m.prompt(a, [SYSTEM])
    m.say(a, [SYSTEM], [1], A)
    assert [info.scope for info in m.memory.pages()] == [T, T, A]


def test_more_tokens_than_were_reserved_are_refused():
    m = lab()
    a = m.memory.register(A)
    m.begin(a, [Span((1, 2), A)], new=1)
    m.prompt(a, [Span((1, 2), A)])
    m.say(a, [Span((1, 2), A)], [3], A)
    with pytest.raises(InvalidRequestError, match="2 tokens of context and room for 1 new ones: token 3"):
        m.memory.decode(a, 4)


def test_what_differs_from_the_history_is_dropped_from_there_on():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, Span(tuple(range(9)), A)], A)
    spans = [SYSTEM, Span((0, 1, 2, 3, 4, 99), A)]
    m.begin(a, spans)
    assert m.memory.usage(a).kept_tokens == 6 + 5
    m.prompt(a, spans)
    # the page of 4.. was sealed: its first slot came by a copy
    assert m.memory.stats().copies == 1


def test_the_same_tokens_under_another_scope_are_not_kept():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, Span((1, 2, 3, 4), G, published=True), Span((5,), A)], A)
    spans = [SYSTEM, Span((1, 2, 3, 4), A), Span((5,), A)]
    m.begin(a, spans)
    assert m.memory.usage(a).kept_tokens == 6
    m.prompt(a, spans)


def test_a_page_of_which_nothing_is_kept_is_not_copied():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [Span(tuple(range(8)), A)], A)
    m.turn(a, [Span((0, 1, 2, 3, 9, 9), A)], A)
    assert m.memory.stats().copies == 0


def test_pages_are_not_kept_across_a_cut_that_has_moved():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, Span((1,), A)], A)
    spans = [Span(SYSTEM.tokens[:3], T, published=True), Span(SYSTEM.tokens[3:], T, published=True), Span((1,), A)]
    m.begin(a, spans)
    assert m.memory.usage(a).kept_tokens == 0
    m.prompt(a, spans)


def test_a_complete_block_is_kept_only_as_the_page_of_its_own_key():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(A)
    m.turn(a, [Span((1, 2, 3, 4), G), Span((5,), A)], A)
    spans = [Span((1, 2, 3), G), Span((5,), A)]
    m.turn(a, spans, A)
    m.begin(b, spans)
    assert m.memory.match(b).cached_tokens == 3


def test_a_closed_page_becomes_shareable_when_later_text_closes_it():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(A)
    text = Span((1, 2, 3), G)
    for handle in (a, b):
        m.memory.begin_turn(handle, [text], max_new_tokens=0)
        m.prompt(handle, [text])
        m.memory.end_turn(handle, keep=True, history_len=3)
    assert m.pages(a) != m.pages(b)
    m.turn(a, [text, Span((4,), A)], A)
    m.turn(b, [text, Span((4,), A)], A)
    assert m.pages(a)[0] == m.pages(b)[0]


@pytest.mark.parametrize("step", ["begun", "planned", "half", "prefilled", "decode planned", "decoded"])
def test_an_abort_at_any_point_leaves_the_conversation_as_before(step):
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [SYSTEM, Span((1, 2, 3), A)], A, answer=[4, 5])
    before = m.memory.stats()
    spans = [*history, Span(tuple(range(20, 30)), A)]
    m.begin(a, spans)
    if step == "planned":
        m.memory.prefill(a, 5)
    if step == "half":
        chunk = m.memory.prefill(a, 5)
        m.apply_prefill(a, chunk, spans)
        m.memory.commit_prefill(a, chunk)
    if step in ("prefilled", "decode planned", "decoded"):
        m.prompt(a, spans)
    if step == "decode planned":
        m.memory.decode(a, 8)
    if step == "decoded":
        m.say(a, spans, [8, 9], A)
    m.memory.end_turn(a, keep=False, history_len=11)
    m.memory.verify()
    after = m.memory.stats()
    assert (after.reserved, after.held) == (0, before.held if step not in ("begun", "planned") else 3)
    m.check(a, history)
    m.turn(a, [*history, Span((50,), A)], A, answer=[51])


def test_a_plan_that_was_not_committed_blocks_what_would_build_on_it():
    m = lab()
    a = m.memory.register(A)
    m.begin(a, [Span((1, 2), A)])
    chunk = m.memory.prefill(a, 1)
    for call in (m.memory.match, lambda h: m.memory.prefill(h, 1), lambda h: m.memory.fork(h, A)):
        with pytest.raises(StateError, match="planned step to token 1: commit it first"):
            call(a)
    m.memory.commit_prefill(a, chunk)
    with pytest.raises(StateError, match="nothing is planned"):
        m.memory.commit_prefill(a, chunk)


def test_operations_out_of_order_raise_and_change_nothing():
    m = lab()
    a = m.memory.register(A)
    for call in (
        lambda: m.memory.match(a),
        lambda: m.memory.prefill(a, 1),
        lambda: m.memory.decode(a, 1),
        lambda: m.memory.end_turn(a, keep=True, history_len=0),
    ):
        with pytest.raises(StateError, match="'new'"):
            call()
    m.begin(a, [Span((1, 2), A)])
    before = m.memory.stats()
    with pytest.raises(StateError, match="'prefill'"):
        m.memory.begin_turn(a, [Span((1,), A)], max_new_tokens=1)
    with pytest.raises(StateError, match="'finish turn' is not possible"):
        m.memory.end_turn(a, keep=True, history_len=0)
    with pytest.raises(StateError, match="only sequences between turns"):
        m.memory.drop(a)
    with pytest.raises(StateError, match="no planned decode"):
        m.memory.commit_decode(a)
    assert m.memory.stats() == before


@pytest.mark.parametrize(
    ("spans", "options", "message"),
    [
        ([], {"max_new_tokens": 1}, "at least 1 token"),
        ([Span((), A)], {"max_new_tokens": 1}, "at least 1 token"),
        ([Span((1,), A)], {"max_new_tokens": -1}, "got -1 and 1"),
        ([Span((1,), A)], {"max_new_tokens": 1, "branches": 0}, "got 1 and 0"),
    ],
)
def test_turns_that_cannot_be_are_refused(spans, options, message):
    m = lab()
    with pytest.raises(InvalidRequestError, match=message):
        m.memory.begin_turn(m.memory.register(A), spans, **options)


def test_a_sequence_cannot_move_to_another_group():
    m = lab()
    a = m.memory.register(A)
    with pytest.raises(VisibilityError, match="tenant and group must stay"):
        m.memory.begin_turn(a, [Span((1,), A)], max_new_tokens=1, new_scope=D)
    with pytest.raises(VisibilityError, match="tenant and group must stay"):
        m.memory.fork(a, D)


def test_a_dead_handle_can_touch_nothing():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [Span((1, 2, 3, 4), A)], A)
    m.memory.release(a)
    b = m.memory.register(A)
    assert (b.id, b.generation) == (a.id, a.generation + 1)
    before = m.memory.stats()
    for call in (m.memory.release, m.memory.drop, m.memory.row, m.memory.match):
        with pytest.raises(StaleHandleError, match=r"Sequence 0 of generation 0 .* at generation 1"):
            call(a)
    assert m.memory.stats() == before


def test_a_dropped_sequence_computes_its_context_again():
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [Span(tuple(range(6)), A)], A, answer=[7])
    m.memory.drop(a)
    m.memory.evict_cached()
    assert m.memory.stats().free == m.memory.stats().total - 1
    spans = [*history, Span((8,), A)]
    m.begin(a, spans)
    assert m.prompt(a, spans) == 8


def test_clear_spares_running_turns():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(A)
    m.turn(a, [Span((1, 2, 3, 4, 5), A)], A)
    m.begin(b, [SYSTEM])
    m.prompt(b, [SYSTEM])
    m.memory.clear()
    assert (m.pages(a), len(m.pages(b)), m.memory.stats().cached) == ([], 2, 0)
    m.say(b, [SYSTEM], [1], A)
