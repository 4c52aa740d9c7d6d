"""Leases, pauses and host memory of the memory manager, without a model; time is what the test says."""

import pytest

from inms_jax.errors import CapacityError, InvalidRequestError, StaleHandleError, StateError
from inms_jax.memory.lifecycle import SequenceState
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope
from tests.memory.people import EVERY, A, B, T
from tests.memory.simulation import Lab

SYSTEM = Span(tuple(range(100, 106)), T, published=True, name="system")


def lab(**options) -> Lab:
    return Lab(scopes=EVERY, **{"num_pages": 33, **options})


def private(scope: Scope, length: int, start: int = 500) -> Span:
    return Span(tuple(range(start, start + length)), scope)


def test_a_sequence_that_nobody_uses_ends_and_says_so():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(B)
    m.turn(a, [SYSTEM, private(A, 9)], A)
    m.turn(b, [SYSTEM, private(B, 9)], B)
    m.memory.lease(a, 10, 100)
    m.memory.lease(b, 10, 100)
    assert m.memory.sweep(109.9).expired == ()
    m.memory.renew(b, 105)
    (gone,) = m.memory.sweep(112.5).expired
    assert (gone.handle, gone.scope, gone.age, gone.ttl, gone.pages) == (a, A, 12.5, 10, 5)
    with pytest.raises(StaleHandleError, match=r"was not used for 12 s and its ttl is 10 s"):
        m.memory.begin_turn(a, [SYSTEM], max_new_tokens=1)
    with pytest.raises(StaleHandleError):
        m.memory.release(a)
    m.memory.verify()
    assert m.memory.stats().expired_sequences == 1
    assert m.memory.stats().held == 2 + 3  # b has the system text and its own
    m.check(b, [SYSTEM, private(B, 9)])


def test_a_sequence_in_its_turn_is_in_use():
    m = lab()
    a = m.memory.register(A)
    m.memory.lease(a, 10, 0)
    spans = [private(A, 9)]
    m.begin(a, spans)
    assert m.memory.sweep(50).expired == ()
    m.prompt(a, spans)
    m.memory.end_turn(a, keep=True, history_len=9)
    assert m.memory.sweep(59).expired == ()
    assert [expired.age for expired in m.memory.sweep(60).expired] == [10]


def test_pages_that_others_hold_outlive_the_expired_one_without_a_key():
    m = lab()
    a = m.memory.register(A)
    spans = m.turn(a, [SYSTEM, private(A, 8)], A)
    twin = m.memory.fork(a, B)
    m.memory.lease(a, 1, 0)
    m.memory.sweep(5)
    m.memory.close_scope(A)  # what an engine does when an agent has ended
    states = {info.state.value for info in m.memory.pages() if info.scope == A}
    assert states == {"suspect"}
    m.check(twin, spans)
    m.memory.release(twin)
    m.memory.verify()
    assert m.memory.stats().held == 0


def test_a_paused_sequence_keeps_its_pages_until_the_pause_is_over():
    m = lab(num_pages=1 + 8)
    a, b = m.memory.register(A), m.memory.register(B)
    m.turn(a, [private(A, 20)], A)
    m.memory.pause(a, 10)
    large = [private(B, 24)]
    assert not m.memory.begin_turn(b, large, max_new_tokens=0).admitted
    with pytest.raises(StateError, match="is 'paused'"):
        m.memory.drop(a)
    assert m.memory.empty("acme#1") == 0
    assert m.memory.sweep(9).resumed == ()
    assert m.memory.sweep(10).resumed == (a,)
    m.turn(b, large, B)
    assert m.memory.stats().dropped_sequences == 1


def test_a_pause_ends_with_the_next_turn_or_when_asked():
    m = lab()
    a = m.memory.register(A)
    m.memory.pause(a, None)
    m.memory.resume(a)
    with pytest.raises(StateError, match="'resume' is not possible"):
        m.memory.resume(a)
    m.memory.pause(a, None)
    spans = m.turn(a, [private(A, 9)], A)
    assert m.memory.stats().sequences == {SequenceState.IDLE: 1}
    m.memory.begin_turn(a, spans, max_new_tokens=0)
    with pytest.raises(StateError, match="'pause' is not possible"):
        m.memory.pause(a, None)
    m.memory.verify()


