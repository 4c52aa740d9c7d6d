"""Fragments through the public API of a tiny engine: what is computed, whose pages are read, and the bits."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from inms_jax import LLM, Agent, RequestOutput, SamplingParams, Segment, Shared
from inms_jax.engine.report import StepReport
from inms_jax.errors import CapacityError, ConfigError, InvalidRequestError, VisibilityError
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope
from tests.fragment_oracle import log_probabilities
from tests.tiny import tiny_llm, tiny_model

SYSTEM = "You are an agent of a web shop."
DOCUMENT = "The release is on Thursday. The database is called orders, and nobody writes to it on Fridays. " * 2
RECORD = "Decisions: billing listens on port 8443; money is an integer of cents; retries stop after three. " * 2
LLM_SCOPE = Scope("acme#1")
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(fragments="unchecked", link_tokens=5, num_pages=256) as engine:
        yield engine


def said(output: RequestOutput) -> tuple[tuple[int, ...], tuple[float, ...]]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return answer.token_ids, tuple(step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True))


def spans(agent: Agent) -> list[Span]:
    return agent._conversation.spans(generate=False)


def check_against_oracle(agent: Agent, output: RequestOutput, tolerance: float = 1e-4) -> None:
    """The answer's log-probabilities are those of the dense computation, teacher-forced on what was said."""
    context = agent._conversation.spans(generate=True)
    model = tiny_model()
    ids, logprobs = said(output)
    expected = log_probabilities(model.config, model.params, context)
    start = len(output.prompt_token_ids)
    flat = [token for span in context for token in span.tokens]
    assert tuple(flat[start : start + len(ids)]) == ids
    np.testing.assert_allclose(logprobs, [expected[start - 1 + i, t] for i, t in enumerate(ids)], atol=tolerance)


@pytest.mark.parametrize("link", [0, 1, 16, 40])
def test_fragments_equal_block_attention_computed_densely(link: int) -> None:
    with tiny_llm(fragments="unchecked", link_tokens=link, num_pages=256) as llm, llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("document", DOCUMENT, mode="fragment")
        group = tenant.group("team")
        group.publish("record", RECORD, mode="fragment")
        agent = group.agent("a", ["system", Segment("I like tea."), "document", "record", Segment("More notes.")])
        output = agent.chat("When is the release?", PARAMS)
        assert output.num_fragment_tokens == sum(len(s.tokens) - link for s in spans(agent) if s.root is not None) > 0
        check_against_oracle(agent, output)
        output = agent.chat("And the port?", PARAMS)
        check_against_oracle(agent, output)
        llm._core.memory.verify()


def test_the_oracle_with_the_whole_fragment_as_link_is_the_dense_model() -> None:
    model = tiny_model()
    one = Span(tuple(range(20)), LLM_SCOPE, published=True)
    root = Span((30, 31), LLM_SCOPE, published=True)
    notes, tail = Span((40, 41, 42), LLM_SCOPE), Span((50,), LLM_SCOPE)
    dense = log_probabilities(model.config, model.params, [root, notes, one, tail])
    all_link = log_probabilities(model.config, model.params, [root, notes, one.after((root,), 20), tail])
    np.testing.assert_allclose(all_link, dense, atol=1e-12)
    placed = log_probabilities(model.config, model.params, [root, notes, one.after((root,), 3), tail])
    assert np.abs(placed[-1] - dense[-1]).max() > 1e-3


