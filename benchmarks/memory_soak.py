"""Two hundred thousand operations on the memory manager with faults in the middle of them: is a page or an update lost?

    PYTHONPATH=. nice -n 19 python benchmarks/memory_soak.py --operations 200000 --json out/memory_soak.json

No model: the value in a slot stands for the KV of a token and all before it, so that what a sequence reads can be
compared with what it should read. One operation in twenty is broken off by an exception at a random point inside it;
agents are left behind by whoever used them, and end by their leases; the pool is always full.
"""

import argparse
import contextlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import machine
from inms_jax.errors import CapacityError, InmsError
from inms_jax.memory.eviction import EvictionOrder
from inms_jax.memory.index import PrefixIndex
from inms_jax.memory.plan import Span
from inms_jax.memory.pool import PagePool
from inms_jax.memory.quota import Ledger
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope
from tests.memory.simulation import Lab, chain

POINTS: tuple[tuple[type, str], ...] = (
    *((PagePool, name) for name in ("move", "retain", "release", "recharge")),
    *((PrefixIndex, name) for name in ("intern", "publish", "withdraw")),
    *((EvictionOrder, name) for name in ("park", "found", "forget")),
    *((PageStore, name) for name in ("retain", "let_go", "seal", "evict", "open_scope", "close_scope")),
    (Ledger, "claim"),
)
TENANT, GROUP = Scope("t"), Scope("t", "g")
PUBLISHED = tuple(
    Span(tuple(range(100 * i, 100 * i + 5 + 4 * i)), GROUP if i % 2 else TENANT, published=True) for i in range(1, 6)
)
TTL = 400.0


class Fault(BaseException):
    """What breaks an operation off. Not one of the errors that the memory expects."""


class Faults:
    """Breaks off the operation that runs at the n-th point that it passes."""

    def __init__(self) -> None:
        self.left: int | None = None
        for owner, name in POINTS:
            setattr(owner, name, self._breaking(getattr(owner, name)))

    def _breaking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise Fault
            return method(*args, **options)

        return call


@dataclass(eq=False)
class Agent:
    handle: SequenceHandle
    scope: Scope
    history: list[Span]
    """What its next turn begins with."""
    reads: list[Span]
    """What its pages hold a beginning of."""
    lineages: frozenset[Scope]
    """Whose private text it may read: its own, and that of those it was forked from."""


