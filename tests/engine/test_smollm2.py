"""The real model through the public API: golden tokens, and the contract's bits where they matter."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inms_jax import LLM, RequestOutput, SamplingParams, Segment

pytestmark = pytest.mark.model

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())["cases"]
SYSTEM = (
    "You are an engineer of a small web shop. Answer in one or two sentences, name exact values, and follow the "
    "decision record over anything you remember. Never invent ports, queues or amounts."
) * 2
DECISIONS = (
    "Decision record. 1. Billing listens on port 8443 and nowhere else. 2. Orders go through the queue named "
    "orders-v2. 3. Money is an integer of cents. 4. Retries stop after three attempts. 5. Logs carry the order id."
) * 2
NOTES = "Private notes of backend: the staging database is called amber, and the deploy window is Tuesday morning."


@pytest.fixture(scope="module")
def llm(smollm2_spec: str) -> Iterator[LLM]:
    with LLM(smollm2_spec, kv_cache_memory="768MiB", max_num_seqs=8, progress=False) as engine:
        yield engine


def said(output: RequestOutput) -> list[tuple[int, float]]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [(t, step[t].logprob) for t, step in zip(answer.token_ids, answer.logprobs, strict=True)]


def test_greedy_tokens_equal_the_golden_ones(llm: LLM) -> None:
    """All four at once, so decode runs them in one batch."""
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in GOLDEN.values()]
    longest = max(len(case["greedy_token_ids"]) for case in GOLDEN.values())
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=longest))
    for (name, case), output in zip(GOLDEN.items(), outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["greedy_token_ids"], name


@pytest.mark.parametrize("name", ["chat_capital", "chat_story"])
def test_chat_renders_and_tokenises_as_golden(llm: LLM, name: str) -> None:
    case = GOLDEN[name]
    system, user = (
        part.split("<|im_end|>")[0] for part in case["prompt"].split("\n", 1)[1].split("\n<|im_start|>user\n")
    )
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    output = llm.chat(messages, params)
    assert list(output.prompt_token_ids) == case["prompt_token_ids"]
    assert list(output.outputs[0].token_ids) == case["greedy_token_ids"][:8]
    with llm.tenant("golden") as tenant:
        agent = tenant.agent("a", [Segment(system)])
        output = agent.chat(user, params)
        assert list(output.prompt_token_ids) == case["prompt_token_ids"], "segments tokenised one by one"
        assert list(output.outputs[0].token_ids) == case["greedy_token_ids"][:8]


def test_bits_alone_beside_others_cold_warm_and_after_eviction(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.7, seed=4, logprobs=0)
    turns = ("Which port does billing use?", "And the queue?")
    llm.reset_prefix_cache()
    with llm.tenant("acme") as tenant:
        tenant.publish("system", SYSTEM)
        group = tenant.group("checkout")
        group.publish("decisions", DECISIONS)

        def converse(evict: bool = False) -> list[list[tuple[int, float]]]:
            with group.agent("backend", ["system", "decisions", Segment(NOTES)]) as agent:
                answers = []
                for turn in turns:
                    if evict:
                        llm.reset_prefix_cache()
                    output = agent.chat(turn, params)
                    answers.append(said(output))
                return answers

        cold = converse()
        assert converse() == cold, "warm"
        assert converse(evict=True) == cold, "evicted between turns"
        shared = ["system", "decisions"]
        noise = SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True)
        for count in (1, 3, 7):
            others = [group.agent(f"other-{i}", [*shared, Segment(f"Note {i}. " * (i + 1))]) for i in range(count)]
            streams = [other.stream(f"Tell me about {i}", noise) for i, other in enumerate(others)]
            for stream in streams:
                next(stream)  # everyone is past the prompt
            sizes: list[int] = []
            stop = llm.observe(lambda r, to=sizes: to.append(r.tokens) if r.kind == "decode" else None)  # type: ignore[misc]
            assert converse() == cold, f"beside {count} others"
            stop()
            assert sizes.count(count + 1) >= 18, "the agent did not decode together with all others"
            for stream, other in zip(streams, others, strict=True):
                stream.close()
                other.close()
        llm.verify()


def test_a_single_long_prefill_equals_chunks(smollm2_spec: str, llm: LLM) -> None:
    """Chunks of 64 and of 256 give the same bits: a row does not depend on the rows beside it."""
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    prompt = SYSTEM + DECISIONS + NOTES
    (expected,) = llm.generate(prompt, params)
    options: dict[str, Any] = {"kv_cache_memory": "128MiB", "max_model_len": 1024, "progress": False}
    with LLM(smollm2_spec, max_num_batched_tokens=64, **options) as chunked:
        assert said(chunked.generate(prompt, params)[0]) == said(expected)


def test_other_block_sizes_agree_to_rounding(smollm2_spec: str, llm: LLM) -> None:
    case = GOLDEN["raw_gravity"]
    prompt = {"prompt_token_ids": case["prompt_token_ids"]}
    options: dict[str, Any] = {"kv_cache_memory": "128MiB", "max_model_len": 1024, "progress": False}
    with LLM(smollm2_spec, block_size=16, **options) as small:
        (output,) = small.generate(prompt, SamplingParams(max_tokens=48, temperature=0.0))
    assert list(output.outputs[0].token_ids) == case["greedy_token_ids"][:48]
