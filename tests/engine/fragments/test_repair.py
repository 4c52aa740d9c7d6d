"""Repair of blocks: which are chosen, from what, and that they equal the dense computation."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inms_jax import LLM, Agent, SamplingParams, Segment, Shared
from inms_jax.engine.repair_choice import RepairChoice
from inms_jax.errors import InvalidRequestError
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope
from tests.fragment_oracle import log_probabilities, values
from tests.tiny import tiny_llm, tiny_model

SYSTEM = "You are an agent of a web shop."
DOCUMENT = "The release is on Thursday. The database is called orders, and nobody writes to it on Fridays. " * 2
NOTES = Segment("I like tea.")
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
T = Scope("acme#1")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(fragments="unchecked", link_tokens=5, num_pages=256) as engine:
        yield engine


def spans(agent: Agent) -> list[Span]:
    return agent._conversation.spans(generate=True)


@pytest.mark.parametrize("blocks", [1, 3, 20])
def test_repaired_fragments_equal_block_attention_computed_densely(llm: LLM, blocks: int) -> None:
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        tenant.publish("document", DOCUMENT, mode="fragment")
        context: list[str | Segment | Shared] = ["system", NOTES, Shared("document", repair_blocks=blocks), NOTES]
        agent = tenant.agent("a", context)
        output = agent.chat("When is the release?", PARAMS)
        (answer,) = output.outputs
        found = [span for span in spans(agent) if span.root is not None]
        decision = agent.explain()[2]
        if blocks == 20:  # more than there are: computed in place, which costs no page of its own
            assert not found
            assert decision.reason.value == "too_short"
        else:
            assert decision.repaired_tokens == sum(end - start for start, end in found[0].repaired)
            assert 16 * blocks - 5 <= decision.repaired_tokens <= 16 * blocks
            assert output.num_fragment_tokens == len(found[0].tokens) - 5 - decision.repaired_tokens
        model = tiny_model()
        context_spans = spans(agent)
        flat = [token for span in context_spans for token in span.tokens]
        start = len(output.prompt_token_ids)
        assert tuple(flat[start : start + len(answer.token_ids)]) == answer.token_ids
        expected = log_probabilities(model.config, model.params, context_spans)
        assert answer.logprobs is not None
        said = [step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True)]
        wanted = [expected[start - 1 + i, t] for i, t in enumerate(answer.token_ids)]
        np.testing.assert_allclose(said, wanted, atol=1e-4)
        llm.verify()


def test_the_values_of_layer_1_are_those_of_the_model(llm: LLM) -> None:
    model = tiny_model()
    tokens = np.arange(7, 7 + 150, dtype=np.int32)
    expected = values(model.config, model.params, tokens.tolist(), 1)
    np.testing.assert_allclose(llm._core.runner.second_values(tokens), expected, atol=1e-5)


def test_the_blocks_that_moved_most_are_chosen_once() -> None:
    asked: list[int] = []

    def moved(tokens: np.ndarray) -> np.ndarray:
        """Values that differ behind a 9 where a token is 5, twice as much where it is 6."""
        asked.append(len(tokens))
        found = np.where(tokens == 5, 1.0, np.where(tokens == 6, 2.0, 0.0)) * (tokens[0] == 9)
        return np.asarray(found[:, None, None])

    choose = RepairChoice(moved, block_size=4)
    fragment = Span((1, 1, 1, 1, 1, 5, 1, 1, 6, 1, 1, 1, 5, 5), T, published=True)
    before, root = [Span((9, 1, 1), T)], [Span((2,), T, published=True)]
    assert choose(before, fragment, root, 1) == ((12, 14),)  # a mean of 1 in a short block
    assert choose(before, fragment, root, 2) == ((8, 12), (12, 14))
    assert choose(before, fragment, root, 3) == ((4, 8), (8, 12), (12, 14))
    assert choose(before, fragment, root, 9) == ((0, 4), (4, 8), (8, 12), (12, 14))
    assert asked == [17, 15]
    assert choose([Span((8, 1, 1), T)], fragment, root, 1) == ((0, 4),)  # nothing moved: the first
    assert asked == [17, 15, 17, 15]


def test_the_choice_stays_through_a_conversation_and_does_not_depend_on_others(llm: LLM) -> None:
    def chosen(beside: bool) -> list[tuple[tuple[int, int], ...]]:
        with llm.tenant("acme") as tenant:
            tenant.publish("system", SYSTEM)
            tenant.publish("document", DOCUMENT, mode="fragment")
            if beside:
                other = tenant.agent("b", [Segment("Other notes, longer ones."), Shared("document", repair_blocks=2)])
                other.chat("Hm?", PARAMS)
            agent = tenant.agent("a", ["system", NOTES, Shared("document", repair_blocks=2), NOTES])
            found = []
            for _ in range(3):
                agent.chat("When?", PARAMS)
                (span,) = [span for span in spans(agent) if span.root is not None]
                found.append(span.repaired)
            return found

    alone = chosen(False)
    assert len(set(alone)) == 1
    assert chosen(True) == alone


@pytest.mark.parametrize("options", [{"link_tokens": -1}, {"repair_blocks": -1}, {"repair_blocks": True}])
def test_bad_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="must be an integer >= 0"):
        Shared("document", **options)