class Soak:
    """The operations, and what each agent should read."""

    def __init__(self, pages: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lab = Lab(num_pages=pages, block_size=4, scopes=[TENANT, GROUP])
        self.memory = self.lab.memory
        self.lab.memory.verify = lambda: None  # type: ignore[method-assign]  # the lab asks after each step; see run()
        self.verify = type(self.memory).verify
        self.lab.check = self.check  # type: ignore[method-assign]
        self.agents: list[Agent] = []
        self.left_behind: list[SequenceHandle] = []
        self.now = 0.0
        self.names = 0
        self.counts: Counter[str] = Counter()
        self.faults = Faults()
        self.plain_register = self.memory.register
        self.memory.register = self.register  # type: ignore[method-assign]

    def register(self, scope: Scope) -> SequenceHandle:
        """Every sequence has a lease, those too that compute a fragment for somebody else."""
        handle = self.plain_register(scope)
        self.memory.lease(handle, TTL, self.now)
        return handle

    # ---- operations

    def new(self) -> None:
        self.names += 1
        scope = Scope("t", "g", f"a{self.names}")
        self.memory.open_scope(scope)
        handle = self.memory.register(scope)
        head = sorted(self.rng.sample(range(len(PUBLISHED)), self.rng.randrange(3)))
        self.agents.append(Agent(handle, scope, [PUBLISHED[i] for i in head], [], frozenset([scope])))

    def turn(self) -> None:
        agent = self.pick()
        spans = list(agent.history)
        if self.rng.random() < 0.2:
            text = PUBLISHED[self.rng.randrange(len(PUBLISHED))]
            root = () if not spans or not spans[0].published else (spans[0],)
            root = tuple(span for span in root if span.scope == TENANT or text.scope == GROUP)
            spans += [Span(self.tokens(2), agent.scope), text.after(root, self.rng.randrange(3)) if root else text]
        spans.append(Span(self.tokens(self.rng.randrange(1, 12)), agent.scope))
        answer = self.tokens(self.rng.randrange(6))
        try:
            self.lab.begin(agent.handle, spans, new=len(answer))
        except AssertionError:
            self.counts["waits"] += 1
            return
        end, kept = agent.history, False
        agent.reads = agent.history
        try:
            if self.rng.random() < 0.1:  # the caller leaves in the middle of the prompt
                self.memory.restore(agent.handle, self.lab.upload)
                chunk = self.memory.prefill(agent.handle, 3)
                self.lab.apply_prefill(agent.handle, chunk, spans)
                self.memory.commit_prefill(agent.handle, chunk)
            else:
                self.lab.prompt(agent.handle, spans, budget=self.rng.choice([3, 7, 100]))
                end, kept = self.lab.say(agent.handle, spans, answer, agent.scope), True
        finally:
            length = sum(len(span.tokens) for span in end)
            with_faults, self.faults.left = self.faults.left, None
            try:
                self.memory.end_turn(agent.handle, keep=kept, history_len=length)
            except InmsError:
                self.counts["turns that were given up"] += 1
            self.faults.left = with_faults
            agent.history = agent.reads = end
        self.memory.renew(agent.handle, self.now)
        if len(agent.history) > 12:
            agent.history = agent.history[:2]

    def fork(self) -> None:
        agent = self.pick()
        self.names += 1
        scope = Scope("t", "g", f"a{self.names}")
        self.memory.open_scope(scope)
        handle = self.memory.fork(agent.handle, scope)
        self.memory.lease(handle, TTL, self.now)
        lineages = agent.lineages | {scope}
        self.agents.append(Agent(handle, scope, list(agent.history), list(agent.reads), lineages))

    def release(self) -> None:
        agent = self.pick()
        self.agents.remove(agent)
        self.end(agent)

    def end(self, agent: Agent) -> None:
        try:
            self.memory.release(agent.handle)
        finally:
            self.faults.left = None
            self.memory.close_scope(agent.scope)

    def leave_behind(self) -> None:
        """A thread that died with its agent in hand: nobody releases it."""
        agent = self.pick()
        self.agents.remove(agent)
        self.left_behind.append(agent.handle)

    def drop(self) -> None:
        self.memory.drop(self.pick().handle)

    def evict(self) -> None:
        self.memory.evict_cached()

    def pause(self) -> None:
        self.memory.pause(self.pick().handle, self.now + 20)

    def offload(self) -> None:
        agent = self.pick()
        self.memory.pause(agent.handle, self.now + 20)
        self.memory.offload(agent.handle, self.lab.download)

    def sweep(self) -> None:
        gone = {expired.handle: expired.scope for expired in self.memory.sweep(self.now).expired}
        self.faults.left = None
        for scope in gone.values():
            self.memory.close_scope(scope)
        self.agents = [agent for agent in self.agents if agent.handle not in gone]
        self.left_behind = [handle for handle in self.left_behind if handle not in gone]
        self.counts["expired"] += len(gone)

    # ---- all of it

    def pick(self) -> Agent:
        return self.rng.choice(self.agents)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(4) for _ in range(count))

    def run(self, operations: int, fault_rate: float) -> dict[str, Any]:
        weights = {
            self.new: 4, self.turn: 40, self.fork: 5, self.release: 5, self.leave_behind: 1, self.drop: 3,
            self.evict: 1, self.pause: 3, self.offload: 3, self.sweep: 3,
        }  # fmt: skip
        choices = [operate for operate, weight in weights.items() for _ in range(weight)]
        began = time.perf_counter()
        for number in range(operations):
            self.now += 1
            operate = self.rng.choice(choices)
            if len(self.agents) < 3:
                operate = self.new
            elif len(self.agents) > 14:
                operate = self.release
            self.counts[operate.__name__] += 1
            broken = self.rng.random() < fault_rate
            self.faults.left = self.rng.randrange(40) if broken else None
            try:
                operate()
            except Fault:
                self.counts["broken off"] += 1
            except CapacityError:
                self.counts["refused"] += 1
            except InmsError:
                self.counts["not possible in this state"] += 1
            self.faults.left = None
            if number % 20 == 0 or broken:
                self.verify(self.memory)
                self.counts["verified"] += 1
                self.read_everything()
        seconds = time.perf_counter() - began
        for agent in self.agents:
            with contextlib.suppress(InmsError):  # a sweep that was broken off has ended it without saying so
                self.end(agent)
        self.now += 10 * TTL
        self.agents = []
        self.sweep()
        self.memory.evict_cached()
        self.verify(self.memory)
        stats = self.memory.stats()
        return {
            "operations": operations,
            "fault_rate": fault_rate,
            "pages": stats.total,
            "seconds": seconds,
            "counts": dict(self.counts),
            "evictions": stats.evictions,
            "dropped_sequences": stats.dropped_sequences,
            "lost_updates": self.counts["lost"],
            "reads_of_foreign_text": self.counts["foreign"],
            "held_at_the_end": stats.held,
            "reserved_at_the_end": stats.reserved,
            "leaked_pages": stats.total - 1 - stats.free,
            "sequences_at_the_end": sum(stats.sequences.values()),
        }

    def check(self, handle: SequenceHandle, spans: Sequence[Span]) -> None:
        """The sequence reads a beginning of `spans`, computed under no scope but those that it may read."""
        agent = next((agent for agent in self.agents if agent.handle == handle), None)
        self.lab.device.poison(self.memory)
        values, _, owners = self.lab.device.read(self.memory.row(handle))
        self.counts["lost"] += values != chain(spans)[: len(values)]
        self.counts["foreign"] += not owners <= {TENANT, GROUP} | (agent.lineages if agent else set())
        self.counts["read"] += 1

    def read_everything(self) -> None:
        """Every agent reads a beginning of its own history, and nothing else."""
        for agent in self.agents:
            self.check(agent.handle, agent.reads)


def main() -> None:
    logging.getLogger("inms_jax").setLevel(logging.ERROR)  # each operation that is broken off is told
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=200_000, help="%(default)s")
    parser.add_argument("--faults", type=float, default=0.05, help="share that is broken off (%(default)s)")
    parser.add_argument("--pages", type=int, default=97, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {"machine": machine(), **Soak(args.pages, args.seed).run(args.operations, args.faults)}
    for name, value in found.items():
        print(f"{name}: {value}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
