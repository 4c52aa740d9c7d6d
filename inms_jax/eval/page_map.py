"""The page map of an engine at one moment, as data: what every page holds, whose it is, how many sequences hold it.

    maps = [page_map(llm, "now")]        # then map_text.show(maps, Console()) or map_picture.write(maps, path)

Names and colours of owners are chosen here, so that text and picture agree. Knows nothing of screens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from string import ascii_uppercase
from typing import Any

from inms_jax.llm import LLM
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.stats import PageInfo
from inms_jax.memory.tier import Scope

# Families of Okabe and Ito's colours, which colour-blind readers can tell apart; the labels tell the rest.
_COLOURS = {
    "global": ("#56B4E9", "#9AD2F2", "#2E86C1"),
    "group": ("#009E73", "#66C5A9", "#00785A"),
    "private": ("#F0C27B", "#E69F00", "#D55E00", "#CC79A7"),
}
_TIERS = tuple(_COLOURS)
_HELD = {state.value for state in (PageState.FILLING, PageState.SEALED, PageState.SUSPECT)}


@dataclass(frozen=True, slots=True)
class PageCell:
    """One page that is not free. tier and state are lower-case words, `owner` a path of names."""

    page: int
    tier: str
    owner: str
    state: str
    tokens: int
    sequences: int

    @property
    def held(self) -> bool:
        return self.state in _HELD

    @property
    def cached(self) -> bool:
        return self.state == PageState.CACHED.value


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose pages these are. `label` has one or two characters."""

    name: str
    tier: str
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class PageMap:
    """Pages 1 .. `total_pages`; those without a cell are free."""

    title: str
    total_pages: int
    block_size: int
    page_bytes: int
    cells: tuple[PageCell, ...]

    @property
    def held(self) -> int:
        return sum(cell.held for cell in self.cells)

    @property
    def cached(self) -> int:
        return sum(cell.cached for cell in self.cells)

    @property
    def fenced(self) -> int:
        """Pages that nobody holds and that a step may still read."""
        return len(self.cells) - self.held - self.cached

    @property
    def free(self) -> int:
        return self.total_pages - len(self.cells)

    @property
    def shared(self) -> int:
        return sum(cell.sequences > 1 for cell in self.cells)

    @property
    def spared(self) -> int:
        """Pages that would be held besides, if every sequence had its own."""
        return sum(cell.sequences - 1 for cell in self.cells if cell.sequences)

    def to_json(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("held", "cached", "fenced", "free", "shared", "spared")}
        return {**asdict(self), **counts}


def page_map(llm: LLM, title: str) -> PageMap:
    """What the pages of `llm` hold now."""
    total = llm.stats().memory.total - 1  # without the null page
    cells = tuple(_cell(info) for info in llm.memory_map())
    return PageMap(title, total, llm.config.block_size, llm.page_bytes, cells)


def _cell(info: PageInfo) -> PageCell:
    return PageCell(
        page=info.page,
        tier=info.tier.name.lower(),
        owner=_path(info.scope),
        state=info.state.value,
        tokens=info.tokens_used,
        sequences=len(info.holders),
    )


def _path(scope: Scope) -> str:
    """Names from the outside in; an id of the first generation is the name alone."""
    ids = [part for part in (scope.tenant, scope.group, scope.agent) if part is not None]
    return "/".join(part.removesuffix("#1") for part in ids)


def owners_of(maps: Iterable[PageMap]) -> Mapping[str, Owner]:
    """Every owner in `maps`, by name, GLOBAL first."""
    tiers = {cell.owner: cell.tier for pages in maps for cell in pages.cells}
    found: dict[str, Owner] = {}
    for name in sorted(tiers, key=lambda name: (_TIERS.index(tiers[name]), name)):
        tier = tiers[name]
        colours = _COLOURS[tier]
        found[name] = Owner(
            name=name,
            tier=tier,
            label=_label(name, {owner.label for owner in found.values()}),
            colour=colours[sum(owner.tier == tier for owner in found.values()) % len(colours)],
        )
    return found


def _label(name: str, taken: set[str]) -> str:
    """The first letter of the last name that is not taken, else any letter, else a number; "*" when all are."""
    letters = [letter for letter in name.rsplit("/", 1)[-1].upper() if letter in ascii_uppercase]
    candidates = [*letters, *ascii_uppercase, *map(str, range(1, 100))]
    return next((label for label in candidates if label not in taken), "*")
