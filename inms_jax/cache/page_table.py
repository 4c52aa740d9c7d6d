"""KVPages, the keys and values of the pool, and PageTable, which says what each row of a batch reads from them.

Page 0 is the null page: padding points at it, nothing is ever read from it. Sharing is the same page id
twice. Knows nothing of owners, reference counts or tokens.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from inms_jax.kernels.paged_attention.api import Level
from inms_jax.kernels.scaled import Pages, empty_pages
from inms_jax.kernels.state import register_state, static
from inms_jax.kernels.storage import number_dtype, storage_dtype


@runtime_checkable
class KVShape(Protocol):
    """What the pool must know of a model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@register_state
@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of all pages; page p of layer l is row `p + l * num_pages`. Donated by every step."""

    k: Pages
    v: Pages
    num_layers: int = static()

    @classmethod
    def create(cls, config: KVShape, num_pages: int, block_size: int, dtype: DTypeLike, platform: str) -> "KVPages":
        """Empty pool of `num_pages` pages (the null page included) of `block_size` slots."""
        shape = (config.num_layers * num_pages, config.num_kv_heads, block_size, config.head_dim)
        stored = storage_dtype(dtype, platform)
        return cls(k=empty_pages(shape, stored), v=empty_pages(shape, stored), num_layers=config.num_layers)

    @property
    def num_pages(self) -> int:
        """Pages per layer, the null page included."""
        return int(self.k.shape[0]) // self.num_layers

    @property
    def block_size(self) -> int:
        """Slots of a page."""
        return int(self.k.shape[2])

    @property
    def dtype(self) -> Any:
        """Dtype of the numbers held, which may differ from the arrays' own."""
        return number_dtype(self.k.dtype)


@register_state
@dataclass(frozen=True, slots=True)
class PageTable:
    """What each of S rows reads: entry m uses slots begin <= j < end of `page`.

    `position` is the stored position of slot 0, `shift` target minus stored position. Entries from
    `num_entries` on are unused: page 0, begin == end == 0. Immutable: a step that started with a table
    finishes with it.
    """

    page: Int32[Array, "S M"]
    begin: Int32[Array, "S M"]
    end: Int32[Array, "S M"]
    position: Int32[Array, "S M"]
    shift: Int32[Array, "S M"]
    num_entries: Int32[Array, " S"]

    @classmethod
    def empty(cls, num_rows: int, max_entries: int) -> "PageTable":
        """A table whose rows read nothing."""
        none = jnp.zeros((num_rows, max_entries), jnp.int32)
        return cls(none, none, none, none, none, jnp.zeros((num_rows,), jnp.int32))

    def set_row(
        self,
        row: int | Int32[Array, ""],
        *,
        page: Int32[Array, " m"],
        begin: Int32[Array, " m"],
        end: Int32[Array, " m"],
        position: Int32[Array, " m"],
        shift: Int32[Array, " m"] | None = None,
    ) -> "PageTable":
        """New table in which `row` has exactly these m <= M entries."""
        M, m = self.page.shape[1], page.shape[0]

        def put(old: Int32[Array, "S M"], new: Int32[Array, " m"]) -> Int32[Array, "S M"]:
            return old.at[row].set(jnp.pad(new, (0, M - m)))

        return PageTable(
            page=put(self.page, page),
            begin=put(self.begin, begin),
            end=put(self.end, end),
            position=put(self.position, position),
            shift=put(self.shift, jnp.zeros_like(page) if shift is None else shift),
            num_entries=self.num_entries.at[row].set(m),
        )

    def level(self, rows_per_group: int = 1, *, shifted: bool = False) -> Level:
        """All S rows as the groups of one level, each with `rows_per_group` query rows in order.

        `shifted=False` is for tables whose shifts are all zero: the level then costs no rotation.
        """
        S, M = self.page.shape
        shift = jnp.broadcast_to(self.shift[:, None], (S, rows_per_group, M)) if shifted else None
        return Level(
            rows=None,
            page=self.page,
            begin=self.begin,
            end=self.end,
            position=self.position,
            shift=shift,
            num_entries=self.num_entries.max(),
        )