def test_two_agents_read_the_same_pages_at_different_shifts(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("document", DOCUMENT, mode="fragment")
        rows = []
        outputs = []
        agents = []
        for name, notes in (("a", "I like tea."), ("b", "I am the other one, and my notes are quite a bit longer.")):
            agent = tenant.agent(name, ["system", Segment(notes), "document"])
            agents.append(agent)  # both live to the end
            held = llm.stats().memory.held
            outputs.append(agent.chat("When?", PARAMS))
            assert agent._handle is not None
            row = llm._core.memory.row(agent._handle)
            assert row.shift is not None
            rows.append([(int(page), int(by)) for page, by in zip(row.page, row.shift, strict=True) if by])
        assert [page for page, _ in rows[0]] == [page for page, _ in rows[1]]
        assert {by for _, by in rows[0]} != {by for _, by in rows[1]}
        # The second adds pages for its own text: notes, 5 link tokens, question and answer, packed.
        own = len(outputs[1].prompt_token_ids) - outputs[1].num_fragment_tokens + len(outputs[1].outputs[0].token_ids)
        system = len(spans(agent)[0].tokens)
        assert llm.stats().memory.held - held == math.ceil((own - 1 - system) / 16)  # the last token has no KV yet
        assert llm.stats().work.encoded_fragments == 1 or outputs[1].num_fragment_tokens > 0


def test_bits_do_not_depend_on_what_is_cached_or_who_runs_beside(llm: LLM) -> None:
    def run(other: bool, evict: bool) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        with llm.tenant("acme") as tenant:
            tenant.publish("system", SYSTEM)
            tenant.publish("document", DOCUMENT, mode="fragment")
            if other:
                beside = tenant.agent("o", ["system", Segment("Something else."), "document"])
                beside.chat("Hm?", PARAMS)
            agent = tenant.agent("a", ["system", Segment("I like tea."), "document", Segment("And biscuits.")])
            found = [said(agent.chat("When?", PARAMS))]
            if evict:
                llm.reset_prefix_cache()
            if other:
                pending = [tenant.agent(f"x{i}", ["document"])._submit("Hm?", PARAMS, None) for i in range(3)]
            found.append(said(agent.chat("And where?", PARAMS)))
            if other:
                for one in pending:
                    one.result()
            return found

    alone = run(False, False)
    assert run(True, False) == alone
    assert run(False, True) == alone
    assert run(True, True) == alone


def test_a_prefix_hit_and_a_fragment_in_one_request(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("document", DOCUMENT, mode="fragment")
        context: list[str | Segment | Shared] = ["system", Segment("I like tea."), "document"]
        with tenant.agent("a", context) as agent:
            agent.chat("When?", PARAMS)
        agent = tenant.agent("b", context)
        output = agent.chat("When?", PARAMS)
        assert output.num_cached_tokens == len(spans(agent)[0].tokens)
        assert output.num_fragment_tokens == len(spans(agent)[2].tokens) - 5
        check_against_oracle(agent, output)


def test_documents_in_another_order_are_the_same_pages(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        for i in range(3):
            tenant.publish(f"d{i}", f"Document {i}. " + DOCUMENT, mode="fragment")
        before = llm.stats().work.encoded_fragments
        orders = (("a", ["d0", "d1", "d2"]), ("b", ["d2", "d0", "d1"]))
        agents = [tenant.agent(name, ["system", Segment("Hm."), *order]) for name, order in orders]
        one, other = (agent.chat("When?", PARAMS) for agent in agents)
        assert llm.stats().work.encoded_fragments - before == 3
        assert one.num_fragment_tokens == other.num_fragment_tokens > 500


def test_modes_are_chosen_by_the_author_and_by_each_context(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("document", DOCUMENT)
        notes = Segment("I like tea.")
        shared, judge, plain = (
            tenant.agent(name, ["system", notes, part])
            for name, part in (
                ("shared", Shared("document", mode="fragment")),
                ("judge", Shared("document", mode="dense")),
                ("plain", "document"),
            )
        )
        assert [agent.explain()[2].reason.value for agent in (shared, judge, plain)] == ["placed", "dense", "prefix"]
        outputs = [agent.chat("When?", PARAMS) for agent in (shared, judge, plain)]
        assert [output.num_fragment_tokens > 0 for output in outputs] == [True, False, False]
        assert said(outputs[1]) == said(outputs[2])
        assert outputs[1].outputs[0].logprobs != outputs[0].outputs[0].logprobs
        tenant.publish("more", RECORD, mode="fragment")
        shared.append("more")
        assert shared.explain()[-2].reason.value == "placed"


def test_a_declared_root_serves_contexts_without_a_public_head(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("document", DOCUMENT, mode="fragment")
        without = tenant.agent("a", [Segment("I like tea."), "document"])
        tenant.root(["system"])
        agent = tenant.agent("b", [Segment("I like tea."), "document"])
        assert [one.explain()[1].reason.value for one in (without, agent)] == ["no_root", "placed"]
        output = agent.chat("When?", PARAMS)
        check_against_oracle(agent, output)
        check_against_oracle(without, without.chat("When?", PARAMS))
        with pytest.raises(VisibilityError, match="nothing"):
            tenant.root(["nothing"])


def test_a_fork_reads_the_fragments_of_its_parent(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("document", DOCUMENT, mode="fragment")
        agent = tenant.agent("a", ["system", Segment("I like tea."), "document"])
        agent.chat("When?", PARAMS)
        twin = agent.fork("b")
        one, other = agent.chat("And?", PARAMS), twin.chat("And?", PARAMS)
        assert said(one) == said(other)
        agent.close()
        check_against_oracle(twin, twin.chat("So?", PARAMS))
        llm._core.memory.verify()


def test_private_text_that_is_published_later_is_computed_anew(llm: LLM) -> None:
    """The KV of the private text depends on what stood before it; nobody else may find it, under whatever name."""
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        team = tenant.group("team")
        author = team.agent("a", ["system", Segment("I like tea."), Segment(RECORD)])
        author.chat("Hm?", PARAMS)
        private = {info.page for info in llm.memory_map() if info.scope == author.scope}
        encoded = llm.stats().work.encoded_fragments
        team.publish("record", RECORD, mode="fragment")
        reader = team.agent("b", ["system", Segment("I like tea."), "record"])
        reader.chat("Hm?", PARAMS)
        assert llm.stats().work.encoded_fragments == encoded + 1
        assert reader._handle is not None
        assert not private & set(llm._core.memory.row(reader._handle).page.tolist())
        assert {info.page for info in llm.memory_map() if info.scope == author.scope} == private


def test_after_everything_is_closed_nothing_is_held(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("document", DOCUMENT, mode="fragment")
        agent = tenant.agent("a", [Segment("I like tea."), "document"])
        agent.chat("When?", PARAMS)
    assert llm.stats().memory.held == 0
    llm._core.memory.verify()


def test_what_is_counted(llm: LLM) -> None:
    before = llm.stats()
    with llm.tenant("acme") as tenant:
        tenant.publish("document", DOCUMENT, mode="fragment")
        output = tenant.agent("a", [Segment("I like tea."), "document"]).chat("When?", PARAMS)
        after = llm.stats()
        assert after.work.encoded_fragments - before.work.encoded_fragments == 1
        assert after.work.fragment_tokens - before.work.fragment_tokens == output.num_fragment_tokens > 0
        assert after.work.segments["no_root"] - before.work.segments["no_root"] == 1
        assert output.num_cached_tokens + output.num_fragment_tokens + sum(output.miss_reasons.values()) == len(
            output.prompt_token_ids
        )


def test_abort_while_a_fragment_is_computed_gives_everything_back() -> None:
    with tiny_llm(fragments="unchecked", num_pages=128) as llm, llm.tenant("acme") as tenant:
        tenant.publish("document", DOCUMENT * 3, mode="fragment")
        agent = tenant.agent("a", [Segment("I like tea."), "document"])
        seen: list[StepReport] = []

        def abort(report: StepReport) -> None:
            if not seen:
                seen.append(report)
                llm._core._abort(lambda request: True)

        llm._core.observers.append(abort)
        with pytest.raises(Exception, match="aborted"):
            agent.chat("When?", PARAMS)
        assert seen
        llm._core.memory.verify()
        assert llm.stats().memory.held == 0
        check_against_oracle(agent, agent.chat("When?", PARAMS))


def test_more_fragments_than_fit_are_refused_and_the_engine_goes_on() -> None:
    with tiny_llm(fragments="unchecked", num_pages=30) as llm, llm.tenant("acme") as tenant:
        tenant.publish("document", DOCUMENT, mode="fragment")
        tenant.publish("record", RECORD, mode="fragment")
        agent = tenant.agent("a", [Segment("I like tea."), "document", "record"])
        with pytest.raises(CapacityError, match="the pool has 29"):
            agent.chat("When?", PARAMS)
        llm._core.memory.verify()
        assert tenant.agent("b").chat("Hello?", PARAMS).finished


def test_fragments_are_refused_where_they_are_off() -> None:
    with tiny_llm(fragments="off") as llm, llm.tenant("acme") as tenant:
        with pytest.raises(ConfigError, match="off"):
            tenant.publish("document", DOCUMENT, mode="fragment")
        tenant.publish("document", DOCUMENT)
        with pytest.raises(ConfigError, match="off"):
            tenant.agent("a", [Segment("I."), Shared("document")])
        with pytest.raises(InvalidRequestError, match="mode"):
            Shared("document", mode="quick")
