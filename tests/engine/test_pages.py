"""Pages in use: predicted exactly at every step, conserved after every step, shared by index, none left at the end."""

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from inms_jax import LLM, Agent, SamplingParams, Segment
from inms_jax.errors import ClosedError
from inms_jax.memory.prediction import Context, Piece, predict_pages
from inms_jax.text.chat import ChatTemplate
from tests.tiny import tiny_llm, tiny_model

SYSTEM = "You are an agent of a web shop. Be brief, exact and polite, and read the decisions first."
DECISIONS = "Billing listens on port 8443. Orders go through the queue named orders. Money is an integer of cents."
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)


def context_of(agent: Agent, written: int, extra: tuple[Piece, ...]) -> Context:
    """The agent's history cut at `written` tokens, as the prediction wants it."""
    pieces: list[Piece] = []
    left = written
    spans = agent._conversation.spans(generate=False)
    known = [Piece((s.scope, s.tokens), len(s.tokens), int(s.scope.tier), s.scope, s.published) for s in spans]
    for piece in (*known, *extra):
        length = min(piece.length, left)
        pieces.append(
            Piece(piece.identity, length, piece.tier, piece.scope, piece.published and length == piece.length)
        )
        left -= length
    assert left == 0
    return Context(tuple(pieces), agent.full_name)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_pages_equal_the_prediction_at_every_step(block_size: int) -> None:
    """Three agents in three threads and several turns; the engine thread compares after each device step."""
    with tiny_llm(block_size=block_size, num_pages=400) as llm:
        tenant = llm.tenant("acme")
        tenant.publish("system", SYSTEM)
        group = tenant.group("checkout")
        group.publish("decisions", DECISIONS)
        agents = [group.agent(f"a{i}", ["system", "decisions", Segment(f"notes of {i} " * (4 + i))]) for i in range(3)]
        checked: list[int] = []
        memory = llm._services.memory

        def compare(report: object) -> None:
            llm.verify()
            turns = {r.queue: r for r in llm._core.scheduler.running}
            contexts = []
            for agent in agents:
                assert agent._handle is not None
                row = memory.row(agent._handle)
                written = int((row.end - row.begin).sum())
                extra: tuple[Piece, ...] = ()
                if agent in turns:  # the running turn's own text: private, so only its length matters
                    history = sum(len(s.tokens) for s in agent._conversation.spans(generate=False))
                    extra = (Piece((agent.full_name, agent.turn), max(0, written - history), 2, agent.scope),)
                contexts.append(context_of(agent, written, extra))
            predicted = predict_pages(contexts, block_size)
            held = llm.stats().memory.held
            assert held == predicted, f"step {len(checked)}: {held} held, {predicted} predicted"
            checked.append(held)

        failures: list[BaseException] = []

        def observer(report: object) -> None:
            try:
                compare(report)
            except BaseException as error:
                failures.append(error)

        llm._core.observers.append(observer)

        def talk(agent: Agent) -> None:
            for turn in range(3):
                agent.chat(f"turn {turn} of {agent.name}: please say something", GREEDY)

        threads = [threading.Thread(target=talk, args=(agent,)) for agent in agents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        assert len(checked) > 30
        tenant.close()
        stats = llm.stats().memory
        assert (stats.held, stats.cached, stats.free) == (0, 0, stats.total - 1)


def test_rows_of_two_agents_hold_the_same_page_ids() -> None:
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        agents = [tenant.agent(name, ["system", Segment(f"I am {name}")]) for name in ("a", "b")]
        for agent in agents:
            agent.chat("hello", GREEDY)
        rows = [llm._services.memory.row(agent._handle) for agent in agents if agent._handle]
        shared = -(-len(agents[0]._conversation.spans(generate=False)[0].tokens) // 16)
        assert shared == 7
        assert rows[0].page[:shared].tolist() == rows[1].page[:shared].tolist()
        assert not set(rows[0].page[shared:].tolist()) & set(rows[1].page[shared:].tolist())
        counts = {info.page: info.references for info in llm.memory_map()}
        assert all(counts[page] == 2 for page in rows[0].page[:shared].tolist())


def test_a_hit_needs_membership() -> None:
    """Same text, other group or other tenant: no hit; same group: a hit. Both, or it proves nothing."""
    with tiny_llm() as llm:
        outputs = {}
        for tenant_name, group_name, agent_name in (
            ("acme", "g1", "first"),
            ("acme", "g1", "same group"),
            ("acme", "g2", "other group"),
            ("other", "g1", "other tenant"),
        ):
            tenant = llm._tenants.get(tenant_name) or llm.tenant(tenant_name)
            group = tenant.groups.get(group_name)
            if group is None:
                group = tenant.group(group_name)
                group.publish("decisions", DECISIONS)
            outputs[agent_name] = group.agent(agent_name, ["decisions"]).chat("hi", GREEDY)
        cached = {name: output.num_cached_tokens for name, output in outputs.items()}
        assert cached == {"first": 0, "same group": cached["same group"], "other group": 0, "other tenant": 0}
        assert cached["same group"] > 100
        assert "scope" not in outputs["other tenant"].miss_reasons, "a reader must not learn that others have its text"
        assert llm.stats().memory.misses["scope"] > 0, "the operator sees why"  # type: ignore[index]


def test_tools_that_nobody_published_are_private() -> None:
    """The template writes tools into the published system message; that piece is then private, whoever guesses it."""
    qwen = (Path(__file__).parents[1] / "data/chat_templates/qwen2.5.jinja").read_text()
    model = dataclasses.replace(tiny_model(), chat_template=ChatTemplate(qwen, bos_token="", eos_token="<|im_end|>"))

    def tools(code: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "launch", "description": f"code {code}", "parameters": {}}}]

    options: dict[str, Any] = {"block_size": 16, "kv_cache_memory": "8MiB", "max_num_batched_tokens": 64}
    with LLM(model, **options) as llm, llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        first, second = tenant.group("g1"), tenant.group("g2")
        author = first.agent("author", ["system"], tools=tools("7731"))
        author.chat("hi", GREEDY)
        assert all(info.tier == 2 for info in llm.memory_map()), "no page with tools in it is shared"
        guesses = [
            second.agent(f"spy-{code}", ["system"], tools=tools(code)).chat("hi", GREEDY).num_cached_tokens
            for code in ("7731", "1234")
        ]
        assert guesses == [0, 0]
        again = author.chat("more", GREEDY).num_cached_tokens
        assert again > 100, "the author's own prefix is kept"
        plain = [second.agent(f"plain-{i}", ["system"]).chat("hi", GREEDY).num_cached_tokens for i in range(2)]
        assert plain[0] == 0
        assert plain[1] > 80, "without tools the published text is shared"


