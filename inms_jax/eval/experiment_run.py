"""Run an experiment cell by cell into a folder: results.json, report.md, a picture. A killed run goes on where it was.

Each finished cell is a line of journal.jsonl; what is found there of the same settings is not measured again.
"""

import json
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from inms_jax.errors import ConfigError
from inms_jax.eval.experiment import Config, Measured, Results, Table
from inms_jax.eval.plots import require_matplotlib

JOURNAL = "journal.jsonl"


def run_experiment(config: Config, out: Path, console: Console) -> Results:
    """Measure what is missing, write everything, print the tables."""
    require_matplotlib()  # before the minutes of work, not after
    module = config.module
    cells = module.cells(config.settings)
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out / JOURNAL, config.digest)
    done = journal.read()
    missing = [number for number in range(len(cells)) if number not in done]
    if missing and len(missing) < len(cells):
        console.print(
            f"{len(cells) - len(missing)} of {len(cells)} cells are in {out / JOURNAL} already", soft_wrap=True
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(config.name, total=len(cells), completed=len(cells) - len(missing))
        if missing:
            measure = module.bench(config.settings)
            for number in missing:
                done[number] = measure(cells[number])
                journal.add(number, done[number])
                bar.advance(task)
    settings = {name: getattr(config.settings, name) for name in config.settings.__dataclass_fields__}
    results = Results(config.experiment, settings, tuple(cells), tuple(done[i] for i in range(len(cells))))
    results = Results.from_json(json.loads(json.dumps(results.to_json())))  # what was read back and what was not
    write_results(results, module, out)
    for table in module.tables(results):
        print_table(table, console)
    console.print(
        f"Written to {out}: results.json, report.md, {config.experiment}.png", soft_wrap=True, highlight=False
    )
    return results


class Journal:
    """Cells that were measured, one JSON object a line; the first line says with which settings."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest

    def read(self) -> dict[int, Measured]:
        """What is there of these settings. A last line that was cut off is measured again."""
        if not self._path.exists():
            self._begin()
            return {}
        lines = self._path.read_text(encoding="utf-8").split("\n")
        try:
            head = json.loads(lines[0])
        except ValueError:
            head = None
        if head != {"settings": self._digest}:
            raise ConfigError(
                f"{self._path} belongs to a run with other settings: choose another folder (--out) or delete it"
            )
        found = {}
        whole = [lines[0]]
        for line in lines[1:-1]:
            entry = json.loads(line)
            found[int(entry["cell"])] = Measured(entry["facts"], entry["times"])
            whole.append(line)
        if lines[-1]:  # killed while it wrote
            self._path.write_text("\n".join(whole) + "\n", encoding="utf-8")
        return found

    def _begin(self) -> None:
        self._path.write_text(json.dumps({"settings": self._digest}) + "\n", encoding="utf-8")

    def add(self, cell: int, one: Measured) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "facts": dict(one.facts), "times": dict(one.times)}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def write_results(results: Results, module: object, out: Path) -> None:
    """results.json, report.md and the picture."""
    (out / "results.json").write_text(json.dumps(results.to_json(), indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(report(results, module), encoding="utf-8")
    module.plot(results, out / f"{results.experiment}.png")  # type: ignore[attr-defined]


def report(results: Results, module: object) -> str:
    """The tables as Markdown, and the picture."""
    parts = [f"# {module.TITLE}"]  # type: ignore[attr-defined]
    parts += [markdown(table) for table in module.tables(results)]  # type: ignore[attr-defined]
    parts.append(f"![{results.experiment}]({results.experiment}.png)")
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    """One table."""
    lines = [f"**{table.title}**", "", "| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join([*lines, *(["", table.note] if table.note else [])])


def print_table(table: Table, console: Console) -> None:
    """One table on a terminal."""
    shown = RichTable(title=table.title, title_justify="left", title_style="bold")
    for number, name in enumerate(table.columns):
        shown.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    if table.note:
        console.print(table.note, soft_wrap=True, highlight=False)
