"""Block sizes against contexts that part at random points: what is found, what is wasted, what it costs on the host.

With chained keys a block is found only behind all blocks before it, so smaller blocks find more of a common beginning,
never less: the reason that the article gives for large blocks does not hold. Large blocks cost less bookkeeping.
"""

import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from inms_jax.errors import ConfigError
from inms_jax.eval.experiment import Cell, Measured, Results, Table
from inms_jax.eval.experiments.bare import bare_memory
from inms_jax.eval.plots import BLUE, figure_of, plain
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope

TITLE = "Block sizes"
_OWNER = Scope("article", None, "everyone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`contexts` of `length` tokens, each a copy of the first up to a random point."""

    sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    contexts: int = 40
    length: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or self.length < max(self.sizes) or self.contexts < 2:
            raise ConfigError(
                f"sizes: must lie in 1..{self.length} (the length), with 2 contexts or more, got {list(self.sizes)}"
            )


def cells(settings: Settings) -> list[dict[str, Any]]:
    return [{"block_size": size} for size in settings.sizes]


def bench(settings: Settings) -> Callable[[Cell], Measured]:
    rng = random.Random(settings.seed)
    points = [0, *(rng.randrange(1, settings.length) for _ in range(settings.contexts - 1))]

    def measure(cell: Cell) -> Measured:
        facts, lookup_ms = _run(settings, points, cell["block_size"])
        tracemalloc.start()  # once more, since it makes everything slow
        try:
            kept = _run(settings, points, cell["block_size"])[0]["traced_bytes"]
        finally:
            tracemalloc.stop()
        facts.pop("traced_bytes")
        return Measured(facts, {"lookup_ms": lookup_ms, "host_bytes_per_token": kept / facts.pop("unique_tokens")})

    return measure


def _run(settings: Settings, points: Sequence[int], size: int) -> tuple[dict[str, Any], float]:
    pages = settings.contexts * (-(-settings.length // size) + 1)
    memory = bare_memory(pages, size)
    memory.open_scope(_OWNER)
    hits, slots, tokens = 0, 0, 0
    lookups: list[float] = []
    handles = []
    for number, point in enumerate(points):
        own = [1_000_000 * number + i for i in range(settings.length - point)]
        context = [Span((*range(point), *own), _OWNER)]
        handle = memory.register(_OWNER)
        began = time.perf_counter()
        memory.begin_turn(handle, context, max_new_tokens=0)
        lookups.append(time.perf_counter() - began)
        while not (chunk := memory.prefill(handle, settings.length)).is_last:
            memory.commit_prefill(handle, chunk)
        memory.commit_prefill(handle, chunk)
        if number == 0:
            points_possible = sum(points)
        hits += memory.usage(handle).hit_tokens
        memory.end_turn(handle, keep=True, history_len=settings.length)
        handles.append(handle)
    held = memory.stats().held
    slots = held * size
    tokens = settings.contexts * settings.length - hits
    facts = {
        "hit_tokens": hits,
        "hit_share": hits / points_possible,
        "pages": held,
        "waste_share": (slots - tokens) / slots,
        "unique_tokens": tokens,
        "traced_bytes": tracemalloc.get_traced_memory()[0],
    }
    return facts, 1e3 * median(lookups)


def tables(results: Results) -> Sequence[Table]:
    columns = ("block size", "common tokens found", "pages", "slots unused", "begin a turn", "host bytes a token")
    rows = tuple(
        (
            str(row["block_size"]),
            f"{100 * row['hit_share']:.1f}%",
            str(row["pages"]),
            f"{100 * row['waste_share']:.1f}%",
            f"{row['lookup_ms']:.2f} ms",
            f"{row['host_bytes_per_token']:.1f}",
        )
        for row in results.rows()
    )
    title = f"{results.settings['contexts']} contexts of {results.settings['length']} tokens"
    note = "Found: of the tokens that a context has in common with the first one, and that come before it differs."
    return [Table(title, columns, rows, note)]


def plot(results: Results, path: Path) -> None:
    """What is not found against what it costs: down and left is better."""
    figure, axes = figure_of(7, 4.6)
    rows = results.rows()
    x, y = [row["lookup_ms"] for row in rows], [100 * (1 - row["hit_share"]) for row in rows]
    axes.plot(x, y, "o-", color=BLUE)
    for row, *at in zip(rows, x, y, strict=True):
        axes.annotate(str(row["block_size"]), at, xytext=(6, 5), textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlabel("host time to begin a turn (ms)")
    axes.set_ylabel("common tokens that are not found (%)")
    axes.set_ylim(bottom=0)
    plain(axes, "Block sizes: what is lost against what it costs")
    figure.savefig(path, dpi=130)
