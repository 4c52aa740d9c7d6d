"""Requests that end before their end: streams left, aborts, closes, failures of a step or of the engine."""

import asyncio
import gc
import weakref

import jax
import pytest

from inms_jax import LLM, Agent, SamplingParams
from inms_jax.errors import (
    AbortedError,
    ClosedError,
    EngineError,
)
from tests.engine.requests.conftest import GREEDY, PROMPT
from tests.tiny import tiny_llm


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
            jax.tree.leaves(llm._core.runner.kv)[0].delete()
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
    for _ in range(200):  # the engine thread may still be at the release of the agent
        gc.collect()
        thread.join(0.05)
        if not thread.is_alive():
            break
    assert not thread.is_alive(), "dropped by everyone, the engine stops"
    gc.collect()
    assert core() is None
