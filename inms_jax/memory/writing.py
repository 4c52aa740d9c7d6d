"""Planning and committing writes: which page and slot each token goes to, copy-on-write, sealing, claims.

Works on one sequence at a time over the page store. Knows nothing of handles, admission or stepping order.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from inms_jax.errors import InvalidRequestError, StateError
from inms_jax.memory.fragment import between, first_shifted, positions
from inms_jax.memory.index import Node
from inms_jax.memory.lifecycle import SEQUENCE_TRANSITIONS, PageState, SequenceEvent, advance
from inms_jax.memory.plan import NULL_PAGE, Copy, DecodeSlot, PrefillChunk
from inms_jax.memory.policy import MissReason
from inms_jax.memory.reservation import rebook, spend_copy
from inms_jax.memory.sequence import Pending, Sequence
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Tier

Move: TypeAlias = Callable[[list[int], list[bytes]], None]
"""Copies pages to or from host memory, each under a key."""


class Writer:
    """The rules of writing into pages."""

    def __init__(self, store: PageStore, *, provisional_decode: bool) -> None:
        self._store = store
        self._provisional_decode = provisional_decode

    def advance_hits(self, seq: Sequence) -> int:
        """Retain the indexed blocks that come next; the number of tokens that need not be computed for it."""
        before = seq.written
        while seq.written < seq.context_length:
            block = seq.layout.block_at(seq.written)
            page = self._store.indexed(seq.node(block))
            if page is None:
                break
            self._store.retain(page)
            if block < len(seq.pages):
                # Begun here, finished by another meanwhile.
                self._store.let_go(seq.pages.pop())
                seq.copy_reserved = 0
            seq.pages.append(page)
            seq.written = seq.prefilled = seq.layout.ends[block]
        seq.hit_tokens += seq.written - before
        rebook(self._store, seq)
        self._release_claims(seq)
        return seq.written - before

    def is_claimed(self, seq: Sequence, block: int) -> bool:
        """Whether another sequence is computing this block."""
        node = seq.node(block)
        if node is None or not self._store.shares(node):
            return False
        return node.claimant is not None and node.claimant != seq.handle.id

    def plan_prefill(self, seq: Sequence, budget: int, sequences: Iterable[Sequence]) -> PrefillChunk:
        start, length = seq.written, seq.context_length
        if start == length:
            chunk = PrefillChunk(
                tokens=seq.tokens[length - 1 : length].copy(),
                start=length - 1,
                positions=positions(seq.bodies, np.array([length - 1], np.int32)),
                write_page=np.array([NULL_PAGE], np.int32),
                write_slot=np.zeros(1, np.int32),
                copies=(),
                is_last=True,
            )
            seq.pending = Pending(chunk, length, 1, Counter())
            return chunk
        first = seq.layout.block_at(start)
        if self.is_claimed(seq, first):
            raise StateError(
                f"{seq.name} waits for tokens {start}..{seq.layout.ends[first] - 1}, which another sequence is "
                "computing: ask match() until it is ready."
            )
        end = self._chunk_end(seq, first, min(start + budget, length))
        last = seq.layout.block_at(end - 1)
        misses = Counter[MissReason]()
        for block in range(first, last + 1):
            low, high = max(start, seq.layout.starts[block]), min(end, seq.layout.ends[block])
            misses.update(self._miss_reasons(seq, block, low, high))
        copies = self._open_pages(seq, first, last, sequences)
        for block in range(first, last + 1):
            node = seq.node(block)
            if node is not None and node.claimant is None and self._store.shares(node):
                node.claimant = seq.handle.id
                seq.claims.append(node)
        numbers = np.arange(start, end, dtype=np.int32)
        blocks = np.searchsorted(seq.layout.start_array, numbers, side="right") - 1
        chunk = PrefillChunk(
            tokens=seq.tokens[start:end].copy(),
            start=start,
            positions=positions(seq.bodies, numbers),
            write_page=np.array(seq.pages, np.int32)[blocks],
            write_slot=numbers - seq.layout.start_array[blocks],
            copies=copies,
            is_last=end == length,
        )
        seq.pending = Pending(chunk, end, end - start, misses)
        return chunk

    def commit_prefill(self, seq: Sequence, chunk: PrefillChunk) -> Pending:
        pending = seq.pending
        if pending is None or pending.plan is not chunk:
            planned = "nothing is planned" if pending is None else f"a step to token {pending.end} is planned"
            raise StateError(
                f"{seq.name} cannot commit tokens {chunk.start}..{chunk.start + len(chunk.tokens) - 1}: {planned}."
            )
        first = seq.layout.block_at(chunk.start)
        self._finish(seq, pending)
        seq.written = seq.prefilled = pending.end
        seq.computed_tokens += pending.computed
        seq.misses.update(pending.misses)
        self.seal_blocks(seq, range(first, seq.layout.blocks_before(pending.end)))
        self._release_claims(seq)
        return pending

    def plan_decode(self, seq: Sequence, token: int, sequences: Iterable[Sequence]) -> DecodeSlot:
        position = seq.written
        if position >= len(seq.tokens):
            raise InvalidRequestError(
                f"{seq.name} began its turn with {seq.context_length} tokens of context and room for "
                f"{len(seq.tokens) - seq.context_length} new ones: token {position} is past the end."
            )
        block = seq.layout.block_at(position)
        copies = self._open_pages(seq, block, block, sequences)
        seq.tokens[position] = token
        place = int(positions(seq.bodies, np.array([position], np.int32))[0])
        slot = DecodeSlot(token, place, seq.pages[block], position - seq.layout.starts[block], copies)
        seq.pending = Pending(slot, position + 1, 0, Counter())
        return slot

    def commit_decode(self, seq: Sequence) -> Pending:
        pending = seq.pending
        if pending is None or not isinstance(pending.plan, DecodeSlot):
            raise StateError(f"{seq.name} has no planned decode step to commit.")
        self._finish(seq, pending)
        seq.written = pending.end
        if not self._provisional_decode:
            seq.prefilled = pending.end
            block = seq.layout.block_at(pending.end - 1)
            if seq.layout.ends[block] == pending.end and seq.layout.closed[block]:
                self._extend_nodes(seq, block)
                self.seal_blocks(seq, range(block, block + 1))
        return pending

    def offload(self, seq: Sequence, download: Move) -> int:
        """Have complete private blocks that nobody else holds copied, and let go of everything from the first on."""
        after = advance(SEQUENCE_TRANSITIONS, seq.state, SequenceEvent.OFFLOAD, seq.name)
        found = [(block, node) for block in range(len(seq.pages)) if (node := self._own_block(seq, block)) is not None]
        if found:
            download([seq.pages[block] for block, _ in found], [node.digest for _, node in found])
            self.truncate(seq, seq.layout.starts[found[0][0]], superseded=True)
            rebook(self._store, seq)
        seq.offloaded.update((node, None) for _, node in found)
        seq.state = after
        return len(found)

    def _own_block(self, seq: Sequence, block: int) -> Node | None:
        """The node of a sealed PRIVATE block that nobody else holds."""
        node, page = seq.node(block), seq.pages[block]
        if node is None or node.page != page or node.scope.tier is not Tier.PRIVATE:
            return None
        return node if self._store.pool.references(page) == 1 else None

    def restore(self, seq: Sequence, upload: Move) -> int:
        """Take pages for the blocks that come next and were offloaded, have them filled, and seal them."""
        before = seq.written
        self.advance_hits(seq)
        block = seq.layout.block_at(seq.written)
        if seq.written >= seq.context_length or seq.layout.starts[block] != seq.written or block < len(seq.pages):
            return 0
        nodes: list[Node] = []
        for node in seq.nodes[block:]:
            if node is None or node not in seq.offloaded or not self._store.shares(node) or node.page is not None:
                break
            nodes.append(node)
        if nodes:
            pages = self._store.take([node.scope for node in nodes])
            try:
                upload(pages, [node.digest for node in nodes])
            except BaseException:
                for page in pages:
                    self._store.let_go(page)
                raise
            seq.pages += pages
            seq.written = seq.prefilled = seq.layout.ends[block + len(nodes) - 1]
            seq.hit_tokens += seq.written - seq.layout.starts[block]
            rebook(self._store, seq)
            self.seal_blocks(seq, range(block, block + len(nodes)))
        return seq.written - before

    def cancel(self, seq: Sequence) -> None:
        """Take back what was planned but not committed, and every claim."""
        pending, seq.pending = seq.pending, None
        if pending is not None and pending.plan.copies:
            # The copy may not have been made: nothing of its page can be relied on.
            block = seq.layout.block_at(seq.written)
            seq.written = min(seq.written, seq.layout.starts[block])
            seq.prefilled = min(seq.prefilled, seq.written)
            for copy in pending.plan.copies:
                self._store.end_read(copy.source)
        for node in seq.claims:
            node.claimant = None
        seq.claims.clear()

    def truncate(self, seq: Sequence, length: int, *, superseded: bool = False) -> None:
        """Keep at most `length` tokens; pages without one of them are let go, the last first."""
        seq.written = min(seq.written, length)
        seq.prefilled = min(seq.prefilled, seq.written)
        seq.tokens = seq.tokens[: seq.written].copy()
        blocks = seq.layout.blocks_before(seq.written)
        for page in reversed(seq.pages[blocks:]):
            # Later blocks are found only through earlier ones, so they are the first to be evicted.
            self._store.let_go(page, superseded=superseded)
        del seq.pages[blocks:]
        needed = sum(body.at < seq.written for body in seq.bodies)
        for pages in seq.body_pages[needed:]:
            for page in reversed(pages):
                self._store.let_go(page)
        del seq.body_pages[needed:]

    def seal_blocks(self, seq: Sequence, blocks: Iterable[int]) -> None:
        """Publish those of the blocks that are complete and written by prefill."""
        for block in blocks:
            node, page = seq.node(block), seq.pages[block]
            if node is None or not self._store.shares(node) or seq.layout.ends[block] > seq.prefilled:
                continue
            if self._store.pool.state(page) is not PageState.FILLING:
                continue
            if node.page is None:
                self._store.seal(node, page)
            elif self._store.writable(page):
                # Computed twice: the table is pointed at the indexed page before this one is given up.
                self._store.retain(node.page)
                seq.pages[block] = node.page
                self._store.let_go(page)

    def _chunk_end(self, seq: Sequence, first: int, end: int) -> int:
        """Where the chunk must end: before a block that is, or will be, there, and before the first relocated page.

        Whether a chunk sees relocated pages decides which program computes it, so a token's must always be the same.
        """
        moved = first_shifted(seq.bodies)
        if moved is not None and seq.written < moved:
            end = min(end, moved)
        for block in range(first + 1, len(seq.layout.starts)):
            if seq.layout.starts[block] >= end:
                break
            node = seq.node(block)
            if self._store.indexed(node) is not None or self.is_claimed(seq, block) or node in seq.offloaded:
                return seq.layout.starts[block]
        return end

    def _open_pages(self, seq: Sequence, first: int, last: int, sequences: Iterable[Sequence]) -> tuple[Copy, ...]:
        """Make blocks first..last writable: new pages, and a copy where one is held that may not be written."""
        held = first < len(seq.pages)
        source = seq.pages[first] if held and not self._store.writable(seq.pages[first]) else None
        fresh = range(first + held, last + 1)
        owners = [seq.layout.scopes[block] for block in ([first, *fresh] if source is not None else fresh)]
        taken = self._store.take(owners)
        copies: tuple[Copy, ...] = ()
        if source is not None:
            spend_copy(self._store, sequences, seq, source)
            self._store.begin_read(source)
            seq.pages[first] = taken.pop(0)
            copies = (Copy(source, seq.pages[first]),)
        elif held:
            seq.copy_reserved = 0  # it writes in place
        seq.pages += taken
        rebook(self._store, seq)
        return copies

    def _extend_nodes(self, seq: Sequence, block: int) -> None:
        """Give the blocks up to one that decode has filled their nodes."""
        if not self._store.caching:
            return
        for index in range(len(seq.nodes), block + 1):
            parent = seq.nodes[index - 1] if index else None
            if index and parent is None:
                seq.nodes.append(None)
                continue
            start, end = seq.layout.starts[index], seq.layout.ends[index]
            tokens = seq.tokens[start:end].tobytes()
            inside = between(seq.bodies, start, end)
            seq.nodes.append(self._store.index.intern(parent, seq.layout.scopes[index], tokens, *inside))

    def _miss_reasons(self, seq: Sequence, block: int, low: int, high: int) -> dict[MissReason, int]:
        """Why tokens low .. high - 1, all of one block, are computed."""
        reason = self._miss_reason(seq, block)
        if reason in (MissReason.DISABLED, MissReason.EVICTED):
            return {reason: high - low}
        moved = sum(max(0, min(end, high) - max(start, low)) for start, end in seq.displaced)
        counts = {reason: high - low - moved, MissReason.POSITION: moved}
        return {reason: tokens for reason, tokens in counts.items() if tokens}

    def _miss_reason(self, seq: Sequence, block: int) -> MissReason:
        if not self._store.caching:
            return MissReason.DISABLED
        node = seq.node(block)
        if node is not None:
            return self._store.index.miss_reason(node)
        return MissReason.NO_PREFIX if block < len(seq.nodes) else MissReason.SUB_BLOCK

    def _finish(self, seq: Sequence, pending: Pending) -> None:
        seq.pending = None
        for copy in pending.plan.copies:
            self._store.end_read(copy.source)

    def _release_claims(self, seq: Sequence) -> None:
        """Claims end when the block is indexed, by whomever."""
        open_claims = [node for node in seq.claims if node.page is None]
        for node in seq.claims:
            if node.page is not None:
                node.claimant = None
        seq.claims = open_claims
