"""The level builder against its definition: every row reads exactly its entries, in order, each shared page once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inms_jax.engine.levels import SharedSplits, share, split_entries
from inms_jax.engine.scheduler import chunk_size
from inms_jax.memory.plan import Row


def row_of(pages: list[int]) -> Row:
    ids = np.array(pages, np.int32)
    count = len(ids)
    return Row(ids, np.zeros(count, np.int32), np.full(count, 16, np.int32), np.arange(count, dtype=np.int32) * 16)


def read_back(splits: SharedSplits, own: list[Row], s: int) -> list[int]:
    shared = [int(p) for u in range(splits.num_groups) if splits.rows[u, s] == s for p in splits.page[u]]
    return shared + [int(p) for p in own[s].page]


# Rows as walks in a small tree: equal heads are likely, equal pages after different heads possible.
WALKS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=8)


@given(walks=WALKS, split=st.sampled_from([1, 2, 4]), max_groups=st.integers(0, 12))
def test_rows_read_their_entries_in_order(walks: list[list[int]], split: int, max_groups: int) -> None:
    rows = [row_of(walk) for walk in walks]
    splits, own = share(rows, num_rows=8, split=split, max_groups=max_groups)
    assert splits.num_groups <= max_groups
    for s, walk in enumerate(walks):
        assert read_back(splits, own, s) == walk
    for u in range(splits.num_groups):
        readers = [s for s in range(8) if splits.rows[u, s] == s]
        assert len(readers) >= 2
        assert all(splits.rows[u, s] == 8 for s in range(8) if s not in readers)
    assert (splits.rows[splits.num_groups :] == 8).all()


@given(walks=WALKS)
def test_a_page_that_rows_share_from_the_start_is_read_once(walks: list[list[int]]) -> None:
    """Unless that would take longer: one shared split costs half a turn of the loop over what rows have besides."""
    splits, own = share([row_of(w) for w in walks], num_rows=8, split=1, max_groups=100)
    heads = {tuple(w[:i]) for w in walks for i in range(1, len(w) + 1)}
    shared = {head for head in heads if sum(tuple(w[: len(head)]) == head for w in walks) > 1}
    left = max(len(w) - max((i for i in range(len(w) + 1) if tuple(w[:i]) in shared), default=0) for w in walks)
    if len(shared) / 2 + left < max(map(len, walks)):
        assert splits.pages_read + sum(len(row) for row in own) == len(heads)
    else:
        assert splits.num_groups == 0


def test_one_team_shares_and_many_pairs_do_not() -> None:
    team = [row_of([*range(1, 39), *range(100 + 30 * s, 126 + 30 * s)]) for s in range(8)]
    splits, own = share(team, num_rows=8, split=1, max_groups=80)
    assert splits.num_groups == 38
    assert {len(row) for row in own} == {26}
    pairs = [
        row_of([*range(1 + 38 * (s // 2), 39 + 38 * (s // 2)), *range(400 + 30 * s, 426 + 30 * s)]) for s in range(8)
    ]
    splits, own = share(pairs, num_rows=8, split=1, max_groups=200)
    assert splits.num_groups == 0
    assert {len(row) for row in own} == {64}


def test_block_sizes_and_splits() -> None:
    assert [split_entries(B) for B in (16, 64, 128, 512)] == [8, 2, 1, 1]


def test_an_entry_that_differs_in_length_is_not_shared() -> None:
    first, second = row_of([1, 2]), row_of([1, 2])
    second.end[1] = 5
    splits, own = share([first, second], num_rows=2, split=1, max_groups=8)
    assert splits.num_groups == 1
    assert [row.page.tolist() for row in own] == [[2], [2]]


def test_chunks_waste_little() -> None:
    buckets = (64, 128, 256, 512)
    for remaining in range(1, 2000):
        left, padded = remaining, 0
        while left > 0:
            size = chunk_size(left, buckets)
            padded += min(bucket for bucket in buckets if bucket >= min(size, left))
            left -= size
        assert remaining <= padded <= max(64, remaining * 4 / 3 + 63)
