"""Many agents in little room: what is shared counts once, everybody gets a turn, and a full pool costs no more."""

import gc
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from inms_jax import SamplingParams, Segment
from inms_jax.errors import CapacityError
from inms_jax.memory.plan import Span
from inms_jax.memory.quota import Quota
from inms_jax.memory.tier import Scope, Tier
from tests.memory.people import EVERY, A, B, C, T
from tests.memory.simulation import Lab
from tests.tiny import tiny_llm

SYSTEM = Span(tuple(range(100, 112)), T, published=True)


def private(scope: Scope, tokens: Sequence[int]) -> Span:
    return Span(tuple(tokens), scope)


def test_pages_that_several_gave_back_are_cached_once_each() -> None:
    m = Lab(scopes=EVERY)
    handles = [m.memory.register(scope) for scope in (A, B, C)]
    for handle, scope in zip(handles, (A, B, C), strict=True):
        m.turn(handle, [SYSTEM, private(scope, [1])], scope)
    for handle in handles:
        m.memory.release(handle)
        m.memory.verify()
    stats = m.memory.stats()
    assert (stats.cached, stats.held, stats.reserved) == (3, 0, 0)
    assert stats.free + stats.cached == stats.total - 1
    assert m.memory.evict_cached() == 3


@pytest.mark.parametrize(("tokens", "fits"), [(11, True), (12, True), (13, False)])
def test_a_limit_is_exact_to_the_page(tokens: int, fits: bool) -> None:
    """Three pages of four tokens, cached by an earlier turn: they give way, and one token over is refused."""
    m = Lab()
    m.memory.open_tenant(A.tenant, {Tier.PRIVATE: Quota(limit=3)})
    m.memory.open_scope(A)
    first = m.memory.register(A)
    m.turn(first, [private(A, range(12))], A)
    m.memory.release(first)
    assert m.memory.stats().cached == 3
    handle = m.memory.register(A)
    context = [private(A, range(50, 50 + tokens))]
    if fits:
        m.turn(handle, context, A)
        assert (m.memory.stats().held, m.memory.stats().quota_refusals) == (3, 0)
    else:
        before = m.memory.pages()
        with pytest.raises(CapacityError, match=r"needs 4 pages .* its limit is 3 pages"):
            m.begin(handle, context, new=0)
        assert m.memory.pages() == before
        assert m.memory.stats().quota_refusals == 1
    m.memory.verify()


def test_five_agents_with_room_for_four_compute_nothing_again_but_their_own_text() -> None:
    """In turns, the agent that speaks next is always the one that was idle longest: the worst order there is."""
    scopes = [Scope("acme#1", "team#1", f"agent {n}#1") for n in range(5)]
    m = Lab(num_pages=1 + 3 + 4 * 3, scopes=[T, Scope("acme#1", "team#1"), *scopes])
    agents = [(m.memory.register(scope), scope) for scope in scopes]
    for turn in range(4):
        for handle, scope in agents:
            own = private(scope, range(10))
            m.turn(handle, [SYSTEM, own], scope)
            usage = m.memory.usage(handle)
            if turn:
                assert usage.cached_tokens >= len(SYSTEM.tokens)
            assert usage.computed_tokens <= len(own.tokens) + len(SYSTEM.tokens) * (turn == 0)
    assert m.memory.stats().dropped_sequences > 0


def _calls(run: Any) -> int:
    """Function calls that `run` makes: a count, where a time would depend on the machine.

    Nothing is collected meanwhile: finalizers of what earlier tests left behind would be counted too.
    """
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("num_pages", [200, 2000])
def test_taking_a_page_costs_the_same_when_the_pool_is_full(num_pages: int) -> None:
    def cost(cached: int) -> int:
        """Calls to write 3 blocks of 4 tokens by decode while `cached` pages could be evicted."""
        m = Lab(num_pages=num_pages, scopes=EVERY)
        for number in range(cached // 50):
            handle = m.memory.register(B)
            context = [private(B, [number, *range(199)])]
            m.memory.begin_turn(handle, context, max_new_tokens=0)
            m.memory.commit_prefill(handle, m.memory.prefill(handle, 200))
            m.memory.release(handle)
        assert m.memory.stats().cached == cached // 50 * 50
        handle = m.memory.register(A)
        m.memory.begin_turn(handle, [private(A, range(4))], max_new_tokens=60)
        m.memory.commit_prefill(handle, m.memory.prefill(handle, 4))

        def decode() -> None:
            for token in range(12):
                m.memory.decode(handle, token)
                m.memory.commit_decode(handle)

        return _calls(decode)

    half, full = cost(num_pages // 2), cost(num_pages - 1)
    assert full <= 2 * half
    assert cost(0) <= half


def test_a_hundred_prompts_of_eight_samples_each_pass_through_a_small_pool() -> None:
    params = SamplingParams(n=8, max_tokens=2, temperature=0.0, ignore_eos=True)
    with tiny_llm() as llm:
        with llm.tenant("t").agent("big", [Segment("z" * 900)]) as big:  # takes half of the pool
            big.chat("hello", params_of_one())
            prompts = [f"prompt {n} of a hundred" for n in range(100)]
            outputs = llm.generate(prompts, params)
        assert all(len(out.outputs) == 8 for out in outputs)
        assert all(one.token_ids == out.outputs[0].token_ids for out in outputs for one in out.outputs)
        llm.verify()
        assert llm.stats().memory.held == 0


def params_of_one() -> SamplingParams:
    return SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
