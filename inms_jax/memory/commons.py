"""What all tenants of one memory share, and whose cached page goes when one of them is owed a page.

Knows tenants only as page stores. Each has a lock of its own; ledger, events and contents lock themselves, free pages
are taken and given back in one step, and a page that is not free belongs to the tenant that took it. Where a tenant
needs something of another one, the operation is begun anew under the locks of all.
"""

import itertools
import threading
from dataclasses import dataclass, field

from inms_jax.memory.contents import Contents
from inms_jax.memory.events import EventLog
from inms_jax.memory.fingerprint import Fingerprints
from inms_jax.memory.index import PrefixIndex
from inms_jax.memory.pool import PagePool
from inms_jax.memory.quota import Ledger
from inms_jax.memory.store import PageStore

# Events remembered; a long prompt makes a few hundred.
_EVENTS = 10_000


class Crowded(Exception):  # noqa: N818 (no error: the operation has changed nothing and is begun anew)
    """There is room only if other tenants give way, and their locks are not held."""


@dataclass(slots=True, eq=False)
class Commons:
    """One pool of pages for the stores of many tenants."""

    pool: PagePool
    ledger: Ledger
    fingerprints: Fingerprints
    caching: bool
    events: EventLog = field(default_factory=lambda: EventLog(_EVENTS))
    contents: Contents = field(default_factory=Contents)
    clock: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    """Orders the uses of sequences of all tenants; measures nothing."""
    stores: list[PageStore] = field(default_factory=list)
    owner: int | None = None
    """The thread that holds the locks of all tenants."""

    @property
    def all_locked(self) -> bool:
        """Whether this thread may look into every tenant."""
        return self.owner == threading.get_ident()

    def require_all(self) -> None:
        """Raise Crowded unless this thread may look into every tenant, or there is only one."""
        if len(self.stores) > 1 and not self.all_locked:
            raise Crowded

    def add_store(self, tenant: str) -> PageStore:
        """The store of a new tenant."""
        index = PrefixIndex(self.fingerprints, self.contents, self.events, num_pages=self.pool.num_pages)
        store = PageStore(tenant, self.pool, index, self.evict_borrowed, caching=self.caching)
        self.stores.append(store)
        return store

    def evict_borrowed(self) -> bool:
        """Free a cached page of a pool above its reserve, one that is easily given up; False when there is none."""
        self.require_all()
        lenders = [
            (store.index.orders[tier].rank, book.quota.reserve - book.used, store.tenant, tier, store)
            for store in self.stores
            for tier, book in store.pools.items()
            if book.lends
        ]
        if not lenders:
            return False
        *_, tier, store = min(lenders, key=lambda lender: lender[:4])
        store.evict(store.index.orders[tier].next_victim())
        return True
