"""Decode of several agents with a common beginning: what each step reads, and what that is worth.

A step reads the weights and the keys and values of every agent. Read once for all where they are common, the bytes are
W + s U, else W + s sum L: their ratio bounds what sharing can gain where reading is what takes the time.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax

from inms_jax.config import SamplingParams
from inms_jax.engine.report import StepReport
from inms_jax.engine.runner import compiled_programs
from inms_jax.engine.segment import Segment
from inms_jax.errors import ConfigError
from inms_jax.eval.experiment import Cell, Measured, Results, Table
from inms_jax.eval.experiments.texts import text_of
from inms_jax.eval.plots import figure_of, plain
from inms_jax.llm import LLM
from inms_jax.weights import LoadedModel, load

TITLE = "Decode: shared pages are read once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Contexts of about `length` tokens, `shares` of them public; each agent generates `new_tokens`."""

    model: str = "smollm2-135m-instruct"
    agents: tuple[int, ...] = (1, 2, 4, 8, 16)
    shares: tuple[float, ...] = (0.0, 0.6, 0.9)
    length: int = 1024
    new_tokens: int = 24
    block_size: int = 128

    def __post_init__(self) -> None:
        if not min(self.agents) >= 1 or max(self.agents) > 32:
            raise ConfigError(f"agents: must lie in 1..32, got {list(self.agents)}")
        if max(self.shares) > 1:
            raise ConfigError(f"shares: must lie in 0..1, got {list(self.shares)}")


def cells(settings: Settings) -> list[dict[str, Any]]:
    return [{"agents": agents, "share": share} for share in settings.shares for agents in settings.agents]


def bench(settings: Settings) -> Callable[[Cell], Measured]:
    model = load(settings.model)
    return lambda cell: _run(model, settings, cell["agents"], cell["share"])


def _run(model: LoadedModel, settings: Settings, count: int, share: float) -> Measured:
    token_bytes = model.config.kv_bytes_per_token(4)
    pages = count * ((settings.length + settings.new_tokens + 64) // settings.block_size + 3) + 8
    options: dict[str, Any] = {"kv_cache_memory": pages * settings.block_size * token_bytes}
    options |= {"block_size": settings.block_size, "max_num_seqs": max(2, count), "kv_cache_dtype": "float32"}
    with LLM(model, **options) as llm, llm.tenant("article") as tenant:
        llm.warmup()
        context: list[Any] = []
        public = int(settings.length * share)
        if public:
            tenant.publish("public", text_of(llm.tokenizer, public))
            context = ["public"]
        own = settings.length - public
        agents = [
            tenant.agent(
                f"a{n}", [*context, Segment([1 + (7919 * n + 31 * i) % 200 for i in range(own)])] if own else context
            )
            for n in range(count)
        ]
        for agent in agents:  # prompts first, so that all decode together afterwards
            agent.chat("?", SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        compiled = compiled_programs()
        steps: list[tuple[float, int]] = []
        llm.observe(lambda report: _note(steps, report))
        before = llm.stats().work
        params = SamplingParams(max_tokens=settings.new_tokens, temperature=0.0, ignore_eos=True)
        threads = [threading.Thread(target=agent.chat, args=("?", params)) for agent in agents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = llm.stats().work
        together = [at for at, tokens in steps if tokens == count]
        gaps = [b - a for a, b in itertools.pairwise(together)]
        decode_steps = after.decode_steps - before.decode_steps
        facts = {
            "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
            "page_bytes": llm.page_bytes,
            "pages_needed": (after.pages_needed - before.pages_needed) / decode_steps,
            "pages_read": (after.pages_read - before.pages_read) / decode_steps,
            "compiled_meanwhile": compiled_programs() - compiled,
        }
        return Measured(facts, {"tokens_per_s": count / median(gaps) if gaps else 0.0})


def _note(steps: list[tuple[float, int]], report: StepReport) -> None:
    if report.kind == "decode":
        steps.append((time.perf_counter(), report.tokens))


def bound(row: dict[str, Any]) -> float:
    """What reading once could gain at most: bytes of a step without it by those with it."""
    weights, page = row["weight_bytes"], row["page_bytes"]
    gain: float = (weights + row["pages_needed"] * page) / (weights + row["pages_read"] * page)
    return gain


def tables(results: Results) -> Sequence[Table]:
    columns = ("public", "agents", "pages needed", "pages read", "bound on the gain", "tokens/s")
    rows = tuple(
        (
            f"{100 * row['share']:.0f}%",
            str(row["agents"]),
            f"{row['pages_needed']:.1f}",
            f"{row['pages_read']:.1f}",
            f"{bound(row):.2f}x",
            f"{row['tokens_per_s']:.0f}",
        )
        for row in results.rows()
    )
    late = sum(row["compiled_meanwhile"] for row in results.rows())
    note = f"Pages are means over decode steps. Programs compiled in the measured part: {late}."
    return [Table(f"Contexts of {results.settings['length']} tokens, {results.settings['model']}", columns, rows, note)]


def plot(results: Results, path: Path) -> None:
    """Pages read and tokens per second against the number of agents."""
    figure, axes = figure_of(9.5, 4.3, columns=2)
    for share in results.settings["shares"]:
        rows = [row for row in results.rows() if row["share"] == share]
        x, label = [row["agents"] for row in rows], f"{100 * share:.0f}% public"
        axes[0].plot(x, [row["pages_read"] for row in rows], "o-", label=label)
        axes[1].plot(x, [row["tokens_per_s"] for row in rows], "o-", label=label)
    for one, what in zip(axes, ("pages read by a step", "tokens per second, all agents"), strict=True):
        one.set_xlabel("agents that decode together")
        one.set_ylabel(what)
        one.set_ylim(bottom=0)
        plain(one, what)
    figure.savefig(path, dpi=130)
