"""Who shares pages with whom, and what a hit must never be. Each denial has its paired hit."""

import dataclasses

import numpy as np
import pytest

from inms_jax.errors import ClosedError, VisibilityError
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.plan import Span
from inms_jax.memory.policy import MissReason
from inms_jax.memory.tier import Scope, Tier
from tests.memory.people import EVERY, G2, T2, A, B, C, D, E, G, T
from tests.memory.simulation import Lab, chain

SYSTEM = Span(tuple(range(100, 110)), T, published=True, name="system")
DECISIONS = Span(tuple(range(200, 206)), G, published=True, name="decisions")


def private(scope: Scope, *tokens: int) -> Span:
    return Span(tokens, scope)


def lab(**options) -> Lab:
    return Lab(scopes=EVERY, **options)


def cached(lab: Lab, scope: Scope, spans: list[Span]) -> int:
    """Cached tokens of a first turn of a new agent."""
    handle = lab.memory.register(scope)
    lab.begin(handle, spans)
    lab.prompt(handle, spans)
    return lab.memory.usage(handle).cached_tokens


def test_sharing_is_the_same_page_twice():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(B)
    m.turn(a, [SYSTEM, DECISIONS, private(A, 1, 2)], A)
    m.turn(b, [SYSTEM, DECISIONS, private(B, 1, 2)], B)
    assert m.pages(a)[:5] == m.pages(b)[:5]
    assert m.pages(a)[5] != m.pages(b)[5]
    assert m.memory.stats().by_tier == {Tier.GLOBAL: 3, Tier.GROUP: 2, Tier.PRIVATE: 2}
    assert m.memory.stats().held == 7


def test_same_group_hits_and_other_group_does_not():
    m = lab()
    cached(m, A, [SYSTEM, DECISIONS, private(A, 1)])
    assert cached(m, B, [SYSTEM, DECISIONS, private(B, 1)]) == 16
    own = dataclasses.replace(DECISIONS, scope=G2)
    assert cached(m, D, [SYSTEM, own, private(D, 1)]) == 10


def test_same_tenant_hits_and_other_tenant_does_not():
    m = lab()
    cached(m, A, [SYSTEM, private(A, 1)])
    assert cached(m, B, [SYSTEM, private(B, 1)]) == 10
    assert cached(m, E, [dataclasses.replace(SYSTEM, scope=T2), private(E, 1)]) == 0
    assert m.memory.stats().misses[MissReason.SCOPE] == 10


def test_same_owner_hits_and_other_agent_does_not():
    m = lab()
    text = tuple(range(8))
    cached(m, A, [Span(text, A)])
    assert cached(m, A, [Span(text, A), private(A, 9)]) == 8
    assert cached(m, B, [Span(text, B), private(B, 9)]) == 0


def test_same_tokens_under_another_tier_are_another_page():
    m = lab()
    cached(m, A, [SYSTEM, private(A, 1)])
    assert cached(m, B, [dataclasses.replace(SYSTEM, scope=G), private(B, 1)]) == 0


def test_the_reader_is_not_told_that_others_have_its_text():
    m = lab()
    cached(m, A, [Span(tuple(range(8)), A)])
    handle = m.memory.register(B)
    m.begin(handle, [Span(tuple(range(8)), B)])
    m.prompt(handle, [Span(tuple(range(8)), B)])
    assert m.memory.usage(handle).misses == {MissReason.NO_PREFIX: 8}
    assert m.memory.stats().misses[MissReason.SCOPE] == 8


def test_published_text_after_private_text_is_shared_with_nobody():
    m = lab()
    cached(m, A, [private(A, 1, 2, 3, 4), DECISIONS, private(A, 5)])
    assert cached(m, B, [private(B, 1, 2, 3, 4), DECISIONS, private(B, 5)]) == 0
    assert cached(m, A, [private(A, 1, 2, 3, 4), DECISIONS, private(A, 5)]) == 8
    assert {info.tier for info in m.memory.pages()} == {Tier.PRIVATE}


def test_256_tenants_members_compute_the_system_prompt_once():
    m = Lab(num_pages=300, scopes=[T])
    for i in range(256):
        scope = Scope("acme#1", None, f"agent-{i}#1")
        m.memory.open_scope(scope)
        handle = m.memory.register(scope)
        assert m.memory.begin_turn(handle, [SYSTEM, private(scope, 7)], max_new_tokens=0).admitted
        assert m.memory.match(handle).cached_tokens == (10 if i else 0)
        chunk = m.memory.prefill(handle, 100)
        m.memory.commit_prefill(handle, chunk)
        m.memory.end_turn(handle, keep=True, history_len=11)
    m.memory.verify()
    stats = m.memory.stats()
    assert stats.by_scope[T] == 3
    assert (stats.held, stats.computed_tokens) == (3 + 256, 10 + 256)


