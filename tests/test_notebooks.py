"""The notebooks run from the first cell to the last, on a CPU, and are kept without outputs."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SAYS = {
    "01_quickstart": ["prompt tokens were in pages", "the same answer, computed anew: True", "GLOBAL"],
    "03_isolation": ["largest change of a logit: 0.000", "same_group="],
    "04_block_size_and_memory": ["llama-2-7b", "GiB"],
    "05_bring_your_own_model": ["Question: What is a cache?", "release day"],
}


def printed(cell: Any) -> str:
    outputs = cell.get("outputs", [])
    return "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)


def test_every_notebook_is_named_above() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(SAYS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs_and_open_alike(path: Path) -> None:
    notebook: Any = nbformat.read(path, as_version=4)
    cells = notebook.cells
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    title, badge, line = cells[0].source.split("\n\n")
    assert title.startswith("# ")
    assert f"notebooks/{path.name}" in badge
    assert line.startswith("**")
    assert line.endswith("**")
    assert "inms-jax[cuda12,plot]" in cells[1].source


@pytest.mark.model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, smollm2_spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INMS_JAX_NOTEBOOK_MODEL", smollm2_spec)
    notebook: Any = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER.parent)}}
    ).execute()
    said = "".join(printed(cell) for cell in notebook.cells)
    for words in SAYS[path.stem]:
        assert words in said
    if path.stem == "03_isolation":
        naive, ours = (printed(notebook.cells[place]) for place in (6, 8))
        assert all(float(one.split()[0]) > 0.01 for one in naive.split("logit: ")[1:])
        assert all(float(one.split()[0]) == 0 for one in ours.split("logit: ")[1:])
