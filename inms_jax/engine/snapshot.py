"""What of an engine can outlive it: published texts and the pages of GLOBAL and GROUP text. Never anything PRIVATE.

Pages mean something to an engine that computes the same: what differs is named. Saved pages enter a memory as if they
had just been computed, by the same three calls as any others, so every rule of the memory holds for them.
Knows nothing of folders, nor of the objects that tenants and groups are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

from inms_jax.engine.request import Request, TurnStart
from inms_jax.engine.runner import Runner
from inms_jax.errors import SnapshotError
from inms_jax.memory.fingerprint import CacheIdentity
from inms_jax.memory.manager import MemoryManager, SequenceHandle
from inms_jax.memory.plan import Span
from inms_jax.memory.shared_blocks import SharedBlock, as_context, chains
from inms_jax.memory.tier import Scope

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RestoredPages:
    """How many pages of a snapshot were put back, and how many found no room."""

    restored: int
    left_out: int


def check_same(saved: Mapping[str, Any], identity: CacheIdentity, *, deterministic: bool) -> None:
    """SnapshotError naming everything in which the saved engine computed otherwise."""
    if saved.get("format") != FORMAT:
        raise SnapshotError(f"the snapshot has format {saved.get('format')!r}, this version reads {FORMAT}")
    theirs, ours = dict(saved["identity"]), asdict(identity)
    if deterministic:  # pages written outside deterministic mode need not have the bits that this engine promises
        theirs["deterministic"], ours["deterministic"] = saved["deterministic"], True
    differences = [
        f"{name}: {theirs.get(name)!r} there, {value!r} here"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if differences:
        raise SnapshotError(f"the snapshot is of an engine that computes otherwise: {'; '.join(differences)}")


def take_pages(
    memory: MemoryManager, runner: Runner, scopes: Mapping[Scope, Any]
) -> tuple[list[SharedBlock], dict[str, Shaped[np.ndarray, "P L K B W"]]]:
    """The blocks of `scopes` that others may read, and what their pages hold. Engine thread."""
    known = memory.shared_blocks()
    places: dict[int, int] = {}
    blocks: list[SharedBlock] = []
    for number, block in enumerate(known):
        if block.scope in scopes and (block.parent is None or block.parent in places):
            places[number] = len(blocks)
            parent = None if block.parent is None else places[block.parent]
            blocks.append(SharedBlock(block.page, block.scope, block.tokens, parent))
    k, v = runner.read_pages([block.page for block in blocks])
    return blocks, {"k": k, "v": v}


def put_pages(
    memory: MemoryManager,
    runner: Runner,
    blocks: Sequence[SharedBlock],
    arrays: Mapping[str, Shaped[np.ndarray, "P L K B W"]],
) -> RestoredPages:
    """Put blocks back as cached pages, as far as pages are free: nothing is evicted for them. Engine thread."""
    done: set[int] = set()
    for chain in chains(blocks):
        new = [at for at in chain if at not in done]
        stats = memory.stats()
        if len(new) > stats.free - stats.reserved:
            continue
        _put_chain(memory, runner, blocks, chain, arrays)
        done.update(new)
    return RestoredPages(len(done), len(blocks) - len(done))


def _put_chain(
    memory: MemoryManager,
    runner: Runner,
    blocks: Sequence[SharedBlock],
    chain: Sequence[int],
    arrays: Mapping[str, Shaped[np.ndarray, "P L K B W"]],
) -> None:
    context = as_context([blocks[at] for at in chain])
    starts = np.cumsum([0, *(len(span.tokens) for span in context)])
    last = blocks[chain[-1]].scope
    reader = Scope(last.tenant, last.group, "restore")
    memory.open_scope(reader)
    handle = memory.register(reader)
    try:
        if not memory.begin_turn(handle, context, max_new_tokens=0).admitted:
            raise SnapshotError(f"{len(chain)} pages of the snapshot find no room beside what runs: restore first")
        while _waiting(memory, handle, int(starts[-1])):
            chunk = memory.prefill(handle, int(starts[-1]))
            first = np.flatnonzero(np.isin(starts[:-1], chunk.positions)).tolist()
            own = [chain[at] for at in first]
            pages = chunk.write_page[starts[first] - chunk.start].tolist()
            runner.write_pages(pages, arrays["k"][own], arrays["v"][own])
            memory.commit_prefill(handle, chunk)
            if chunk.is_last:
                break
    finally:
        memory.release(handle)
        memory.close_scope(reader)


def _waiting(memory: MemoryManager, handle: SequenceHandle, length: int) -> bool:
    """Whether some of `length` tokens of the prompt are in no page yet."""
    memory.match(handle)
    usage = memory.usage(handle)
    return usage.hit_tokens + usage.computed_tokens < length


class SpotCheck:
    """The owner of one request that computes the first block of a snapshot again, as PRIVATE text of nobody.

    In deterministic mode an engine promises the bits that it would compute itself, so those of a snapshot must be
    them: another processor or another version of the compiler rounds otherwise.
    """

    def __init__(self, memory: MemoryManager, runner: Runner, tokens: tuple[int, ...], scope: Scope) -> None:
        self._memory, self._runner, self._tokens, self._scope = memory, runner, tokens, scope
        self._handle: SequenceHandle | None = None
        self._found: tuple[np.ndarray, np.ndarray] | None = None

    def start_turn(self) -> TurnStart:
        self._memory.open_scope(self._scope)
        self._handle = self._memory.register(self._scope)
        return TurnStart(self._handle, [Span(self._tokens, self._scope)], self._scope, ("spot check",))

    def end_turn(self, request: Request) -> None:
        if self._handle is None:
            return
        if request.error is None:
            self._found = self._runner.read_pages(self._memory.row(self._handle).page[:1].tolist())
        self._memory.release(self._handle)
        self._memory.close_scope(self._scope)

    def compare(self, k: Shaped[np.ndarray, "L K B W"], v: Shaped[np.ndarray, "L K B W"]) -> None:
        """SnapshotError unless these are the bits that this engine computes."""
        assert self._found is not None, "the request ended well"
        for name, saved, found in (("k", k, self._found[0][0]), ("v", v, self._found[1][0])):
            used = slice(len(self._tokens))
            differ = int((saved[:, :, used] != found[:, :, used].view(saved.dtype)).sum())
            if differ:
                raise SnapshotError(
                    f"{differ} of {saved[:, :, used].size} numbers of {name} in the first block are not those that "
                    "this engine computes: the snapshot is of another machine or version. deterministic=False takes it."
                )
