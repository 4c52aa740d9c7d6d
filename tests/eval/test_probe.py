"""What the probe hands to the prediction, against pages and tokens counted by hand."""

import pytest

from inms_jax.agents import AgentSnapshot
from inms_jax.errors import StateError
from inms_jax.eval.probe import context_of, unique_tokens
from inms_jax.eval.results import StepSample
from inms_jax.eval.three_agents import run_demo
from inms_jax.memory.plan import Span
from inms_jax.memory.prediction import predict_pages
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope
from tests.eval.work import Recorder, small_scenario
from tests.tiny import tiny_model

TENANT, GROUP = Scope("t"), Scope("t", "g")
SYSTEM = Span(tuple(range(10)), TENANT, True, "system")
DECISIONS = Span(tuple(range(50, 55)), GROUP, True, "decisions")


def state(name: str, tokens: int, *spans: Span) -> AgentSnapshot:
    notes = Span(tuple(range(100, 106)), Scope("t", "g", name))
    return AgentSnapshot((*spans, notes), tokens, 0, SequenceHandle(0, 0))


def pages(states: dict[str, AgentSnapshot], *, shared: bool) -> int:
    return predict_pages([context_of(name, s, shared=shared) for name, s in states.items()], 4)


def distinct(states: dict[str, AgentSnapshot]) -> int:
    return unique_tokens(context_of(name, s, shared=True) for name, s in states.items())


def test_whole_contexts() -> None:
    # Blocks of 4: system 4+4+2, decisions 4+1, notes 4+2, and one more generated token fits behind the notes.
    states = {name: state(name, 22, SYSTEM, DECISIONS) for name in ("a", "b")}
    assert pages(states, shared=False) == 2 * (3 + 2 + 2)
    assert pages(states, shared=True) == 3 + 2 + 2 * 2
    assert distinct(states) == 10 + 5 + 2 * (6 + 1)


def test_a_context_cut_in_the_middle() -> None:
    # b has 9 tokens: two complete blocks that a has too, and one of its own with a single token.
    states = {"a": state("a", 15, SYSTEM, DECISIONS), "b": state("b", 9, SYSTEM, DECISIONS)}
    assert pages(states, shared=True) == 3 + 2 + 1
    assert pages(states, shared=False) == 5 + 3
    assert distinct(states) == 15


def test_equal_text_behind_another_text_is_another_text() -> None:
    states = {"a": state("a", 15, SYSTEM, DECISIONS), "b": state("b", 5, DECISIONS)}
    assert distinct(states) == 20
    assert pages(states, shared=True) == 5 + 2


def test_pages_held_that_were_not_predicted_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inms_jax.eval.probe.predict_pages", lambda contexts, block_size: 1000)
    with pytest.raises(StateError, match=r"after step 1 \(prefill\) \d+ pages are held and 1000 were predicted"):
        run_demo(small_scenario(), tiny_model(), Recorder())


def test_samples_hold_the_numbers_of_the_step() -> None:
    recorder = Recorder()
    result = run_demo(small_scenario(), tiny_model(), recorder)
    assert recorder.steps == [*result.independent.samples, *result.shared.samples]
    last: StepSample = recorder.steps[-1]
    assert last.held_pages == last.predicted_pages > 0
    assert sum(agent.pages for agent in last.agents.values()) > last.held_pages  # shared pages count for each
