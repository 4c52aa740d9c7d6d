"""Snippets of long-term memory that many agents recall behind their own notes: found as prefixes only, or as fragments.

The memory manager alone, without a model. Which snippets an agent recalls follows Zipf's law; each stands at another
place in each context, since private notes come first.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from inms_jax.errors import ConfigError
from inms_jax.eval.experiment import Cell, Measured, Results, Table
from inms_jax.eval.experiments.bare import bare_memory, read_context
from inms_jax.eval.plots import BLUE, ORANGE, figure_of, plain
from inms_jax.memory.plan import Span
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope

TITLE = "Long-term memory: snippets as prefixes and as fragments"
_TENANT = Scope("t")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`agents` come one after the other, `living` of them stay; each recalls `recalled` of `snippets`."""

    agents: int = 400
    living: int = 32
    snippets: int = 200
    recalled: tuple[int, ...] = (1, 2, 4, 8)
    exponent: float = 1.1
    block_size: int = 32
    link_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if max(self.recalled) > self.snippets or self.living < 1:
            raise ConfigError(
                f"recalled: must be at most the {self.snippets} snippets there are, got {list(self.recalled)}"
            )


def cells(settings: Settings) -> list[dict[str, Any]]:
    return [{"recalled": count, "mode": mode} for count in settings.recalled for mode in ("prefix", "fragment")]


def bench(settings: Settings) -> Callable[[Cell], Measured]:
    return lambda cell: Measured(_run(settings, cell["recalled"], cell["mode"]))


def _run(settings: Settings, recalled: int, mode: str) -> dict[str, Any]:
    rng = random.Random(f"{settings.seed}/{recalled}")
    system = Span(tuple(range(100, 180)), _TENANT, published=True)
    lengths = [rng.randint(60, 200) for _ in range(settings.snippets)]
    texts = [tuple(range(1000 * n, 1000 * n + length)) for n, length in enumerate(lengths, start=1)]
    snippets = [Span(text, _TENANT, published=True) for text in texts]
    weights = [1 / (rank + 1) ** settings.exponent for rank in range(settings.snippets)]
    longest = 80 + 120 + 8 * 200 + 40
    memory = bare_memory(
        (settings.living + 2) * (longest // settings.block_size + 12) + settings.snippets * 10, settings.block_size
    )
    memory.open_scope(_TENANT)
    living: deque[tuple[SequenceHandle, Scope]] = deque()
    computed = prompt = 0
    held: list[int] = []
    for number in range(settings.agents):
        scope = Scope("t", None, f"a{number}")
        memory.open_scope(scope)
        handle = memory.register(scope)
        chosen: dict[int, None] = {}
        while len(chosen) < recalled:
            chosen[rng.choices(range(settings.snippets), weights)[0]] = None
        own = 1_000_000 + 1000 * number
        context = [system, Span(tuple(range(own, own + rng.randint(10, 120))), scope)]
        for snippet in chosen:
            text = snippets[snippet]
            context.append(text.after((system,), settings.link_tokens) if mode == "fragment" else text)
        context.append(Span(tuple(range(own + 500, own + 500 + rng.randint(5, 40))), scope))
        found = read_context(memory, handle, context)
        assert found is not None, "the memory is made large enough"
        computed += found
        prompt += sum(len(span.tokens) for span in context)
        living.append((handle, scope))
        if len(living) > settings.living:
            gone, closed = living.popleft()
            memory.release(gone)
            memory.close_scope(closed)
        held.append(memory.stats().held)
    memory.verify()
    steady = held[settings.living :] or held
    return {"prompt_tokens": prompt, "computed_tokens": computed, "mean_pages": fmean(steady)}


def tables(results: Results) -> Sequence[Table]:
    columns = ("recalled", "read as", "prompt tokens", "computed", "found", "pages held")
    rows = tuple(
        (
            str(row["recalled"]),
            row["mode"],
            f"{row['prompt_tokens']:,}",
            f"{row['computed_tokens']:,}",
            f"{100 * (1 - row['computed_tokens'] / row['prompt_tokens']):.0f}%",
            f"{row['mean_pages']:.0f}",
        )
        for row in results.rows()
    )
    settings = results.settings
    title = f"{settings['agents']} agents, {settings['snippets']} snippets, pages of {settings['block_size']} tokens"
    return [Table(title, columns, rows, "Computing a fragment for the first time is among the tokens computed.")]


def plot(results: Results, path: Path) -> None:
    """Tokens found and pages held, against the snippets that each agent recalls."""
    figure, axes = figure_of(9, 4.2, columns=2)
    for mode, colour, label in (("prefix", ORANGE, "prefixes only"), ("fragment", BLUE, "fragments")):
        rows = [row for row in results.rows() if row["mode"] == mode]
        x = [row["recalled"] for row in rows]
        found = [100 * (1 - row["computed_tokens"] / row["prompt_tokens"]) for row in rows]
        axes[0].plot(x, found, "o-", color=colour, label=label)
        axes[1].plot(x, [row["mean_pages"] for row in rows], "o-", color=colour, label=label)
    for one, what in zip(axes, ("prompt tokens found (%)", "pages held"), strict=True):
        one.set_xlabel("snippets that each agent recalls")
        one.set_ylabel(what)
        one.set_ylim(bottom=0)
        plain(one, what)
    figure.savefig(path, dpi=130)