def test_offloaded_pages_come_back_as_they_were_and_keep_their_scope():
    m = lab(num_pages=1 + 12)
    a, b = m.memory.register(A), m.memory.register(B)
    spans = m.turn(a, [SYSTEM, private(A, 14)], A)
    m.memory.pause(a, None)
    assert m.memory.offload(a, m.download) == 3  # the fourth block is not complete
    assert m.memory.stats().offloaded == 3
    assert m.memory.stats().held == 2  # the system text
    # Another agent takes the pages, and finds nothing of a's though its text is the same.
    m.turn(b, [SYSTEM, private(B, 14), private(B, 20, 600)], B)
    assert m.memory.usage(b).hit_tokens == 6
    m.memory.release(b)
    m.memory.evict_cached()
    spans = m.turn(a, [*spans, private(A, 3, 700)], A)
    usage = m.memory.usage(a)
    assert (usage.cached_tokens, usage.computed_tokens) == (6 + 12, 2 + 3)
    assert m.memory.stats().offloaded == 0
    m.check(a, spans)


def test_what_is_still_on_the_device_is_not_copied_back():
    m = lab()
    a = m.memory.register(A)
    spans = m.turn(a, [SYSTEM, private(A, 12)], A)
    m.memory.pause(a, None)
    m.memory.offload(a, m.download)
    m.host.clear()  # whoever asks for it fails
    m.turn(a, [*spans, private(A, 3, 700)], A)
    assert m.memory.usage(a).computed_tokens == 3


def test_another_context_brings_back_only_what_it_has_in_common():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [private(A, 16)], A)
    m.memory.pause(a, None)
    m.memory.offload(a, m.download)
    m.memory.evict_cached()
    spans = m.turn(a, [private(A, 8), private(A, 9, 900)], A)
    assert m.memory.usage(a).cached_tokens == 8
    m.check(a, spans)


def test_a_copy_that_fails_changes_nothing():
    m = lab()
    a = m.memory.register(A)
    spans = m.turn(a, [private(A, 16)], A)
    m.memory.pause(a, None)

    def fail(pages: list[int], keys: list[bytes]) -> None:
        raise CapacityError(f"no room for {len(pages)} pages")

    with pytest.raises(CapacityError):
        m.memory.offload(a, fail)
    assert m.memory.stats().sequences == {SequenceState.PAUSED: 1}
    m.check(a, spans)
    m.memory.offload(a, m.download)
    m.memory.evict_cached()
    m.begin(a, [*spans, private(A, 1, 900)])
    before = m.memory.stats()
    with pytest.raises(CapacityError):
        m.memory.restore(a, fail)
    assert m.memory.stats() == before
    m.memory.verify()
    assert m.memory.restore(a, m.upload) == 16


def test_only_what_nobody_else_holds_is_offloaded():
    m = lab()
    a = m.memory.register(A)
    spans = m.turn(a, [SYSTEM, private(A, 8)], A)
    twin = m.memory.fork(a, B)
    m.turn(a, [*spans, private(A, 8, 900)], A)
    m.memory.pause(a, None)
    assert m.memory.offload(a, m.download) == 2
    m.check(twin, spans)


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan"), True])
def test_bad_times_are_refused(ttl):
    m = lab()
    a = m.memory.register(A)
    with pytest.raises(InvalidRequestError, match="seconds above 0, or None"):
        m.memory.lease(a, ttl, 0)


def test_a_tenant_that_nobody_uses_is_emptied_and_goes_on():
    m = lab()
    a = m.memory.register(A)
    m.memory.lease(a, None, 0)
    spans = m.turn(a, [SYSTEM, private(A, 9)], A)
    assert m.memory.sweep(9, empty_after=10).emptied == ()
    m.memory.renew(a, 9)
    assert m.memory.sweep(18, empty_after=10).emptied == ()
    assert m.memory.sweep(19, empty_after=10).emptied == (("acme#1", 5),)
    assert m.memory.sweep(40, empty_after=10).emptied == ()
    assert m.memory.stats().free == m.memory.stats().total - 1
    m.turn(a, spans, A)
    m.begin(a, spans)
    assert m.memory.sweep(90, empty_after=10).emptied == ()
    m.memory.end_turn(a, keep=False, history_len=15)
    assert m.memory.sweep(99, empty_after=10).emptied == ()
    assert m.memory.sweep(100, empty_after=10).emptied == (("acme#1", 5),)
