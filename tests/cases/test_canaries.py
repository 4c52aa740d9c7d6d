"""Two agents with words of their own, through eviction, forgetting and restarts: no word crosses, and no bit moves."""

from pathlib import Path

from inms_jax import LLM, SamplingParams, Segment
from inms_jax.agents import Agent
from inms_jax.engine.outputs import CompletionOutput
from tests.tiny import tiny_llm

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=0)
SYSTEM = "You are an agent of a web shop. Be brief."
CANARY = {"ann": "Ann's word is ultraviolet. " * 4, "bob": "Bob's word is marzipan. " * 5}
ROUNDS = 3


def group_agent(llm: LLM, name: str) -> Agent:
    tenant = llm._tenants.get("shop")
    if tenant is None:
        tenant = llm.tenant("shop")
        tenant.publish("system", SYSTEM)
        tenant.group("team")
    return tenant.groups["team"].agent(name, ["system", Segment(CANARY[name])])


def alone(name: str) -> list[CompletionOutput]:
    with tiny_llm(enable_prefix_caching=False) as llm:
        agent = group_agent(llm, name)
        return [agent.chat(f"round {n}", PARAMS).outputs[0] for n in range(ROUNDS)]


def check_pages(llm: LLM, agents: list[Agent]) -> None:
    """Every page that an agent reads holds a run of its own context, and the words of the other are in none."""
    rows = {agent.name: set(llm._services.memory.row(agent.snapshot().sequence).page.tolist()) for agent in agents}
    private = {info.page for info in llm.memory_map() if info.scope.agent is not None}
    assert not rows["ann"] & rows["bob"] & private
    for agent in agents:
        other = next(text for name, text in CANARY.items() if name != agent.name).encode()[:12]
        assert other not in bytes(token % 256 for token in agent.token_ids)


def test_no_word_crosses_through_many_rounds_of_eviction_and_restarts(tmp_path: Path) -> None:
    expected = {name: alone(name) for name in CANARY}
    with tiny_llm(num_pages=128) as llm:
        agents = [group_agent(llm, name) for name in CANARY]
        flood = llm.tenant("flood")
        for n in range(ROUNDS):
            for agent in agents:
                answer = agent.chat(f"round {n}", PARAMS)
                assert answer.outputs[0] == expected[agent.name][n]
            check_pages(llm, agents)
            with flood.agent(f"crowd {n}", [Segment("y" * 900)]) as crowd:  # takes what others have cached
                crowd.chat("hello", PARAMS)
            if n == 1:
                llm.reset_prefix_cache()
            llm.verify()
        llm.save(tmp_path / "kv")
    with tiny_llm(num_pages=128) as llm:
        llm.restore(tmp_path / "kv")
        agents = [group_agent(llm, name) for name in reversed(CANARY)]
        for n in range(ROUNDS):
            for agent in agents:
                answer = agent.chat(f"round {n}", PARAMS)
                assert answer.outputs[0] == expected[agent.name][n]
                assert answer.num_cached_tokens > 0
        check_pages(llm, agents)
