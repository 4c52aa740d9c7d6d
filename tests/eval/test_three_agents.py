"""The whole demo on a tiny random model: both runs say the same, and sharing holds fewer pages."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from inms_jax.errors import ConfigError, StateError
from inms_jax.eval import demo
from inms_jax.eval.live import View
from inms_jax.eval.plots import require_matplotlib
from inms_jax.eval.report import print_report
from inms_jax.eval.results import DemoResult, ModeResult, TurnResult
from inms_jax.eval.three_agents import run_demo
from tests.eval.work import ROOT, Recorder, small_scenario
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def result(recorder: Recorder) -> DemoResult:
    return run_demo(small_scenario(), tiny_model(), recorder)


def test_both_runs_say_the_same(result: DemoResult) -> None:
    assert result.texts_identical
    for mode in result.modes:
        assert [len(agent.turns) for agent in mode.agents] == [2, 2, 1]
        assert all(len(t.logprobs) == len(t.token_ids) > 0 for agent in mode.agents for t in agent.turns)


def test_sharing_holds_and_computes_less(result: DemoResult) -> None:
    independent, shared = result.modes
    assert independent.tokens_prompt == shared.tokens_prompt
    assert shared.peak_kv_bytes < independent.peak_kv_bytes
    assert shared.tokens_computed < independent.tokens_computed
    assert shared.ideal_kv_bytes <= shared.peak_kv_bytes
    assert [agent.num_cached_tokens for agent in independent.agents] == [0, 0, 0]
    assert all(agent.num_cached_tokens > 0 for agent in shared.agents[1:])


def test_three_agents_decode_in_the_same_steps(result: DemoResult) -> None:
    for mode in result.modes:
        assert max(sample.tokens for sample in mode.samples if sample.kind == "decode") == 3


def test_the_page_map_is_that_of_the_peak(result: DemoResult) -> None:
    for mode in result.modes:
        held = [cell for cell in mode.page_map if cell.state != "cached"]
        assert len(held) == mode.peak.held_pages
        assert all(cell.holders for cell in held)
    assert not any(len(cell.holders) > 1 for cell in result.independent.page_map)
    tiers = {cell.tier: cell.holders for cell in result.shared.page_map if len(cell.holders) > 1}
    assert set(tiers) == {"global", "group"}
    assert set(tiers["group"]) == {"backend", "frontend"}


def test_the_answer_of_the_author_is_read_by_the_others(result: DemoResult) -> None:
    backend = result.shared.agents[1]
    scenario = small_scenario()
    texts = [*(text.text for text in scenario.published), scenario.decisions.text, scenario.agents[1].notes]
    without_answer = sum(len(text.encode()) for text in texts)
    assert backend.turns[0].prompt_tokens > without_answer + len(result.shared.agents[0].turns[0].token_ids)


def test_the_watcher_hears_of_everything(result: DemoResult, recorder: Recorder) -> None:
    assert recorder.modes == ["independent", "shared"]
    assert len(recorder.turns) == 10
    assert len(recorder.steps) == sum(len(mode.samples) for mode in result.modes)


def test_the_report_fits_a_narrow_terminal(result: DemoResult) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        print_report(result, console)
    text = capture.get()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert f"({result.independent.peak.held_pages} -> {result.shared.peak.held_pages} pages)" in text
    assert "identical in both runs" in text
    assert "…" not in text


def test_the_live_table_shows_every_agent(result: DemoResult) -> None:
    console = Console(width=100)
    with View(console, {"architect": 2, "backend": 2}) as view:
        with console.capture() as capture:
            view.mode("shared", 40, 1 << 20)
            view.step(result.shared.samples[-1])
            view.asked("backend", 2)
            view.said("backend", "Billing\nlistens", 3, 0.25)
            console.print(view.render())
            view.answered("backend", result.shared.agents[1].turns[1])
        text = capture.get()
    held = result.shared.samples[-1].held_pages
    assert f"held {held} of 40 pages = {held} MiB, predicted {held}" in text
    [row] = [line for line in text.splitlines() if line.strip().startswith("backend")]
    assert row.split()[:3] == ["backend", "2/2", "writing"]
    assert "Billing listens" in row
    assert "shared: backend turn 2/2: TTFT" in text  # not a terminal: a line for each turn


def test_a_failed_turn_ends_the_run() -> None:
    class Impatient(Recorder):
        def answered(self, agent: str, turn: TurnResult) -> None:
            if agent == "frontend":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(small_scenario(), tiny_model(), Impatient())


def test_runs_that_differ_are_an_error_after_the_files_are_written(
    result: DemoResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    different = DemoResult(result.model, result.independent, _with_other_text(result))
    monkeypatch.setattr(demo, "run_demo", lambda *_: different)
    monkeypatch.setattr(demo, "load_model", lambda _: tiny_model())
    with pytest.raises(StateError, match="the two runs differ"):
        demo.show_demo(ROOT / "tests/data/short_demo.toml", tmp_path / "out", Console(quiet=True))
    assert json.loads((tmp_path / "out/demo.json").read_text())["texts_identical"] is False


def _with_other_text(result: DemoResult) -> ModeResult:
    first = result.shared.agents[0]
    turn = replace(first.turns[0], logprobs=(0.5, *first.turns[0].logprobs[1:]))
    return replace(result.shared, agents=(replace(first, turns=(turn, *first.turns[1:])), *result.shared.agents[1:]))


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install inms-jax\[plot\]"):
        require_matplotlib()
