"""Pool and index moved together: what happens to a page when it is taken, keyed, hit, let go or evicted.

Knows which scopes are open. Knows nothing of sequences.
"""

from inms_jax.errors import StateError
from inms_jax.memory.index import Node, PrefixIndex
from inms_jax.memory.lifecycle import PageEvent, PageState
from inms_jax.memory.policy import Sharing, decide
from inms_jax.memory.pool import PagePool
from inms_jax.memory.tier import Scope, Tier


class PageStore:
    """The pages, their keys, and the scopes under which pages may have keys."""

    def __init__(self, pool: PagePool, index: PrefixIndex, *, caching: bool) -> None:
        self.pool = pool
        self.index = index
        self.caching = caching
        self.open_scopes: set[Scope] = set()
        self.evictions = 0
        # The scope of what is in each page that is not free, and how many planned copies read a page.
        self.owner: dict[int, Scope] = {}
        self.readers: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and cached ones by evicting them."""
        return self.pool.count(PageState.FREE) + self.pool.count(PageState.CACHED)

    def shares(self, node: Node | None) -> bool:
        """Whether a block may be looked up, claimed and published."""
        scope_open = node is not None and node.scope in self.open_scopes
        return decide(caching=self.caching, scope_open=scope_open, has_key=node is not None) is Sharing.SHARE

    def indexed(self, node: Node | None) -> int | None:
        """The page that holds the block, when it may be shared."""
        return node.page if node is not None and self.shares(node) else None

    def writable(self, page: int) -> bool:
        """One holder and not sealed. A holder that only waits for its copy of the page does not count."""
        held = self.pool.references(page) - self.readers.get(page, 0)
        return held == 1 and self.pool.state(page) is PageState.FILLING

    def take(self, owner: Scope) -> int:
        """A page to fill; evicts a cached page when none is free."""
        if self.pool.count(PageState.FREE) == 0 and self.pool.count(PageState.CACHED):
            self.evict(self.index.order.next_victim())
        page = self.pool.allocate()
        self.owner[page] = owner
        return page

    def retain(self, page: int) -> None:
        self.pool.retain(page)
        if self.index.node_of(page) is not None:
            self.index.order.found(page)

    def let_go(self, page: int, *, superseded: bool = False) -> None:
        """One holder leaves. The last one leaves a keyed page CACHED and any other FREE.

        `superseded`: the holder goes on without the page, so a PRIVATE one is not asked for again.
        """
        if self.pool.release(page):
            return
        if self.pool.state(page) is PageState.SEALED:
            self.pool.move(page, PageEvent.LAST_HOLDER_LEFT)
            self.index.order.park(page, superseded=superseded and self.owner[page].tier is Tier.PRIVATE)
        else:
            self._free(page)

    def begin_read(self, page: int) -> None:
        """A holder leaves the page, but keeps it from being reused until its copy was dispatched."""
        self.readers[page] = self.readers.get(page, 0) + 1

    def end_read(self, page: int) -> None:
        self.readers[page] -= 1
        if not self.readers[page]:
            del self.readers[page]
        self.let_go(page)

    def seal(self, node: Node, page: int) -> None:
        """Publish a written page under its key."""
        self.pool.move(page, PageEvent.SEAL)
        self.owner[page] = node.scope
        self.index.publish(node, page)

    def evict(self, page: int) -> None:
        """Free a cached page."""
        if self.pool.state(page) is not PageState.CACHED:
            raise StateError(f"Page {page} is {self.pool.state(page).value!r}: only cached pages are evicted.")
        self.index.note_eviction(page)
        self.index.withdraw(page)
        self._free(page)
        self.evictions += 1

    def evict_all(self) -> int:
        pages = self.index.order.pages()
        for page in pages:
            self.evict(page)
        return len(pages)

    def open_scope(self, scope: Scope) -> None:
        if scope in self.open_scopes:
            raise StateError(f"{scope} is open already; ids of scopes carry a generation, take a new one.")
        self.open_scopes.add(scope)

    def close_scope(self, scope: Scope) -> None:
        """Withdraw every key of the scope: cached pages go now, held ones when their last holder leaves."""
        if scope not in self.open_scopes:
            raise StateError(f"{scope} is not one of the {len(self.open_scopes)} open scopes.")
        self.open_scopes.remove(scope)
        self.index.forget(scope)
        for page in self.index.pages_of(scope):
            self.index.withdraw(page)
            if self.pool.state(page) is PageState.CACHED:
                self._free(page)
            else:
                self.pool.move(page, PageEvent.WITHDRAW)

    def _free(self, page: int) -> None:
        self.pool.retire(page)
        del self.owner[page]
