"""Two pictures of a demo: KV bytes over time, and the page map at the peak. Needs the extra `plot` (matplotlib).

Knows nothing of engines: everything comes from the results.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inms_jax.errors import ConfigError
from inms_jax.eval.results import DemoResult, MapCell, ModeResult

MIB = 2**20
# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
_MODE_COLOURS = {"independent": ORANGE, "shared": BLUE}
PAGE_COLOURS = {
    "global": "#56B4E9",
    "group": "#009E73",
    "private": "#F0C27B",
    "cached": "#B9B9B9",
    "free": "#FFFFFF",
}
_PAGE_LABELS = {
    "global": "GLOBAL",
    "group": "GROUP",
    "private": "PRIVATE",
    "cached": "cached (nobody holds it)",
    "free": "free",
}


def require_matplotlib() -> None:
    """ConfigError naming the extra when matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("the pictures need matplotlib: install the extra, `pip install inms-jax[plot]`") from error


def figure_of(width: int | float, height: int | float, *, columns: int = 1) -> tuple[Any, Any]:
    """A figure with one row of axes; one axes when there is one column."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=_layout())
    return figure, figure.subplots(1, columns)


def plain(axes: Any, title: str) -> None:
    """A title, a grid, no frame, and a legend if anything has a label."""
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9, framealpha=1.0)


def write_plots(result: DemoResult, folder: Path) -> tuple[Path, Path]:
    """Write memory.png and pages.png into `folder`."""
    require_matplotlib()
    memory, pages = folder / "memory.png", folder / "pages.png"
    plot_memory(result, memory)
    plot_pages(result, pages)
    return memory, pages


def plot_memory(result: DemoResult, path: Path) -> None:
    """KV bytes over time of both runs: held, predicted (thin, on top) and ideal (dashed)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout=_layout())
    axes = figure.add_subplot()
    for mode in result.modes:
        _memory_lines(axes, mode)
    axes.set_title(
        f"KV memory of {len(result.shared.agents)} agents on one model, the same work twice "
        f"({result.model}, pages of {result.shared.block_size} tokens)",
        fontsize=11,
    )
    axes.set_xlabel("time since the first question (s)")
    axes.set_ylabel("KV pages in use (MiB)")
    axes.set_xlim(0, 1.02 * max(mode.samples[-1].time_s for mode in result.modes))
    axes.set_ylim(0, 1.18 * max(mode.peak_kv_bytes for mode in result.modes) / MIB)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", framealpha=1.0, fontsize=9)
    figure.savefig(path, dpi=130)


def _memory_lines(axes: Any, mode: ModeResult) -> None:
    colour = _MODE_COLOURS[mode.mode]
    times = [0.0, *(sample.time_s for sample in mode.samples)]

    def series(values: Sequence[int]) -> list[float]:
        return [0.0, *(value / MIB for value in values)]

    held = series([sample.held_pages * mode.page_bytes for sample in mode.samples])
    predicted = series([sample.predicted_pages * mode.page_bytes for sample in mode.samples])
    ideal = series([sample.unique_tokens * mode.bytes_per_token for sample in mode.samples])
    axes.plot(times, held, drawstyle="steps-post", color=colour, lw=4, alpha=0.45, label=f"{mode.mode}: held")
    axes.plot(times, predicted, drawstyle="steps-post", color="black", lw=0.9, label=f"{mode.mode}: predicted")
    axes.plot(times, ideal, color=colour, lw=1.3, ls="--", label=f"{mode.mode}: ideal (distinct tokens)")
    peak = mode.peak
    axes.annotate(
        f"{mode.mode}: {mode.peak_kv_bytes / MIB:.0f} MiB, {peak.held_pages} pages",
        (peak.time_s, mode.peak_kv_bytes / MIB),
        xytext=(0, 7),
        textcoords="offset points",
        ha="right",
        color=colour,
        fontsize=9.5,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        zorder=5,
    )


def plot_pages(result: DemoResult, path: Path) -> None:
    """The page pool of both runs when the most pages were held, one square a page, with its holders' letters."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    letters = letters_of([agent.name for agent in result.shared.agents])
    columns = _columns(max(mode.total_pages for mode in result.modes) + 1)
    figure = Figure(figsize=(12, 7), layout=_layout())
    for place, mode in enumerate(result.modes, start=1):
        axes = figure.add_subplot(1, 2, place)
        _page_grid(axes, mode, letters, columns)
        held = [cell for cell in mode.page_map if cell.state != "cached"]
        several = sum(len(cell.holders) > 1 for cell in held)
        axes.set_title(
            f"{mode.mode}: {len(held)} pages held, {several} of them by several agents\n"
            f"{len(held) * mode.page_bytes / MIB:.0f} MiB of {mode.total_pages * mode.page_bytes / MIB:.0f} MiB",
            fontsize=11,
        )
    handles = [
        Patch(facecolor=PAGE_COLOURS[kind], edgecolor="#777777", label=label) for kind, label in _PAGE_LABELS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10)
    names = ", ".join(f"{letter} = {name}" for name, letter in letters.items())
    figure.suptitle(
        f"Pages at the peak. In each: who holds it ({names}) and how many of its "
        f"{result.shared.block_size} slots are used",
        fontsize=11.5,
    )
    figure.savefig(path, dpi=130)


def _page_grid(axes: Any, mode: ModeResult, letters: Mapping[str, str], columns: int) -> None:
    from matplotlib.patches import Rectangle

    cells = {cell.page: cell for cell in mode.page_map}
    size = mode.total_pages + 1
    for page in range(size):
        cell = cells.get(page)
        x, y = page % columns, page // columns
        corner = (x + 0.04, y + 0.04)
        axes.add_patch(Rectangle(corner, 0.92, 0.92, facecolor=PAGE_COLOURS[_kind(cell)], edgecolor="#777777", lw=0.8))
        if page == 0:
            axes.text(x + 0.5, y + 0.5, "null\npage", ha="center", va="center", fontsize=6.5, color="#777777")
        elif cell is not None:
            who = "".join(letters[name] for name in cell.holders)
            axes.text(x + 0.5, y + 0.44, who, ha="center", va="center", fontsize=10, fontweight="bold")
            axes.text(x + 0.5, y + 0.78, str(cell.tokens), ha="center", va="center", fontsize=6, color="#333333")
    axes.set_xlim(0, columns)
    axes.set_ylim(-(-size // columns), 0)
    axes.set_aspect("equal")
    axes.axis("off")


def _layout() -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)


def _kind(cell: MapCell | None) -> str:
    if cell is None:
        return "free"
    return "cached" if cell.state == "cached" else cell.tier


def letters_of(names: Sequence[str]) -> dict[str, str]:
    """The shortest head of each name that no other name begins with, at most the whole name; its first letter large."""
    found: dict[str, str] = {}
    for name in names:
        others = [other for other in names if other != name]
        length = next(
            (n for n in range(1, len(name)) if not any(other.startswith(name[:n]) for other in others)), len(name)
        )
        found[name] = name[:length].capitalize()
    return found


def _columns(pages: int) -> int:
    """Nearly square, and a little wider than high."""
    columns = 1
    while columns * columns < pages:
        columns += 1
    return columns
