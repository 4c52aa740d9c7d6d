"""Agents that nobody uses, agents that pause, and requests that stand still; time is what the test says."""

import logging
import time
from collections.abc import Iterator

import pytest

from inms_jax import LLM, Agent, RequestOutput, SamplingParams, Segment
from inms_jax.errors import ConfigError, InvalidRequestError, LeakError, StaleHandleError, StateError
from inms_jax.memory.lifecycle import SequenceState
from tests.tiny import tiny_llm

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
SYSTEM = "You are an agent of a web shop. Be brief."
NOTES = Segment("I like tea, and the meeting is on Thursday. " * 3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(num_pages=256, lease_ttl=100) as engine:
        yield engine


def said(output: RequestOutput) -> tuple[tuple[int, ...], float]:
    (answer,) = output.outputs
    return answer.token_ids, answer.cumulative_logprob


def later(seconds: float) -> float:
    return time.monotonic() + seconds


def test_an_agent_that_nobody_uses_is_ended_and_its_name_is_free(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        idle, busy = tenant.agent("idle", ["system", NOTES], lease_ttl=50), tenant.agent("busy", ["system", NOTES])
        for agent in (idle, busy):
            agent.chat("Hm?", PARAMS)
        assert llm.sweep().expired == ()
        with caplog.at_level(logging.WARNING, "inms_jax"):
            (gone,) = llm.sweep(later(70)).expired
        assert gone.pages > 0
        assert gone.ttl == 50
        assert "agent acme/idle was ended" in caplog.text
        with pytest.raises(StaleHandleError, match=r"agent 'idle' was ended: .* for 7\d s, its ttl is 50 s"):
            idle.chat("Hm?", PARAMS)
        for use in (idle.stats, idle.resume, lambda: idle.append(NOTES), lambda: idle.fork("x")):
            with pytest.raises(StaleHandleError):
                use()
        idle.close()
        assert list(tenant.agents) == ["busy"]
        assert tenant.agent("idle", ["system", NOTES]).chat("Hm?", PARAMS).num_cached_tokens > 0
        busy.chat("Hm?", PARAMS)
        llm.verify()
        assert llm.stats().memory.expired_sequences == 1
    assert llm.stats().memory.held == 0


def test_using_an_agent_renews_its_lease(llm: LLM) -> None:
    clock = [0.0]
    now, llm._services.now = llm._services.now, lambda: clock[0]
    try:
        with llm.tenant("acme") as tenant:
            agent = tenant.agent("a", [NOTES])
            uses = (
                lambda: agent.chat("Hm?", PARAMS),
                lambda: agent.append(Segment("More.")),
                lambda: agent.score("Hm?", "Yes."),
                lambda: agent.fork("twin"),
                lambda: agent.pause(),
                lambda: agent.resume(),
            )
            for use in uses:
                clock[0] += 90
                use()
                assert [one.scope for one in llm.sweep(clock[0] + 9).expired if one.scope == agent.scope] == []
            clock[0] += 99
            assert agent.scope not in [one.scope for one in llm.sweep(clock[0]).expired]
            assert agent.scope in [one.scope for one in llm.sweep(clock[0] + 2).expired]
    finally:
        llm._services.now = now


def test_the_engine_looks_by_itself() -> None:
    with tiny_llm(lease_ttl=5) as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        agent.chat("Hm?", PARAMS)
        llm._services.now = lambda: later(60)
        llm._core._next_sweep = 0
        llm.generate("x", PARAMS)
        llm.generate("x", PARAMS)
        with pytest.raises(StaleHandleError):
            agent.chat("Hm?", PARAMS)


def test_in_strict_mode_a_leak_is_an_error() -> None:
    llm = tiny_llm(lease_ttl=5, strict_leaks=True)
    tenant = llm.tenant("acme")
    agents = [tenant.agent(name, [NOTES]) for name in ("a", "b")]
    with pytest.raises(LeakError, match=r"2 agents were not closed: .*a#1.*; .*b#1.*Close agents after use"):
        llm.sweep(later(60))
    assert llm.sweep(later(60)).expired == ()
    agents.append(tenant.agent("c", [NOTES]))
    llm._core.call(lambda: llm._services.sweep(later(120)))
    with pytest.raises(LeakError, match="1 agents"):
        llm.close()
    llm.close()
    assert all(agent._membership.expired for agent in agents)


@pytest.mark.parametrize("evict", [False, True])
def test_an_offloaded_agent_goes_on_with_the_same_bits(llm: LLM, evict: bool) -> None:
    def talk(pause: bool) -> list[tuple[tuple[int, ...], float]]:
        with llm.tenant("acme") as tenant:
            tenant.publish("system", SYSTEM)
            agent = tenant.agent("a", ["system", NOTES])
            found = [said(agent.chat("One?", PARAMS))]
            if pause:
                held = llm.stats().memory.held
                agent.pause(offload=True)
                stats = llm.stats().memory
                assert stats.offloaded > 5
                assert stats.held == held - stats.offloaded - 1  # the last page is not complete, and not kept
                assert stats.sequences == {SequenceState.OFFLOADED: 1}
                assert llm._core.host.num_bytes == stats.offloaded * llm.page_bytes
                with tenant.agent("b", ["system", NOTES]) as other:
                    assert said(other.chat("One?", PARAMS)) == found[0]
                if evict:
                    llm._core.call(llm._core.memory.evict_cached)
            output = agent.chat("Two?", PARAMS)
            assert output.num_cached_tokens > 100 if not evict or pause else True
            assert llm._core.host.num_bytes == 0
            return [*found, said(output), said(agent.chat("Three?", PARAMS))]

    assert talk(pause=True) == talk(pause=False)
    llm.verify()


def test_closing_and_expiry_free_host_memory(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        one, other = (tenant.agent(name, [NOTES], lease_ttl=ttl) for name, ttl in (("a", 10_000), ("b", 5)))
        for agent in (one, other):
            agent.chat("Hm?", PARAMS)
            agent.pause(offload=True)
        kept = llm._core.host.num_bytes
        assert kept > 0
        llm.sweep(later(50))
        assert llm._core.host.num_bytes == kept // 2
        one.close()
        assert llm._core.host.num_bytes == 0
        assert llm.stats().memory.offloaded == 0


def test_a_failed_turn_leaves_an_offloaded_agent_as_it_was(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        agent.chat("One?", PARAMS)
        agent.pause(offload=True)
        llm._core.call(llm._core.memory.evict_cached)
        with pytest.raises(InvalidRequestError):
            agent.chat("x" * 5000, PARAMS)
        agent.stream("Two?", PARAMS)  # dropped at once
        assert agent.chat("Two?", PARAMS).num_cached_tokens > 100
        llm.verify()


def test_a_paused_agent_keeps_its_kv_while_others_need_room() -> None:
    with tiny_llm(num_pages=24) as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        agent.chat("Hm?", PARAMS)
        agent.pause(60)
        kept = agent.snapshot().kv_tokens
        with tenant.agent("b", [Segment("z" * 150)]) as other:
            other.chat("Hm?", PARAMS)
        assert agent.snapshot().kv_tokens == kept
        llm._core.call(lambda: llm._services.sweep(later(61)))
        assert llm.stats().memory.sequences == {SequenceState.IDLE: 1}
        with pytest.raises(StateError):
            agent.resume()


def test_a_request_that_stands_still_is_reported(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])

        def look() -> None:
            (running,) = llm._services.sweep(later(50), stalled_after=40).stalled
            assert (running.waiting, 45 < running.seconds < 55) == (False, True)
            assert str(running).endswith("has had no step for 50 s") or "s" in str(running)
            looked.append(running.request_id)

        looked: list[str] = []
        pending = agent._submit("Hm?", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True), None)
        while not looked and not pending._future.done():
            llm._core.call(lambda: look() if llm._core.scheduler.decoding else None)
        pending.leave()
        assert looked
        assert llm.sweep(stalled_after=40).stalled == ()


def test_an_idle_tenant_is_emptied_and_says_the_same() -> None:
    with tiny_llm(empty_idle_tenants=60) as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        agent.chat("One?", PARAMS)
        assert llm.sweep(later(50)).emptied == ()
        ((name, pages),) = llm.sweep(later(70)).emptied
        assert (name, pages > 5) == (tenant.scope.tenant, True)
        assert llm.stats().memory.free == llm.stats().memory.total - 1
        emptied = said(agent.chat("Two?", PARAMS))
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        agent.chat("One?", PARAMS)
        assert said(agent.chat("Two?", PARAMS)) == emptied


@pytest.mark.parametrize("ttl", [0, -5, True])
def test_bad_times_are_refused(llm: LLM, ttl: float) -> None:
    with pytest.raises(ConfigError, match="lease_ttl must be a number of seconds above 0"):
        tiny_llm(lease_ttl=ttl)
    with llm.tenant("acme") as tenant:
        with pytest.raises(InvalidRequestError, match="the ttl of agent 'a'"):
            tenant.agent("a", [NOTES], lease_ttl=ttl)
        agent: Agent = tenant.agent("a", [NOTES])
        with pytest.raises(InvalidRequestError, match="a pause of agent 'a'"):
            agent.pause(ttl)
