"""Documents that quote results say what the committed results say."""

import json
from pathlib import Path

import pytest

from benchmarks.fragments import markdown
from benchmarks.results_page import page
from inms_jax.engine.gate import SHIPPED, Gate, find_gate
from inms_jax.eval.experiment import Results, find_config, load_config
from inms_jax.eval.experiment_run import report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("name", ["fragments_smollm2", "fragments_smollm2_judge"])
def test_the_tables_of_fragments_are_those_of_the_results(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert result["documents"] >= 40
    assert markdown(result) in (ROOT / "docs/fragments.md").read_text()


@pytest.mark.parametrize("path", sorted((RESULTS / "eval").iterdir()), ids=lambda path: path.name)
def test_reports_of_experiments_are_those_of_their_results(path: Path) -> None:
    results = Results.from_json(json.loads((path / "results.json").read_text()))
    config = load_config(find_config(path.name))
    assert (path / "report.md").read_text() == report(results, config.module)
    settings = {name: getattr(config.settings, name) for name in config.settings.__dataclass_fields__}
    assert results.settings == json.loads(json.dumps(settings)), "the results are not those of the committed settings"


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_gates_are_found_and_pass(path: Path, tmp_path: Path) -> None:
    gate = Gate.from_json(json.loads(path.read_text()), str(path))
    assert find_gate(gate.model_id, gate.weights_version, gate.dtype, tmp_path) == gate
    assert gate.rooted.probes >= 40
    assert gate.rooted.failures() == []


def test_the_page_of_results_is_made_from_them() -> None:
    assert (ROOT / "docs/results.md").read_text() == page()
