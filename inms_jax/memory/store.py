"""Pool and index of one tenant moved together: what happens to a page when it is taken, keyed, hit, let go or evicted.

Knows which scopes are open and who pays for them. Knows nothing of sequences.
"""

from collections.abc import Callable, Iterable

from inms_jax.errors import CapacityError, StateError
from inms_jax.memory.index import Node, PrefixIndex
from inms_jax.memory.lifecycle import PageEvent, PageState
from inms_jax.memory.lineages import Lineages
from inms_jax.memory.policy import Sharing, decide
from inms_jax.memory.pool import PagePool
from inms_jax.memory.quota import Book, Quota
from inms_jax.memory.tier import Scope, Tier
from inms_jax.memory.totals import Totals


class PageStore:
    """The pages of a tenant, their keys, and the scopes under which pages may have keys.

    `borrow` frees a cached page of another tenant, or says that there is none.
    """

    def __init__(
        self, tenant: str, pool: PagePool, index: PrefixIndex, borrow: Callable[[], bool], *, caching: bool
    ) -> None:
        self.tenant = tenant
        self.pool = pool
        self.index = index
        self.caching = caching
        self._borrow = borrow
        self.open_scopes: set[Scope] = set()
        self.lineages = Lineages()
        self.pools = {tier: Book(f"the {tier.name.lower()} pool of {tenant}", Quota(), is_pool=True) for tier in Tier}
        self.accounts: dict[Scope, Book] = {}
        self._had_accounts = False
        self._books: dict[Scope, tuple[Book, ...]] = {}
        self.totals = Totals()
        # The scope of what is in each page that is not free, and how many planned copies read a page.
        self.owner: dict[int, Scope] = {}
        self.readers: dict[int, int] = {}

    def books(self, scope: Scope) -> tuple[Book, ...]:
        """What pages of `scope` are charged to: the pool of its tier, and the account of its payer if it has one."""
        found = self._books.get(scope)
        if found is None:
            payer = self.lineages.payer(scope)
            account = None if payer is None else self.accounts.get(payer)
            pool = self.pools[scope.tier]
            found = self._books[scope] = (pool,) if account is None else (pool, account)
        return found

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

    def take(self, owners: Iterable[Scope]) -> list[int]:
        """One page to fill for each owner, all or none; evicts cached pages where a limit or the pool is full."""
        pages: list[int] = []
        try:
            for owner in owners:
                pages.append(self._take(owner))  # noqa: PERF401 (what came before an error is given back)
        except BaseException:
            for page in pages:
                self.let_go(page)
            raise
        return pages

    def retain(self, page: int) -> None:
        self.pool.retain(page)
        node = self.index.node_of(page)
        if node is not None:
            self.index.orders[node.scope.tier].found(page)

    def let_go(self, page: int, *, superseded: bool = False) -> None:
        """One holder leaves. The last one leaves a keyed page CACHED and any other FREE.

        `superseded`: the holder goes on without the page, so a PRIVATE one is not asked for again.
        """
        if self.pool.release(page):
            return
        if self.pool.state(page) is PageState.SEALED:
            self.pool.move(page, PageEvent.LAST_HOLDER_LEFT)
            tier = self.owner[page].tier
            self.index.orders[tier].park(page, superseded=superseded and tier is Tier.PRIVATE)
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
        if self.owner[page] != node.scope:
            self.owner[page] = node.scope
            self.pool.recharge(page, self.books(node.scope))
        self.index.publish(node, page)

    def evict(self, page: int) -> None:
        """Free a cached page."""
        if self.pool.state(page) is not PageState.CACHED:
            raise StateError(f"Page {page} is {self.pool.state(page).value!r}: only cached pages are evicted.")
        self.index.note_eviction(page)
        self.index.withdraw(page)
        self._free(page)
        self.totals.evictions += 1

    def evict_all(self) -> int:
        pages = [page for order in self.index.orders.values() for page in order.pages()]
        for page in pages:
            self.evict(page)
        return len(pages)

    def evict_own(self, tier: Tier) -> bool:
        """Free a cached page of the pool of `tier`, or of another pool of this tenant that is above its reserve."""
        lenders = [other for other in Tier if other is not tier and self.pools[other].lends]
        if self.pools[tier].cached:
            lenders = [tier]
        if not lenders:
            return False
        order = min((self.index.orders[other] for other in lenders), key=lambda order: order.rank)
        self.evict(order.next_victim())
        return True

    def open_scope(self, scope: Scope) -> None:
        if scope in self.open_scopes:
            raise StateError(f"{scope} is open already; ids of scopes carry a generation, take a new one.")
        self.open_scopes.add(scope)

    def close_scope(self, scope: Scope) -> None:
        """Withdraw every key of the scope: cached pages go now, held ones when their last holder leaves."""
        if scope not in self.open_scopes:
            raise StateError(f"{scope} is not one of the {len(self.open_scopes)} open scopes.")
        self.open_scopes.remove(scope)
        self.lineages.forget(scope)
        self.index.forget(scope)
        for page in self.index.pages_of(scope):
            self.index.withdraw(page)
            if self.pool.state(page) is PageState.CACHED:
                self._free(page)
            else:
                self.pool.move(page, PageEvent.WITHDRAW)
        self.recharge()

    def recharge(self) -> None:
        """Somebody else pays for some scope now: charge its pages to the right books."""
        self._books.clear()
        if not (self.accounts or self._had_accounts):
            return
        self._had_accounts = bool(self.accounts)
        for page, owner in self.owner.items():
            books = self.books(owner)
            if self.pool.books(page) != books:
                self.pool.recharge(page, books)

    def charge_anew(self) -> None:
        """Charge every page to the right books, which are empty."""
        self._books.clear()
        self._had_accounts = bool(self.accounts)
        for page, owner in self.owner.items():
            self.pool.recharge(page, self.books(owner))

    def _take(self, owner: Scope) -> int:
        books = self.books(owner)
        for book in books:
            if book.full:
                # L1 says that a pool has one; an account may be over its limit, since charges are passed on to it.
                victims = self.index.orders[owner.tier].pages()
                victim = next((page for page in victims if book in self.pool.books(page)), None)
                if victim is not None:
                    self.evict(victim)
        while True:
            try:
                page = self.pool.allocate(books)
            except CapacityError:
                if not (self.evict_own(owner.tier) or self._borrow()):
                    raise
            else:
                self.owner[page] = owner
                return page

    def _free(self, page: int) -> None:
        self.pool.retire(page)
        del self.owner[page]
