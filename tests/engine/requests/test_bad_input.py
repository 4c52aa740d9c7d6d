"""What is refused, with which words; and a pool that is full."""

from typing import Any

import pytest

from inms_jax import LLM, SamplingParams, Segment, Tier
from inms_jax.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    InvalidRequestError,
    VisibilityError,
)
from tests.engine.requests.conftest import GREEDY, PROMPT
from tests.tiny import tiny_llm


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [3, 320]}, "320 is out of range: the vocabulary has 320"),
        ({"prompt_token_ids": [-1]}, "-1 is out of range"),
        ({"prompt_token_ids": ["a"]}, "must be integers"),
        ({"tokens": [1]}, "a prompt is a text or"),
        ({"prompt_token_ids": [1] * 1024}, "1024 tokens and max_model_len is 1024"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["fine", prompt], GREEDY)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.chat([{"role": "user", "content": None}]), "non-empty text, got None"),
        (lambda llm: llm.chat([]), "empty"),
        (lambda llm: llm.generate("half a pair: \ud800"), "not valid Unicode at character 13"),
        (lambda llm: llm.tenant(""), "non-empty string"),
    ],
)
def test_input_of_the_wrong_kind(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises((InvalidRequestError, ConfigError), match=message):
        call(llm)


def test_append_refuses_what_no_turn_could_serve(llm: LLM) -> None:
    with llm.tenant("t") as tenant:
        agent = tenant.agent("a")
        agent.chat("first", GREEDY)
        before = agent.token_ids
        with pytest.raises(InvalidRequestError, match="999999 is out of range"):
            agent.append(Segment([999999]))
        with pytest.raises(InvalidRequestError, match=r"\d+ tokens and max_model_len is 1024"):
            agent.append(Segment("x" * 2000))
        assert agent.token_ids == before
        assert agent.chat("second", GREEDY).finished
        with pytest.raises(InvalidRequestError, match="max_model_len is 1024"):
            tenant.agent("b", [Segment("x" * 2000)])
        assert tenant.agent("b").chat("hi", GREEDY).finished, "a refused agent leaves its name free"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be >= 0, got -0.1"),
        ({"temperature": float("nan")}, "finite"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20}, r"min_tokens must be at most max_tokens \(16\), got 20"),
        ({"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ({"stop": [""]}, "non-empty"),
        ({"stop_token_ids": [-4]}, "token ids"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"temperature": 10**400}, "ordinary size"),
        ({"top_p": 1e-46}, "ordinary size"),
        ({"top_k": 2**31}, "top_k must be at most"),
        ({"stop_token_ids": [2**31]}, "token ids"),
        ({"best_of": 3}, r"unknown sampling value\(s\) \['best_of'\]"),
    ],
)
def test_bad_sampling_values(llm: LLM, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(PROMPT, values)


def test_bad_contexts_names_and_publishes(llm: LLM) -> None:
    tenant = llm.tenant("t")
    tenant.publish("system", "Be brief.")
    group, other = tenant.group("g"), tenant.group("other")
    group.publish("decisions", "The port is 1.")
    with pytest.raises(VisibilityError, match=r"'decisions' is not published where agent 't/other/x' can read"):
        other.agent("x", context=["decisions"])
    with pytest.raises(VisibilityError, match="'nothing' is not published"):
        group.agent("x", context=["nothing"])
    with pytest.raises(InvalidRequestError, match="already published by tenant"):
        group.publish("system", "Mine.")
    with pytest.raises(InvalidRequestError, match="already published in group 'g'"):
        tenant.publish("decisions", "Mine.")
    with pytest.raises(InvalidRequestError, match="cannot change"):
        tenant.publish("system", "Another.")
    with pytest.raises(InvalidRequestError, match="publish shared text"):
        Segment("text", Tier.GROUP)
    agent = group.agent("x", context=["system", "decisions"])
    with pytest.raises(ConfigError, match="agent 'x' is live in 'g'"):
        group.agent("x")
    with pytest.raises(InvalidRequestError, match="n=2: use agent"):
        agent.chat("hi", SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="empty"):
        agent.chat([])
    with pytest.raises(InvalidRequestError, match="non-empty text"):
        agent.chat("")
    group.close()
    with pytest.raises(ClosedError, match="group 'g' was closed"):
        group.publish("more", "text")
    with pytest.raises(ClosedError, match="group 'g' was closed"):
        group.agent("late")
    assert agent.chat("still here", GREEDY).finished, "members of a closed group go on"
    tenant.close()
    with pytest.raises(ClosedError):
        agent.chat("gone")
    assert llm.tenant("t").name == "t", "after close the name is free again"
    llm._tenants["t"].close()


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown option\(s\) \['gpu_memory_utilisation'\]"):
        tiny_llm(gpu_memory_utilisation=0.9)


def test_a_pool_too_small_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"holds 3 pages of \d+ bytes \(48 tokens\), too few for max_model_len 64"):
        tiny_llm(num_pages=4, max_model_len=64)


def test_full_pool_queues_then_evicts_then_refuses() -> None:
    with tiny_llm(num_pages=21) as llm:  # 20 pages of 16 tokens
        ids = {"prompt_token_ids": [7] * 100}
        outputs = llm.generate([ids] * 6, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
        assert all(len(o.outputs[0].token_ids) == 60 for o in outputs), "10 pages each: they take turns"
        flood = [{"prompt_token_ids": [i] * 200} for i in range(6)]
        assert all(o.finished for o in llm.generate(flood, SamplingParams(max_tokens=4)))
        assert llm.stats().memory.evictions > 0
        with pytest.raises(CapacityError, match=r"needs 26 pages .* the pool has 20"):
            llm.generate({"prompt_token_ids": [7] * 100}, SamplingParams(n=5, max_tokens=60))
        with llm.tenant("t") as tenant:
            agents = [tenant.agent(f"a{i}") for i in range(6)]
            answers = [a.chat("x" * 60, GREEDY) for a in agents]  # idle KV of all exceeds the pool
            again = [a.chat("more", GREEDY) for a in agents]
            assert all(o.finished for o in (*answers, *again))
        llm.verify()
        assert llm.stats().memory.held == 0
