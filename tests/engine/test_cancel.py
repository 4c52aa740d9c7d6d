"""A request that is aborted after any number of device steps leaves everything as it was."""

from collections import Counter

import pytest

from inms_jax import LLM, Agent, SamplingParams, Segment, Tier
from inms_jax.engine.pending import Pending
from inms_jax.engine.report import StepReport
from inms_jax.errors import AbortedError
from tests.tiny import tiny_llm

SYSTEM = "You are an agent of a web shop. Be brief."
RECORD = "Decisions: billing listens on port 8443; money is an integer of cents; retries stop after three. " * 2
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0, ignore_eos=True)


def shared_references(llm: LLM) -> Counter[int]:
    found = {info.page: info.references for info in llm.memory_map() if info.tier is not Tier.PRIVATE}
    return Counter({page: count for page, count in found.items() if count})


def abort_after(llm: LLM, agent: Agent, steps: int) -> bool:
    """Ask, and abort after so many steps of the device; whether the request was still there."""
    seen = [0]
    asked: list[Pending] = []

    def count(_: StepReport) -> None:
        seen[0] += 1
        if seen[0] == steps:
            llm._core.abort(asked[0].request_id)

    llm._core.observers.append(count)
    try:
        # Held back until the request is known, so that the first step is counted.
        def submit() -> None:
            asked.append(agent._submit("What is the port, and how is money kept?", PARAMS, None))
            if steps == 0:
                llm._core.abort(asked[0].request_id)

        llm._core.call(submit)
        try:
            asked[0].result()
        except AbortedError:
            return True
        return False
    finally:
        llm._core.observers.remove(count)


@pytest.mark.parametrize("talked", [False, True])
def test_an_abort_after_any_step_gives_back_what_the_request_took(talked: bool) -> None:
    with tiny_llm(num_pages=200, fragments="unchecked", link_tokens=4) as llm, llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("record", RECORD, mode="fragment")

        def make(name: str) -> Agent:
            agent = tenant.agent(name, ["system", Segment("I like tea."), "record", Segment("And biscuits. " * 6)])
            if talked:
                agent.chat("Hm?", PARAMS)
            return agent

        with make("expected") as expected:
            (answer,) = expected.chat("What is the port, and how is money kept?", PARAMS).outputs
        other = tenant.agent("other", ["system", Segment("Other notes."), "record"])
        other.chat("Hm?", PARAMS)
        aborted, steps = True, 0
        while aborted:
            if steps % 2:
                llm.reset_prefix_cache()  # everything is computed again, the fragment too
                other.chat("Hm?", PARAMS)
            agent = make(f"agent {steps}")
            before, history = shared_references(llm), agent.token_ids
            aborted = abort_after(llm, agent, steps)
            if aborted:
                assert shared_references(llm) == before
                assert agent.token_ids == history
            memory = llm.stats().memory
            assert memory.reserved == 0
            llm.verify()
            if aborted:
                (again,) = agent.chat("What is the port, and how is money kept?", PARAMS).outputs
                assert (again.token_ids, again.logprobs) == (answer.token_ids, answer.logprobs)
            agent.close()
            steps += 1
        assert steps > 6
    assert llm._core.memory.stats().held == 0
