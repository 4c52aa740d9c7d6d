"""Group records that change: who reads which version when, and what becomes of the pages of the old one."""

import threading
from collections.abc import Iterator

import pytest

from inms_jax import LLM, RequestOutput, SamplingParams, Segment, Shared
from inms_jax.errors import CapacityError, InvalidRequestError
from inms_jax.memory.tier import Tier
from tests.tiny import tiny_llm

SYSTEM = "You are an agent of a web shop."
OLD = "Decisions: billing listens on port 8443, and money is an integer of cents. " * 2
NEW = "Decisions: billing listens on port 9000, and money is an integer of cents. " * 2
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(fragments="unchecked", link_tokens=4, num_pages=256) as engine:
        yield engine


def text(llm: LLM, output: RequestOutput) -> str:
    return llm.tokenizer.decode(output.prompt_token_ids, skip_special=True)


def group_pages(llm: LLM) -> int:
    """Pages of GROUP text that somebody holds."""
    return sum(info.tier is Tier.GROUP and info.references > 0 for info in llm.memory_map())


@pytest.mark.parametrize("mode", ["prefix", "fragment"])
@pytest.mark.parametrize("rule", ["append", "replace"])
def test_four_agents_read_the_new_value_from_the_same_turn_on(llm: LLM, rule: str, mode: str) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        group = tenant.group("team")
        group.publish("record", OLD, mode=mode)
        agents = [group.agent(f"a{i}", ["system", Segment(f"I am number {i}."), "record"]) for i in range(4)]
        for agent in agents:
            assert "8443" in text(llm, agent.chat("Which port?", PARAMS))
        before = group_pages(llm)
        group.publish("record", NEW, on_update=rule)
        for agent in agents:
            seen = text(llm, agent.chat("Which port now?", PARAMS))
            assert ("8443" in seen) == (rule == "append")
            assert seen.count("9000") == 2
            if rule == "append":
                assert seen.index("8443") < seen.index("Which port?") < seen.index("9000")
            else:
                assert seen.index("9000") < seen.index("Which port?")
        if mode == "fragment" and rule == "replace":
            assert group_pages(llm) == before > 0
        elif mode == "fragment":  # stored once for all four; both versions begin with the same blocks
            assert before < group_pages(llm) < 2 * before
        llm._core.memory.verify()
    assert llm.stats().memory.held == 0
    llm._core.memory.verify()


def test_a_running_turn_finishes_with_the_old_version(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        group = tenant.group("team")
        group.publish("record", OLD)
        agent = group.agent("a", ["record"])
        running = agent.stream("Which port?", SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
        next(running)
        published = threading.Thread(target=lambda: group.publish("record", NEW))
        published.start()
        published.join(10)
        assert not published.is_alive(), "publish does not wait for turns"
        last = list(running)[-1]
        assert last.finished
        assert "9000" not in text(llm, last)
        assert "9000" in text(llm, agent.chat("And now?", PARAMS))


def test_a_failed_turn_leaves_the_old_version_and_the_next_one_reads_the_new(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        group = tenant.group("team")
        group.publish("record", OLD)
        agent = group.agent("a", ["record", Segment("Notes.")])
        agent.chat("Which port?", PARAMS)
        history = agent.token_ids
        group.publish("record", NEW, on_update="replace")
        stream = agent.stream("And now?", PARAMS)
        next(stream)
        stream.close()
        assert agent.token_ids == history
        assert "9000" in text(llm, agent.chat("And now?", PARAMS))


def test_versions_that_came_meanwhile_are_taken_in_order(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        group = tenant.group("team")
        group.publish("record", "Version one.")
        agent = group.agent("a", ["record"])
        agent.chat("Hm?", PARAMS)
        group.publish("record", "Version two.")
        group.publish("record", "Version three.", on_update="replace")
        group.publish("record", "Version four.")
        seen = text(llm, agent.chat("Hm?", PARAMS))
        assert "one" in seen
        assert "two" not in seen
        assert seen.index("three") < seen.index("four")
        # Who comes now starts with the newest one.
        late = text(llm, group.agent("b", ["record"]).chat("Hm?", PARAMS))
        assert "four" in late
        assert "three" not in late


def test_a_context_keeps_the_mode_in_which_it_took_the_text(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        group = tenant.group("team")
        group.publish("record", OLD)
        notes = Segment("Notes.")
        reader, judge = (
            group.agent(mode, [notes, Shared("record", mode=mode), notes]) for mode in ("fragment", "dense")
        )
        group.publish("record", NEW, on_update="replace")
        assert [str(agent.explain()[1].mode) for agent in (reader, judge)] == ["fragment", "dense"]
        assert "9000" in text(llm, reader.chat("Hm?", PARAMS))


def test_global_names_never_change_and_rules_are_checked(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        with pytest.raises(InvalidRequestError, match="cannot change"):
            tenant.publish("system", "Something else.")
        group = tenant.group("team")
        group.publish("record", OLD)
        with pytest.raises(InvalidRequestError, match="on_update"):
            group.publish("record", NEW, on_update="merge")
        agent = group.agent("a", ["record"])
        assert "9000" not in text(llm, agent.chat("Hm?", PARAMS))


def test_a_new_version_that_does_not_fit_fails_the_turn_and_nothing_else() -> None:
    with tiny_llm(num_pages=20) as llm, llm.tenant("acme") as tenant:
        group = tenant.group("team")
        group.publish("record", OLD)
        agent = group.agent("a", ["record"])
        agent.chat("Hm?", PARAMS)
        group.publish("record", NEW)
        with pytest.raises((InvalidRequestError, CapacityError), match="tokens"):
            agent.chat("Hm?", PARAMS)
        group.publish("record", "Short.", on_update="replace")
        group.publish("record", "Short again.", on_update="replace")
        assert "Short again." in text(llm, agent.chat("Hm?", PARAMS))
