"""Elastic and reserved pools at equal memory: tenants whose demand goes up and down, turns that wait, pages in use.

The memory manager alone, without a model: a turn takes its pages for some ticks. Elastic: each tenant has its reserve
and borrows what nobody uses. Reserved: each has its part and no more.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from inms_jax.errors import CapacityError, ConfigError
from inms_jax.eval.experiment import Cell, Measured, Results, Table
from inms_jax.eval.experiments.bare import bare_memory
from inms_jax.eval.plots import BLUE, ORANGE, figure_of, plain
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import Span
from inms_jax.memory.quota import Quota
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope, Tier

TITLE = "Elastic and reserved pools at equal memory"
BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`loads`: how many times the pages of the memory all tenants ask for together, on average."""

    tenants: int = 4
    pages: int = 256
    ticks: int = 2000
    loads: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tenants < 1 or self.pages < 8 * self.tenants:
            raise ConfigError(f"pages: must be at least 8 for each of {self.tenants} tenants, got {self.pages}")


def cells(settings: Settings) -> list[dict[str, Any]]:
    return [{"load": load, "mode": mode} for load in settings.loads for mode in ("elastic", "reserved")]


def bench(settings: Settings) -> Callable[[Cell], Measured]:
    return lambda cell: Measured(_Crowd(settings, cell["mode"], cell["load"]).run())


@dataclass(eq=False)
class _Turn:
    tenant: int
    pages: int
    ticks: int
    asked: int
    handle: SequenceHandle | None = None
    scope: Scope | None = None


@dataclass(eq=False)
class _Crowd:
    """Tenants in turn busy and quiet; the same demand in both modes, since it follows from the seed alone."""

    settings: Settings
    mode: str
    load: float
    waiting: list[_Turn] = field(default_factory=list)
    running: list[_Turn] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        settings = self.settings
        rng = random.Random(f"{settings.seed}/{self.load}")
        memory = bare_memory(settings.pages, BLOCK, pool_mode=self.mode)
        share = settings.pages // settings.tenants
        for tenant in range(settings.tenants):
            quota = Quota(reserve=share // 2, limit=settings.pages) if self.mode == "elastic" else Quota(reserve=share)
            memory.open_tenant(f"t{tenant}", {Tier.PRIVATE: quota})
        used, waits, refused, served = [], [], 0, 0
        # A turn takes 2 to 10 pages for 5 to 15 ticks: 60 page-ticks on average.
        rate = self.load * settings.pages / 60
        for tick in range(settings.ticks):
            busy = (tick // 100) % settings.tenants  # one tenant at a time asks for most
            for _ in range(int(rate) + (rng.random() < rate % 1)):
                tenant = busy if rng.random() < 0.7 else rng.randrange(settings.tenants)
                self.waiting.append(_Turn(tenant, rng.randint(2, 10), rng.randint(5, 15), tick))
            for turn in [turn for turn in self.running if turn.ticks == 0]:
                self.running.remove(turn)
                self._give_back(memory, turn)
            blocked: set[int] = set()
            for turn in list(self.waiting):
                if turn.tenant in blocked:
                    continue
                try:
                    started = self._start(memory, turn, served)
                except CapacityError:
                    refused += 1
                    self.waiting.remove(turn)
                    continue
                if started:
                    waits.append(tick - turn.asked)
                    served += 1
                    self.waiting.remove(turn)
                else:
                    blocked.add(turn.tenant)
            for turn in self.running:
                turn.ticks -= 1
            used.append(sum(turn.pages for turn in self.running))
        return {
            "served": served,
            "refused": refused,
            "waiting_at_the_end": len(self.waiting),
            "mean_wait": fmean(waits),
            "waited": sum(wait > 0 for wait in waits),
            "mean_use": fmean(used) / settings.pages,
        }

    def _start(self, memory: MemoryManager, turn: _Turn, number: int) -> bool:
        scope = Scope(f"t{turn.tenant}", None, f"a{number}-{turn.asked}-{turn.pages}")
        memory.open_scope(scope)
        turn.scope, turn.handle = scope, memory.register(scope)
        context = [Span(tuple(range(number % 97, number % 97 + turn.pages * BLOCK)), scope)]
        admitted = False
        try:
            admitted = memory.begin_turn(turn.handle, context, max_new_tokens=0).admitted
        finally:
            if not admitted:
                self._give_back(memory, turn)
        if admitted:
            self.running.append(turn)
        return admitted

    def _give_back(self, memory: MemoryManager, turn: _Turn) -> None:
        assert turn.handle is not None
        assert turn.scope is not None
        memory.release(turn.handle)
        memory.close_scope(turn.scope)


def tables(results: Results) -> Sequence[Table]:
    columns = ("load", "pools", "turns served", "that waited", "mean wait (ticks)", "still waiting", "pages in use")
    rows = tuple(
        (
            f"{row['load']:.1f}",
            row["mode"],
            str(row["served"]),
            f"{100 * row['waited'] / row['served']:.0f}%",
            f"{row['mean_wait']:.1f}",
            str(row["waiting_at_the_end"]),
            f"{100 * row['mean_use']:.0f}%",
        )
        for row in results.rows()
    )
    title = f"{results.settings['tenants']} tenants, one at a time busy, {results.settings['pages']} pages"
    return [Table(title, columns, rows, "Load 1.0 asks for all pages on average.")]


def plot(results: Results, path: Path) -> None:
    """Pages in use and turns that wait, against the load."""
    figure, axes = figure_of(9, 4.2, columns=2)
    for mode, colour in (("elastic", BLUE), ("reserved", ORANGE)):
        rows = [row for row in results.rows() if row["mode"] == mode]
        x = [row["load"] for row in rows]
        axes[0].plot(x, [100 * row["mean_use"] for row in rows], "o-", color=colour, label=mode)
        axes[1].plot(x, [100 * row["waited"] / row["served"] for row in rows], "o-", color=colour, label=mode)
    for one, what in zip(axes, ("pages in use (%)", "turns that waited (%)"), strict=True):
        one.set_xlabel("pages asked for / pages there are")
        one.set_ylabel(what)
        one.set_ylim(0, 105)
        plain(one, what)
    figure.savefig(path, dpi=130)
