"""What all tenants of one memory share, and whose cached page goes when one of them is owed a page.

Knows tenants only as page stores. Changed where the locks of all of them are held, except for parts that lock
themselves: ledger, events, contents.
"""

import itertools
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

    def add_store(self, tenant: str) -> PageStore:
        """The store of a new tenant."""
        index = PrefixIndex(self.fingerprints, self.contents, self.events, num_pages=self.pool.num_pages)
        store = PageStore(tenant, self.pool, index, self.evict_borrowed, caching=self.caching)
        self.stores.append(store)
        return store

    def evict_borrowed(self) -> bool:
        """Free a cached page of a pool above its reserve, one that is easily given up; False when there is none."""
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
