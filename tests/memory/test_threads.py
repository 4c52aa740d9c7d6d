"""Eight threads on one memory, switched every few microseconds: no page is lost, no law broken, nobody stuck."""

import contextlib
import faulthandler
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from inms_jax.errors import CapacityError, StateError
from inms_jax.memory import room as room_module
from inms_jax.memory import turns as turns_module
from inms_jax.memory.admission import TurnPlan
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.partition import Partition
from inms_jax.memory.plan import Span
from inms_jax.memory.quota import Quota
from inms_jax.memory.room import Room
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope, Tier
from tests.memory.simulation import identity

PATIENCE = 240


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Switch threads often; if they block each other, say where each of them stands and end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(before)


def run(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []


def prefill(memory: MemoryManager, handle: SequenceHandle) -> None:
    while True:
        if memory.match(handle).status == "wait":
            time.sleep(0)
            continue
        try:
            chunk = memory.prefill(handle, 7)
        except StateError:  # another thread claimed the block after `match`
            continue
        memory.commit_prefill(handle, chunk)
        if chunk.is_last:
            return


def guard(memory: MemoryManager, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Who evicts a page or drops a sequence must hold its tenant's lock; how often it held all locks."""
    evict, drop, taken = PageStore.evict, Partition.drop, [0, 0]

    def require_lock(part: Partition) -> None:
        assert part.lock._is_owned(), "something is taken from a tenant without its lock"  # type: ignore[attr-defined]

    def guarded_evict(self: PageStore, page: int) -> None:
        require_lock(memory._parts[self.tenant])
        taken[0] += memory._commons.all_locked
        evict(self, page)

    def guarded_drop(self: Partition, seq: Sequence) -> None:
        require_lock(self)
        taken[1] += memory._commons.all_locked
        drop(self, seq)

    monkeypatch.setattr(PageStore, "evict", guarded_evict)
    monkeypatch.setattr(Partition, "drop", guarded_drop)
    return taken


def turns(memory: MemoryManager, tenant: str, seed: int, times: int) -> None:
    """An agent that comes, speaks, forks and goes, again and again."""
    draw = random.Random(seed)
    shared = [Span(tuple(range(10 * n, 10 * n + 8)), Scope(tenant), published=True) for n in range(3)]
    for i in range(times):
        scope = Scope(tenant, "g", f"a{seed}.{i}")
        memory.hold_scope(scope, limit=draw.choice([None, 9]))
        handle = memory.register(scope)
        handles = [handle]
        context = [*draw.sample(shared, 2), Span(tuple(range(draw.randint(1, 9))), scope)]
        for _ in range(2):
            while not memory.begin_turn(handle, context, max_new_tokens=3).admitted:
                time.sleep(0)
            prefill(memory, handle)
            if draw.random() < 0.3:
                with contextlib.suppress(CapacityError):
                    handles.append(memory.fork(handle, scope))
            for token in range(draw.randint(0, 3)):
                memory.decode(handle, token)
                memory.commit_decode(handle)
                context = [*context, Span((token,), scope)]
            memory.end_turn(handle, keep=draw.random() < 0.8, history_len=5)
        for each in handles:
            memory.release(each)
        memory.drop_scope(scope)


def test_threads_of_several_tenants_that_borrow_from_each_other(monkeypatch: pytest.MonkeyPatch):
    memory = MemoryManager(num_pages=44, block_size=4, identity=identity(4))
    guard(memory, monkeypatch)
    tenants = {"x": Quota(reserve=12), "y": Quota(reserve=8, limit=30), "z": Quota()}
    for name, quota in tenants.items():
        memory.open_tenant(name, {Tier.PRIVATE: quota})
        memory.hold_scope(Scope(name))
        memory.hold_scope(Scope(name, "g"))
    ended = threading.Event()

    def look() -> None:
        """What looks into all tenants, and one that comes and goes."""
        n = 0
        while not ended.is_set():
            n += 1
            memory.verify()
            stats = memory.stats()
            assert stats.free + stats.cached + stats.held + stats.fenced == stats.total - 1
            memory.empty("z")
            try:
                memory.open_tenant(f"guest {n}", {Tier.GROUP: Quota(reserve=3)})
            except CapacityError:
                continue
            guest = Scope(f"guest {n}", "g")
            memory.hold_scope(guest)
            handle = memory.register(guest)
            if memory.begin_turn(handle, [Span((1, 2, 3, 4, 5), guest)], max_new_tokens=1).admitted:
                prefill(memory, handle)
            memory.release(handle)
            memory.drop_scope(guest)
            memory.close_tenant(guest.tenant)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    run(*[lambda n=n: turns(memory, "xyz"[n % 3], n, 12) for n in range(8)])
    ended.set()
    watcher.join(PATIENCE)
    assert not watcher.is_alive()
    memory.verify()
    assert memory.stats().held == 0
    for name in tenants:
        memory.drop_scope(Scope(name, "g"))
        memory.drop_scope(Scope(name))
        memory.close_tenant(name)
    memory.verify()
    assert memory.stats().free == memory.stats().total - 1


def test_who_takes_pages_from_another_tenant_holds_its_lock(monkeypatch: pytest.MonkeyPatch):
    memory = MemoryManager(num_pages=11, block_size=4, identity=identity(4))
    taken = guard(memory, monkeypatch)
    scopes = Scope("x"), Scope("y")
    for scope in scopes:
        memory.hold_scope(scope)
    first, second, idle = (memory.register(scope) for scope in (*scopes, scopes[0]))
    for handle, start in ((first, 0), (idle, 100)):
        memory.begin_turn(handle, [Span(tuple(range(start, start + 16)), scopes[0])], max_new_tokens=0)
        prefill(memory, handle)
        memory.end_turn(handle, keep=True, history_len=16)
    memory.release(first)  # now 4 pages are cached, 4 those of an idle sequence, 2 free
    assert memory.begin_turn(second, [Span(tuple(range(200, 232)), scopes[1])], max_new_tokens=0).admitted
    prefill(memory, second)
    assert taken == [6, 1]
    memory.verify()


def test_room_that_another_tenant_claims_meanwhile_is_looked_for_again(monkeypatch: pytest.MonkeyPatch):
    memory = MemoryManager(num_pages=11, block_size=4, identity=identity(4))
    scopes = Scope("x"), Scope("y")
    for scope in scopes:
        memory.hold_scope(scope)
    first, second = (memory.register(scope) for scope in scopes)
    make_room, looked = room_module.make_room, [0]

    def slow(part: Partition, seq: Sequence, plan: TurnPlan) -> Room:
        room = make_room(part, seq, plan)
        looked[0] += 1
        if looked[0] == 1:  # between the look and the claim another thread begins its turn
            assert memory.begin_turn(second, [Span(tuple(range(24)), scopes[1])], max_new_tokens=0).admitted
        return room

    monkeypatch.setattr(turns_module, "make_room", slow)
    admission = memory.begin_turn(first, [Span(tuple(range(24)), scopes[0])], max_new_tokens=0)
    assert (admission.admitted, admission.available, looked[0]) == (False, 4, 3)
    memory.verify()


def test_threads_with_one_prompt_compute_it_once_and_all_hold_it():
    memory = MemoryManager(num_pages=200, block_size=4, identity=identity(4))
    tenant = Scope("t")
    memory.hold_scope(tenant)
    text = Span(tuple(range(64)), tenant, published=True)
    handles: list[SequenceHandle] = []

    def read(n: int) -> None:
        scope = Scope("t", None, f"a{n}")
        memory.hold_scope(scope)
        handle = memory.register(scope)
        assert memory.begin_turn(handle, [text, Span((n,), scope)], max_new_tokens=1).admitted
        prefill(memory, handle)
        handles.append(handle)

    run(*[lambda n=n: read(n) for n in range(8)])
    memory.verify()
    assert memory.stats().held == 16 + 8
    assert memory.stats().computed_tokens == 64 + 8
    assert len({tuple(memory.row(handle).page[:16]) for handle in handles}) == 1
