"""Eight samples of one prompt write at once: pages and copies of each step, with several copy budgets.

Every sample must copy the page that they share before it writes its first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inms_jax.config import SamplingParams
from inms_jax.engine.report import StepReport
from inms_jax.errors import ConfigError
from inms_jax.eval.experiment import Cell, Measured, Results, Table
from inms_jax.eval.plots import figure_of, plain
from inms_jax.llm import LLM
from inms_jax.weights import load

TITLE = "A burst of copies on write, with and without a budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`budgets`: pages that one step may copy."""

    model: str = "smollm2-135m-instruct"
    samples: int = 8
    budgets: tuple[int, ...] = (1, 2, 4, 64)
    prompt_tokens: int = 200
    new_tokens: int = 12
    block_size: int = 128

    def __post_init__(self) -> None:
        if not 2 <= self.samples <= 64:
            raise ConfigError(f"samples: must lie in 2..64, got {self.samples}")
        if min(self.budgets) < 1:
            raise ConfigError(f"budgets: must be at least 1, got {list(self.budgets)}")


def cells(settings: Settings) -> list[dict[str, Any]]:
    return [{"budget": budget} for budget in settings.budgets]


def bench(settings: Settings) -> Callable[[Cell], Measured]:
    model = load(settings.model)
    params = SamplingParams(
        n=settings.samples, max_tokens=settings.new_tokens, temperature=1.0, seed=1, ignore_eos=True
    )
    page_bytes = settings.block_size * model.config.kv_bytes_per_token(4)
    blocks = -(-(settings.prompt_tokens + settings.new_tokens) // settings.block_size)

    def measure(cell: Cell) -> Measured:
        options: dict[str, Any] = {"kv_cache_memory": (settings.samples * (blocks + 1) + 4) * page_bytes}
        seqs = max(8, settings.samples)
        with LLM(
            model, block_size=settings.block_size, copy_budget=cell["budget"], max_num_seqs=seqs, **options
        ) as llm:
            held: list[int] = []
            llm.observe(lambda report: _note(held, report))
            prompt = {"prompt_token_ids": [1 + i % 250 for i in range(settings.prompt_tokens)]}
            (output,) = llm.generate(prompt, params)
            stats = llm.stats()
            return Measured(
                {
                    "held": held,
                    "peak": max(held),
                    "copies": stats.memory.copies,
                    "peak_copies": stats.work.peak_copies,
                    "waits": stats.work.copy_waits,
                    "steps": len(held),
                    "said": [list(one.token_ids) for one in output.outputs],
                }
            )

    return measure


def _note(held: list[int], report: StepReport) -> None:
    held.append(report.held_pages)


def tables(results: Results) -> Sequence[Table]:
    rows = results.rows()
    columns = ("copies a step", "copies", "most in a step", "waits", "steps", "most pages held")
    lines = tuple(
        (str(r["budget"]), str(r["copies"]), str(r["peak_copies"]), str(r["waits"]), str(r["steps"]), str(r["peak"]))
        for r in rows
    )
    same = all(row["said"] == rows[0]["said"] for row in rows)
    note = f"The samples are {'the same' if same else 'NOT the same'} with every budget."
    return [Table(f"{results.settings['samples']} samples of one prompt", columns, lines, note)]


def plot(results: Results, path: Path) -> None:
    """Pages held after each step."""
    figure, axes = figure_of(7.5, 4.4)
    for row in results.rows():
        axes.plot(range(1, len(row["held"]) + 1), row["held"], "o-", ms=4, label=f"{row['budget']} copies a step")
    axes.set_xlabel("device step")
    axes.set_ylabel("pages held")
    axes.set_ylim(bottom=0)
    plain(axes, f"{results.settings['samples']} samples of one prompt write at once")
    figure.savefig(path, dpi=130)
