"""An exception at every point of every operation: no page is lost, no law broken, and nobody else loses anything."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inms_jax.memory.eviction import EvictionOrder
from inms_jax.memory.index import PrefixIndex
from inms_jax.memory.plan import Span
from inms_jax.memory.pool import PagePool
from inms_jax.memory.quota import Ledger, Quota
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope, Tier
from tests.memory.simulation import Lab

POINTS: tuple[tuple[type, str], ...] = (
    *((PagePool, name) for name in ("move", "retain", "release", "recharge")),
    *((PrefixIndex, name) for name in ("intern", "publish", "withdraw")),
    *((EvictionOrder, name) for name in ("park", "found", "forget")),
    *((PageStore, name) for name in ("retain", "let_go", "seal", "evict", "open_scope", "close_scope")),
    (Ledger, "claim"),
)
"""Where an operation may be broken off: before and after each call of these."""


class Fault(BaseException):
    """Not one of our errors."""


@contextmanager
def fault_at(number: int) -> Iterator[list[int]]:
    """Break off at the `number`-th point that is passed; how many were passed."""
    passed = [0]

    def point() -> None:
        passed[0] += 1
        if passed[0] - 1 == number:
            raise Fault

    def breaking(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            point()
            result = method(*args, **options)
            point()
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in POINTS:
            patch.setattr(owner, name, breaking(getattr(owner, name)))
        yield passed


X, Y = Scope("x"), Scope("y")
G = Scope("x", "g")
A, B, C, D = (Scope("x", "g", name) for name in "abcd")
HEAD, TEAM = Span(tuple(range(8)), X, published=True), Span((20, 21, 22, 23, 24), G, published=True)


class Scene:
    """A full memory: idle, forked, running and cached pages of one tenant, idle ones of another."""

    def __init__(self) -> None:
        self.lab = Lab(num_pages=20, block_size=4)
        self.memory = self.lab.memory
        for scope in (X, Y, G):
            self.memory.hold_scope(scope)
        for scope in (A, B, C, D):
            self.memory.hold_scope(scope, limit=20)
        self.contexts: dict[SequenceHandle, list[Span]] = {}
        self.a, self.b, self.c = (self.memory.register(scope) for scope in (A, B, C))
        self.history = self.turn(self.a, A, 6, answer=[1, 2])
        self.twin = self.memory.fork(self.a, D)
        self.contexts[self.twin] = self.history
        self.memory.hold_scope(A, D)
        gone = self.memory.register(C)
        self.turn(gone, C, 9)
        self.release(gone)
        self.other = self.memory.register(Y)
        self.turn(self.other, Y, 15)
        # b is in its turn, one chunk from the end of its prompt; c decodes.
        self.begin(self.b, B, 7)
        self.step(self.b, 3)
        self.begin(self.c, C, 5)
        self.lab.prompt(self.c, self.contexts[self.c])
        self.memory.verify()
        assert self.memory.stats().free <= 5

    def turn(self, handle: SequenceHandle, scope: Scope, own: int, answer: list[int] | None = None) -> list[Span]:
        context = [Span(tuple(range(own)), scope)]
        if scope.tenant == X.tenant:
            context = [HEAD, TEAM, *context]
        self.contexts[handle] = self.lab.turn(handle, context, scope, answer=answer or [])
        return self.contexts[handle]

    def begin(self, handle: SequenceHandle, scope: Scope, own: int, new: int = 6) -> None:
        self.contexts[handle] = [HEAD, TEAM, Span(tuple(range(own)), scope)]
        assert self.memory.begin_turn(handle, self.contexts[handle], max_new_tokens=new).admitted

    def step(self, handle: SequenceHandle, budget: int) -> None:
        chunk = self.memory.prefill(handle, budget)
        self.lab.apply_prefill(handle, chunk, self.contexts[handle])
        self.memory.commit_prefill(handle, chunk)

    def release(self, handle: SequenceHandle) -> None:
        self.memory.release(handle)
        del self.contexts[handle]

    def end(self) -> None:
        """Everybody leaves, though some may have left already; nothing may be left behind."""
        memory, parts = self.memory, self.memory._parts
        for part in list(parts.values()):
            for seq in list(part.sequences):
                memory.release(seq.handle)
        for name in list(parts):
            for scope in list(parts[name].store.open_scopes):
                memory.close_scope(scope)
        for name in list(parts):
            memory.close_tenant(name)
        memory.verify()
        assert memory._registry._live == {}
        assert (memory.stats().free, memory.stats().reserved) == (memory.stats().total - 1, 0)


def begin_again(s: Scene) -> None:
    """Keeps, copies, hits, drops the idle sequence of the other tenant."""
    assert s.memory.begin_turn(s.a, [*s.history, Span((5,) * 3, A)], max_new_tokens=6).admitted
    assert s.lab.pages(s.other) == []


def prefill_with_copy(s: Scene) -> None:
    assert s.memory.begin_turn(s.twin, [*s.history, Span((5, 6), D)], max_new_tokens=2).admitted
    assert s.memory.match(s.twin).status == "ready"
    chunk = s.memory.prefill(s.twin, 9)
    s.memory.commit_prefill(s.twin, chunk)


def decode_on(s: Scene) -> None:
    for token in range(6):
        s.memory.decode(s.c, token)
        s.memory.commit_decode(s.c)


def sweep(s: Scene) -> None:
    """Two of three leases are over."""
    for handle, ttl in ((s.a, 1), (s.other, 1000), (s.twin, 1)):
        s.memory.lease(handle, ttl, 0)
    s.memory.sweep(100)
    assert s.memory.sweep(200).expired == ()


def offload(s: Scene) -> None:
    s.release(s.twin)
    s.memory.pause(s.a, None)
    assert s.memory.offload(s.a, s.lab.download) == 1
    s.memory.evict_cached()
    assert s.memory.begin_turn(s.a, [*s.history, Span((1,), A)], max_new_tokens=0).admitted
    assert s.memory.restore(s.a, s.lab.upload) == 4


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "register": lambda s: s.memory.register(A),
    "begin_turn": begin_again,
    "match, prefill and commit": lambda s: s.step(s.b, 9),
    "prefill with a copy": prefill_with_copy,
    "decode and commit": decode_on,
    "end_turn": lambda s: s.memory.end_turn(s.c, keep=True, history_len=18),
    "abort": lambda s: s.memory.end_turn(s.b, keep=False, history_len=9),
    "fork": lambda s: s.memory.fork(s.a, A),
    "fork in a turn": lambda s: s.memory.fork(s.c, C),
    "release": lambda s: s.memory.release(s.b),
    "drop": lambda s: s.memory.drop(s.a),
    "sweep": sweep,
    "offload and restore": offload,
    "empty": lambda s: s.memory.empty("x"),
    "evict_cached": lambda s: s.memory.evict_cached(),
    "clear": lambda s: s.memory.clear(),
    "hold_scope": lambda s: s.memory.hold_scope(Scope("x", "g", "new"), limit=3),
    "hold a lineage": lambda s: s.memory.hold_scope(B, D),
    "drop_scope": lambda s: s.memory.drop_scope(C),
    "pass charges on": lambda s: s.memory.drop_scope(A),
    "close_scope": lambda s: s.memory.close_scope(G),
    "open_tenant": lambda s: s.memory.open_tenant("z", {Tier.PRIVATE: Quota(reserve=5)}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_broken_off_loses_nothing(name: str):
    operate, number, broken = OPERATIONS[name], 0, 0
    while True:
        scene = Scene()
        try:
            with fault_at(number) as passed:
                operate(scene)
        except Fault:
            broken += 1
        if passed[0] <= number:
            break
        scene.memory.verify()
        for handle, context in scene.contexts.items():
            if handle.id in scene.memory._registry._live:
                scene.lab.check(handle, context)
        scene.end()
        number += 1 if number < 6 else 5  # the first points one by one, then every fifth
    scene.end()
    assert broken or name in ("register", "end_turn", "hold a lineage"), "nothing can break these off"
