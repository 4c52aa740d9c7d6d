"""What a demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inms_jax.eval.results import StepSample, TurnResult

MIB = 2**20


@dataclass(slots=True)
class _Row:
    """One agent as the table shows it; written by the threads that report, under the view's lock."""

    turns: int
    turn: int = 0
    state: str = "not started"
    tokens: int = 0
    ttft_s: float | None = None
    text: str = ""


class View:
    """Watches a run (`three_agents.Watcher`) and shows it on `console`. A context manager.

    turns: how many turns each agent will have, by name.
    """

    def __init__(self, console: Console, turns: dict[str, int]) -> None:
        self._console = console
        self._turns = turns
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._begin("", 0, 0)

    def _begin(self, mode: str, total_pages: int, page_bytes: int) -> None:
        self._mode, self._total_pages, self._page_bytes = mode, total_pages, page_bytes
        self._rows = {name: _Row(turns) for name, turns in self._turns.items()}
        self._sample: StepSample | None = None
        self._steps = 0

    # ---- Watcher -----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self._stop()
        self._console.print(Text(text, style="dim"))

    def mode(self, mode: str, total_pages: int, page_bytes: int) -> None:
        self._stop()
        with self._lock:
            self._begin(mode, total_pages, page_bytes)
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=8)
            self._live.start()
        else:
            size = total_pages * page_bytes / MIB
            self._console.print(f"{mode}: a pool of {total_pages} pages, {size:.0f} MiB")

    def asked(self, agent: str, turn: int) -> None:
        with self._lock:
            row = self._rows[agent]
            row.turn, row.state, row.tokens, row.ttft_s, row.text = turn, "reading", 0, None, ""

    def said(self, agent: str, text: str, tokens: int, ttft_s: float) -> None:
        with self._lock:
            row = self._rows[agent]
            row.state, row.text, row.tokens, row.ttft_s = "writing", text, tokens, ttft_s

    def answered(self, agent: str, turn: TurnResult) -> None:
        with self._lock:
            row = self._rows[agent]
            row.state = "done" if row.turn == row.turns else "idle"
            held = self._sample.held_pages if self._sample else 0
            line = (
                f"{self._mode}: {agent} turn {row.turn}/{row.turns}: TTFT {turn.ttft_s:.2f} s, "
                f"{turn.cached_tokens}/{turn.prompt_tokens} prompt tokens cached, {len(turn.token_ids)} generated, "
                f"{held} pages held"
            )
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)

    def step(self, sample: StepSample) -> None:
        with self._lock:
            self._sample = sample
            self._steps += 1

    # ---- screen ------------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """The table as it stands now."""
        with self._lock:
            table = Table(title=f"run: {self._mode}", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
            for name, justify in _COLUMNS:
                table.add_column(name, justify=justify, no_wrap=True)
            table.add_column("says", no_wrap=True, overflow="ellipsis", ratio=1)
            for name, row in self._rows.items():
                table.add_row(*self._cells(name, row))
            return Group(table, self._totals())

    def _cells(self, name: str, row: _Row) -> Sequence[RenderableType]:
        held = self._sample.agents.get(name) if self._sample else None
        says = " ".join(row.text.split())
        return (
            name,
            f"{row.turn}/{row.turns}",
            Text(row.state, style=_STYLES[row.state]),
            str(held.tokens) if held else "-",
            str(held.pages) if held else "-",
            str(row.tokens),
            "-" if row.ttft_s is None else f"{row.ttft_s:.2f} s",
            Text(f"...{says[-60:]}" if len(says) > 60 else says, style="dim"),
        )

    def _totals(self) -> RenderableType:
        sample = self._sample
        held, predicted, time_s = (sample.held_pages, sample.predicted_pages, sample.time_s) if sample else (0, 0, 0.0)
        return Text(
            f"  held {held} of {self._total_pages} pages = {held * self._page_bytes / MIB:.0f} MiB, "
            f"predicted {predicted}, {self._steps} steps, {time_s:.1f} s",
            style="bold",
        )

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> "View":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()


_STYLES = {"not started": "dim", "reading": "yellow", "writing": "green", "idle": "", "done": "cyan"}
_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("agent", "left"),
    ("turn", "right"),
    ("state", "left"),
    ("KV tokens", "right"),
    ("pages", "right"),
    ("generated", "right"),
    ("TTFT", "right"),
)
