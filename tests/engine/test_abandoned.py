"""Agents whose users drop them without close(): released like closed ones, wherever and whenever they are collected."""

import contextlib
import gc
import threading
from typing import Any

import pytest

from inms_jax import LLM, SamplingParams, Segment
from inms_jax.memory.tier import Scope
from tests.tiny import tiny_llm

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


def on_the_engine(llm: LLM) -> None:
    """Wait until the engine thread has run everything that was left for it."""
    gc.collect()
    llm._core.call(lambda: None)


def test_pages_scopes_and_name_of_a_dropped_agent_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with tiny_llm() as llm:
        tenant = llm.tenant("acme")
        group = tenant.group("team")
        group.publish("plan", "Ship on Monday, not before the review is done. " * 2)
        stays = group.agent("ann", ["plan"])
        stays.chat("hello", PARAMS)
        before, open_before = llm.memory_map(), scopes(llm)
        agent = group.agent("bob", ["plan", Segment("notes of bob")])
        agent.chat("hi", PARAMS)
        twin = agent.fork("twin")
        twin.chat("and you?", PARAMS)
        assert set(group.agents) == {"ann", "bob", "twin"}
        del agent
        on_the_engine(llm)
        assert set(group.agents) == {"ann", "twin"}
        twin.chat("still there?", PARAMS)  # on pages that it has from the dropped agent
        del twin
        on_the_engine(llm)
        assert llm.memory_map() == before
        assert scopes(llm) == open_before
        assert [r.message for r in caplog.records if "without close()" in r.message] == [
            f"agent 'acme/team/{name}' was dropped without close(): its pages are released" for name in ("bob", "twin")
        ]
        again = group.agent("bob")
        assert again.scope.agent == "bob#2"
        llm.verify()


def test_a_closed_group_ends_with_its_last_member_though_that_is_only_dropped() -> None:
    with tiny_llm() as llm:
        tenant = llm.tenant("acme")
        group = tenant.group("team")
        group.publish("plan", "Ship on Monday, not before the review is done. " * 2)
        agent = group.agent("ann", ["plan"])
        agent.chat("hello", PARAMS)
        group.close()
        assert set(tenant.groups) == {"team"}
        del agent
        on_the_engine(llm)
        assert tenant.groups == {}
        assert llm.memory_map() == []
        tenant.group("team")  # the name is free again
        group.close()  # of the old one: changes nothing
        assert set(tenant.groups) == {"team"}


def test_a_turn_that_runs_or_waits_keeps_its_agent() -> None:
    with tiny_llm() as llm:
        tenant = llm.tenant("acme")
        agent = tenant.agent("ann")
        streams = [agent.stream(text, PARAMS) for text in ("one", "two")]
        del agent
        gc.collect()
        assert [len(list(stream)) for stream in streams] == [5, 5]
        del streams
        on_the_engine(llm)
        assert tenant.agents == {}
        assert llm.memory_map() == []


@pytest.mark.parametrize("where", ["this thread", "another thread"])
def test_an_agent_may_be_collected_under_any_lock(where: str) -> None:
    """The collector runs wherever it likes: a finalizer that waited for a lock could wait for ever."""
    with tiny_llm() as llm:
        held: list[Any] = [llm.tenant("acme").agent("ann")]
        held[0].chat("hello", PARAMS)
        services = llm._services
        locks: list[Any] = [llm._core._posting, services.lock, services._name_lock]
        locks += [services.memory._all(), services.memory._registry._lock, services.accounts._lock]
        collected = threading.Event()

        def collect() -> None:
            held.clear()
            gc.collect()
            collected.set()

        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            if where == "this thread":
                collect()
            else:
                threading.Thread(target=collect, daemon=True).start()
            assert collected.wait(20)
            assert llm._tenants["acme"].agents == {}
        on_the_engine(llm)
        assert llm.memory_map() == []


def test_an_engine_whose_last_agent_is_dropped_stops() -> None:
    llm = tiny_llm()
    thread = llm._core._thread
    agent = llm.tenant("acme").agent("ann")
    del llm
    gc.collect()
    agent.chat("hello", PARAMS)  # an agent keeps its engine
    del agent
    for _ in range(400):  # the engine thread may still be at the release, and what then remains is a cycle
        gc.collect()
        thread.join(0.05)
        if not thread.is_alive():
            break
    assert not thread.is_alive()


def test_an_agent_of_a_closed_engine_may_be_dropped() -> None:
    llm = tiny_llm()
    agent = llm.tenant("acme").agent("ann")
    llm.close()
    del agent
    gc.collect()
    assert llm._tenants["acme"].agents == {}


def scopes(llm: LLM) -> set[Scope]:
    parts = llm._services.memory._parts.values()
    return {scope for part in parts for scope in part.store.open_scopes}
