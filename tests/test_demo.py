"""What a newcomer runs: the demo as a command, and the example of the README."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.model
def test_the_demo_as_a_command(tmp_path: Path) -> None:
    out, extra = tmp_path / "out", tmp_path / "extra.json"
    command = ["demo", "--config", "tests/data/short_demo.toml", "--out", str(out), "--json", str(extra)]
    done = subprocess.run(
        [sys.executable, "-m", "inms_jax.cli", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {"demo.json", "memory.png", "pages.png"}
    found = json.loads((out / "demo.json").read_text())
    assert found == json.loads(extra.read_text())
    assert found["texts_identical"] is True
    assert found["deterministic"] is True
    assert set(found["modes"]) == {"independent", "shared"}
    for mode in found["modes"].values():
        assert {"peak_kv_bytes", "predicted_pages", "peak_pages", "tokens_computed", "tokens_prompt", "wall_s"} <= set(
            mode
        )
        assert mode["peak_pages"] == mode["predicted_pages"] > 0
        assert mode["peak_kv_bytes"] == mode["peak_pages"] * mode["page_bytes"]
        assert all(step["held_pages"] == step["predicted_pages"] for step in mode["steps"])
        assert set(mode["agents"]) == {"architect", "backend", "frontend"}
        for agent in mode["agents"].values():
            assert agent["ttft_s"] > 0
            assert agent["text"]
            assert agent["num_cached_tokens"] >= 0
    independent, shared = found["modes"]["independent"], found["modes"]["shared"]
    assert shared["peak_kv_bytes"] < independent["peak_kv_bytes"]
    assert shared["tokens_computed"] < independent["tokens_computed"]
    assert shared["agents"]["frontend"]["num_cached_tokens"] > 0
    for name, agent in shared["agents"].items():
        assert agent["text"] == independent["agents"][name]["text"]
    assert "Sharing saved" in done.stdout
    assert str(out) in done.stdout


def readme_example() -> str:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return str(code)


def test_the_readme_example_is_short() -> None:
    assert len([line for line in readme_example().splitlines() if line.strip()]) <= 20


@pytest.mark.model
def test_the_readme_example_runs() -> None:
    code, count = re.subn(r"max_tokens=\d+", "max_tokens=3", readme_example())
    assert count
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_map_of_the_house_names_every_file_and_operation() -> None:
    text = (ROOT / "docs/structures.md").read_text()
    package = ROOT / "inms_jax"
    files = [*package.glob("*.py"), *(f for d in package.iterdir() if d.is_dir() for f in d.rglob("*.py"))]
    names = {path.relative_to(package).as_posix() for path in files if path.name != "__init__.py"}
    operations = {
        folder.relative_to(package).as_posix() for folder in package.glob("kernels/*/") if any(folder.glob("*.py"))
    }
    names |= {f"{folder}/" for folder in operations}
    missing = {name for name in names if name not in text and Path(name).parent.as_posix() not in operations}
    assert not missing, f"docs/structures.md says nothing of {sorted(missing)}"
    written = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text))
    assert written <= names, f"docs/structures.md names files that do not exist: {sorted(written - names)}"
