"""With a hash function that returns a constant, agents say what they say when nothing is shared, bit by bit."""

import pytest

from inms_jax import LLM, RequestOutput, SamplingParams, Segment
from inms_jax.memory import manager
from tests.tiny import tiny_llm

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=0)


def work(llm: LLM) -> list[RequestOutput]:
    answers: list[RequestOutput] = []
    for tenant in ("shop", "bank"):
        home = llm.tenant(tenant)
        home.publish("system", f"You work for the {tenant}, and you are always brief.")
        team = home.group("team")
        team.publish("plan", f"The {tenant} opens at nine and closes at five.")
        for name in ("ann", "bob"):
            agent = team.agent(name, ["system", "plan", Segment(f"The secret of {name} at the {tenant}.")])
            answers += [agent.chat("Who are you?", PARAMS), agent.chat("And what do you know?", PARAMS)]
            twin = agent.fork(f"{name}-2")
            answers += [twin.chat("One more thing.", PARAMS), agent.chat("Another thing.", PARAMS)]
            twin.close()
    answers += llm.generate(["Once upon a time there was a shop", "Once upon a time there was a bank"] * 2, PARAMS)
    llm.verify()
    return answers


@pytest.mark.parametrize("collide", [lambda message: b"same", lambda message: message[-64:]])
def test_answers_are_those_without_sharing(collide: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_llm(enable_prefix_caching=False) as llm:
        alone = work(llm)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "keyed_blake2b", lambda key: collide)
        with tiny_llm() as llm:
            colliding = work(llm)
            index_was_used = llm.stats().memory.hit_tokens
    assert index_was_used > 0
    for one, other in zip(alone, colliding, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == b.logprobs
