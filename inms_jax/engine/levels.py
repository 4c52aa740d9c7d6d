"""Which pages of a decode batch are read once for several rows. Pure host arithmetic on page-table rows.

A row is cut into splits of n entries from its first entry. Rows whose splits are equal from the start on read them
together, as far as at least two rows agree; the rest is each row's own. So the cut of a row follows from the row alone,
and who else runs decides only with whom a split is read. Knows nothing of scopes: equal page ids are the sharing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from inms_jax.memory.plan import Row

SPLIT_SLOTS = 128
"""Slots of a split. Part of the bits of decode; blocks of 128 and more are splits of their own."""
_FEWEST_ROWS = 2
_SHARED_COST = 0.5
"""Time of one shared split, in turns of the loop over all rows' own splits (benchmarks/kernels.py: 0.4 to 0.6)."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedSplits:
    """U splits of n entries in an order that every row can follow. `rows[u, s]` is s if row s reads split u, else S."""

    rows: Int32[np.ndarray, "U S"]
    page: Int32[np.ndarray, "U n"]
    begin: Int32[np.ndarray, "U n"]
    end: Int32[np.ndarray, "U n"]
    position: Int32[np.ndarray, "U n"]
    num_groups: int

    @property
    def pages_read(self) -> int:
        """Pages that are read for all splits together."""
        return int(np.count_nonzero(self.page))


def split_entries(block_size: int) -> int:
    """Entries of a split."""
    return max(1, SPLIT_SLOTS // block_size)


def share(rows: Sequence[Row], *, num_rows: int, split: int, max_groups: int) -> tuple[SharedSplits, list[Row]]:
    """The splits that at least two of `rows` read, and what each row reads besides, padded to `num_rows` rows."""
    table = np.zeros((4, max_groups, split), np.int32)
    readers = np.full((max_groups, num_rows), num_rows, np.int32)
    own_from = [0] * len(rows)
    used, depth = 0, 0
    together = [list(range(len(rows)))]
    while together:
        equal: dict[tuple[int, bytes], list[int]] = {}
        first, last = depth * split, (depth + 1) * split
        for group, members in enumerate(together):
            for s in members:
                if len(rows[s].page) >= last:
                    key = b"".join(column[first:last].tobytes() for column in _columns(rows[s]))
                    equal.setdefault((group, key), []).append(s)
        together = []
        for members in equal.values():
            if len(members) < _FEWEST_ROWS or used == max_groups:
                continue
            table[:, used] = [column[first:last] for column in _columns(rows[members[0]])]
            readers[used, members] = members
            for s in members:
                own_from[s] = last
            together.append(members)
            used += 1
        depth += 1
    lengths = [-(-len(row) // split) for row in rows]
    left = max((length - start // split for length, start in zip(lengths, own_from, strict=True)), default=0)
    if used * _SHARED_COST + left >= max(lengths, default=0):  # many small teams: sharing saves bytes and no time
        readers[:], table[:], used, own_from = num_rows, 0, 0, [0] * len(rows)
    own = [Row(*(column[start:] for column in _columns(row))) for row, start in zip(rows, own_from, strict=True)]
    page, begin, end, position = table
    return SharedSplits(readers, page, begin, end, position, used), own


def _columns(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return row.page, row.begin, row.end, row.position
