"""A pool of KV pages without a model: the value in a slot stands for the KV of one token.

The value of a token is a digest of it and all tokens before it, as KV is; beside it stands the effective scope under
which it was computed. A test applies plans to the pool and reads rows back: a reader must see the chain of its own
context, computed under no scope but its own ones. The body of a fragment has the values of its canonical context.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from inms_jax.memory.fingerprint import CacheIdentity, HashFunction
from inms_jax.memory.fragment import canonical_context
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import DecodeSlot, PrefillChunk, Row, Span, StepPlan, plan_decode, plan_prefill
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope

PREFILL, DECODE = 1, 2


def identity(block_size: int, **changes: str) -> CacheIdentity:
    fields = {"model_id": "m", "weights_version": "1", "dtype": "float32", "layout": "pkbh", "rope": "theta=1e4"}
    return CacheIdentity(block_size=block_size, **(fields | changes))


def chain(spans: Sequence[Span]) -> list[int]:
    """What each slot of a context must hold."""
    values: list[int] = []
    value = 0
    for span in spans:
        body = [] if span.root is None else chain(canonical_context(span))[-len(span.tokens) :]
        for start, end, in_place in runs(span):
            if in_place:
                for token in span.tokens[start:end]:
                    value = hash((value, token))
                    values.append(value)
            else:
                values += body[start:end]
                value = hash((value, start, *body[start:end]))
    return values


def runs(span: Span) -> list[tuple[int, int, bool]]:
    """Ranges of a span, and whether they are computed in place."""
    return [(0, len(span.tokens), True)] if span.root is None else list(span.runs())


def scopes(spans: Sequence[Span]) -> list[Scope]:
    """The effective scope of each token: the narrowest so far, the latest of that tier."""
    result: list[Scope] = []
    before: Scope | None = None
    for span in spans:
        before = span.scope if before is None or span.scope.tier >= before.tier else before
        body = [] if span.root is None else scopes(canonical_context(span))[-len(span.tokens) :]
        for start, end, in_place in runs(span):
            result += [before] * (end - start) if in_place else body[start:end]
    return result


class Device:
    """Applies step plans to simulated pages."""

    def __init__(self, num_pages: int, block_size: int) -> None:
        self.values = np.zeros((num_pages, block_size), np.int64)
        self.how = np.zeros((num_pages, block_size), np.int8)
        self.scope = np.full((num_pages, block_size), None, object)

    def run(self, plan: StepPlan, values: Sequence[int], owners: Sequence[Scope], how: int) -> None:
        """Copies first, all sources read before any destination is written; then one value per used token."""
        used = plan.copy_dst > 0
        for array in (self.values, self.how, self.scope):
            array[plan.copy_dst[used]] = array[plan.copy_src[used]]
        for i, (value, owner) in enumerate(zip(values, owners, strict=True)):
            if plan.write_page[i]:
                place = plan.write_page[i], plan.write_slot[i]
                self.values[place], self.how[place], self.scope[place] = value, how, owner

    def poison(self, memory: MemoryManager) -> None:
        """Overwrite every page that is not in use."""
        used = [info.page for info in memory.pages()]
        free = np.setdiff1d(np.arange(len(self.values)), used)
        self.values[free] = -1
        self.how[free] = 0
        self.scope[free] = None

    def read(self, row: Row) -> tuple[list[int], list[int], set[Scope]]:
        """What a row sees: values in its order, how they were written, and under which scopes."""
        values: list[int] = []
        how: list[int] = []
        owners: set[Scope] = set()
        shifts = np.zeros(len(row), np.int32) if row.shift is None else row.shift
        for page, begin, end, position, shift in zip(row.page, row.begin, row.end, row.position, shifts, strict=True):
            assert begin < end
            assert position + begin + shift == len(values)
            values += self.values[page, begin:end].tolist()
            how += self.how[page, begin:end].tolist()
            owners |= set(self.scope[page, begin:end])
        return values, how, owners


class Lab:
    """A manager with a simulated device and short verbs."""

    def __init__(
        self,
        *,
        num_pages: int = 33,
        block_size: int = 4,
        scopes: Sequence[Scope] = (),
        caching: bool = True,
        provisional: bool = True,
        pool_mode: str = "elastic",
        hash_function: HashFunction | None = None,
    ) -> None:
        self.memory = MemoryManager(
            num_pages=num_pages,
            block_size=block_size,
            identity=identity(block_size),
            enable_prefix_caching=caching,
            provisional_decode=provisional,
            pool_mode=pool_mode,
            hash_function=hash_function,
        )
        self.device = Device(num_pages, block_size)
        # Pages in host memory, by key.
        self.host: dict[bytes, list[Any]] = {}
        for scope in scopes:
            self.memory.open_scope(scope)

    def download(self, pages: list[int], keys: list[bytes]) -> None:
        device = self.device
        for page, key in zip(pages, keys, strict=True):
            self.host[key] = [array[page].copy() for array in (device.values, device.how, device.scope)]

    def upload(self, pages: list[int], keys: list[bytes]) -> None:
        device = self.device
        for page, key in zip(pages, keys, strict=True):
            arrays: tuple[Any, ...] = (device.values, device.how, device.scope)
            for array, kept in zip(arrays, self.host[key], strict=True):
                array[page] = kept

    def apply_prefill(self, handle: SequenceHandle, chunk: PrefillChunk, spans: Sequence[Span]) -> None:
        row = self.memory.row(handle)
        plan = plan_prefill(
            chunk, row, num_tokens=len(chunk.tokens) + 1, num_entries=len(row) + 1, num_copies=len(chunk.copies)
        )
        flat = [token for span in spans for token in span.tokens]
        values, owners = chain(spans), scopes(spans)
        assert chunk.tokens.tolist() == [flat[i] for i in chunk.positions]
        self.device.run(plan, [values[i] for i in chunk.positions], [owners[i] for i in chunk.positions], PREFILL)

    def apply_decode(
        self, handles: Sequence[SequenceHandle], slots: Sequence[DecodeSlot], contexts: Sequence[Sequence[Span]]
    ) -> None:
        """`contexts` end with the token that is decoded."""
        rows = [self.memory.row(handle) for handle in handles]
        plan = plan_decode(
            slots,
            rows,
            num_rows=len(slots) + 1,
            num_entries=max((len(row) for row in rows), default=1),
            num_copies=sum(len(slot.copies) for slot in slots),
        )
        values = [chain(spans)[-1] for spans in contexts]
        self.device.run(plan, values, [scopes(spans)[-1] for spans in contexts], DECODE)

    def prompt(self, handle: SequenceHandle, spans: Sequence[Span], *, budget: int = 1000) -> int:
        """Prefill a whole context that nobody else is computing; the number of tokens computed."""
        computed = 0
        while True:
            self.memory.restore(handle, self.upload)
            assert self.memory.match(handle).status == "ready"
            chunk = self.memory.prefill(handle, budget)
            self.apply_prefill(handle, chunk, spans)
            self.memory.commit_prefill(handle, chunk)
            self.memory.verify()
            computed += len(chunk.tokens)
            if chunk.is_last:
                self.check(handle, spans)
                return computed

    def begin(
        self,
        handle: SequenceHandle,
        spans: Sequence[Span],
        *,
        new: int = 4,
        branches: int = 1,
        scope: Scope | None = None,
    ) -> None:
        admission = self.memory.begin_turn(handle, spans, max_new_tokens=new, branches=branches, new_scope=scope)
        if admission.missing:
            encoders = [self.encode(context) for context in admission.missing]
            admission = self.memory.begin_turn(handle, spans, max_new_tokens=new, branches=branches, new_scope=scope)
            for encoder in encoders:
                self.memory.release(encoder)
        assert admission.admitted, admission
        self.memory.verify()

    def encode(self, context: Sequence[Span]) -> SequenceHandle:
        """Compute a canonical context; the sequence that holds it."""
        encoder = self.memory.register(context[-1].scope)
        self.turn(encoder, context, context[-1].scope)
        return encoder

    def say(self, handle: SequenceHandle, spans: Sequence[Span], tokens: Sequence[int], scope: Scope) -> list[Span]:
        """Decode `tokens` after a prefilled context; the context with them."""
        for token in tokens:
            spans = [*spans, Span((token,), scope)]
            slot = self.memory.decode(handle, token)
            self.apply_decode([handle], [slot], [spans])
            self.memory.commit_decode(handle)
            self.memory.verify()
        self.check(handle, spans)
        return list(spans)

    def turn(
        self,
        handle: SequenceHandle,
        spans: Sequence[Span],
        scope: Scope,
        *,
        answer: Sequence[int] = (),
        budget: int = 1000,
    ) -> list[Span]:
        """A whole turn; the history after it."""
        self.begin(handle, spans, new=len(answer))
        self.prompt(handle, spans, budget=budget)
        spans = self.say(handle, spans, answer, scope)
        self.memory.end_turn(handle, keep=True, history_len=sum(len(span.tokens) for span in spans))
        self.memory.verify()
        return spans

    def check(self, handle: SequenceHandle, spans: Sequence[Span]) -> None:
        """The sequence sees exactly its own context."""
        self.device.poison(self.memory)
        values, _, owners = self.device.read(self.memory.row(handle))
        assert values == chain(spans)[: len(values)]
        assert owners <= set(scopes(spans))

    def pages(self, handle: SequenceHandle) -> list[int]:
        return [int(page) for page in self.memory.row(handle).page]
