"""Experiments: strict settings, runs that go on after a stop, and each experiment in small from end to end."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from inms_jax.errors import ConfigError
from inms_jax.eval.experiment import EXPERIMENTS, Config, Measured, Results, find_config, load_config
from inms_jax.eval.experiment_run import run_experiment
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def facts(out: Path) -> list[Any]:
    """What must not differ from run to run."""
    cells = json.loads((out / "results.json").read_text())["cells"]
    return [(one["cell"], one["facts"]) for one in cells]


def run(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Results, str]:
    config = load_config(find_config(name), tiny=True)
    if hasattr(config.module, "load"):
        monkeypatch.setattr(config.module, "load", lambda model: tiny_model())
    screen = io.StringIO()
    return run_experiment(config, out, Console(file=screen, width=120)), screen.getvalue()


def check_eight_agents(rows: list[dict[str, Any]]) -> None:
    """Pages in the pool equal the prediction."""
    ran = [row for row in rows if row["run"]]
    assert len(ran) == 2
    assert all(row["measured_pages"] == row["predicted_pages"] > 10 for row in ran)
    assert ran[1]["predicted_pages"] < ran[0]["predicted_pages"]


def check_pools(rows: list[dict[str, Any]]) -> None:
    """Elastic pools serve more turns of the same demand."""
    elastic, reserved = rows
    assert elastic["served"] > reserved["served"]
    assert elastic["refused"] == reserved["refused"] == 0


def check_cow_burst(rows: list[dict[str, Any]]) -> None:
    """A budget changes the steps, and not what is said."""
    small, large = rows
    assert small["said"] == large["said"]
    assert (small["peak_copies"], small["copies"]) == (1, 2)
    assert small["steps"] > large["steps"]


def check_leak_soak(rows: list[dict[str, Any]]) -> None:
    """Without leases the pool fills and everybody is refused."""
    without, lease = rows
    assert without["refused"] > 5 * lease["refused"]
    assert without["expired"] == 0 < lease["expired"] <= lease["crashed"]
    assert without["held"][-1] > lease["held"][-1]


def check_memory_store(rows: list[dict[str, Any]]) -> None:
    """Fragments are computed and stored once."""
    prefix, fragment = rows
    assert prefix["prompt_tokens"] == fragment["prompt_tokens"]
    assert fragment["computed_tokens"] < 0.7 * prefix["computed_tokens"]
    assert fragment["mean_pages"] < prefix["mean_pages"]


def check_decode_sharing(rows: list[dict[str, Any]]) -> None:
    """What is public is read once for all; nothing compiles meanwhile."""
    by = {(row["agents"], row["share"]): row for row in rows}
    assert all(row["compiled_meanwhile"] == 0 for row in rows)
    assert by[3, 0.0]["pages_read"] == by[3, 0.0]["pages_needed"]
    assert by[3, 0.9]["pages_read"] < 0.6 * by[3, 0.9]["pages_needed"]
    assert all(row["tokens_per_s"] > 0 for row in rows)


def check_block_size(rows: list[dict[str, Any]]) -> None:
    """Smaller blocks find more of what is common."""
    small, large = rows
    assert 1 > small["hit_share"] > large["hit_share"] > 0.5


CHECKS = {name: globals()[f"check_{name}"] for name in EXPERIMENTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_runs_in_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, screen = run(name, tmp_path, monkeypatch)
    CHECKS[name](results.rows())
    assert {file.name for file in tmp_path.iterdir()} == {"journal.jsonl", "results.json", "report.md", f"{name}.png"}
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    report = (tmp_path / "report.md").read_text()
    for table in load_config(find_config(name), tiny=True).module.tables(results):
        assert table.title in screen
        assert f"**{table.title}**" in report
        assert all(len(row) == len(table.columns) for row in table.rows)
    # Again: everything is there, nothing is measured.
    monkeypatch.setattr(load_config(find_config(name)).module, "bench", lambda settings: pytest.fail("measured again"))
    again, _ = run(name, tmp_path, monkeypatch)
    assert again == results


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_full_settings_are_valid_and_said_at_the_top(name: str) -> None:
    path = find_config(name)
    assert load_config(path).experiment == name
    head = path.read_text().split("\nexperiment =")[0]
    assert f"inms-jax eval {name}" in head
    assert "Expected: " in head
    assert "Time: " in head


def test_the_articles_own_example_is_30_gib_by_its_formula() -> None:
    module = load_config(find_config("eight_agents")).module
    settings = module.Settings(model="none", lengths=(64,), arithmetic_lengths=(16384,), shares=(0.6,))
    found = module._count(settings, module.Work(agents=8, context=16384, public=0.6))
    assert round(found["formula_bytes"] / 2**30, 1) == 30.4
    assert found["independent_bytes"] / 2**30 == 64


class Numbers:
    """An experiment of four cells, which stops where it is told to."""

    TITLE = "Numbers"

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.measured = stop_at, list[int]()

    def cells(self, settings: Any) -> list[dict[str, Any]]:
        return [{"n": n} for n in range(4)]

    def bench(self, settings: Any) -> Any:
        def measure(cell: Any) -> Measured:
            if cell["n"] == self.stop_at:
                raise KeyboardInterrupt
            self.measured.append(cell["n"])
            return Measured({"square": cell["n"] ** 2, "pair": (1, 2)}, {"s": time.perf_counter()})

        return measure

    def tables(self, results: Results) -> list[Any]:
        return []

    def plot(self, results: Results, path: Path) -> None:
        path.write_bytes(b"png")


def numbers(out: Path, module: Numbers, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Results:
    config = load_config(find_config("pools"))
    monkeypatch.setattr(Config, "module", module)
    if settings:
        config = Config(config.name, config.experiment, type(config.settings)(**settings))
    return run_experiment(config, out, Console(file=io.StringIO()))


@pytest.mark.parametrize("stop_at", [0, 2, 3])
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
    whole = numbers(tmp_path / "whole", Numbers(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        numbers(tmp_path / "parts", Numbers(stop_at), monkeypatch)
    journal = tmp_path / "parts/journal.jsonl"
    journal.write_text(journal.read_text() + '{"cell": 3, "fac')  # killed while it wrote
    rest = Numbers()
    results = numbers(tmp_path / "parts", rest, monkeypatch)
    assert rest.measured == list(range(stop_at, 4))
    assert [one.facts for one in results.measured] == [one.facts for one in whole.measured]
    assert facts(tmp_path / "parts") == facts(tmp_path / "whole")


def test_a_folder_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers(tmp_path, Numbers(), monkeypatch)
    with pytest.raises(ConfigError, match=r"journal.jsonl belongs to a run with other settings"):
        numbers(tmp_path, Numbers(), monkeypatch, ticks=7)


def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    config = tmp_path / "sizes.toml"
    sizes = [16, 24, 32, 40, 48, 64, 80, 96, 128]
    config.write_text(f'experiment = "block_size"\n[settings]\nsizes = {sizes}\ncontexts = 20\nlength = 1500\n')
    command = [sys.executable, "-m", "inms_jax.cli", "eval", str(config), "--out"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    journal = tmp_path / "parts/journal.jsonl"
    process = subprocess.Popen([*command, str(tmp_path / "parts")], env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_text().count("\n") < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "parts/results.json").exists()
    before = journal.read_text().split("\n")[:3]
    for out in ("parts", "whole"):
        subprocess.run([*command, str(tmp_path / out)], env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert journal.read_text().split("\n")[:3] == before
    assert facts(tmp_path / "parts") == facts(tmp_path / "whole")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("experiment = 5", "experiment is missing"),
        ('experiment = "nine_agents"', "there is no experiment 'nine_agents'"),
        ('experiment = "pools"\nmodel = "x"', r"unknown key\(s\) \['model'\]"),
        ('experiment = "pools"\n[settings]\ntick = 5', r"settings.tick: is unknown; known are"),
        ('experiment = "pools"\n[settings]\nticks = -5', "settings.ticks: must not be negative, got -5"),
        ('experiment = "pools"\n[settings]\nticks = "many"', "settings.ticks: must be int, got 'many'"),
        ('experiment = "pools"\n[settings]\nloads = [1.0, true]', r"settings.loads\[1\]: must be float, got True"),
        ('experiment = "pools"\n[settings]\nloads = []', "settings.loads: must be a list with at least one value"),
        ('experiment = "pools"\n[tiny]\nticks = -1', "tiny.ticks: must not be negative"),
        ('experiment = "pools"\n[settings]\npages = 9', "pages: must be at least 8 for each of 4 tenants, got 9"),
        ('experiment = "eight_agents"\n[settings]\nshares = [1.5]', "shares: must lie in 0..1"),
        ("experiment = [", "is no TOML"),
    ],
)
def test_bad_settings_are_named_with_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_what_is_no_file_and_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a TOML file nor one of"):
        find_config("nine_agents")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "missing.toml")
