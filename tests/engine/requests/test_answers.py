"""One request from outside: what comes back, for which sampling values; several callers at once."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from inms_jax import LLM, SamplingParams
from tests.engine.requests.conftest import GREEDY, PROMPT
from tests.tiny import tiny_llm


def test_fields_of_an_output(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.prompt == PROMPT
    assert output.prompt_token_ids == tuple(llm.tokenizer.encode(PROMPT))
    assert output.finished
    assert output.ttft_s is not None
    assert output.ttft_s > 0
    assert output.outputs[0].finish_reason == "length"
    assert output.text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_order_of_a_list_and_ids_as_prompt(llm: LLM) -> None:
    prompts = ["one prompt", "another prompt", "a third"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    (same,) = llm.generate({"prompt_token_ids": llm.tokenizer.encode(prompts[1])}, GREEDY)
    assert same.outputs == outputs[1].outputs


def test_n_samples_differ_share_the_prompt_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=10, temperature=1.0, seed=5)
    (first,) = llm.generate(PROMPT, params)
    (second,) = llm.generate(PROMPT, params)
    assert [a.index for a in first.outputs] == [0, 1, 2, 3]
    assert len({a.token_ids for a in first.outputs}) == 4
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in second.outputs]
    (single,) = llm.generate(PROMPT, SamplingParams(max_tokens=10, temperature=1.0, seed=5))
    assert single.outputs[0].token_ids == first.outputs[0].token_ids, "sample 0 does not depend on n"


def test_same_prompt_twice_in_a_call_gives_two_samples_and_calls_repeat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0)
    first, second = llm.generate([PROMPT, PROMPT], params)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    again, _ = llm.generate([PROMPT, PROMPT], params)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_logprobs_are_those_of_the_distribution(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0, logprobs=20))
    answer = output.outputs[0]
    assert answer.logprobs is not None
    for token, step in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(step) == 20
        values = [entry.logprob for entry in step.values()]
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) < 1
        assert step[token].rank == 1
    assert answer.cumulative_logprob == pytest.approx(
        sum(step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True))
    )


@pytest.mark.parametrize(
    "cold",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}],
    ids=lambda value: next(iter(value)),
)
def test_limits_that_leave_one_token_are_greedy(llm: LLM, cold: dict[str, Any]) -> None:
    (greedy,) = llm.generate(PROMPT, GREEDY)
    (limited,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, **{"temperature": 2.0, **cold}))
    assert limited.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_repetition_penalty_forbids_repeats_when_large(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.0))
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1e6))
    ids = output.outputs[0].token_ids
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(output.prompt_token_ids)
    assert plain.outputs[0].token_ids != ids


def test_stop_token_and_min_tokens(llm: LLM) -> None:
    (free,) = llm.generate(PROMPT, GREEDY)
    stop = free.outputs[0].token_ids[3]
    first = free.outputs[0].token_ids.index(stop)
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=[stop]))
    assert output.outputs[0].token_ids == free.outputs[0].token_ids[: first + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    params = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=[stop], min_tokens=8)
    (later,) = llm.generate(PROMPT, params)
    assert stop not in later.outputs[0].token_ids[:8]


def with_words(llm: LLM) -> tuple[dict[str, Any], str, int]:
    """Settings whose answer has three plain characters in a row, the answer, and where they stand."""
    for seed in range(100):
        values: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": seed}
        text = llm.generate(PROMPT, SamplingParams(**values))[0].text
        for at in range(5, len(text) - 8):
            word = text[at : at + 3]
            if word.isascii() and word.isprintable() and text.find(word) == at:
                return values, text, at
    raise AssertionError("no seed gives three plain characters in a row")


def test_stop_string_is_cut_and_never_streamed(llm: LLM) -> None:
    values, text, at = with_words(llm)
    stop = text[at : at + 3]
    (output,) = llm.generate(PROMPT, SamplingParams(**values, stop=[stop, "\0never"]))
    assert output.text == text[:at]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    (kept,) = llm.generate(PROMPT, SamplingParams(**values, stop=stop, include_stop_str_in_output=True))
    assert kept.text == text[: at + 3]
    streamed = "".join(delta.text for delta in llm.stream(PROMPT, SamplingParams(**values, stop=stop)))
    assert streamed == text[:at]


def test_stream_deltas_add_up(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=1)
    (whole,) = llm.generate(PROMPT, params)
    deltas = list(llm.stream(PROMPT, params))
    assert len(deltas) == 30
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(t for d in deltas for t in d.outputs[0].token_ids) == whole.outputs[0].token_ids
    assert tuple(step for d in deltas for step in d.outputs[0].logprobs or ()) == whole.outputs[0].logprobs
    assert [d.finished for d in deltas] == [False] * 29 + [True]


def test_text_never_has_half_a_character(llm: LLM) -> None:
    """Random bytes: deltas add up to the text, and a character is never emitted in part."""
    for seed in range(6):
        params = SamplingParams(max_tokens=40, temperature=1.5, seed=seed)
        deltas = [d.text for d in llm.stream(PROMPT, params)]
        assert all(delta == delta.encode().decode() for delta in deltas)
        assert "".join(deltas) == llm.generate(PROMPT, params)[0].text


def test_max_tokens_none_fills_the_context() -> None:
    with tiny_llm(max_model_len=80) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 80
        assert output.outputs[0].finish_reason == "length"


def test_threads_decode_in_the_same_steps(llm: LLM) -> None:
    sizes: list[int] = []
    llm._core.observers.append(lambda report: sizes.append(report.tokens) if report.kind == "decode" else None)
    with llm.tenant("t") as tenant:
        agents = [tenant.agent(f"a{i}") for i in range(3)]
        start = threading.Barrier(3)

        def talk(number: int) -> None:
            start.wait()
            agents[number].chat(f"hello from {number}", SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))

        threads = [threading.Thread(target=talk, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    llm._core.observers.clear()
    assert sizes.count(3) > 20


def test_calls_on_one_agent_run_in_call_order(llm: LLM) -> None:
    with llm.tenant("t") as tenant:
        agent = tenant.agent("a")
        streams = [agent.stream(f"message {i}", SamplingParams(max_tokens=4, temperature=0.0)) for i in range(4)]
        for stream in reversed(streams):  # read in another order than asked
            list(stream)
        said = [item.text for item in agent._conversation.items if hasattr(item, "text")]
        assert said == [f"message {i}" for i in range(4)]


def test_identical_prompts_at_once_are_computed_once(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": [10 + i % 90 for i in range(16 * 9 + 5)]}
    before = llm.stats().work.prefill_tokens
    outputs = llm.generate([prompt] * 8, GREEDY)
    computed = llm.stats().work.prefill_tokens - before
    assert computed == 16 * 9 + 8 * 5, "shared blocks once, each own tail"
    assert len({o.outputs[0].token_ids for o in outputs}) == 1
    assert sum(o.num_cached_tokens > 0 for o in outputs) == 7


def test_asyncio_forms(llm: LLM) -> None:
    async def run() -> None:
        (expected,) = llm.generate(PROMPT, GREEDY)
        one, two = await asyncio.gather(llm.agenerate(PROMPT, GREEDY), llm.agenerate("other", GREEDY))
        assert one[0].outputs == expected.outputs
        assert two[0].finished
        deltas = [delta async for delta in llm.astream(PROMPT, GREEDY)]
        assert tuple(t for d in deltas for t in d.outputs[0].token_ids) == expected.outputs[0].token_ids
        answer = await llm.achat([{"role": "user", "content": "hi"}], GREEDY)
        assert answer.outputs == llm.chat([{"role": "user", "content": "hi"}], GREEDY).outputs
        with llm.tenant("t") as tenant:
            agents = [tenant.agent(f"a{i}") for i in range(3)]
            answers = await asyncio.gather(*(a.achat("hello", GREEDY) for a in agents))
            assert len({a.outputs[0].token_ids for a in answers}) == 1
            assert [d.finished async for d in agents[0].astream("more", GREEDY)][-1]

    asyncio.run(run())