@pytest.mark.parametrize("foreign", [D, G2, T2, B])
def test_a_context_may_not_name_what_its_reader_may_not_see(foreign):
    m = lab()
    handle = m.memory.register(A)
    with pytest.raises(VisibilityError, match=r"span 1 .'x'. of 2"):
        m.memory.begin_turn(handle, [SYSTEM, Span((1,), foreign, name="x")], max_new_tokens=1)
    assert m.memory.stats().free == m.memory.stats().total - 1


def test_a_hash_that_always_collides_never_gives_a_wrong_page():
    m = lab(hash_function=lambda message: b"same")
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, private(A, *range(9))], A)
    # the first block has the only key; every other block is a collision
    assert cached(m, B, [SYSTEM, private(B, *range(9))]) == 4
    assert cached(m, B, [Span(SYSTEM.tokens[4:], T, published=True), private(B, 1)]) == 0


def test_equal_blocks_after_different_ones_are_told_apart_when_hashes_collide():
    m = lab(hash_function=lambda message: message[-16:])  # of the tokens alone
    for first in (1, 2, 3):
        handle = m.memory.register(A)
        m.turn(handle, [private(A, *[first] * 4, *[9] * 4, 5)], A)
        assert m.memory.usage(handle).hit_tokens == 0
    assert cached(m, A, [private(A, *[1] * 4, *[9] * 4, 5)]) == 8


def test_equal_prompts_at_once_are_computed_once():
    m = lab(num_pages=80)
    spans = {}
    for scope in (A, B, C) * 3:
        handle = m.memory.register(scope)
        spans[handle] = [SYSTEM, DECISIONS, private(scope, 1, 2)]
        m.begin(handle, spans[handle], new=0)
    first, *others = spans
    assert m.memory.match(first).status == "ready"
    chunk = m.memory.prefill(first, 6)
    assert {m.memory.match(h).status for h in others} == {"wait"}
    m.apply_prefill(first, chunk, spans[first])
    m.memory.commit_prefill(first, chunk)
    # one block is done; the one begun is still the first one's
    assert [m.memory.match(h) for h in others] == [m.memory.match(others[0])] * 8
    assert m.memory.match(others[0]).status == "wait"
    assert m.memory.match(others[0]).cached_tokens == 4
    m.prompt(first, spans[first])
    for handle in others:
        assert m.prompt(handle, spans[handle]) == 2
    assert m.memory.stats().computed_tokens == 16 + 9 * 2
    assert m.memory.stats().by_tier[Tier.GLOBAL] == 3


def test_who_waits_goes_on_when_the_other_gives_up():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(B)
    m.begin(a, [SYSTEM, private(A, 1)])
    m.begin(b, [SYSTEM, private(B, 1)])
    m.memory.prefill(a, 6)
    assert m.memory.match(b).status == "wait"
    m.memory.end_turn(a, keep=False, history_len=0)
    assert m.prompt(b, [SYSTEM, private(B, 1)]) == 11
    m.memory.release(b)
    m.memory.clear()
    m.begin(a, [SYSTEM, private(A, 1)])
    m.memory.prefill(a, 1)
    c = m.memory.register(C)
    m.begin(c, [SYSTEM, private(C, 1)])
    assert m.memory.match(c).status == "wait"
    m.memory.release(a)
    assert m.memory.match(c).status == "ready"


def test_a_begun_block_is_given_up_for_the_one_that_another_finished():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(A)
    spans = [private(A, *range(9))]
    m.begin(a, spans)
    chunk = m.memory.prefill(a, 2)
    m.apply_prefill(a, chunk, spans)
    m.memory.commit_prefill(a, chunk)
    m.memory.end_turn(a, keep=False, history_len=2)
    old = m.pages(a)
    m.turn(b, spans, A)
    m.begin(a, spans)
    assert m.pages(a) == m.pages(b)[:2]
    assert m.prompt(a, spans) == 1
    assert m.pages(a)[0] != old[0]


def test_at_least_the_last_token_is_computed_and_written_nowhere():
    m = lab()
    spans = [private(A, *range(8))]
    m.turn(m.memory.register(A), spans, A)
    b = m.memory.register(A)
    m.begin(b, spans, new=0)
    assert m.memory.match(b).cached_tokens == 7
    chunk = m.memory.prefill(b, 100)
    assert (chunk.tokens.tolist(), chunk.start, chunk.is_last) == ([7], 7, True)
    assert (chunk.write_page.tolist(), chunk.write_slot.tolist()) == ([0], [0])
    assert np.sum(m.memory.row(b).end) == 8
    m.memory.commit_prefill(b, chunk)
    m.check(b, spans)
    assert m.memory.usage(b).cached_tokens == 7


def test_misses_are_reported_by_reason():
    m = Lab(block_size=32, scopes=EVERY)
    long = tuple(range(40))
    m.turn(m.memory.register(A), [private(A, *long)], A)
    assert m.memory.stats().misses == {
        **dict.fromkeys(MissReason, 0),
        MissReason.NO_PREFIX: 32,
        MissReason.SUB_BLOCK: 8,
    }
    # 20 shared tokens are less than a block: that is said, not a silent 0
    handle = m.memory.register(A)
    m.turn(handle, [private(A, *long[:20], *[99] * 15)], A)
    assert m.memory.usage(handle).misses == {MissReason.SUB_BLOCK: 35}
    m.memory.clear()
    other = m.memory.register(A)
    m.turn(other, [private(A, *long)], A)
    assert m.memory.usage(other).misses == {MissReason.EVICTED: 32, MissReason.SUB_BLOCK: 8}


