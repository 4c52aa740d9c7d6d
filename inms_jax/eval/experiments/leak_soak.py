"""Agents that crash without a word: pages held and turns refused over time, without leases and with them.

The memory manager alone, without a model. Each tick an agent may come, has a few turns, and leaves or crashes; whoever
used a crashed one never releases it. A lease ends it when nobody has used it for so long. All of them are paused,
waiting for a tool: idle KV would give way, that of a paused agent does not, and so a leak of it hurts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inms_jax.errors import CapacityError, ConfigError
from inms_jax.eval.experiment import Cell, Measured, Results, Table
from inms_jax.eval.experiments.bare import bare_memory, read_context
from inms_jax.eval.plots import figure_of, plain
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import Span
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope

TITLE = "Agents that crash, without leases and with them"
BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`leases`: ticks after which an agent that nobody used is ended; 0 is never. `crash`: share that crashes."""

    leases: tuple[int, ...] = (0, 400, 100)
    pages: int = 512
    ticks: int = 4000
    agents_per_tick: float = 0.2
    crash: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.crash > 1:
            raise ConfigError(f"crash: must lie in 0..1, got {self.crash}")


def cells(settings: Settings) -> list[dict[str, Any]]:
    return [{"lease": lease} for lease in settings.leases]


def bench(settings: Settings) -> Callable[[Cell], Measured]:
    return lambda cell: Measured(_run(settings, cell["lease"]))


def _run(settings: Settings, lease: int) -> dict[str, Any]:
    rng = random.Random(settings.seed)
    memory = bare_memory(settings.pages, BLOCK)
    living: list[tuple[SequenceHandle, Scope]] = []
    held, served, refused, crashed, expired = [], 0, 0, 0, 0
    for tick in range(settings.ticks):
        if rng.random() < settings.agents_per_tick:
            scope = Scope("t", None, f"a{tick}")
            memory.open_scope(scope)
            handle = memory.register(scope)
            memory.lease(handle, lease or None, tick)
            length = rng.randint(20, 200)
            if _turn(memory, handle, Span(tuple(range(tick, tick + length)), scope)):
                served += 1
                memory.pause(handle, None)  # it waits for a tool
                living.append((handle, scope))
            else:
                refused += 1
                _end(memory, handle, scope)
        for handle, scope in list(living):
            memory.renew(handle, tick)
            if rng.random() < 0.05:
                living.remove((handle, scope))
                if rng.random() < settings.crash:
                    crashed += 1  # nobody ever releases it
                else:
                    _end(memory, handle, scope)
        for gone in memory.sweep(tick).expired:
            memory.close_scope(gone.scope)
            expired += 1
        if tick % max(1, settings.ticks // 200) == 0:
            held.append(memory.stats().held)
    memory.verify()
    return {"held": held, "served": served, "refused": refused, "crashed": crashed, "expired": expired}


def _turn(memory: MemoryManager, handle: SequenceHandle, span: Span) -> bool:
    try:
        return read_context(memory, handle, [span]) is not None
    except CapacityError:
        return False


def _end(memory: MemoryManager, handle: SequenceHandle, scope: Scope) -> None:
    memory.release(handle)
    memory.close_scope(scope)


def _name(lease: int) -> str:
    return f"lease of {lease} ticks" if lease else "no lease"


def tables(results: Results) -> Sequence[Table]:
    columns = ("", "agents served", "refused", "crashed", "ended by lease", "pages held at the end")
    rows = tuple(
        (
            _name(row["lease"]),
            str(row["served"]),
            str(row["refused"]),
            str(row["crashed"]),
            str(row["expired"]),
            f"{row['held'][-1]} of {results.settings['pages']}",
        )
        for row in results.rows()
    )
    title = f"One agent in {1 / results.settings['crash']:.0f} crashes, {results.settings['ticks']} ticks"
    return [Table(title, columns, rows)]


def plot(results: Results, path: Path) -> None:
    """Pages held over time."""
    figure, axes = figure_of(7.5, 4.4)
    for row in results.rows():
        every = results.settings["ticks"] / len(row["held"])
        axes.plot([i * every for i in range(len(row["held"]))], row["held"], label=_name(row["lease"]))
    axes.axhline(results.settings["pages"], color="black", ls=":", lw=1, label="all pages")
    axes.set_xlabel("tick")
    axes.set_ylabel("pages held")
    axes.set_ylim(bottom=0)
    plain(axes, "Agents that crash: pages held")
    figure.savefig(path, dpi=130)
