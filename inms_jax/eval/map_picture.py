"""Page maps as one picture: a square for each page. Needs the extra `plot` (matplotlib)."""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from inms_jax.eval.page_map import Owner, PageCell, PageMap, owners_of
from inms_jax.eval.plots import require_matplotlib

MIB = 2**20
_EDGE, _PALE = "#777777", 0.28


def write(maps: Sequence[PageMap], path: Path) -> None:
    """The maps side by side.

    A square is filled as far as its page is: the rest of it is pale. Dots say how many sequences hold it.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    owners = owners_of(maps)
    columns = ceil(sqrt(1.2 * (max(pages.total_pages for pages in maps) + 1)))
    rows = ceil((max(pages.total_pages for pages in maps) + 1) / columns)
    height = 6.2 * rows / columns + 1.6 + 0.22 * ceil(len(owners) / 3)
    figure = Figure(figsize=(6.2 * len(maps), height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for place, pages in enumerate(maps, start=1):
        axes = figure.add_subplot(1, len(maps), place)
        _grid(axes, pages, owners, columns, rows)
        fenced = f", {pages.fenced} fenced" if pages.fenced else ""
        spared = f"sharing spares {pages.spared} pages, {pages.spared * pages.page_bytes / MIB:.3g} MiB"
        axes.set_title(
            f"{pages.title}: {pages.held} held ({pages.shared} by several), {pages.cached} cached{fenced}, "
            f"{pages.free} free\n{spared if pages.spared else ''}",
            fontsize=11,
        )
    figure.legend(handles=_legend(owners), loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    figure.suptitle(
        f"Every page of the pool ({maps[0].block_size} tokens, {maps[0].page_bytes / MIB:.3g} MiB each); dots: "
        "sequences that hold it",
        fontsize=11.5,
    )
    figure.savefig(path, dpi=130)


def _grid(axes: Any, pages: PageMap, owners: Mapping[str, Owner], columns: int, rows: int) -> None:
    cells = {cell.page: cell for cell in pages.cells}
    for page in range(pages.total_pages + 1):
        x, y = page % columns + 0.04, page // columns + 0.04
        cell = cells.get(page)
        if cell is None:
            _square(axes, x, y, 1.0, facecolor="white", edgecolor="#BBBBBB")
            if page == 0:
                axes.text(x + 0.46, y + 0.46, "null\npage", ha="center", va="center", fontsize=6.5, color=_EDGE)
        else:
            _page(axes, x, y, cell, owners[cell.owner], cell.tokens / pages.block_size)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_aspect("equal")
    axes.axis("off")


def _page(axes: Any, x: float, y: float, cell: PageCell, owner: Owner, filled: float) -> None:
    _square(axes, x, y, 1.0, facecolor=owner.colour, alpha=_PALE)
    if cell.held:
        _square(axes, x, y, min(filled, 1.0), facecolor=owner.colour)
    _square(axes, x, y, 1.0, facecolor="none", edgecolor=_EDGE, hatch=None if cell.held else "////", linewidth=0.8)
    box = None if cell.held else {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
    axes.text(x + 0.46, y + 0.36, owner.label, ha="center", va="center", fontsize=10, fontweight="bold", bbox=box)
    if cell.sequences > 6:
        axes.text(x + 0.46, y + 0.76, f"x{cell.sequences}", ha="center", va="center", fontsize=7.5)
    else:
        spread = [0.46 + 0.14 * (i - (cell.sequences - 1) / 2) for i in range(cell.sequences)]
        axes.scatter([x + at for at in spread], [y + 0.76] * cell.sequences, s=9, color="black", zorder=3)


def _square(axes: Any, x: float, y: float, filled: float, **style: Any) -> None:
    """The lowest part of a square, as y runs down."""
    from matplotlib.patches import Rectangle

    style = {"edgecolor": "none", **style}
    axes.add_patch(Rectangle((x, y + 0.92 * (1 - filled)), 0.92, 0.92 * filled, **style))


def _legend(owners: Mapping[str, Owner]) -> list[Any]:
    from matplotlib.patches import Patch

    found = [
        Patch(facecolor=owner.colour, edgecolor=_EDGE, label=f"{owner.label}  {owner.tier.upper()}  {owner.name}")
        for owner in owners.values()
    ]
    found.append(Patch(facecolor="#E5E5E5", edgecolor=_EDGE, hatch="////", label="cached: held by nobody, found again"))
    found.append(Patch(facecolor="white", edgecolor="#BBBBBB", label="free"))
    return found
