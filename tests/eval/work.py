"""A scenario for the tiny random model, and a watcher that remembers."""

from dataclasses import replace
from pathlib import Path

from inms_jax.eval.results import StepSample, TurnResult
from inms_jax.eval.scenario import Scenario, load_scenario

ROOT = Path(__file__).resolve().parents[2]


def small_scenario() -> Scenario:
    """The short demo, for a tokenizer of bytes: its texts are five times as many tokens."""
    scenario = load_scenario(ROOT / "tests/data/short_demo.toml")
    engine = {**scenario.engine, "kv_cache_memory": "2MiB", "max_model_len": 1024}
    sampling = replace(scenario.sampling, max_tokens=24, ignore_eos=True)  # long enough to overlap
    return replace(scenario, model="tiny", engine=engine, sampling=sampling)


class Recorder:
    """Keeps what a run tells its watcher."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.modes: list[str] = []
        self.steps: list[StepSample] = []
        self.turns: list[tuple[str, TurnResult]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def mode(self, mode: str, total_pages: int, page_bytes: int) -> None:
        self.modes.append(mode)

    def asked(self, agent: str, turn: int) -> None:
        pass

    def said(self, agent: str, text: str, tokens: int, ttft_s: float) -> None:
        pass

    def answered(self, agent: str, turn: TurnResult) -> None:
        self.turns.append((agent, turn))

    def step(self, sample: StepSample) -> None:
        self.steps.append(sample)
