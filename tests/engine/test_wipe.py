"""Freed pages are wiped before anybody else can use them; what is in a page that is not in use reaches no output."""

import random
from typing import Any

import numpy as np
import pytest

from inms_jax import LLM, Agent, SamplingParams, Segment, Shared
from inms_jax.cache.page_ops import fill_pages
from tests.tiny import tiny_llm

SYSTEM = "You are an agent of a web shop. Be brief."
RECORD = "Decisions: billing listens on port 8443; money is an integer of cents; retries stop after three. " * 2


def programs() -> int:
    fill: Any = fill_pages
    return int(fill._cache_size())


def contents(llm: LLM, pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
    k, v = llm._core.call(lambda: llm._core.runner.read_pages(pages))
    return k, v


def test_pages_of_an_agent_that_is_gone_hold_zeros() -> None:
    with tiny_llm(zero_on_free=True) as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [Segment("My word is ultraviolet. " * 4)])
        agent.chat("Hm?", SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        pages = [info.page for info in llm.memory_map()]
        assert all(content.any(axis=(1, 2, 3, 4)).all() for content in contents(llm, pages))
        agent.close()
        llm._core.call(llm._core.runner.wipe)
        assert llm.stats().memory.free == llm.stats().memory.total - 1
        assert not any(content.any() for content in contents(llm, pages))


def test_wiping_is_compiled_once_and_leaves_other_pages_alone() -> None:
    before = programs()
    with tiny_llm(zero_on_free=True, num_pages=96) as llm, llm.tenant("acme") as tenant:
        stays = tenant.agent("stays", [Segment("I stay. " * 12)])
        stays.chat("Hm?", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        pages = [info.page for info in llm.memory_map()]
        kept = contents(llm, pages)
        for count in (1, 9, 30):
            with tenant.agent("goes", [Segment("x" * 16 * count)]) as agent:
                agent.chat("Hm?", SamplingParams(max_tokens=1))
            llm._core.call(llm._core.runner.wipe)
        assert all(np.array_equal(a, b) for a, b in zip(contents(llm, pages), kept, strict=True))
        assert programs() == before + 1


def busy(llm: LLM, seed: int) -> list[object]:
    """Prefixes, fragments, forks, several samples, aborts and eviction, one after the other."""
    rng = random.Random(seed)
    said: list[object] = []
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("record", RECORD, mode="fragment")
        agents: list[Agent] = []
        for step in range(14):
            kind = rng.choice(["new", "chat", "chat", "chat", "fork", "close", "samples", "abort", "offload", "empty"])
            notes = Segment(f"Note {step}: " + "abc " * rng.randrange(30))
            if kind == "new" or not agents:
                shared = Shared("record", mode=rng.choice(["prefix", "fragment"]), repair_blocks=rng.randrange(2))
                agents.append(tenant.agent(f"a{step}", ["system", notes, shared]))
            agent = rng.choice(agents)
            params = SamplingParams(max_tokens=rng.randrange(1, 20), temperature=0.0, logprobs=2, ignore_eos=True)
            if kind == "fork":
                agents.append(agent.fork(f"f{step}"))
            elif kind == "close":
                agents.remove(agent)
                agent.close()
            elif kind == "samples":
                many = SamplingParams(n=3, max_tokens=9, seed=step, logprobs=1, ignore_eos=True)
                said += [one.cumulative_logprob for one in llm.generate(f"prompt {step}", many)[0].outputs]
            elif kind == "abort":
                next(iter(agent.stream("Hm?", params)))
            elif kind == "offload":
                agent.chat("Hm?", params)
                agent.pause(offload=True)
            elif kind == "empty":
                tenant.empty()
            (answer,) = (agents[-1] if agents else tenant.agent(f"z{step}", [notes])).chat("Hm?", params).outputs
            said.append((answer.token_ids, answer.logprobs))
    llm.verify()
    return said


def poison_everything(llm: LLM) -> None:
    """Every page of an engine that has done nothing yet."""
    runner = llm._core.runner
    runner.wiped_with, runner.freed = float("nan"), lambda: range(1, llm._core.memory.num_pages)
    llm._core.call(runner.wipe)
    runner.freed = llm._core.memory.take_freed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_a_number_in_a_page_that_nobody_uses_reaches_no_output(seed: int) -> None:
    options = {"num_pages": 90, "fragments": "unchecked", "link_tokens": 4}
    with tiny_llm(**options) as llm:
        expected = busy(llm, seed)
    with tiny_llm(zero_on_free=True, **options) as llm:
        poison_everything(llm)
        found = busy(llm, seed)
        llm._core.call(llm._core.runner.wipe)
        free = set(range(1, llm._core.memory.num_pages)) - {info.page for info in llm.memory_map()}
        assert all(np.isnan(content).all() for content in contents(llm, sorted(free)))
    assert repr(found) == repr(expected)
    assert "nan" not in repr(found)
