"""Statistics by tier, group and agent add up to those of the engine; who asks for its own learns nothing of others."""

import dataclasses
from collections import Counter

import pytest

from inms_jax import LLM, SamplingParams, Segment, Tier
from inms_jax.agents import Agent
from inms_jax.errors import AbortedError, ClosedError
from inms_jax.memory.policy import MissReason
from tests.tiny import tiny_llm

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SYSTEM = "You are an agent of a web shop. Be brief."
PLAN = "The plan of the team is to ship on Monday."


def members(llm: LLM, tenant: str = "shop") -> tuple[Agent, Agent]:
    shop = llm.tenant(tenant)
    shop.publish("system", SYSTEM)
    team = shop.group("team")
    team.publish("plan", PLAN)
    return team.agent("ann", ["system", "plan"]), team.agent("bob", ["system", "plan"])


def test_figures_by_tier_group_and_agent_add_up() -> None:
    with tiny_llm() as llm:
        ann, bob = members(llm)
        loner = llm._tenants["shop"].agent("loner", ["system"])
        outputs = [agent.chat("hello there", PARAMS) for agent in (ann, bob, loner, ann)]
        stats = llm.stats()
        shop = stats.tenants["shop"]
        team = shop.groups["team"]
        assert set(shop.agents) == {"loner"}
        assert set(team.agents) == {"ann", "bob"}
        everyone = [*team.agents.values(), *shop.agents.values()]
        for field in dataclasses.fields(shop.work):
            if field.name != "misses":
                assert getattr(shop.work, field.name) == sum(getattr(a.work, field.name) for a in everyone)
        work = shop.work
        assert (work.turns, work.failed_turns) == (4, 0)
        assert work.prompt_tokens == sum(len(out.prompt_token_ids) for out in outputs) == stats.work.prompt_tokens
        assert work.saved_prefill_tokens == sum(out.num_cached_tokens for out in outputs) == stats.work.cached_tokens
        assert work.computed_tokens == stats.work.prefill_tokens == stats.memory.computed_tokens
        assert work.prompt_tokens == work.saved_prefill_tokens + work.computed_tokens
        assert work.generated_tokens == 16
        misses: Counter[str] = Counter()
        for out in outputs:
            misses.update(out.miss_reasons)
        assert work.misses == misses
        assert sum(work.misses.values()) == work.computed_tokens
        # Pages: by tier they are those of the engine, and each agent's are its row.
        assert sum(counts.used for counts in stats.pages.values()) == stats.memory.held
        assert sum(counts.cached for counts in stats.pages.values()) == stats.memory.cached
        assert shop.pages == stats.pages
        assert team.pages[Tier.GROUP] == stats.pages[Tier.GROUP]
        assert team.pages[Tier.GLOBAL].total == 0
        assert team.pages[Tier.PRIVATE].used == sum(a.pages[Tier.PRIVATE] for a in team.agents.values())
        for agent in (ann, bob, loner):
            assert sum(agent.stats().pages.values()) == agent.snapshot().kv_pages
        assert ann.stats() == team.agents["ann"]
        assert llm._tenants["shop"].stats() == shop


def test_what_fragments_saved_is_counted_and_told_apart() -> None:
    with tiny_llm(fragments="unchecked", link_tokens=5, num_pages=256) as llm:
        shop = llm.tenant("shop")
        shop.publish("system", SYSTEM)
        shop.publish("document", "The release is on Thursday. The database is called orders. " * 3, mode="fragment")
        agents = [shop.agent(name, ["system", Segment(f"I am {name}."), "document"]) for name in ("ann", "bob")]
        for agent in agents:
            output = agent.chat("When?", PARAMS)
            work = agent.stats().work
            assert work.fragment_tokens == output.num_fragment_tokens > 0
            assert work.prompt_tokens == work.saved_prefill_tokens + work.computed_tokens
            assert work.saved_prefill_tokens == output.num_cached_tokens + output.num_fragment_tokens
        assert shop.stats().work.fragment_tokens == sum(agent.stats().work.fragment_tokens for agent in agents)


def test_those_that_left_count_for_their_group_until_it_goes() -> None:
    with tiny_llm() as llm:
        ann, bob = members(llm)
        for agent in (ann, bob):
            agent.chat("hello", PARAMS)
        shop = llm._tenants["shop"]
        before = shop.stats().groups["team"].work
        ann.close()
        team = shop.groups["team"].stats()
        assert team.work == before
        assert set(team.agents) == {"bob"}
        assert team.pages[Tier.GROUP].used > 0
        bob.close()
        team = shop.groups["team"].stats()
        assert team.work == before
        assert (team.pages[Tier.GROUP].used, team.pages[Tier.PRIVATE].total) == (0, 0)
        assert team.pages[Tier.GROUP].cached > 0
        shop.groups["team"].close()
        assert shop.stats().work == before
        assert shop.stats().groups == {}
        shop.close()
        assert llm.stats().tenants == {}
        assert llm._services.accounts._work == {}


def test_a_failed_turn_is_counted_apart() -> None:
    with tiny_llm() as llm:
        ann, _ = members(llm)
        stream = ann.stream("hello", SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
        next(iter(stream))
        stream.close()
        with pytest.raises(AbortedError):
            for _ in stream:
                pass
        work = ann.stats().work
        assert (work.turns, work.failed_turns) == (0, 1)
        assert work.computed_tokens > 0


def test_nobody_learns_from_its_own_figures_that_others_hold_the_same_text() -> None:
    """The same things happen to a tenant alone and beside others that hold its very texts: its figures are equal."""

    def figures(*, others: bool) -> tuple[object, ...]:
        with tiny_llm(num_pages=200) as llm:
            if others:
                for agent in members(llm, "copycat"):
                    agent.chat("hello there", PARAMS)
            ann, bob = members(llm)
            spy = llm._tenants["shop"].agent("spy", [Segment(SYSTEM + PLAN), Segment(PLAN)])
            for agent in (ann, bob, spy):
                agent.chat("hello there", PARAMS)
            if others:
                assert llm.stats().memory.misses[MissReason.SCOPE] > 0, "the operator knows"
            return (
                ann.stats(),
                spy.stats(),
                llm._tenants["shop"].groups["team"].stats(),
                llm._tenants["shop"].stats(),
            )

    alone = figures(others=False)
    assert alone == figures(others=True)


def test_figures_of_what_was_closed_are_refused() -> None:
    with tiny_llm() as llm:
        ann, _ = members(llm)
        shop = llm._tenants["shop"]
        team = shop.groups["team"]
        shop.close()
        for handle in (ann, team, shop):
            with pytest.raises(ClosedError):
                handle.stats()
