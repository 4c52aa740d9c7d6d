"""One request from outside: sampling values, stops, streams, threads, asyncio, aborts, bad input."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inms_jax import LLM, Agent, SamplingParams, Segment, Tier
from inms_jax.errors import (
    AbortedError,
    CapacityError,
    ClosedError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    VisibilityError,
)
from tests.tiny import tiny_llm

PROMPT = "The quick brown fox jumps over the lazy dog and then it"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as engine:
        yield engine


@pytest.fixture(autouse=True)
def still_serving(llm: LLM) -> Iterator[None]:
    """Whatever a test did, the engine answers, holds no page and its books balance."""
    yield
    assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 12
    llm.verify()
    assert llm.stats().memory.held == 0
    assert llm.stats().memory.reserved == 0


# ---- what comes back ---------------------------------------------------------------------------------------------


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


# ---- several callers ---------------------------------------------------------------------------------------------


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


# ---- ends before the end -----------------------------------------------------------------------------------------


def test_leaving_a_stream_aborts(llm: LLM) -> None:
    with llm.tenant("t") as tenant:
        agent = tenant.agent("a")
        agent.chat("first", GREEDY)
        history = agent.token_ids
        stream = agent.stream("second", SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
        next(stream)
        stream.close()
        assert agent.token_ids == history, "an aborted turn leaves the conversation as before it"
        assert agent.turn == 1
        expected = agent.chat("third", GREEDY)
        fresh = tenant.agent("fresh")
        fresh.chat("first", GREEDY)
        assert fresh.chat("third", GREEDY).outputs == expected.outputs


def test_abort_by_id_and_cancelled_task(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    stream = llm.stream(PROMPT, endless)
    llm.abort(next(stream).request_id)
    with pytest.raises(AbortedError):
        list(stream)

    async def cancel() -> None:
        task = asyncio.create_task(llm.agenerate(PROMPT, endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def test_close_ends_running_turns(llm: LLM) -> None:
    with llm.tenant("t") as tenant:
        agent = tenant.agent("a")
        stream = agent.stream("go on", SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True))
        next(stream)
        agent.close()
        with pytest.raises(ClosedError, match="'a' was closed during the turn"):
            list(stream)
        with pytest.raises(ClosedError, match="agent 'a' was closed"):
            agent.chat("hello?")


def test_closing_the_engine_fails_what_runs() -> None:
    llm = tiny_llm()
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(ClosedError, match="engine was closed"):
        list(stream)
    with pytest.raises(ClosedError, match="create a new LLM"):
        llm.generate(PROMPT)
    with pytest.raises(ClosedError):
        llm.tenant("t")


def test_a_failing_step_fails_its_requests_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device dies in the middle of a step and takes the pages along: conversations go on all the same."""
    with llm.tenant("t") as tenant:
        agent, reference = tenant.agent("a"), tenant.agent("b")
        agent.chat("first", GREEDY)
        real = llm._core.runner.decode

        def broken(*plan: object) -> object:
            llm._core.runner.kv.k.delete()
            raise RuntimeError("device lost")

        monkeypatch.setattr(llm._core.runner, "decode", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            agent.chat("second", GREEDY)
        monkeypatch.setattr(llm._core.runner, "decode", real)
        reference.chat("first", GREEDY)
        assert agent.chat("third", GREEDY).outputs == reference.chat("third", GREEDY).outputs


def test_dropping_streams_and_calls_aborts_them(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    never_started = llm.stream(PROMPT, endless)
    started = llm.stream(PROMPT, endless)
    next(started)
    del never_started, started
    failed = llm.stats().work.failed_requests

    async def cancel() -> None:
        task = asyncio.create_task(llm.agenerate([PROMPT] * 4, endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    llm._core.call(lambda: None)
    assert not llm._core.scheduler.requests()
    assert llm.stats().work.failed_requests - failed >= 4


def test_an_internal_error_answers_everyone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A bug of ours in the step loop: callers get an error that names it, nobody waits for ever."""
    dying = tiny_llm()
    streams = [dying.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True)) for _ in range(2)]
    next(streams[0])

    def bug(*_: object) -> list[object]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(dying._core.scheduler, "decode_rows", bug)
    for stream in streams:
        with pytest.raises(EngineError, match="a bug"):
            list(stream)
    with pytest.raises(ClosedError):
        dying.generate(PROMPT)
    assert "engine thread failed" in caplog.text


def test_a_listener_that_fails_harms_nobody(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    stream = llm.stream(PROMPT, GREEDY)

    def broken() -> None:
        raise RuntimeError("event loop is gone")

    stream._pending.wake = broken
    assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 12
    assert "listener" in caplog.text


def test_handles_keep_the_engine_alive() -> None:
    def make() -> Agent:
        return tiny_llm().tenant("t").agent("a")

    agent = make()
    gc.collect()
    assert agent.chat("hello", GREEDY).finished
    assert len(list(tiny_llm().stream(PROMPT, GREEDY))) == 12
    core = weakref.ref(agent._services.core)
    thread = agent._services.core._thread
    del agent
    gc.collect()
    thread.join(10)
    assert not thread.is_alive(), "dropped by everyone, the engine stops"
    gc.collect()
    assert core() is None


# ---- bad input ---------------------------------------------------------------------------------------------------


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


# ---- a full pool -------------------------------------------------------------------------------------------------


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
