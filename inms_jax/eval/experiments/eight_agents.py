"""Memory of several agents with a common part: the formula of the article, the exact number of pages, the pool itself.

The formula: M(p) = (p + n (1 - p)) L b, for n agents of L tokens of b bytes, of which the share p is public. It counts
tokens; pages have edges, which the exact prediction knows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inms_jax.agents import Agent
from inms_jax.capacity import Work, model_preset
from inms_jax.config import SamplingParams
from inms_jax.engine.segment import Segment
from inms_jax.errors import ConfigError
from inms_jax.eval.experiment import Cell, Measured, Results, Table
from inms_jax.eval.experiments.texts import text_of
from inms_jax.eval.plots import BLUE, ORANGE, figure_of, plain
from inms_jax.eval.probe import context_of
from inms_jax.llm import LLM
from inms_jax.memory.prediction import predict_pages
from inms_jax.tenants import Tenant
from inms_jax.weights import LoadedModel, load

TITLE = "Eight agents: predicted and measured KV memory"
GIB = 2**30
_ASK = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`model` runs contexts of `lengths` tokens; those of `arithmetic_lengths` are counted for a preset only."""

    model: str = "smollm2-135m-instruct"
    agents: int = 8
    shares: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
    lengths: tuple[int, ...] = (1024,)
    preset: str = "llama-2-7b"
    arithmetic_lengths: tuple[int, ...] = (4096, 16384)
    block_size: int = 128

    def __post_init__(self) -> None:
        if self.agents < 1:
            raise ConfigError(f"agents: must be at least 1, got {self.agents}")
        if any(share > 1 for share in self.shares):
            raise ConfigError(f"shares: must lie in 0..1, got {list(self.shares)}")
        if any(length < 64 for length in (*self.lengths, *self.arithmetic_lengths)):
            raise ConfigError(f"lengths: must be at least 64, got {[*self.lengths, *self.arithmetic_lengths]}")


def cells(settings: Settings) -> list[dict[str, Any]]:
    asked = [(True, settings.lengths), (False, settings.arithmetic_lengths)]
    return [
        {"length": length, "share": share, "run": run}
        for run, lengths in asked
        for length in lengths
        for share in settings.shares
    ]


def bench(settings: Settings) -> Callable[[Cell], Measured]:
    model = load(settings.model)

    def measure(cell: Cell) -> Measured:
        work = Work(agents=settings.agents, context=cell["length"], public=cell["share"])
        return Measured(_run(model, settings, work) if cell["run"] else _count(settings, work))

    return measure


def _count(settings: Settings, work: Work) -> dict[str, Any]:
    token_bytes = model_preset(settings.preset).kv_bytes_per_token(2)
    return {
        "formula_bytes": work.unique_tokens * token_bytes,
        "independent_bytes": work.agents * work.context * token_bytes,
        "predicted_pages": work.pages(settings.block_size),
        "page_bytes": settings.block_size * token_bytes,
        "measured_pages": None,
    }


def _run(model: LoadedModel, settings: Settings, work: Work) -> dict[str, Any]:
    """The agents read their contexts on an engine; lengths are what the template made of them."""
    token_bytes = model.config.kv_bytes_per_token(4)
    pages = work.pages(settings.block_size, shared=False) + 4 * work.agents + 2
    options: dict[str, Any] = {"kv_cache_memory": pages * settings.block_size * token_bytes}
    with LLM(model, block_size=settings.block_size, kv_cache_dtype="float32", **options) as llm:
        with llm.tenant("article") as tenant:
            agents = _agents(llm, tenant, work)
            for agent in agents:
                agent.chat("?", _ASK)
            states = [agent.snapshot() for agent in agents]
            contexts = [context_of(agent.name, state, shared=True) for agent, state in zip(agents, states, strict=True)]
            public = sum(len(span.tokens) for span in states[0].context if span.published)
            tokens = sum(state.kv_tokens for state in states)
            held = llm.stats().memory.held
        return {
            "formula_bytes": (tokens - (work.agents - 1) * public) * token_bytes,
            "independent_bytes": tokens * token_bytes,
            "predicted_pages": predict_pages(contexts, settings.block_size),
            "page_bytes": llm.page_bytes,
            "measured_pages": held,
        }


def _agents(llm: LLM, tenant: Tenant, work: Work) -> list[Agent]:
    """Agents whose contexts have as many tokens as asked, a few for the template aside."""
    read = 0
    context: list[Any] = []
    if work.public_tokens > 16:
        tenant.publish("public", text_of(llm.tokenizer, work.public_tokens))
        context = ["public"]
        with tenant.agent("measure", context) as one:
            read = len(one.token_ids)
    found = []
    for number in range(work.agents):
        own = [1 + (7919 * number + 31 * i) % 200 for i in range(max(0, work.context - read - 8))]
        found.append(tenant.agent(f"agent-{number}", [*context, Segment(own)] if own else context))
    return found


def tables(results: Results) -> Sequence[Table]:
    found = []
    for run in (True, False):
        rows = [row for row in results.rows() if row["run"] == run]
        if rows:
            what = results.settings["model"] if run else f"{results.settings['preset']}, 16 bit, counted"
            columns = ("tokens each", "public", "formula", "pages", "in the pool", "their bytes", "without sharing")
            found.append(Table(f"{results.settings['agents']} agents, {what}", columns, tuple(map(_line, rows))))
    return found


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    size = row["predicted_pages"] * row["page_bytes"]
    held = "-" if row["measured_pages"] is None else str(row["measured_pages"])
    amounts = [f"{number / GIB:.3f} GiB" for number in (row["formula_bytes"], size, row["independent_bytes"])]
    share = f"{100 * row['share']:.0f}%"
    return (str(row["length"]), share, amounts[0], str(row["predicted_pages"]), held, amounts[1], amounts[2])


def plot(results: Results, path: Path) -> None:
    """Bytes against the public share, for the longest contexts: formula as a line, pages as points."""
    longest = max(row["length"] for row in results.rows())
    rows = [row for row in results.rows() if row["length"] == longest]
    figure, axes = figure_of(7.5, 4.6)
    x = [100 * row["share"] for row in rows]
    axes.plot(x, [row["independent_bytes"] / GIB for row in rows], color=ORANGE, label="without sharing")
    axes.plot(x, [row["formula_bytes"] / GIB for row in rows], color=BLUE, ls="--", label="formula of the article")
    y = [row["predicted_pages"] * row["page_bytes"] / GIB for row in rows]
    axes.plot(x, y, "o", color=BLUE, label="pages, counted exactly")
    axes.set_xlabel("public part of each context (%)")
    axes.set_ylabel("KV memory (GiB)")
    axes.set_ylim(bottom=0)
    plain(axes, f"{results.settings['agents']} agents, {longest} tokens each")
    figure.savefig(path, dpi=130)
