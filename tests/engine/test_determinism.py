"""Contract 1 and 3 of the design: what an agent says does not depend, to the bit, on what is cached or who else runs.

Every comparison is of token ids and of log-probabilities as exact floats. Each test also asserts that the thing it
compares really differed (a hit counter above 0, another batch size), so that it cannot pass by doing nothing.
"""

import threading
from collections.abc import Iterator, Sequence

import pytest

from inms_jax import LLM, Agent, Group, RequestOutput, SamplingParams, Segment, Tenant
from tests.tiny import tiny_llm

SYSTEM = "You are an agent of a web shop. Be brief, exact and polite, and read the decisions first."
DECISIONS = "Billing listens on port 8443. Orders go through the queue named orders. Money is an integer of cents."
NOTES = "My own notes: the retry budget is three, and the cache is warmed at start."
TURNS = ("Which port does billing use?", "And what is the queue called?", "How is money stored?")
SAMPLED = SamplingParams(max_tokens=14, temperature=0.8, top_p=0.95, seed=11, logprobs=0)
GREEDY = SamplingParams(max_tokens=14, temperature=0.0, logprobs=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as engine:
        yield engine


def said(output: RequestOutput) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and their exact log-probabilities."""
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return answer.token_ids, tuple(step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True))


def team(llm: LLM, tenant: str = "acme") -> tuple[Tenant, Group]:
    home = llm.tenant(tenant)
    home.publish("system", SYSTEM)
    group = home.group("checkout")
    group.publish("decisions", DECISIONS)
    return home, group


def converse(agent: Agent, params: SamplingParams, turns: Sequence[str] = TURNS) -> list[RequestOutput]:
    return [agent.chat(turn, params) for turn in turns]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_cold_equals_warm(llm: LLM, params: SamplingParams) -> None:
    llm.reset_prefix_cache()
    with team(llm)[0] as home:
        group = home.groups["checkout"]
        with group.agent("backend", ["system", "decisions", Segment(NOTES)]) as agent:
            cold = converse(agent, params)
        assert cold[0].num_cached_tokens == 0
        with group.agent("backend", ["system", "decisions", Segment(NOTES)]) as agent:
            warm = converse(agent, params)
        assert warm[0].num_cached_tokens > 100
    assert [said(o) for o in cold] == [said(o) for o in warm]


def test_plain_requests_cold_equal_warm(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = SYSTEM + DECISIONS
    (cold,) = llm.generate(prompt, SAMPLED)
    (warm,) = llm.generate(prompt, SAMPLED)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens > 100
    assert said(cold) == said(warm)


def test_a_fully_cached_prompt_of_whole_blocks(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = {"prompt_token_ids": [5 + i % 200 for i in range(64)]}
    (cold,) = llm.generate(ids, GREEDY)
    (warm,) = llm.generate(ids, GREEDY)
    assert warm.num_cached_tokens == 63, "the last token is always computed"
    assert said(cold) == said(warm)


@pytest.mark.parametrize("others", [1, 3, 7])
@pytest.mark.parametrize("words", ["short", "a much longer private text, " * 5])
def test_alone_equals_beside_others(llm: LLM, others: int, words: str) -> None:
    llm.reset_prefix_cache()
    with team(llm)[0] as home:
        group = home.groups["checkout"]
        with group.agent("backend", ["system", "decisions", Segment(NOTES)]) as agent:
            alone = converse(agent, SAMPLED)
        batch_sizes: set[int] = set()
        llm._core.observers.append(lambda r: batch_sizes.add(r.tokens) if r.kind == "decode" else None)
        start = threading.Barrier(others + 1)
        noisy = [group.agent(f"other-{i}", ["system", "decisions", Segment(f"{i} {words}")]) for i in range(others)]

        def talk(other: Agent) -> None:
            start.wait()
            for number in range(len(TURNS)):
                other.chat(f"{other.name} says {number} {words}", SamplingParams(max_tokens=30, temperature=1.0))

        threads = [threading.Thread(target=talk, args=(other,)) for other in noisy]
        for thread in threads:
            thread.start()
        with group.agent("backend", ["system", "decisions", Segment(NOTES)]) as agent:
            start.wait()
            beside = converse(agent, SAMPLED)
        for thread in threads:
            thread.join()
        llm._core.observers.clear()
    assert max(batch_sizes) > 1, "nobody ran beside the agent"
    assert [said(o) for o in alone] == [said(o) for o in beside]


def three_turns(llm: LLM, between: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The same conversation by four routes."""
    llm.reset_prefix_cache()
    answers = []
    with team(llm)[0] as home:
        group = home.groups["checkout"]
        context: list[str | Segment] = ["system", "decisions", Segment(NOTES)]
        agent = group.agent("backend", context)
        for number, turn in enumerate(TURNS):
            if between == "evict":
                llm.reset_prefix_cache()
                assert llm.stats().memory.held == 0
            elif between == "fork" and number:
                before = llm.stats().memory.held
                twin = agent.fork(f"backend-{number}")
                assert llm.stats().memory.held == before, "a fork copies nothing"
                agent.close()
                agent = twin
            elif between == "rebuild" and number:
                public = sum(len(span.tokens) for span in agent._conversation.spans(generate=False)[:2])
                history = agent.token_ids
                agent.close()
                agent = group.agent("backend", ["system", "decisions", Segment(history[public:])])
                assert agent.token_ids == history
            answers.append(said(agent.chat(turn, SAMPLED)))
        assert llm.stats().memory.held > 0
    return answers


@pytest.mark.parametrize("between", ["evict", "fork", "rebuild"])
def test_three_turns_by_another_route(llm: LLM, between: str) -> None:
    assert three_turns(llm, between) == three_turns(llm, "warm")


def test_forks_that_both_go_on(llm: LLM) -> None:
    """Parent and twin write on from one shared tail page, in the same steps; each as if it were alone."""
    llm.reset_prefix_cache()
    with team(llm)[0] as home:
        group = home.groups["checkout"]
        lone = group.agent("lone", ["system", Segment(NOTES)])
        expected = [said(lone.chat(t, SAMPLED)) for t in TURNS[:2]]
        lone.close()
        parent = group.agent("parent", ["system", Segment(NOTES)])
        assert said(parent.chat(TURNS[0], SAMPLED)) == expected[0]
        twin = parent.fork("twin")
        answers: dict[str, object] = {}
        threads = [
            threading.Thread(target=lambda a=a, t=t: answers.update({a.name: said(a.chat(t, SAMPLED))}))
            for a, t in ((parent, TURNS[1]), (twin, TURNS[2]))
        ]
        copies = llm.stats().memory.copies
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers["parent"] == expected[1]
        assert answers["twin"] != expected[1]
        assert llm.stats().memory.copies > copies, "the shared tail must have been copied before it was written"


def test_sharing_off_equals_sharing_on() -> None:
    results = []
    for caching in (True, False):
        with tiny_llm(enable_prefix_caching=caching) as llm, team(llm)[0] as home:
            group = home.groups["checkout"]
            agents = [group.agent(f"a{i}", ["system", "decisions", Segment(f"{i} {NOTES}")]) for i in range(3)]
            results.append([said(output) for agent in agents for output in converse(agent, SAMPLED)])
            hits = llm.stats().memory.hit_tokens
            assert (hits > 0) == caching
    assert results[0] == results[1]


def test_another_agents_secret_moves_nothing(llm: LLM) -> None:
    """Non-interference: change, add and remove other agents' private text; the observed agent's bits stay."""
    seen = []
    for secrets in ([], ["the port is 1111"], ["the port is 2222", NOTES], [NOTES + " ", "x" * 200, "y"]):
        llm.reset_prefix_cache()
        with team(llm)[0] as home:
            group = home.groups["checkout"]
            others = [group.agent(f"o-{i}", ["system", "decisions", Segment(text)]) for i, text in enumerate(secrets)]
            for other in others:
                other.chat("Say it.", GREEDY)
            with group.agent("observed", ["system", "decisions", Segment(NOTES)]) as agent:
                seen.append([said(o) for o in converse(agent, SAMPLED)])
    assert all(answers == seen[0] for answers in seen)


def test_chunks_do_not_change_bits() -> None:
    """The same prompt prefilled in chunks of 64 and of 128."""
    found = []
    for chunk in (64, 128):
        with tiny_llm(max_num_batched_tokens=chunk) as llm:
            (output,) = llm.generate(SYSTEM + DECISIONS + NOTES, SAMPLED)
            found.append(said(output))
    assert found[0] == found[1]


def test_sixteen_rows_at_once_are_those_of_each_alone() -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    prompts = [f"Prompt number {i} that ends somewhere." for i in range(16)]
    with tiny_llm(num_pages=400, max_num_seqs=16) as llm:
        together = llm.generate(prompts, params)
        assert len(llm._core._decode_buckets) == 4
        for prompt, beside in list(zip(prompts, together, strict=True))[::5]:
            (alone,) = llm.generate([prompt], params)
            assert alone.outputs[0].logprobs == beside.outputs[0].logprobs