def test_a_fork_that_fails_leaves_nothing_behind() -> None:
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        group = tenant.group("g")
        group.publish("decisions", DECISIONS)
        agent = group.agent("a", ["decisions"])
        stream = agent.stream("hello", SamplingParams(max_tokens=600, ignore_eos=True))
        next(stream)
        failures: list[BaseException] = []

        def fork() -> None:
            try:
                agent.fork("twin")
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=fork)
        thread.start()
        while "twin" not in group.agents:
            time.sleep(0.001)
        group.close()
        agent.close()
        thread.join()
        assert isinstance(failures[0], ClosedError)
        stats = llm.stats().memory
        assert (stats.held, stats.cached) == (0, 0)
        assert tenant.group("g").name == "g", "the name is free"


def test_plain_requests_and_agents_never_share() -> None:
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [Segment(SYSTEM)])
        prompt = agent.chat("hello", GREEDY).prompt_token_ids
        (plain,) = llm.generate({"prompt_token_ids": list(prompt)}, GREEDY)
        (again,) = llm.generate({"prompt_token_ids": list(prompt)}, GREEDY)
        assert (plain.num_cached_tokens, again.num_cached_tokens > 50) == (0, True)


def test_group_pages_go_with_the_last_member() -> None:
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        group = tenant.group("g")
        group.publish("decisions", DECISIONS)
        first, second = group.agent("a", ["decisions"]), group.agent("b", ["decisions"])
        first.chat("hi", GREEDY)
        second.chat("hi", GREEDY)
        first.close()
        group.close()
        assert llm.stats().memory.held > 0
        assert second.chat("more", GREEDY).num_cached_tokens > 100
        second.close()
        assert (llm.stats().memory.held, llm.stats().memory.cached) == (0, 0)


def test_closed_agents_private_text_cannot_be_hit_by_its_namesake() -> None:
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        for _ in range(2):
            with tenant.agent("a", [Segment(SYSTEM)]) as agent:
                assert agent.chat("hello", GREEDY).num_cached_tokens == 0


def test_fork_is_free_until_someone_writes() -> None:
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [Segment(SYSTEM)])
        agent.chat("hello", GREEDY)
        before = llm.stats().memory
        twins = [agent.fork(f"twin-{i}") for i in range(8)]
        after = llm.stats().memory
        assert (after.held, after.copies) == (before.held, before.copies)
        for twin in twins:
            twin.chat(f"I am {twin.name}", GREEDY)
        assert llm.stats().memory.held > before.held
        llm.verify()
        agent.close()
        assert twins[0].chat("still here", GREEDY).num_cached_tokens > 80


def churn(llm: LLM) -> None:
    for count in (1, 3, 8, 2, 5):
        llm.generate([f"{count}-{i} " + "w" * (i * 37 % 300) for i in range(count)], GREEDY)
        llm.generate(f"sampled {count}", SamplingParams(n=min(count, 3), max_tokens=5, logprobs=3, top_p=0.9))
    with llm.tenant("t") as tenant:
        agents = [tenant.agent(f"a{i}", [Segment("notes " * (3 * i + 1))]) for i in range(4)]
        for agent in agents:
            agent.chat("hello " * 20, GREEDY)
            agent.fork(agent.name + "-twin").chat("and on", SamplingParams(max_tokens=5, repetition_penalty=1.2))


def test_nothing_compiles_after_warmup() -> None:
    with tiny_llm(num_pages=300) as llm:
        llm.warmup()
        compiled = llm.stats().compiled_programs
        churn(llm)
        assert llm.stats().compiled_programs == compiled


def test_programs_are_counted_by_row_count_only() -> None:
    """Prefill 64, 128, 256, decode 2, 4, 8: six step programs whatever the lengths."""
    from inms_jax.engine import runner

    step: Any = runner.step

    with tiny_llm(num_pages=301, max_num_batched_tokens=256) as llm:
        before = step._cache_size()
        churn(llm)
        assert step._cache_size() - before == 6


def test_outside_deterministic_mode_decoded_kv_is_kept() -> None:
    """The next turn then computes only what is new; in deterministic mode it computes the answer again."""
    computed = {}
    for deterministic in (True, False):
        with tiny_llm(deterministic=deterministic) as llm, llm.tenant("acme") as tenant:
            agent = tenant.agent("a", [Segment(SYSTEM)])
            agent.chat("hello", GREEDY)
            before = llm.stats().work.prefill_tokens
            output = agent.chat("more", GREEDY)
            computed[deterministic] = llm.stats().work.prefill_tokens - before
            assert output.num_cached_tokens == len(output.prompt_token_ids) - computed[deterministic]
            llm.verify()
    assert computed[True] - computed[False] == 8, "nine tokens were generated, the last of them is never in pages"
