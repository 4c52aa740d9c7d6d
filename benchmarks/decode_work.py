"""Agents that decode behind a public text, as page tables: what the kernel benchmarks give to attention.

Tables are built by the engine's own code (`engine/levels.py`, `memory/plan.py`). Knows nothing of models.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from inms_jax.cache.page_table import PageTable
from inms_jax.engine.levels import SharedSplits, share, split_entries
from inms_jax.kernels.paged_attention.api import Level
from inms_jax.memory.plan import DecodeSlot, Row, StepPlan, plan_decode
from inms_jax.models.config import ModelConfig

BLOCK = 128
"""Slots of a page where nothing else is said: the engine's default."""


class Pool:
    """Random float32 pages of one layer after another. Calls that go through the layers find no page in a cache."""

    def __init__(self, model: ModelConfig, num_pages: int, rng: np.random.Generator, block_size: int = BLOCK) -> None:
        shape = (num_pages, model.num_kv_heads, block_size, model.head_dim)
        self.k, self.v = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2))

    def offsets(self, pages_per_layer: int) -> Iterator[jax.Array]:
        """Page offsets of layers in turn, for ever."""
        layers = self.k.shape[0] // pages_per_layer
        return itertools.cycle([jnp.int32(layer * pages_per_layer) for layer in range(layers)])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """Rows of agents that each decode the last token of their context.

    `content[p]` numbers what page p holds, the same number for each agent's copy of one public page: fill pages by it
    and agents with copies get the same results as agents that share.
    """

    rows: list[Row]
    slots: list[DecodeSlot]
    content: np.ndarray
    block_size: int

    @property
    def num_pages(self) -> int:
        """Pages of one layer, the null page included."""
        return len(self.content)

    @property
    def pages_needed(self) -> int:
        """Pages that the rows name, shared ones once per row."""
        return sum(len(row) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """One step as the engine hands it to the device, and the pages that it reads."""

    plan: StepPlan
    splits: SharedSplits
    pages_read: int


def agents(
    count: int, context: int, public: float, block_size: int, *, team: int | None = None, copies: bool = False
) -> DecodeWork:
    """`count` agents at `context` tokens, of which the share `public` (whole pages) is common to each team of `team`
    agents (None: all are one team). With `copies` each holds its own pages of the public text.
    """
    total = -(-context // block_size)
    common = int(public * context) // block_size
    team = team or count
    content = [0]
    rows, slots = [], []
    shared: dict[int, list[int]] = {}
    teams = -(-count // team)
    for agent in range(count):
        number = agent // team
        if copies or number not in shared:
            shared[number] = list(range(len(content), len(content) + common))
            content += range(1 + number * common, 1 + (number + 1) * common)
        own = range(len(content), len(content) + total - common)
        first = 1 + teams * common + agent * (total - common)
        content += range(first, first + total - common)
        page = np.array([*shared[number], *own], np.int32)
        end = np.full(total, block_size, np.int32)
        # Contexts that end at different slots, as they do in practice.
        end[-1] = context - (total - 1) * block_size - agent % min(16, block_size // 2)
        start = np.arange(total, dtype=np.int32) * block_size
        rows.append(Row(page, np.zeros(total, np.int32), end, start))
        slots.append(
            DecodeSlot(
                token=agent + 1,
                position=int(start[-1] + end[-1]) - 1,
                page=int(page[-1]),
                slot=int(end[-1]) - 1,
                copies=(),
            )
        )
    return DecodeWork(rows=rows, slots=slots, content=np.array(content, np.int32), block_size=block_size)


def tables(work: DecodeWork, num_entries: int, *, sharing: bool) -> Tables:
    """The plan of one decode step, padded to the engine's bucket of rows and to `num_entries` pages of a row."""
    num_rows = max(2, 1 << (len(work.rows) - 1).bit_length())
    split = split_entries(work.block_size)
    groups = -(-num_entries // split)
    own: Sequence[Row]
    if sharing:
        splits, own = share(work.rows, num_rows=num_rows, split=split, max_groups=groups)
    else:
        (splits, _), own = share([], num_rows=num_rows, split=split, max_groups=groups), work.rows
    plan = plan_decode(work.slots, own, num_rows=num_rows, num_entries=num_entries, num_copies=0)
    return Tables(plan=plan, splits=splits, pages_read=splits.pages_read + sum(len(row) for row in own))


def levels(step: Tables) -> tuple[Level, Level]:
    """What rows share and what each has besides, on the device, as the engine's runner builds them."""
    splits, plan = step.splits, step.plan
    shared = Level(
        rows=jnp.asarray(splits.rows),
        page=jnp.asarray(splits.page),
        begin=jnp.asarray(splits.begin),
        end=jnp.asarray(splits.end),
        position=jnp.asarray(splits.position),
        shift=None,
        num_entries=jnp.asarray(splits.page.shape[1], jnp.int32),
        num_groups=jnp.asarray(splits.num_groups, jnp.int32),
    )
    columns = ("page", "begin", "end", "position", "shift", "num_entries")
    own = PageTable(**{name: jnp.asarray(getattr(plan, name)) for name in columns}).level(1)
    return shared, own
