"""Decode with shared splits: equal to dense attention, and to the bit the same however rows are grouped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inms_jax.engine.levels import share, split_entries
from inms_jax.kernels.paged_attention.api import Level
from inms_jax.kernels.paged_attention.shared import shared_attention
from inms_jax.memory.plan import Row
from tests.oracles import dense_attention

ATTEND = jax.jit(shared_attention, static_argnames=("scale",))


def make_rows(rng: np.random.Generator, S: int, B: int, common: list[int]) -> list[Row]:
    """Rows of one tree: row s shares its first `common[s]` pages with all others that have as many."""
    rows, page = [], 1 + max(common)
    for s in range(S):
        own = int(rng.integers(1, 5))
        pages = [*range(1, 1 + common[s]), *range(page, page + own)]
        page += own
        end = np.full(len(pages), B, np.int32)
        end[-1] = rng.integers(1, B + 1)
        starts = np.arange(len(pages), dtype=np.int32) * B
        rows.append(Row(np.array(pages, np.int32), np.zeros(len(pages), np.int32), end, starts))
    return rows


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: list[Row], num_rows: int, *, sharing: bool = True
) -> tuple[np.ndarray, np.ndarray, int]:
    B = k.shape[2]
    splits, own = share(rows, num_rows=num_rows, split=split_entries(B), max_groups=64 if sharing else 0)
    if not sharing:
        splits, _ = share([], num_rows=num_rows, split=split_entries(B), max_groups=64)
    M = 32
    table = np.zeros((4, num_rows, M), np.int32)
    for s, row in enumerate(own):
        for column, values in zip(table, (row.page, row.begin, row.end, row.position), strict=True):
            column[s, : len(values)] = values
    position = np.zeros(num_rows, np.int32)
    position[: len(rows)] = [row.position[-1] + row.end[-1] - 1 for row in rows]

    def level(columns: Any, num_entries: int, **rest: Any) -> Level:
        page, begin, end, positions = (jnp.asarray(x) for x in columns)
        return Level(
            page=page, begin=begin, end=end, position=positions, shift=None, num_entries=jnp.int32(num_entries), **rest
        )

    shared_columns = (splits.page, splits.begin, splits.end, splits.position)
    out, lse = ATTEND(
        jnp.asarray(np.pad(q, ((0, num_rows - len(q)), (0, 0), (0, 0)))),
        jnp.asarray(k),
        jnp.asarray(v),
        level(shared_columns, split_entries(B), rows=jnp.asarray(splits.rows), num_groups=jnp.int32(splits.num_groups)),
        level(table, max((len(row) for row in own), default=0), rows=None),
        jnp.asarray(position),
        jnp.int32(0),
        scale=q.shape[-1] ** -0.5,
    )
    return np.asarray(out)[: len(rows)], np.asarray(lse)[: len(rows)], splits.num_groups


# (query heads, kv heads, head dim): SmolLM2, no grouping, one kv head
HEADS = [(9, 3, 64), (4, 4, 16), (6, 1, 32)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("B", [16, 128])
def test_bits_do_not_depend_on_who_shares(heads: tuple[int, int, int], B: int) -> None:
    N, K, H = heads
    compared = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        S = 7
        common = [int(x) for x in rng.choice([0, 3, 9, 17 if B == 16 else 5], S)]
        rows = make_rows(rng, S, B, common)
        pages = 1 + max(int(row.page.max()) for row in rows)
        k, v = (rng.standard_normal((pages, K, B, H)).astype(np.float32) * 2 for _ in range(2))
        q = rng.standard_normal((S, N, H)).astype(np.float32) * 2
        out, lse, groups = attend(q, k, v, rows, 8)
        assert groups > 0
        plain, plain_lse, none = attend(q, k, v, rows, 8, sharing=False)
        assert none == 0
        np.testing.assert_array_equal(out, plain)
        np.testing.assert_array_equal(lse, plain_lse)
        for count, bucket in ((1, 2), (2, 2), (4, 4), (3, 32)):
            some = rng.permutation(S)[:count]
            part, part_lse, _ = attend(q[some], k, v, [rows[s] for s in some], bucket)
            np.testing.assert_array_equal(part, out[some])
            np.testing.assert_array_equal(part_lse, lse[some])
            compared += 1
    assert compared == 16


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("B", [8, 64, 256])
def test_equals_dense(heads: tuple[int, int, int], B: int) -> None:
    N, K, H = heads
    rng = np.random.default_rng(B)
    rows = make_rows(rng, 5, B, [2, 2, 0, 3, 3])
    pages = 1 + max(int(row.page.max()) for row in rows)
    k, v = (rng.standard_normal((pages, K, B, H)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((5, N, H)).astype(np.float32)
    out, lse, _ = attend(q, k, v, rows, 8)
    for s, row in enumerate(rows):
        entries = {"page": row.page, "begin": row.begin, "end": row.end, "position": row.position}
        entries = {name: x[None] for name, x in entries.items()}
        position = np.array([[row.position[-1] + row.end[-1] - 1]])
        expected, expected_lse = dense_attention(q[None, s : s + 1], k, v, entries, position, scale=H**-0.5)
        np.testing.assert_allclose(out[s], expected[0, 0], atol=2e-5, rtol=2e-5)
        np.testing.assert_allclose(lse[s], expected_lse[0, 0], atol=2e-5, rtol=2e-5)


def test_stale_slots_and_unused_pages_may_hold_nan() -> None:
    rng = np.random.default_rng(0)
    rows = make_rows(rng, 4, 16, [9, 9, 9, 0])
    pages = 2 + max(int(row.page.max()) for row in rows)
    k, v = (rng.standard_normal((pages, 2, 16, 16)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((4, 4, 16)).astype(np.float32)
    clean = attend(q, k, v, rows, 4)
    for x in (k, v):
        x[[0, -1]] = np.nan
        for row in rows:
            x[row.page[-1], :, row.end[-1] :] = np.nan
    poisoned = attend(q, k, v, rows, 4)
    assert clean[2] == poisoned[2] == 1
    np.testing.assert_array_equal(clean[0], poisoned[0])


@settings(max_examples=25, deadline=None)
@given(
    common=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    last=st.integers(1, 16),
)
def test_levels_equal_no_levels_on_any_table(common: list[int], seed: int, last: int) -> None:
    """Tables of up to 8 rows on one tree, with any last slot."""
    rng = np.random.default_rng(seed)
    rows = make_rows(rng, len(common), 16, common)
    for row in rows:
        row.end[-1] = last
    k, v = (rng.standard_normal((64, 2, 16, 16)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((len(rows), 4, 16)).astype(np.float32)
    out, lse, _ = attend(q, k, v, rows, 8)
    plain, plain_lse, _ = attend(q, k, v, rows, 8, sharing=False)
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(lse, plain_lse)
    for s, row in enumerate(rows):
        entries = {"page": row.page, "begin": row.begin, "end": row.end, "position": row.position}
        position = np.array([[row.position[-1] + last - 1]])
        expected, _ = dense_attention(
            q[None, s : s + 1], k, v, {n: x[None] for n, x in entries.items()}, position, scale=0.25
        )
        np.testing.assert_allclose(out[s], expected[0, 0], atol=1e-5)