def test_published_text_behind_narrower_text_is_told_from_text_that_nobody_has():
    m = lab()
    m.turn(m.memory.register(B), [SYSTEM, private(B, 1)], B)
    handle = m.memory.register(A)
    m.turn(handle, [private(A, 1, 2, 3), SYSTEM, private(A, *range(60, 66))], A)
    # One stream of 4 + 4 + 4 + 4 + 3 tokens: SYSTEM is tokens 3 .. 12 of it.
    assert m.memory.usage(handle).misses == {
        MissReason.NO_PREFIX: 3 + 3,
        MissReason.POSITION: len(SYSTEM.tokens),
        MissReason.SUB_BLOCK: 3,
    }
    # Its own pages of it are found like any others, and missed as such when they were given up.
    again = m.memory.register(A)
    m.turn(again, [private(A, 1, 2, 3), SYSTEM, private(A, *range(60, 66))], A)
    assert m.memory.usage(again).misses == {MissReason.SUB_BLOCK: 3}
    m.memory.release(again)
    m.memory.clear()
    again = m.memory.register(A)
    m.turn(again, [private(A, 1, 2, 3), SYSTEM, private(A, *range(60, 66))], A)
    assert m.memory.usage(again).misses == {MissReason.EVICTED: 16, MissReason.SUB_BLOCK: 3}
    # Where it may be shared, it is not called displaced.
    assert cached(m, C, [SYSTEM, private(C, 1)]) == 0
    assert m.memory.stats().misses[MissReason.POSITION] == len(SYSTEM.tokens)


def test_without_prefix_caching_nothing_is_shared_kept_or_claimed():
    m = lab(caching=False)
    a, b = m.memory.register(A), m.memory.register(B)
    spans = [SYSTEM, private(A, 1)]
    m.begin(a, spans)
    chunk = m.memory.prefill(a, 4)
    m.begin(b, [SYSTEM, private(B, 1)])
    assert m.memory.match(b).status == "ready"
    m.memory.commit_prefill(a, chunk)
    assert m.memory.match(b).cached_tokens == 0
    m.prompt(b, [SYSTEM, private(B, 1)])
    assert m.memory.usage(b).misses == {MissReason.DISABLED: 11}
    m.memory.release(a)
    m.memory.release(b)
    assert m.memory.stats().free == m.memory.stats().total - 1


def test_pages_nobody_holds_are_cached_while_their_scope_is_open_and_go_when_it_closes():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, DECISIONS, private(A, 1, 2, 3, 4, 5)], A)
    m.memory.release(a)
    # the private tail of 1 token has no key: it is free at once
    assert (m.memory.stats().cached, m.memory.stats().held) == (3 + 2 + 1, 0)
    for scope, left in ((A, 5), (G, 3), (T, 0)):
        m.memory.close_scope(scope)
        m.memory.verify()
        assert m.memory.stats().cached == left
    assert m.memory.stats().free == m.memory.stats().total - 1


def test_held_pages_of_a_closed_scope_stay_readable_but_are_hit_no_more():
    m = lab()
    a = m.memory.register(A)
    spans = [SYSTEM, DECISIONS, private(A, 1)]
    m.turn(a, spans, A)
    m.memory.close_scope(G)
    assert {info.state for info in m.memory.pages() if info.scope == G} == {PageState.SUSPECT}
    m.check(a, spans)
    assert cached(m, B, [SYSTEM, DECISIONS, private(B, 1)]) == 10
    m.turn(a, [*spans, private(A, 2)], A)
    assert m.memory.usage(a).kept_tokens == 17
    m.memory.release(a)
    assert not [i for i in m.memory.pages() if i.scope == G and i.state is PageState.SUSPECT]


def test_a_closed_scope_takes_no_new_sequence():
    m = lab()
    m.memory.close_scope(A)
    with pytest.raises(ClosedError, match="not one of the 6 open scopes"):
        m.memory.register(A)


def test_late_duplicates_are_remapped_before_they_are_freed():
    m = lab(provisional=False)
    a, b = m.memory.register(A), m.memory.register(A)
    context = [private(A, 1, 2)]
    m.begin(a, context)
    m.prompt(a, context)
    m.begin(b, context)
    m.prompt(b, context)
    m.say(a, context, [3, 4], A)
    assert m.pages(a) != m.pages(b)
    spans = m.say(b, context, [3, 4], A)
    assert m.pages(a) == m.pages(b)
    assert m.memory.stats().held == 1
    m.say(b, spans, [5], A)
    assert m.device.read(m.memory.row(b))[0] == chain([private(A, 1, 2, 3, 4, 5)])
