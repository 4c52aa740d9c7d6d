"""Pools, accounts and the one edge rule: who must give way to whom, and who never."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inms_jax.errors import CapacityError, ConfigError, StateError
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.plan import Span
from inms_jax.memory.quota import Book, Ledger, Quota
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope, Tier
from tests.memory.simulation import Lab

ONE, TWO, THREE = Scope("one#1"), Scope("two#1"), Scope("three#1")


def agent(tenant: Scope, name: str = "a") -> Scope:
    return Scope(tenant.tenant, None, f"{name}#1")


def text(scope: Scope, pages: int, start: int = 0) -> Span:
    """Text of whole pages of 4 tokens, less the one token that stays free."""
    return Span(tuple(range(1000 * start, 1000 * start + 4 * pages - 1)), scope)


def published(scope: Scope, pages: int, start: int = 0) -> Span:
    return Span(tuple(range(1000 * start, 1000 * start + 4 * pages)), scope, published=True)


class Tenants(Lab):
    """Tenants of one agent each, with quotas."""

    def join(
        self,
        tenant: Scope,
        *,
        name: str = "a",
        limit: int | None = None,
        private: Quota | None = None,
        shared: Quota | None = None,
    ) -> SequenceHandle:
        """Open the tenant, if it is not open, and an agent of it. `shared`: the quota of its GLOBAL pool."""
        quotas = {tier: quota for tier, quota in ((Tier.PRIVATE, private), (Tier.GLOBAL, shared)) if quota is not None}
        if quotas:
            self.memory.open_tenant(tenant.tenant, quotas)
        for scope in (tenant, agent(tenant, name)):
            if scope not in self.opened:
                self.memory.hold_scope(scope, limit=limit if scope.agent else None)
                self.opened.add(scope)
        return self.memory.register(agent(tenant, name))

    def __init__(self, num_pages: int, **options) -> None:
        super().__init__(num_pages=num_pages, **options)
        self.opened: set[Scope] = set()

    def speak(self, handle: SequenceHandle, *spans: Span) -> None:
        """A whole turn without an answer."""
        self.turn(handle, list(spans), spans[-1].scope)

    def used(self, scope: Scope) -> int:
        return sum(info.scope.tenant == scope.tenant for info in self.memory.pages())


def test_a_tenant_at_its_limit_evicts_its_own_pages_though_others_are_free():
    m = Tenants(30)
    one = m.join(ONE, private=Quota(limit=4))
    for n in range(5):
        m.speak(one, text(agent(ONE), 3, n))
    assert m.used(ONE) <= 4
    assert m.memory.stats().free >= 25


def test_a_turn_above_the_limit_of_its_pool_is_refused_with_the_numbers():
    m = Tenants(30)
    one = m.join(ONE, private=Quota(limit=4))
    with pytest.raises(CapacityError, match=r"needs 5 pages of the private pool of one#1.*its limit is 4 pages"):
        m.memory.begin_turn(one, [text(agent(ONE), 5)], max_new_tokens=1)
    assert m.memory.stats().quota_refusals == 1


def test_a_turn_waits_for_another_one_of_its_own_pool_and_says_so():
    m = Tenants(30)
    one, other = m.join(ONE, private=Quota(limit=4)), m.join(ONE, name="b")
    m.begin(one, [text(agent(ONE), 3)], new=0)
    before = m.memory.pages()
    for _ in range(3):
        admission = m.memory.begin_turn(other, [text(agent(ONE, "b"), 2)], max_new_tokens=0)
    assert (admission.admitted, admission.short, admission.available) == (False, "pool", 1)
    assert admission.reason == "2 pages are needed, 1 of the 4 of the private pool of one#1 can be had now"
    assert m.memory.pages() == before
    assert m.memory.stats().quota_refusals == 1, "one turn waits, however often it asks"
    m.prompt(one, [text(agent(ONE), 3)])
    m.memory.end_turn(one, keep=True, history_len=11)
    m.begin(other, [text(agent(ONE, "b"), 2)], new=0)
    assert m.pages(one) == [], "an idle sequence of the same pool gave way"


def test_an_idle_sequence_of_another_pool_does_not_give_way_to_a_limit():
    m = Tenants(30)
    one = m.join(ONE, private=Quota(limit=4))
    group = Scope(ONE.tenant, "g#1")
    m.memory.hold_scope(group)
    reader = m.memory.register(group)
    m.speak(reader, text(group, 3))
    m.speak(one, text(agent(ONE), 3))
    other = m.join(ONE, name="b")
    m.speak(other, text(agent(ONE, "b"), 3))
    assert (len(m.pages(reader)), len(m.pages(one))) == (3, 0)


def test_what_a_tenant_reserves_is_never_lent():
    m = Tenants(21)
    m.join(ONE, private=Quota(reserve=8))
    two = m.join(TWO)
    m.speak(two, text(agent(TWO), 12))
    with pytest.raises(CapacityError, match=r"needs 13 pages of 4 tokens.*the pool has 12"):
        m.memory.begin_turn(two, [text(agent(TWO), 13)], max_new_tokens=0)
    one = m.join(ONE, name="b")
    m.speak(one, text(agent(ONE, "b"), 8))
    assert len(m.pages(two)) == 12, "the reserve was there, so nobody gave way"


def test_borrowed_pages_come_back_cached_ones_first_then_the_longest_idle():
    m = Tenants(21)
    first, second = m.join(TWO), m.join(TWO, name="b")
    m.speak(first, text(agent(TWO), 5))
    m.speak(second, text(agent(TWO, "b"), 5))
    gone = m.join(TWO, name="c")
    m.speak(gone, published(TWO, 6), text(agent(TWO, "c"), 1))
    m.memory.release(gone)
    assert (m.memory.stats().cached, m.memory.stats().free) == (6, 4)
    one = m.join(ONE, private=Quota(reserve=12))
    m.memory.verify()
    assert (len(m.pages(first)), len(m.pages(second))) == (0, 5), "12 of 20 can be had only without the longest idle"
    m.speak(one, text(agent(ONE), 12))
    assert len(m.pages(second)) == 5


def test_a_reserve_that_running_turns_hold_is_refused_with_the_numbers():
    m = Tenants(21)
    two = m.join(TWO)
    m.begin(two, [text(agent(TWO), 12)], new=0)
    with pytest.raises(CapacityError, match=r"cannot reserve 9 pages now.*hold 1 of them"):
        m.join(ONE, private=Quota(reserve=9))
    m.memory.verify()
    m.join(ONE, private=Quota(reserve=8))
    with pytest.raises(CapacityError, match="cannot reserve 13 pages: 8 of 20 are reserved by others"):
        m.join(THREE, private=Quota(reserve=13))


def test_reserves_end_with_their_tenant():
    m = Tenants(21)
    one = m.join(ONE, private=Quota(reserve=20))
    two = m.join(TWO)
    with pytest.raises(CapacityError, match="the pool has 0"):
        m.memory.begin_turn(two, [text(agent(TWO), 1)], max_new_tokens=0)
    m.memory.release(one)
    m.memory.drop_scope(agent(ONE))
    m.memory.drop_scope(ONE)
    m.memory.close_tenant(ONE.tenant)
    m.speak(two, text(agent(TWO), 20))


def test_a_flood_of_one_tenant_leaves_the_cached_pages_of_others_within_their_reserve():
    m = Tenants(21)
    one = m.join(ONE, shared=Quota(reserve=6))
    m.speak(one, published(ONE, 6), text(agent(ONE), 1))
    m.memory.release(one)
    two = m.join(TWO)
    for n in range(20):
        m.speak(two, published(TWO, 10, n), text(agent(TWO), 1))
    assert sum(info.scope == ONE for info in m.memory.pages()) == 6
    back = m.join(ONE, name="b")
    m.begin(back, [published(ONE, 6), text(agent(ONE, "b"), 1)], new=0)
    assert m.memory.match(back).cached_tokens == 24


def test_pages_are_borrowed_back_from_who_is_above_the_reserve_though_others_give_theirs_up_more_readily():
    m = Tenants(21)
    one, two, three = m.join(ONE, shared=Quota(reserve=6)), m.join(TWO), m.join(THREE)
    for _ in range(2):  # found once more, so pages of `three` are the last to go by the order of eviction
        for handle, tenant in ((three, THREE), (m.join(THREE, name="b"), THREE)):
            scope = agent(THREE) if handle == three else agent(THREE, "b")
            m.speak(handle, published(tenant, 6), text(scope, 1))
            m.memory.drop(handle)
    m.speak(one, published(ONE, 6), text(agent(ONE), 1))
    m.memory.drop(one)
    m.speak(two, text(agent(TWO), 11))
    held = [info.scope for info in m.memory.pages()]
    assert (held.count(ONE), held.count(THREE)) == (6, 3)


def test_a_tenant_in_need_evicts_its_own_cached_pages_before_those_of_others():
    m = Tenants(21)
    one, two = m.join(ONE), m.join(TWO)
    m.speak(two, published(TWO, 6), text(agent(TWO), 1))
    m.memory.release(two)
    for n in range(10):
        m.speak(one, published(ONE, 6, n), text(agent(ONE), 1))
    assert sum(info.scope == TWO for info in m.memory.pages()) == 6


def test_the_cap_of_an_agent_holds_inside_the_pool():
    m = Tenants(30)
    capped, free = m.join(ONE, limit=3), m.join(ONE, name="b")
    m.speak(free, text(agent(ONE, "b"), 6))
    m.speak(capped, text(agent(ONE), 3))
    m.speak(capped, text(agent(ONE), 3, 7))
    assert m.used(ONE) == 9, "what the agent no longer needs went, to stay within 3"
    with pytest.raises(CapacityError, match=r"needs 4 pages of agent a#1 of one#1.*its limit is 3"):
        m.memory.begin_turn(capped, [text(agent(ONE), 4)], max_new_tokens=0)


def test_the_oldest_living_holder_of_a_lineage_pays_and_being_over_the_limit_blocks_only_new_pages():
    m = Tenants(30)
    a, b = agent(ONE), agent(ONE, "b")
    parent = m.join(ONE, limit=8)
    m.speak(parent, text(a, 6))
    m.memory.hold_scope(b, limit=3)
    twin = m.memory.fork(parent, b)
    m.memory.hold_scope(a, b)
    m.memory.verify()
    m.begin(twin, [text(a, 6), Span((1, 2, 3), b)], new=0)  # 2 pages of its own: the parent pays for the rest
    m.prompt(twin, [text(a, 6), Span((1, 2, 3), b)])
    m.memory.end_turn(twin, keep=True, history_len=26)
    m.memory.release(parent)
    m.memory.drop_scope(a)
    m.memory.verify()
    assert a in {info.scope for info in m.memory.pages()}, "the twin holds the lineage now"
    with pytest.raises(CapacityError, match=r"needs 8 pages of agent b#1 of one#1.*its limit is 3"):
        m.memory.begin_turn(twin, [text(a, 6), Span(tuple(range(1, 8)), b)], max_new_tokens=0)
    m.begin(twin, [text(a, 6), Span((1, 2, 3), b)], new=0)
    m.memory.release(twin)
    m.memory.drop_scope(a, b)
    m.memory.drop_scope(b)
    assert m.used(ONE) == 0


def test_pinned_pages_stay_whatever_is_needed():
    m = Tenants(21)
    pinned, two = m.join(ONE), m.join(TWO)
    m.speak(pinned, published(ONE, 6), text(agent(ONE), 1))
    m.memory.pin(pinned)
    m.speak(two, text(agent(TWO), 13))
    with pytest.raises(StateError, match="is pinned"):
        m.memory.drop(pinned)
    admission = m.memory.begin_turn(two, [text(agent(TWO), 14)], max_new_tokens=0)
    assert (admission.admitted, admission.needed, admission.available) == (False, 1, 0)
    m.memory.empty(ONE.tenant)
    assert len(m.pages(pinned)) == 7


def test_an_emptied_tenant_keeps_only_what_its_turns_need():
    m = Tenants(30)
    idle, running = m.join(ONE), m.join(ONE, name="b")
    m.speak(idle, published(ONE, 2), text(agent(ONE), 3))
    m.begin(running, [published(ONE, 2), text(agent(ONE, "b"), 1)], new=0)
    assert m.memory.empty(ONE.tenant) == 3
    m.prompt(running, [published(ONE, 2), text(agent(ONE, "b"), 1)])
    assert m.used(ONE) == 3


def test_reserved_mode_has_no_limit_but_the_reserve():
    m = Tenants(30, pool_mode="reserved")
    with pytest.raises(ConfigError, match="a reserve of 3 and a limit of 5"):
        m.join(ONE, private=Quota(reserve=3, limit=5))
    one = m.join(ONE, private=Quota(reserve=3))
    with pytest.raises(CapacityError, match="its limit is 3"):
        m.memory.begin_turn(one, [text(agent(ONE), 4)], max_new_tokens=0)
    two = m.join(TWO)
    m.speak(two, text(agent(TWO), 26))


@pytest.mark.parametrize(("reserve", "limit"), [(-1, None), (True, None), (5, 4), (0, -2)])
def test_quotas_that_mean_nothing_are_refused(reserve, limit):
    with pytest.raises(ConfigError, match=f"got {reserve}|got {limit}|reserve 5 pages and be limited to 4"):
        Quota(reserve, limit)


@given(
    total=st.integers(1, 30),
    pools=st.lists(st.tuples(*[st.integers(0, 12)] * 4), min_size=1, max_size=6),
)
@settings(max_examples=400, deadline=None)
def test_a_reserved_page_can_always_be_had(total: int, pools: list[tuple[int, int, int, int]]):
    """The proof in quota.py, on any books for which L2 holds and whose pages are all in use."""
    books = []
    for n, (held, cached, reserved, reserve) in enumerate(pools):
        book = Book(f"pool {n}", Quota(reserve), is_pool=True)
        book.states[PageState.SEALED], book.states[PageState.CACHED], book.reserved = held, cached, reserved
        books.append(book)
    if sum(book.claim for book in books) > total:
        return
    spare = total - sum(book.used for book in books)
    if spare < 0:  # more pages cached than there is room for
        return
    for book in books:
        if book.reserved and not spare:
            assert book.cached or any(other.lends for other in books)


def test_the_ledger_gives_all_or_none():
    ledger = Ledger(5)
    assert ledger.claim("x", 3)
    assert not ledger.claim("y", 3)
    assert ledger.claim("y", 2)
    assert ledger.spare == 0
    assert not ledger.claim("x", 4)
    assert ledger.claim("x", 1)
    ledger.settle("y", 0)
    assert ledger.spare == 4
