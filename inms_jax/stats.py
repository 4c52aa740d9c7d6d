"""Statistics as typed results: of the whole engine for its operator, and of one tenant, group or agent for itself.

Who asks for its own sees its own turns, the pages of its own texts, and nothing of what others have: not whether they
hold the same text (a miss for that reason is told as `no_prefix`), nor their numbers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from inms_jax.engine.accounts import Work
from inms_jax.engine.report import Counters
from inms_jax.engine.services import Services
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.stats import MemoryStats, PageInfo, SequenceHandle
from inms_jax.memory.tier import Scope, Tier


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages that are not free. used: somebody holds them; cached: found again until room is needed."""

    used: int = 0
    cached: int = 0
    fenced: int = 0

    @property
    def total(self) -> int:
        return self.used + self.cached + self.fenced


@dataclass(frozen=True, slots=True)
class AgentStats:
    """One agent. `pages`: those of its own context, by the tier of their text, whoever else reads them."""

    name: str
    work: Work
    pages: Mapping[Tier, int]


@dataclass(frozen=True, slots=True)
class HomeStats:
    """A tenant or a group: the work of all its agents, those that left too, and the pages that are its own.

    `pages`: of what was published here and of everything further in, by tier. agents and groups: those that live.
    """

    name: str
    work: Work
    pages: Mapping[Tier, PageCounts]
    agents: Mapping[str, AgentStats]
    groups: Mapping[str, "HomeStats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """The operator's view: pages, work done, and bytes.

    used / cached / free pages are in `memory` (held = used), those of each tier in `pages`; a page takes `page_bytes`
    of device memory. `tenants` have their groups and agents.
    """

    memory: MemoryStats
    work: Counters
    page_bytes: int
    compiled_programs: int
    pages: Mapping[Tier, PageCounts]
    tenants: Mapping[str, HomeStats]

    @property
    def kv_bytes_held(self) -> int:
        return self.memory.held * self.page_bytes


class View:
    """All pages at one moment, to be counted for one owner after the other."""

    def __init__(self, services: Services) -> None:
        self._pages = services.memory.pages()
        self._accounts = services.accounts

    def tiers(self, scope: Scope | None = None) -> Mapping[Tier, PageCounts]:
        """Pages by tier: all, or those of `scope` and of everything inside it."""
        own = [info for info in self._pages if scope is None or _belongs(info.scope, scope)]
        return {tier: _count(info for info in own if info.tier is tier) for tier in Tier}

    def agent(self, name: str, scope: Scope, handle: SequenceHandle | None) -> AgentStats:
        tiers = Counter(info.tier for info in self._pages if handle in info.holders)
        return AgentStats(name, self._accounts.of(scope), {tier: tiers[tier] for tier in Tier})

    def home(
        self, name: str, scope: Scope, agents: Mapping[str, AgentStats], groups: Mapping[str, HomeStats]
    ) -> HomeStats:
        return HomeStats(name, self._accounts.of(scope), self.tiers(scope), agents, groups)


def _belongs(owner: Scope, scope: Scope) -> bool:
    return owner.tenant == scope.tenant and scope.group in (None, owner.group)


def _count(pages: Iterable[PageInfo]) -> PageCounts:
    states = Counter(info.state for info in pages)
    cached, fenced = states[PageState.CACHED], states[PageState.FENCED]
    return PageCounts(sum(states.values()) - cached - fenced, cached, fenced)
