"""A page map on a terminal: one cell a page, coloured by its owner, and a legend. Readable without colours too."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inms_jax.eval.page_map import Owner, PageCell, PageMap, owners_of

MIB = 2**20
_CELL = 4


def show(maps: Sequence[PageMap], console: Console) -> None:
    """Print each map, who owns what in it, and what is held, cached and free."""
    owners = owners_of(maps)
    for pages in maps:
        _show(pages, owners, console)
    console.print(
        "A: held by one sequence, A3: by three, (A): cached (held by nobody, found again until room is needed), "
        "x: fenced (a running step may read it), ·: free, 0: the null page.",
        style="dim",
        highlight=False,
    )


def _show(pages: PageMap, owners: Mapping[str, Owner], console: Console) -> None:
    width = len(str(pages.total_pages))
    columns = _columns(console.width - width - 2)
    cells = {cell.page: cell for cell in pages.cells}
    console.print(Text(f"Pages {pages.title}", style="bold"))
    for first in range(0, pages.total_pages + 1, columns):
        line = Text.styled(f"{first:>{width}}  ", "dim")
        for page in range(first, min(first + columns, pages.total_pages + 1)):
            line.append_text(_cell(page, cells.get(page), owners[cells[page].owner] if page in cells else None))
        console.print(line, no_wrap=True, crop=True)
    console.print()
    if cells:
        console.print(_legend(pages, owners))
    size = pages.page_bytes / MIB
    fenced = f" + fenced {pages.fenced}" if pages.fenced else ""
    spared = f" Sharing spares {pages.spared} pages, {pages.spared * size:.3g} MiB." if pages.spared else ""
    console.print(
        f"held {pages.held} ({pages.shared} by several sequences) + cached {pages.cached}{fenced} + free {pages.free} "
        f"= {pages.total_pages} pages of {pages.block_size} tokens, {size:.3g} MiB each.{spared}",
        highlight=False,
    )
    console.print()


def _cell(page: int, cell: PageCell | None, owner: Owner | None) -> Text:
    if cell is None or owner is None:
        return Text(("0" if page == 0 else "·").center(_CELL), style="dim")
    if not (cell.held or cell.cached):
        return Text("x".center(_CELL), style="dim")
    if cell.cached:
        return Text(f"({owner.label})".center(_CELL), style=f"{owner.colour} italic")
    count = "" if cell.sequences < 2 else str(cell.sequences) if cell.sequences < 10 else "+"
    shown = Text(f"{owner.label}{count}".center(_CELL - 1), style=f"black on {owner.colour}")
    return shown.append(" ", style="default on default")


def _legend(pages: PageMap, owners: Mapping[str, Owner]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "tier", "owner", "held", "by several", "cached"):
        table.add_column(title, justify="left" if title in ("", "tier", "owner") else "right", no_wrap=True)
    for owner in owners.values():
        own = [cell for cell in pages.cells if cell.owner == owner.name]
        if own:
            counts = (sum(c.held for c in own), sum(c.sequences > 1 for c in own), sum(c.cached for c in own))
            label = Text(f" {owner.label} ", style=f"black on {owner.colour}")
            table.add_row(label, owner.tier.upper(), owner.name, *map(str, counts))
    return table


def _columns(width: int) -> int:
    """A power of two that fits, at most 32: page numbers at the left stay round."""
    columns = 32
    while columns > 1 and columns * _CELL > width:
        columns //= 2
    return columns
