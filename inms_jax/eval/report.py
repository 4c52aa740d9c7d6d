"""The last screen of a demo: what both runs needed, side by side, and what the agents said."""

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from inms_jax.eval.results import AgentResult, DemoResult, ModeResult

MIB = 2**20


def print_report(result: DemoResult, console: Console) -> None:
    """Print everything; `result.to_json` has the same numbers and more."""
    console.print(Group(_work(result), _first_tokens(result), *_texts(result), _verdict(result)))


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    return table


def _work(result: DemoResult) -> RenderableType:
    table = _table("")
    for mode in result.modes:
        table.add_column(mode.mode, justify="right")
    table.add_column("ratio", justify="right")

    def row(label: str, values: tuple[float, float], shown: str, unit: str = "") -> None:
        before, after = values
        ratio = f"{after / before:.2f}" if before else "-"
        table.add_row(label, *(f"{value:{shown}}{unit}" for value in values), ratio)

    def both(pick: str) -> tuple[float, float]:
        return float(getattr(result.independent, pick)), float(getattr(result.shared, pick))

    def mib(pick: str) -> tuple[float, float]:
        before, after = both(pick)
        return before / MIB, after / MIB

    row("peak KV, measured", mib("peak_kv_bytes"), ".1f", " MiB")
    row("peak KV, predicted", mib("predicted_kv_bytes"), ".1f", " MiB")
    row("peak KV, ideal", mib("ideal_kv_bytes"), ".1f", " MiB")
    pages = (float(result.independent.peak.held_pages), float(result.shared.peak.held_pages))
    row("pages at the peak", pages, ".0f")
    row("prompt tokens", both("tokens_prompt"), ",.0f")
    row("prompt tokens computed", both("tokens_computed"), ",.0f")
    row("wall time", both("wall_s"), ".1f", " s")
    title = f"The same work twice ({result.model}, pages of {result.shared.block_size} tokens)"
    note = "  ideal: distinct tokens only, as if pages had no edges\n"
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))


def _first_tokens(result: DemoResult) -> RenderableType:
    table = _table("agent")
    table.add_column("context\nat the end", justify="right")
    table.add_column("of which\npublished", justify="right")
    for mode in result.modes:
        table.add_column(f"TTFT\n{mode.mode}", justify="right")
        table.add_column("tokens\ncached", justify="right")
    for before, after in zip(result.independent.agents, result.shared.agents, strict=True):
        cells = [f"{after.context_tokens:,}", f"{after.shared_fraction:.0%}"]
        for agent in (before, after):
            cells += [f"{agent.ttft_s:.2f} s", f"{agent.num_cached_tokens:,}"]
        table.add_row(after.name, *cells)
    return Group(Text("First turn of each agent", style="bold"), table)


def _texts(result: DemoResult) -> list[RenderableType]:
    """What was said; once if both runs said the same."""
    modes: tuple[ModeResult, ...] = (result.shared,) if result.texts_identical else result.modes
    parts: list[RenderableType] = []
    for mode in modes:
        parts.append(Text("Texts" if len(modes) == 1 else f"Texts, {mode.mode}", style="bold"))
        parts += [_conversation(agent) for agent in mode.agents]
    return parts


def _conversation(agent: AgentResult) -> RenderableType:
    lines = Text()
    for turn in agent.turns:
        lines.append(f"{agent.name} is asked: ", style="bold cyan").append(f"{turn.question}\n", style="dim")
        lines.append(" ".join(turn.text.split()) + "\n")
    return Padding(lines, (0, 0, 0, 2))


def _verdict(result: DemoResult) -> RenderableType:
    same = "identical in both runs (token ids and log-probabilities, bit for bit)"
    if not result.texts_identical:
        same = "NOT identical in the two runs"
        if not result.shared.deterministic:
            same += " (deterministic mode is off on this device)"
    before, after = result.independent.peak.held_pages, result.shared.peak.held_pages
    steps = sum(len(mode.samples) for mode in result.modes)
    return Text(
        f"Sharing saved {result.saved_fraction:.1%} of peak KV memory ({before} -> {after} pages).\n"
        f"Pages held equalled the prediction after each of {steps} steps.\n"
        f"Texts are {same}.",
        style="bold",
    )
