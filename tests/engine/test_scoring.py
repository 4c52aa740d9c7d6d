"""Scores of given answers: equal to a dense computation, to what generation says, and without a trace afterwards."""

from collections.abc import Iterator

import numpy as np
import pytest

from inms_jax import LLM, SamplingParams, Segment
from inms_jax.errors import CapacityError, ClosedError, InvalidRequestError
from tests.fragment_oracle import log_probabilities
from tests.tiny import tiny_llm, tiny_model

NOTES = Segment("I like tea, and the meeting is on Thursday. " * 4)
RECORD = "Decisions: billing listens on port 8443; money is an integer of cents; retries stop after three. " * 3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(fragments="unchecked", link_tokens=5, num_pages=256) as engine:
        yield engine


@pytest.mark.parametrize("mode", ["prefix", "fragment"])
def test_scores_equal_the_dense_computation(llm: LLM, mode: str) -> None:
    answer = tuple(range(3, 80))
    with llm.tenant("acme") as tenant:
        tenant.publish("record", RECORD, mode=mode)
        agent = tenant.agent("a", [NOTES, "record"])
        agent.chat("Hello.", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        scores = agent.score("What is the port?", answer)
        assert (scores.num_fragment_tokens > 0) == (mode == "fragment")
        model = tiny_model()
        conversation = agent._conversation
        items = [*conversation.items, *agent._items("What is the port?")]
        context, _ = conversation.placed(items, generate=True)
        prompt = sum(len(span.tokens) for span in context)
        spans = [*context, type(context[0])(answer, agent.scope)]
        expected = log_probabilities(model.config, model.params, spans)[prompt - 1 : -1]
        assert scores.num_prompt_tokens == prompt
        assert scores.token_ids == answer
        assert scores.logits.shape == expected.shape
        logits = scores.logits - np.logaddexp.reduce(scores.logits, axis=1, keepdims=True)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_allclose(scores.logprobs, expected[np.arange(len(answer)), list(answer)], atol=1e-4)
        assert scores.logprob == pytest.approx(sum(scores.logprobs))


def test_what_is_generated_is_greedy_and_as_likely_as_generation_said(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        before = agent.token_ids
        with agent.fork("twin") as twin:
            (said,) = twin.chat("What is the port?", params).outputs
        first = agent.score("What is the port?", said.token_ids)
        again = agent.score("What is the port?", said.token_ids)
        other = agent.score("What is the port?", [*said.token_ids[:-1], (said.token_ids[-1] + 1) % 50])
        assert first.is_greedy
        assert not other.is_greedy
        assert first.logprob == pytest.approx(said.cumulative_logprob, abs=1e-3)
        assert first.logprobs == again.logprobs
        assert again.num_cached_tokens > 0
        assert agent.token_ids == before


def test_nothing_of_a_score_stays(llm: LLM) -> None:
    memory = llm._core.memory
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        agent.score("Which port?", "The port is 7070.")
        held, cached = memory.stats().held, memory.stats().cached
        for _ in range(3):
            agent.score("Which port?", "The port is 7070.")
        assert (memory.stats().held, memory.stats().cached) == (held, cached)
        memory.verify()
        assert agent.turn == 0
    memory.verify()
    assert memory.stats().held == 0


def test_what_cannot_be_scored_is_refused_and_changes_nothing(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        with pytest.raises(InvalidRequestError, match="the answer to score is empty"):
            agent.score("Which port?", "")
        with pytest.raises(InvalidRequestError, match="out of range"):
            agent.score("Which port?", [10**6])
        with pytest.raises((CapacityError, InvalidRequestError)):
            agent.score("Which port?", [1] * 100_000)
        held = llm._core.memory.stats().held
        assert agent.score("Which port?", [1, 2]).token_ids == (1, 2)
        assert llm._core.memory.stats().held == held
        llm._core.memory.verify()
        agent.close()
        with pytest.raises(ClosedError):
            agent.score("Which port?", [1])


def test_a_score_without_a_message_continues_the_conversation(llm: LLM) -> None:
    with llm.tenant("acme") as tenant:
        agent = tenant.agent("a", [NOTES])
        assert len(agent.score(None, [5, 6]).logprobs) == 2
