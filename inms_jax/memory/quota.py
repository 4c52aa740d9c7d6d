"""How many pages each pool and account may have: quotas, the books that count pages, and the sum of all claims.

A *pool* is what one tenant may have of one tier; an *account* is one group or one agent inside a pool. Every page that
is not free is charged once, to the scope that owns it: to the pool of its tenant and tier, and to the account that pays
for the scope, if one does. Two laws hold after every operation:

L1  In a pool with a limit, pages held, fenced and reserved by running turns are at most the limit, and so are pages
    held, fenced and cached.
L2  The sum over all pools of max(hard, reserve) is at most the number of pages, where *hard* pages are those held,
    fenced or reserved by running turns.

L2 is why a page that a running turn reserved can always be had. Suppose that pool p has reserved a page, that no page
is free, that p caches nothing, and that no other pool which caches has more pages than its reserve. The pages of p are
then all held or fenced, fewer than hard_p; those of any other pool q are all held or fenced, so at most hard_q, or they
are at most reserve_q. Every page is in some pool, so all of them together are fewer than the sum of max(hard, reserve),
which contradicts L2. So a page is free, or p caches one, or a pool above its reserve does.

Knows nothing of scopes, of tokens or of who holds a page.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from inms_jax.errors import ConfigError
from inms_jax.memory.lifecycle import PageState

HELD = (PageState.FILLING, PageState.SEALED, PageState.SUSPECT)


@dataclass(frozen=True, slots=True)
class Quota:
    """Pages of one pool: `reserve` of them are lent to nobody; it may have `limit`, or without one what there is."""

    reserve: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("reserve", self.reserve), ("limit", self.limit)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigError(f"The {name} of a pool is a number of pages of at least 0, got {value!r}.")
        if self.limit is not None and self.limit < self.reserve:
            raise ConfigError(
                f"A pool cannot reserve {self.reserve} pages and be limited to {self.limit}: raise the limit or lower "
                "the reserve."
            )


def for_mode(quota: Quota, mode: str) -> Quota:
    """The quota as it holds in a mode. Pools without one share what nobody reserved, in either mode.

    "elastic": what nobody reserved is borrowed up to the limits. "reserved": a pool has exactly what it reserves.
    """
    if mode not in ("elastic", "reserved"):
        raise ConfigError(f"pool_mode must be elastic or reserved, got {mode!r}.")
    if mode == "elastic" or quota == Quota():
        return quota
    if quota.limit not in (None, quota.reserve):
        raise ConfigError(
            f"In pool_mode 'reserved' a pool has what it reserves, got a reserve of {quota.reserve} and a limit of "
            f"{quota.limit} pages: leave the limit out, or use pool_mode 'elastic'."
        )
    return Quota(quota.reserve, quota.reserve)


class Book:
    """Pages charged to one pool or account, by state, and the pages that running turns have reserved in it."""

    __slots__ = ("is_pool", "name", "quota", "reserved", "states")

    def __init__(self, name: str, quota: Quota, *, is_pool: bool) -> None:
        self.name = name
        self.quota = quota
        self.is_pool = is_pool
        self.states = dict.fromkeys(PageState, 0)
        self.reserved = 0

    def clear(self) -> None:
        """Forget every page, to count anew."""
        self.states = dict.fromkeys(PageState, 0)
        self.reserved = 0

    @property
    def held(self) -> int:
        return sum(self.states[state] for state in HELD)

    @property
    def cached(self) -> int:
        return self.states[PageState.CACHED]

    @property
    def used(self) -> int:
        """Pages that are not free."""
        return self.held + self.states[PageState.CACHED] + self.states[PageState.FENCED]

    @property
    def hard(self) -> int:
        """Pages that cannot be taken from it."""
        return self.held + self.states[PageState.FENCED] + self.reserved

    @property
    def claim(self) -> int:
        return max(self.hard, self.quota.reserve)

    @property
    def lends(self) -> bool:
        """Whether a cached page of it may go to another pool."""
        return self.cached > 0 and self.used > self.quota.reserve

    @property
    def full(self) -> bool:
        """Whether one of its cached pages must go before it can have another page."""
        return self.quota.limit is not None and self.used >= self.quota.limit


class Ledger:
    """What each tenant's pools claim, the sum of it kept at most `total` under its own lock."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.claimed = 0
        self.reserves = 0
        self._claims: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def spare(self) -> int:
        """Pages that no pool claims."""
        return self.total - self.claimed

    def claim(self, tenant: str, pages: int) -> bool:
        """The tenant claims `pages` in all from now on, if that fits or is less than before."""
        with self._lock:
            more = pages - self._claims.get(tenant, 0)
            if more > 0 and self.claimed + more > self.total:
                return False
            self._set(tenant, pages)
            return True

    def settle(self, tenant: str, pages: int) -> None:
        """What the tenant claims after an operation, which has claimed before what it needs more."""
        if self._claims.get(tenant, 0) != pages:
            with self._lock:
                self._set(tenant, pages)

    def reserve(self, pages: int) -> None:
        """Count what pools reserve more, or less."""
        with self._lock:
            self.reserves += pages

    def _set(self, tenant: str, pages: int) -> None:
        self.claimed += pages - self._claims.get(tenant, 0)
        self._claims[tenant] = pages
        if not pages:
            del self._claims[tenant]


class Forecast:
    """What books and the ledger would say after changes that are not made yet."""

    def __init__(self, ledger: Ledger) -> None:
        self._hard: dict[Book, int] = {}
        self._total = ledger.total
        self._claimed_before = self._claimed = ledger.claimed

    def add(self, book: Book, pages: int) -> None:
        """Hard pages more, or fewer."""
        before = self.hard(book)
        self._hard[book] = before + pages
        if book.is_pool:
            reserve = book.quota.reserve
            self._claimed += max(before + pages, reserve) - max(before, reserve)

    def hard(self, book: Book) -> int:
        return self._hard.get(book, book.hard)

    def lends(self, book: Book) -> bool:
        """Whether fewer hard pages of it would leave more to other pools."""
        return book.is_pool and self.hard(book) > book.quota.reserve

    def claim(self, pools: Iterable[Book]) -> int:
        """What the pools would claim."""
        return sum(max(self.hard(book), book.quota.reserve) for book in pools)

    @property
    def grown(self) -> int:
        """Claims more than now."""
        return self._claimed - self._claimed_before

    @property
    def missing(self) -> int:
        """Pages by which all claims together would exceed the memory."""
        return max(0, self._claimed - self._total) if self.grown > 0 else 0

    def over(self) -> dict[Book, int]:
        """Books that would grow beyond their limit, and by how many pages."""
        return {
            book: hard - book.quota.limit
            for book, hard in self._hard.items()
            if book.quota.limit is not None and hard > max(book.quota.limit, book.hard)
        }
