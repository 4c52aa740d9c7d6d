"""Tenants with quotas, come and gone in any order: every law after every operation, and every admitted turn ends."""

import itertools
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inms_jax.errors import CapacityError
from inms_jax.memory.plan import Span
from inms_jax.memory.quota import Quota
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope, Tier
from tests.memory.simulation import Lab

WHICH = st.integers(0, 30)
TENANTS = ("x", "y", "z")


@st.composite
def quotas(draw: st.DrawFn) -> Quota:
    reserve = draw(st.sampled_from([0, 0, 1, 3, 6]))
    extra = draw(st.sampled_from([None, None, 0, 2, 5]))
    return Quota(reserve, None if extra is None else reserve + extra)


@dataclass(eq=False)
class Speaker:
    handle: SequenceHandle
    scope: Scope
    spans: list[Span]
    room: int = 0
    lineages: tuple[Scope, ...] = ()
    pinned: bool = False

    @property
    def running(self) -> bool:
        return self.room >= 0


class QuotaMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(8, 30))
    def start(self, num_pages: int) -> None:
        self.lab = Lab(num_pages=num_pages, block_size=2)
        self.memory = self.lab.memory
        self.numbers = itertools.count()
        self.open: dict[str, dict[Tier, Quota]] = {}
        self.names: dict[str, str] = {}
        self.live: list[Speaker] = []

    @rule(which=st.sampled_from(TENANTS), quota=st.fixed_dictionaries({tier: quotas() for tier in Tier}))
    def open_tenant(self, which: str, quota: dict[Tier, Quota]) -> None:
        if which in self.names:
            return
        name = f"{which}#{next(self.numbers)}"
        before = self.memory.pages()
        try:
            self.memory.open_tenant(name, quota)
        except CapacityError:
            assert self.memory.pages() == before
            return
        self.names[which], self.open[name] = name, quota
        self.memory.hold_scope(Scope(name))
        self.memory.hold_scope(Scope(name, "g"))

    @precondition(lambda self: self.names)
    @rule(which=WHICH, limit=st.sampled_from([None, None, 2, 5]))
    def join(self, which: int, limit: int | None) -> None:
        if len(self.live) > 7:
            return
        names = sorted(self.open)
        scope = Scope(names[which % len(names)], "g", f"a#{next(self.numbers)}")
        self.memory.hold_scope(scope, limit=limit)
        self.live.append(Speaker(self.memory.register(scope), scope, [], -1, (scope,)))

    @precondition(lambda self: any(not speaker.running for speaker in self.live))
    @rule(
        which=WHICH,
        heads=st.lists(st.integers(0, 3), max_size=3),
        own=st.integers(1, 6),
        new=st.integers(0, 4),
        anew=st.booleans(),
    )
    def begin(self, which: int, heads: list[int], own: int, new: int, anew: bool) -> None:
        idle = [speaker for speaker in self.live if not speaker.running]
        speaker = idle[which % len(idle)]
        scope = speaker.scope
        shared = [Scope(scope.tenant), Scope(scope.tenant), Scope(scope.tenant, "g"), Scope(scope.tenant, "g")]
        spans = [] if anew else list(speaker.spans)
        if not spans:
            spans = [Span((n, n, n, n), shared[n], published=True) for n in sorted(heads)]
        spans.append(Span(tuple(range(own)), scope))
        before = self.memory.pages()
        try:
            admission = self.memory.begin_turn(speaker.handle, spans, max_new_tokens=new)
        except CapacityError:
            assert self.memory.pages() == before
            return
        if not admission.admitted:
            assert self.memory.pages() == before
            assert admission.needed > admission.available
            return
        speaker.spans, speaker.room = spans, new

    @precondition(lambda self: any(speaker.running for speaker in self.live))
    @rule(which=WHICH, say=st.booleans(), keep=st.booleans())
    def finish(self, which: int, say: bool, keep: bool) -> None:
        """Whatever the others do meanwhile, a turn that was admitted has all of its pages."""
        running = [speaker for speaker in self.live if speaker.running]
        speaker = running[which % len(running)]
        self.lab.prompt(speaker.handle, speaker.spans)
        while say and speaker.room:
            speaker.spans = self.lab.say(speaker.handle, speaker.spans, [7], speaker.scope)
            speaker.room -= 1
        length = sum(len(span.tokens) for span in speaker.spans)
        self.memory.end_turn(speaker.handle, keep=keep, history_len=length)
        speaker.room = -1

    @precondition(lambda self: any(not speaker.running for speaker in self.live))
    @rule(which=WHICH, limit=st.sampled_from([None, 3]))
    def fork(self, which: int, limit: int | None) -> None:
        idle = [speaker for speaker in self.live if not speaker.running]
        parent = idle[which % len(idle)]
        scope = Scope(parent.scope.tenant, "g", f"a#{next(self.numbers)}")
        self.memory.hold_scope(scope, limit=limit)
        handle = self.memory.fork(parent.handle, scope)
        for lineage in parent.lineages:
            self.memory.hold_scope(lineage, scope)
        self.live.append(Speaker(handle, scope, list(parent.spans), -1, (scope, *parent.lineages)))

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        speaker = self.live.pop(which % len(self.live))
        self.memory.release(speaker.handle)
        for lineage in speaker.lineages:
            self.memory.drop_scope(lineage, speaker.scope)

    @precondition(lambda self: any(not speaker.running for speaker in self.live))
    @rule(which=WHICH, really=st.sampled_from([False, False, True]))
    def pin(self, which: int, really: bool) -> None:
        if really:
            idle = [speaker for speaker in self.live if not speaker.running]
            speaker = idle[which % len(idle)]
            self.memory.pin(speaker.handle)
            speaker.pinned = True

    @precondition(lambda self: self.names)
    @rule(which=WHICH)
    def empty(self, which: int) -> None:
        names = sorted(self.open)
        self.memory.empty(names[which % len(names)])

    @precondition(lambda self: self.names)
    @rule(which=WHICH)
    def close_tenant(self, which: int) -> None:
        short = sorted(self.names)[which % len(self.names)]
        name = self.names.pop(short)
        del self.open[name]
        for speaker in [speaker for speaker in self.live if speaker.scope.tenant == name]:
            self.live.remove(speaker)
            self.memory.release(speaker.handle)
            for lineage in speaker.lineages:
                self.memory.drop_scope(lineage, speaker.scope)
        self.memory.drop_scope(Scope(name, "g"))
        self.memory.drop_scope(Scope(name))
        self.memory.close_tenant(name)
        assert not any(info.scope.tenant == name for info in self.memory.pages())

    @invariant()
    def every_law_holds(self) -> None:
        if hasattr(self, "memory"):
            self.memory.verify()
            for speaker in self.live:
                if speaker.pinned and not speaker.running:
                    row = self.memory.row(speaker.handle)
                    assert int((row.end - row.begin).sum()) > 0 or not speaker.spans

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.live:
            self.leave(0)
        while self.names:
            self.close_tenant(0)
        self.memory.verify()
        stats = self.memory.stats()
        assert (stats.free, stats.reserved) == (stats.total - 1, 0)


QuotaMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrderOfTenants = QuotaMachine.TestCase
