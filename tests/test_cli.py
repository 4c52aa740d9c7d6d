"""The command line: exit codes, one line for an error, the traceback only on request, JSON where asked."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inms_jax import cli

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inms_jax.cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["generate"], "the following arguments are required: --prompt"),
        (["generate", "--prompt", "x", "--top-k", "many"], "invalid int value: 'many'"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature must be >= 0, got -1.0"),
        (["generate", "--prompt", "x", "--model", "no-such-model"], "Model 'no-such-model' does not exist"),
        (["demo", "--config", "no-such.toml"], "no-such.toml: cannot be read: No such file"),
        (["models", "--json", "/dev/null/x"], "File exists"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main(arguments)
    except SystemExit as left:  # argparse
        code = left.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("inms-jax: error: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    assert said in error
    assert "Traceback" not in error


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--config", "no-such.toml", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.splitlines()[-1].startswith("inms-jax: error: no-such.toml")


def test_an_error_of_our_own_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(options: object) -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr(cli, "_models", broken)
    assert cli.main(["models"]) == 2
    assert capsys.readouterr().err.startswith("inms-jax: error: KeyError: 'a\\nb' (unexpected; --debug")


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_models", interrupted)
    assert cli.main(["models"]) == 130
    assert capsys.readouterr().err == ""


def test_models_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INMS_JAX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "new" / "models.json"
    assert cli.main(["models", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["cache_dir"] == str(tmp_path / "cache")
    [model] = [model for model in found["models"] if model["name"] == "smollm2-135m-instruct"]
    assert model["cached"] is False
    assert model["bytes"] == 98_362_432
    assert model["licence"] == "Apache-2.0"
    shown = capsys.readouterr().out
    assert "smollm2-135m-instruct" in shown
    assert "98,362,432" in shown


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from inms_jax.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'rich', 'matplotlib', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert "generate" in done.stdout
    assert "models" in done.stdout


@pytest.mark.model
def test_generate_streams_to_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    done = run(
        "generate",
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--json",
        str(file),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert done.stdout == found["text"] + "\n"
    assert "Paris" in found["text"]
    assert len(found["token_ids"]) == 5
    assert found["finish_reason"] == "length"
