"""The manager's record of one sequence: its tokens, its blocks, the pages it holds and what its turn reserved.

The one mutable record per sequence; only the manager changes it. Knows nothing of reference counts or keys of others.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from inms_jax.memory.fragment import Body, row_with_bodies
from inms_jax.memory.index import Node
from inms_jax.memory.layout import Layout, lay_out
from inms_jax.memory.lease import Lease
from inms_jax.memory.lifecycle import SequenceState
from inms_jax.memory.plan import DecodeSlot, PrefillChunk, Row
from inms_jax.memory.policy import MissReason
from inms_jax.memory.quota import Book
from inms_jax.memory.stats import SequenceHandle, TurnUsage
from inms_jax.memory.tier import Scope


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A planned step that was not committed yet; `end` is the number of tokens written after it."""

    plan: PrefillChunk | DecodeSlot
    end: int
    computed: int
    misses: Counter[MissReason]


def _empty_layout() -> Layout:
    return lay_out([], 1)


def _no_tokens() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """Invariant: `pages` are those of the first blocks of `layout`, one each, without a gap.

    Layout, tokens and all counts are of the own text: the context without the bodies of its fragments, whose pages
    are in `body_pages`, those of the first bodies, without a gap.
    """

    handle: SequenceHandle
    scope: Scope
    readable: frozenset[Scope]
    state: SequenceState = SequenceState.NEW
    layout: Layout = field(default_factory=_empty_layout)
    # Tokens of the context, then room for those that decode writes.
    tokens: np.ndarray = field(default_factory=_no_tokens)
    context_length: int = 0
    # One per complete block of the context; None where a key collided.
    nodes: list[Node | None] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    bodies: tuple[Body, ...] = ()
    body_pages: list[tuple[int, ...]] = field(default_factory=list)
    # Own tokens of published text that stands behind text of a narrower tier.
    displaced: tuple[tuple[int, int], ...] = ()
    # Tokens whose KV is in the pages, and the first of them that prefill did not write.
    written: int = 0
    prefilled: int = 0
    pending: Pending | None = None
    claims: list[Node] = field(default_factory=list)
    # Pages set aside besides those for blocks: for a copy of the page written next, and for branches.
    copy_reserved: int = 0
    branch_reserved: int = 0
    # What of that is written down, and where.
    booked: Counter[Book] = field(default_factory=Counter)
    booked_pages: int = 0
    lease: Lease = field(default_factory=Lease)
    # Blocks of which the engine has a copy in host memory.
    offloaded: dict[Node, None] = field(default_factory=dict)
    # Pinned pages stay: no turn of another makes the sequence give them up.
    pinned: bool = False
    # Its next turn waits for pages within a quota, which was counted.
    refused: bool = False
    last_used: int = 0
    kept_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return f"Sequence {self.handle.id} (generation {self.handle.generation}, {self.scope})"

    @property
    def in_turn(self) -> bool:
        return self.state in (SequenceState.PREFILL, SequenceState.ACTIVE)

    @property
    def droppable(self) -> bool:
        """Whether it has pages that a turn of another sequence may make it give up."""
        return bool(self.held) and not (self.in_turn or self.pinned or self.state is SequenceState.PAUSED)

    @property
    def reserved(self) -> int:
        """Pages that this turn may still take."""
        if not self.in_turn:
            return 0
        return len(self.layout.starts) - len(self.pages) + self.copy_reserved + self.branch_reserved

    @property
    def held(self) -> list[int]:
        """Every page that the sequence holds, once for each time it does."""
        return [*self.pages, *(page for pages in self.body_pages for page in pages)]

    @property
    def target(self) -> int | None:
        """The held page that the next token of this turn is written to; None when that takes a new page."""
        if not self.in_turn:
            return None
        block = self.layout.block_at(self.written)
        return self.pages[block] if block < len(self.pages) else None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the context that this turn need not compute; the last one is always computed."""
        return max(0, min(self.kept_tokens + self.hit_tokens, self.context_length - 1))

    @property
    def usage(self) -> TurnUsage:
        told: Counter[MissReason] = Counter()
        for reason, tokens in self.misses.items():
            told[reason.for_reader()] += tokens
        return TurnUsage(
            cached_tokens=self.cached_tokens,
            kept_tokens=self.kept_tokens,
            hit_tokens=self.hit_tokens,
            computed_tokens=self.computed_tokens,
            fragment_tokens=sum(body.length for body in self.bodies),
            misses=dict(told),
        )

    @property
    def row(self) -> Row:
        """The page table line of the sequence, with what was planned last."""
        used = self.written if self.pending is None else max(self.written, self.pending.end)
        if self.bodies:
            return row_with_bodies(self.layout, self.pages, self.bodies, self.body_pages, used)
        blocks = self.layout.blocks_before(used)
        starts = self.layout.start_array[:blocks]
        ends = np.minimum(np.array(self.layout.ends[:blocks], np.int32), np.int32(used)) - starts
        return Row(np.array(self.pages[:blocks], np.int32), np.zeros(blocks, np.int32), ends, starts)

    def node(self, block: int) -> Node | None:
        return self.nodes[block] if block < len(self.nodes) else None
