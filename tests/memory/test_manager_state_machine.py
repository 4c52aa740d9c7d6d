"""All operations in any order, against plain lists: what is read back, what is held, what is conserved."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inms_jax.errors import CapacityError, StateError
from inms_jax.memory.plan import Span
from inms_jax.memory.prediction import Context, Piece, predict_pages
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope, Tier
from tests.memory.simulation import DECODE, PREFILL, Lab, chain

TENANT = Scope("t#1")
GROUP = Scope("t#1", "g#1")
PUBLISHED = (
    Span((7, 8, 9, 7, 8), TENANT, published=True),
    Span((5, 5, 6, 6), TENANT, published=True),
    Span((3, 4, 3), GROUP, published=True),
    Span((3, 4, 3, 3, 4, 4, 3), GROUP, published=True),
)
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)

WHICH = st.integers(0, 30)
RARELY = st.sampled_from([False, False, False, False, False, False, False, True])


def has(*phases: str) -> Callable[["MemoryMachine"], bool]:
    return lambda self: any(model.phase in phases for model in self.live)


@dataclass(eq=False)
class Model:
    """What one sequence should be: its spans, of which the first `written` tokens have KV."""

    handle: SequenceHandle
    scope: Scope
    spans: list[Span]
    holder: int
    # Equal identities are equal tokens of one computation; what decode wrote is like nothing else.
    identities: list[object] = field(default_factory=list)
    written: int = 0
    lineages: frozenset[Scope] = frozenset()
    phase: str = "idle"
    before: int = 0
    room: int = 0
    branches_left: int = 0
    computed: int = 0
    # Its last page may be in use beyond its own tokens, so that the page count is a bound only.
    ragged: bool = False
    ttl: float | None = None
    used: int = 0
    paused_until: int | None = None
    # None, "paused" or "offloaded".
    pause: str | None = None

    @property
    def length(self) -> int:
        return sum(len(span.tokens) for span in self.spans)


class MemoryMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(12, 40),
        block_size=st.integers(2, 5),
        caching=st.sampled_from([True, True, False]),
        provisional=st.sampled_from([True, True, False]),
    )
    def start(self, num_pages: int, block_size: int, caching: bool, provisional: bool) -> None:
        self.caching, self.provisional, self.block_size = caching, provisional, block_size
        self.lab = Lab(
            num_pages=num_pages,
            block_size=block_size,
            scopes=[TENANT, GROUP],
            caching=caching,
            provisional=provisional,
        )
        self.memory = self.lab.memory
        self.live: list[Model] = []
        self.open = {TENANT, GROUP}
        self.numbers = itertools.count()
        self.now = 0
        self.exact = caching
        for _ in range(3):
            self.register(False)

    def private_scope(self) -> Scope:
        scope = Scope("t#1", "g#1", f"a#{next(self.numbers)}")
        self.memory.open_scope(scope)
        self.open.add(scope)
        return scope

    def pick(self, which: int, *phases: str) -> Model:
        able = [model for phase in phases for model in self.live if model.phase == phase]
        return able[which % len(able)]

    # Life

    @precondition(lambda self: len(self.live) < 6)
    @rule(shared=st.booleans())
    def register(self, shared: bool) -> None:
        private = [model.scope for model in self.live if model.scope in self.open]
        # A second sequence of one owner: what plain requests of the built-in owner are.
        scope = private[0] if shared and private else self.private_scope()
        model = Model(self.memory.register(scope), scope, [], next(self.numbers), lineages=frozenset([scope]))
        self.live.append(model)

    @precondition(has("idle"))
    @rule(
        which=WHICH,
        heads=st.lists(st.integers(0, 3), max_size=3),
        text=tokens_strategy,
        published_last=st.sampled_from([None, None, 0, 3]),
        cut=st.sampled_from([None, None, None, 1, 3]),
        new=st.integers(0, 6),
        branches=st.sampled_from([1, 1, 2, 3]),
        new_lineage=st.sampled_from([False, False, False, True]),
    )
    def begin(self, which, heads, text, published_last, cut, new, branches, new_lineage) -> None:
        model = self.pick(which, "idle")
        if model.scope not in self.open:
            return
        scope = self.private_scope() if new_lineage else model.scope
        spans = list(model.spans)
        if cut is not None and len(spans) >= cut:
            del spans[-cut:]
        if not spans:
            spans = [PUBLISHED[i] for i in sorted(heads)]
        if published_last is not None:
            spans.append(PUBLISHED[published_last])
        if cut != 1 or not spans:
            spans.append(Span(text, scope))
        before = self.memory.stats(), self.memory.pages(), self.lab.pages(model.handle)
        try:
            admission = self.memory.begin_turn(
                model.handle, spans, max_new_tokens=new, branches=branches, new_scope=scope
            )
        except CapacityError:
            assert before == (self.memory.stats(), self.memory.pages(), self.lab.pages(model.handle))
            return
        if not admission.admitted:
            assert admission.needed > admission.available
            assert before == (self.memory.stats(), self.memory.pages(), self.lab.pages(model.handle))
            assert any(other.phase != "idle" or other.pause == "paused" for other in self.live)
            return
        model.before = min(model.length, sum(len(span.tokens) for span in spans))
        model.scope, model.spans, model.phase = scope, spans, "prefill"
        model.pause = None
        model.lineages |= {scope}
        model.room, model.branches_left, model.computed = new, branches - 1, 0
        model.identities = [token for span in spans for token in span.tokens]
        for other in self.live:
            if other.phase == "idle" and not self.lab.pages(other.handle):
                other.written = 0

    @precondition(has("prefill"))
    @rule(which=WHICH, budget=st.integers(1, 9))
    def prefill(self, which: int, budget: int) -> None:
        self.prefill_chunk(self.pick(which, "prefill"), budget)

    def prefill_chunk(self, model: Model, budget: int) -> bool:
        self.memory.restore(model.handle, self.lab.upload)
        self.memory.verify()
        if self.memory.match(model.handle).status == "wait":
            assert self.caching
            assert any(other.phase == "prefill" for other in self.live if other is not model)
            return False
        chunk = self.memory.prefill(model.handle, budget)
        assert 1 <= len(chunk.tokens) <= budget
        assert len(chunk.copies) <= 1
        self.lab.apply_prefill(model.handle, chunk, model.spans)
        self.memory.verify()
        self.memory.commit_prefill(model.handle, chunk)
        wrote = bool(chunk.write_page.any())
        model.computed += len(chunk.tokens)
        if wrote:
            model.holder = next(self.numbers)
        if chunk.is_last:
            model.phase, model.written = "active", model.length
            model.ragged = not wrote
            usage = self.memory.usage(model.handle)
            assert usage.cached_tokens == model.length - model.computed or not wrote
            assert usage.cached_tokens <= model.length - 1
            assert usage.computed_tokens == model.computed
            _, how, _ = self.lab.device.read(self.memory.row(model.handle))
            assert len(how) == model.length
            if self.provisional:
                assert set(how) == {PREFILL}
        return True

    @precondition(has("prefill"))
    @rule()
    def finish_prompts(self) -> None:
        """Whoever waits, somebody can go on."""
        while waiting := [model for model in self.live if model.phase == "prefill"]:
            progress = [self.prefill_chunk(model, 4) for model in waiting]
            assert any(progress)

    @precondition(has("active"))
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def decode_step(self, tokens: list[int]) -> None:
        batch = [model for model in self.live if model.phase == "active" and model.room]
        batch = batch[: len(tokens)]
        slots = []
        for model, token in zip(batch, tokens, strict=False):
            slots.append(self.memory.decode(model.handle, token))
            self.memory.verify()
            model.spans.append(Span((token,), model.scope))
            model.identities.append(("decoded", next(self.numbers)) if self.provisional else token)
            model.holder = next(self.numbers)
            model.room -= 1
            model.written += 1
            assert slots[-1].position == model.written - 1
            if slots[-1].copies or slots[-1].slot == 0:
                model.ragged = False
        self.lab.apply_decode([model.handle for model in batch], slots, [model.spans for model in batch])
        for model in batch:
            self.memory.commit_decode(model.handle)

    @precondition(lambda self: any(model.branches_left for model in self.live if model.phase == "active"))
    @rule()
    def branch(self) -> None:
        model = next(model for model in self.live if model.phase == "active" and model.branches_left)
        model.branches_left -= 1
        handle = self.memory.fork(model.handle, model.scope, reserve_from_parent=True)
        self.copy_of(model, handle, model.scope, model.phase)

    @precondition(lambda self: 0 < len(self.live) < 8)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        model = self.live[which % len(self.live)]
        if model.scope not in self.open:
            return
        before = self.memory.stats()
        scope = self.private_scope()
        try:
            handle = self.memory.fork(model.handle, scope)
        except CapacityError:
            assert model.phase != "idle"
            return
        assert (self.memory.stats().held, self.memory.stats().copies) == (before.held, before.copies)
        self.copy_of(model, handle, scope, "idle").ragged |= model.phase == "prefill"

    def copy_of(self, model: Model, handle: SequenceHandle, scope: Scope, phase: str) -> Model:
        child = Model(
            handle,
            scope,
            list(model.spans),
            model.holder,
            identities=list(model.identities),
            written=model.written,
            lineages=model.lineages | {scope},
            phase=phase,
            before=model.before,
            room=model.room,
            ragged=model.ragged,
        )
        self.live.append(child)
        return child

    @precondition(has("prefill", "active"))
    @rule(which=WHICH, keep=st.sampled_from([True, True, False]), planned=st.booleans())
    def end_turn(self, which: int, keep: bool, planned: bool) -> None:
        model = self.pick(which, "active", "prefill")
        keep = keep and model.phase == "active"
        if planned and not keep:
            # The engine planned a step and failed before it could dispatch it.
            if model.phase == "prefill" and self.memory.match(model.handle).status == "ready":
                self.memory.prefill(model.handle, 5)
            elif model.phase == "active" and model.room:
                self.memory.decode(model.handle, 1)
        history = model.length if keep else model.before
        self.memory.end_turn(model.handle, keep=keep, history_len=history)
        if not keep:
            self.cut(model, history)
            model.ragged = True
        model.phase, model.branches_left = "idle", 0

    def cut(self, model: Model, length: int) -> None:
        spans: list[Span] = []
        for span in model.spans:
            taken = span.tokens[: max(0, length - sum(len(s.tokens) for s in spans))]
            if taken:
                spans.append(Span(taken, span.scope, span.published and taken == span.tokens))
        model.spans = spans
        model.identities = model.identities[:length]

    @precondition(lambda self: len(self.live) > 3)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        model = self.live.pop(which % len(self.live))
        self.memory.release(model.handle)

    @precondition(has("idle"))
    @rule(which=WHICH, really=RARELY)
    def drop(self, which: int, really: bool) -> None:
        if really:
            model = self.pick(which, "idle")
            if model.pause == "paused":
                with pytest.raises(StateError, match="'paused'"):
                    self.memory.drop(model.handle)
                return
            self.memory.drop(model.handle)
            model.written = 0
            assert self.lab.pages(model.handle) == []

    @precondition(has("idle"))
    @rule(which=WHICH, ttl=st.sampled_from([None, 2, 5]))
    def pause(self, which: int, ttl: int | None) -> None:
        model = self.pick(which, "idle")
        if model.pause == "offloaded":
            with pytest.raises(StateError):
                self.memory.pause(model.handle, None)
            return
        until = None if ttl is None else self.now + ttl
        self.memory.pause(model.handle, until)
        model.pause, model.paused_until = "paused", until

    @precondition(lambda self: any(model.pause for model in self.live))
    @rule(which=WHICH, offload=st.booleans(), fails=RARELY)
    def offload_or_resume(self, which: int, offload: bool, fails: bool) -> None:
        able = [model for model in self.live if model.pause]
        model = able[which % len(able)]
        if not offload:
            self.memory.resume(model.handle)
            model.pause = None
        elif model.pause == "paused":
            if fails:
                pages = self.lab.pages(model.handle)
                with contextlib.suppress(MemoryError):
                    self.memory.offload(model.handle, self.fail)
                    assert not self.memory.stats().offloaded or model.pause  # there was nothing to copy
                    model.pause = "offloaded"
                assert self.lab.pages(model.handle) == pages or model.pause == "offloaded"
            else:
                self.memory.offload(model.handle, self.lab.download)
                model.pause = "offloaded"
            row = self.memory.row(model.handle)
            model.written = int((row.end - row.begin).sum())

    def fail(self, pages: list[int], keys: list[bytes]) -> None:
        raise MemoryError(f"no room for {len(pages)} pages")

    @precondition(lambda self: self.live)
    @rule(which=WHICH, ttl=st.sampled_from([None, 1, 3]))
    def lease(self, which: int, ttl: int | None) -> None:
        model = self.live[which % len(self.live)]
        self.memory.lease(model.handle, ttl, self.now)
        model.ttl, model.used = ttl, self.now

    @precondition(lambda self: len(self.live) > 3)
    @rule(passed=st.integers(0, 4))
    def sweep(self, passed: int) -> None:
        self.now += passed
        found = self.memory.sweep(self.now)
        idle = [model for model in self.live if model.phase == "idle"]
        over = {m.handle for m in idle if m.ttl is not None and self.now - m.used >= m.ttl}
        assert {expired.handle for expired in found.expired} == over
        for model in self.live:
            if model.phase != "idle":
                model.used = self.now
        self.live = [model for model in self.live if model.handle not in over]
        for model in self.live:
            if model.pause == "paused" and model.paused_until is not None and self.now >= model.paused_until:
                assert model.handle in found.resumed
                model.pause = None

    @precondition(lambda self: self.memory.stats().cached)
    @rule()
    def evict_cached(self) -> None:
        cached = self.memory.stats().cached
        assert self.memory.evict_cached() == cached
        assert self.memory.stats().cached == 0

    @precondition(lambda self: self.live)
    @rule(which=WHICH, really=RARELY)
    def close_scope(self, which: int, really: bool) -> None:
        if not really:
            return
        scopes = sorted(self.open, key=str)
        scope = scopes[which % len(scopes)]
        self.memory.close_scope(scope)
        self.open.remove(scope)
        self.exact = False
        if scope.tier is not Tier.PRIVATE:
            self.memory.open_scope(scope)
            self.open.add(scope)
        assert not [info for info in self.memory.pages() if info.scope == scope and info.state.value == "cached"]

    # What always holds

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.verify()
        stats = self.memory.stats()
        assert stats.free + stats.cached + stats.held + stats.fenced == stats.total - 1
        if not self.live:
            assert (stats.held, stats.reserved) == (0, 0)
            self.exact = self.caching

    @invariant()
    def every_row_reads_its_own_context(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.lab.device.poison(self.memory)
        for model in self.live:
            values, how, owners = self.lab.device.read(self.memory.row(model.handle))
            assert owners <= {TENANT, GROUP} | model.lineages
            assert values == chain(model.spans)[: len(values)]
            if model.phase == "active" or (model.phase == "idle" and not model.ragged):
                assert len(values) in ({model.written} if model.phase == "active" else {model.written, 0})
            assert set(how) <= {PREFILL, DECODE}

    @invariant()
    def pages_are_predicted(self) -> None:
        if not hasattr(self, "memory") or not self.exact:
            return
        if any(model.phase == "prefill" or model.ragged for model in self.live):
            return
        contexts = [Context(self.pieces(model), model.holder) for model in self.live]
        assert self.memory.stats().held == predict_pages(contexts, self.block_size)

    def pieces(self, model: Model) -> tuple[Piece, ...]:
        """One piece per token, so that texts that begin alike need no common name."""
        written = int(np.sum(self.memory.row(model.handle).end))
        pieces = []
        for span in model.spans:
            for i in range(len(span.tokens)):
                last = i == len(span.tokens) - 1
                pieces.append((1, int(span.scope.tier), span.scope, span.published and last))
        return tuple(
            Piece(identity, *piece) for identity, piece in zip(model.identities[:written], pieces, strict=False)
        )

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for model in self.live:
            self.memory.release(model.handle)
        for scope in self.open:
            self.memory.close_scope(scope)
        self.memory.verify()
        stats = self.memory.stats()
        assert (stats.free, stats.reserved) == (stats.total - 1, 0)


MemoryMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrderOfOperations = MemoryMachine.TestCase
