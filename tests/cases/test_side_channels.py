"""What others have cached shows neither in the work that a prompt takes nor in who is served first."""

import threading

import pytest

from inms_jax import LLM, SamplingParams, Segment
from inms_jax.agents import Agent
from tests.tiny import tiny_llm

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SYSTEM = "You are an agent of a web shop, and the number of the vault is nine hundred and ninety-nine. Be brief."


def team(llm: LLM, tenant: str, name: str = "team") -> list[Agent]:
    """Two members who read the same text, published by their own team."""
    home = llm._tenants.get(tenant) or llm.tenant(tenant)
    group = home.group(name)
    group.publish("system", SYSTEM)
    return [group.agent(member, ["system"]) for member in ("ann", "bob")]


def steps_of(llm: LLM, agent: Agent) -> list[tuple[str, int]]:
    steps: list[tuple[str, int]] = []
    stop = llm.observe(lambda report: steps.append((report.kind, report.tokens)))
    agent.chat("hello there", PARAMS)
    stop()
    return steps


@pytest.mark.parametrize("tenant", ["shop", "other"])
def test_a_prompt_that_others_have_cached_takes_the_same_steps_as_a_new_one(tenant: str) -> None:
    with tiny_llm() as llm:
        new = steps_of(llm, team(llm, tenant)[0])
    with tiny_llm() as llm:
        ann, bob = team(llm, "shop", "first")
        cold = steps_of(llm, ann)
        assert steps_of(llm, team(llm, tenant)[0]) == new == cold
        warm = steps_of(llm, bob)
        assert sum(tokens for kind, tokens in warm if kind == "prefill") < len(SYSTEM) // 2, "a member finds it"


def test_the_order_of_service_does_not_depend_on_what_others_have_cached() -> None:
    """Longest-match-first would let who waits behind a prompt learn that it was cached."""

    def served(*, others: bool) -> list[tuple[str, int]]:
        with tiny_llm() as llm:
            if others:
                steps_of(llm, team(llm, "other")[0])
            home = llm.tenant("shop")
            group = home.group("team")
            group.publish("system", SYSTEM)
            agents = [home.agent(f"cold {n}", [Segment("x" * (70 + 9 * n))]) for n in range(2)]
            agents.append(group.agent("like the others", ["system"]))
            steps: list[tuple[str, int]] = []
            llm.observe(lambda report: steps.append((report.kind, report.tokens)))
            gate = threading.Event()
            llm._core._post(lambda: wait(gate))  # nothing is served until all have asked
            streams = [agent.stream("hello", PARAMS) for agent in agents]
            gate.set()
            for stream in streams:
                for _ in stream:
                    pass
            return steps

    assert served(others=True) == served(others=False)


def wait(gate: threading.Event) -> None:
    assert gate.wait(60)
