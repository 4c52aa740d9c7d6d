"""Paged attention against float64 numpy, and what may and may not change a row's bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.kernels.paged_attention.api import Level, paged_attention
from inms_jax.kernels.rotation import rotate
from inms_jax.kernels.storage import encode
from tests.oracles import dense_attention, turn

ATTEND = jax.jit(paged_attention, static_argnames=("scale", "implementation"))
INV_FREQ = (1e4 ** -(np.arange(8) / 8)).astype(np.float32)  # H = 16
POOL = 40  # pages of layer 0; layer 1 follows
# (groups, rows, query heads, kv heads, block size)
SHAPES = [(1, 1, 2, 2, 16), (3, 1, 6, 2, 16), (1, 7, 4, 1, 8), (2, 5, 3, 3, 32)]


def cache_size(jitted: Any) -> int:
    return int(jitted._cache_size())


def pool(rng, K, B, H=16):
    shape = (2 * POOL, K, B, H)
    return tuple(rng.standard_normal(shape).astype(np.float32) for _ in range(2))


def random_entries(rng, G, R, B, *, shifted):
    """Rows of 0 to 6 entries: partial pages, begin > 0, repeated ids, empty entries among them."""
    M = 6
    begin = rng.integers(0, B, (G, M))
    end = np.minimum(B, begin + rng.integers(0, B + 1, (G, M)))
    used = np.arange(M) < rng.integers(0, M + 1, (G, 1))
    entries = {
        "page": np.where(used, rng.integers(1, 8, (G, M)), 0),  # of 7 ids, so some repeat
        "begin": np.where(used, begin, 0),
        "end": np.where(used, end, 0),
        "position": np.where(used, rng.integers(0, 60, (G, M)), 0),
    }
    if shifted:
        entries["shift"] = rng.integers(-20, 20, (G, R, M))
    return {name: x.astype(np.int32) for name, x in entries.items()}


def as_level(entries, num_entries=None):
    arrays = {name: jnp.asarray(x) for name, x in entries.items()}
    M = entries["page"].shape[1] if num_entries is None else num_entries
    return Level(rows=None, shift=arrays.pop("shift", None), num_entries=jnp.int32(M), **arrays)


def run(q, k, v, level, q_position, offset=0, implementation="xla"):
    out, lse = ATTEND(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        level,
        jnp.asarray(q_position, jnp.int32),
        jnp.int32(offset),
        scale=q.shape[-1] ** -0.5,
        inv_freq=None if level.shift is None else jnp.asarray(INV_FREQ),
        implementation=implementation,
    )
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("implementation", "shape"), [*(("xla", shape) for shape in SHAPES), ("reference", SHAPES[3])])
def test_equals_dense_numpy(implementation, shape, shifted):
    G, R, N, K, B = shape
    for seed in range(4):
        rng = np.random.default_rng(seed)
        k, v = pool(rng, K, B)
        q = rng.standard_normal((G, R, N, 16)).astype(np.float32)
        entries = random_entries(rng, G, R, B, shifted=shifted)
        q_position = rng.integers(0, 80, (G, R))
        got = run(q, k, v, as_level(entries), q_position, offset=POOL, implementation=implementation)
        expected = dense_attention(q, k[POOL:], v[POOL:], entries, q_position, scale=16**-0.5, inv_freq=INV_FREQ)
        np.testing.assert_allclose(got[0], expected[0], atol=2e-5, rtol=2e-5)
        np.testing.assert_allclose(got[1], expected[1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_row_that_sees_nothing_is_zero_and_minus_infinity(implementation):
    rng = np.random.default_rng(0)
    k, v = pool(rng, 2, 16)
    entries = {
        name: np.full((1, 2), value, np.int32)
        for name, value in {"page": 1, "begin": 0, "end": 4, "position": 50}.items()
    }
    q = rng.standard_normal((1, 2, 4, 16)).astype(np.float32)
    out, lse = run(q, k, v, as_level(entries), np.array([[49, 50]]), implementation=implementation)
    assert (out[0, 0] == 0).all()
    assert (lse[0, 0] == -np.inf).all()
    assert np.isfinite(lse[0, 1]).all()
    none = run(q, k, v, as_level(entries, num_entries=0), np.array([[49, 50]]), implementation=implementation)
    assert (none[0] == 0).all()
    assert (none[1] == -np.inf).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("shifted", [False, True])
def test_slots_that_nobody_may_see_can_hold_nan(implementation, shifted):
    rng = np.random.default_rng(1)
    k, v = pool(rng, 2, 16)
    q = rng.standard_normal((1, 3, 4, 16)).astype(np.float32)
    names = ("page", "begin", "end", "position")
    values = [[1, 2, 3, 0], [0, 5, 0, 0], [16, 9, 16, 0], [0, 11, 30, 0]]
    entries = {name: np.array([x], np.int32) for name, x in zip(names, values, strict=True)}
    if shifted:
        entries["shift"] = np.array([[[0, 2, 2, 0]]] * 3, np.int32).reshape(1, 3, 4)
    q_position = np.array([[20, 31, 38]])  # of the third page, slots up to 8 (6 when shifted)
    clean = run(q, k, v, as_level(entries), q_position, implementation=implementation)
    for pages in (k, v):
        pages[[0, *range(4, 80)]] = np.nan
        pages[2, :, :5], pages[2, :, 9:] = np.nan, np.nan
        pages[3, :, 7 if shifted else 9 :] = np.nan
    poisoned = run(q, k, v, as_level(entries), q_position, implementation=implementation)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_shift_relocates_keys_without_touching_them(implementation):
    rng = np.random.default_rng(2)
    raw, v = rng.standard_normal((16, 16)), rng.standard_normal((2 * POOL, 1, 16, 16)).astype(np.float32)
    k = np.zeros_like(v)
    k[1, 0] = [turn(x, j, INV_FREQ) for j, x in enumerate(raw)]  # encoded at 0
    k[2, 0] = [turn(x, 37 + j, INV_FREQ) for j, x in enumerate(raw)]  # encoded at 37
    v[2] = v[1]
    q = rng.standard_normal((1, 4, 2, 16)).astype(np.float32)
    q_position = np.array([[37, 40, 52, 90]])

    def read(page, position, shift):
        entries = {"page": page, "begin": 0, "end": 16, "position": position}
        arrays = {name: np.full((1, 1), value, np.int32) for name, value in entries.items()}
        return run(
            q,
            k,
            v,
            as_level(arrays | {"shift": np.full((1, 4, 1), shift, np.int32)}),
            q_position,
            implementation=implementation,
        )

    there = read(2, 37, 0)
    for a, b in zip(read(1, 0, 37), there, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    wrong_sign = read(1, 74, -37)  # same visible slots, rotated the other way
    assert np.abs(wrong_sign[0] - there[0]).max() > 1e-2


def test_rotations_compose():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 16)).astype(np.float32)

    def turned(y, position):
        angle = jnp.float32(position) * INV_FREQ[None]
        return rotate(jnp.asarray(y), jnp.cos(angle), jnp.sin(angle))

    np.testing.assert_allclose(turned(turned(x, 9), 14), turned(x, 23), atol=1e-6)
    np.testing.assert_allclose(turned(x, 23)[0], turn(x[0], 23, INV_FREQ), atol=1e-6)


@pytest.mark.parametrize("stored", [jnp.uint16, jnp.float16, jnp.bfloat16])
def test_sixteen_bit_pools_are_read_as_numbers(stored):
    rng = np.random.default_rng(4)
    k, v = (encode(jnp.asarray(x), stored) for x in pool(rng, 2, 16))
    exact = [np.asarray(x if stored != jnp.uint16 else x.view(jnp.bfloat16)).astype(np.float32) for x in (k, v)]
    q = rng.standard_normal((1, 7, 4, 16)).astype(np.float32)
    entries = random_entries(rng, 1, 7, 16, shifted=False)
    q_position = rng.integers(0, 80, (1, 7))
    got = run(q, k, v, as_level(entries), q_position)
    expected = dense_attention(q, exact[0], exact[1], entries, q_position, scale=0.25)
    np.testing.assert_allclose(got[0], expected[0], atol=2e-5)


def test_unknown_implementation_and_missing_frequencies_are_refused():
    rng = np.random.default_rng(5)
    k, v = (jnp.asarray(x) for x in pool(rng, 2, 16))
    q = jnp.zeros((1, 1, 2, 16))
    entries = random_entries(rng, 1, 1, 16, shifted=True)
    position, offset = jnp.zeros((1, 1), jnp.int32), jnp.int32(0)
    with pytest.raises(ValueError, match="inv_freq"):
        paged_attention(q, k, v, as_level(entries), position, offset, scale=1.0)
    del entries["shift"]
    with pytest.raises(ValueError, match=r"'dense'.*reference.*xla"):
        paged_attention(q, k, v, as_level(entries), position, offset, scale=1.0, implementation="dense")


def test_one_compilation_whatever_the_number_of_entries():
    rng = np.random.default_rng(6)
    k, v = pool(rng, 2, 16)
    q = rng.standard_normal((1, 2, 4, 16)).astype(np.float32)
    entries = random_entries(rng, 1, 2, 16, shifted=False)
    run(q, k, v, as_level(entries, 1), np.array([[80, 81]]))
    before = cache_size(ATTEND)
    position = np.array([[80, 81]])
    for used in range(7):
        got = run(q, k, v, as_level(entries, used), position)
        first = {name: x[:, :used] for name, x in entries.items()}
        expected = dense_attention(q, k, v, first, position, scale=0.25)
        np.testing.assert_allclose(got[0], expected[0], atol=2e-5)
    assert cache_size(ATTEND) == before


class TestBits:
    """On the shapes of SmolLM2: a row's bits are a function of its own query and pages."""

    N, K, H, CONTEXT = 9, 3, 64, 448

    @pytest.fixture(params=[128, 16])
    def case(self, request):
        B = request.param
        rng = np.random.default_rng(B)
        used = -(-self.CONTEXT // B)
        k, v = (rng.standard_normal((used + 1, self.K, B, self.H)).astype(np.float32) for _ in range(2))
        q = rng.standard_normal((self.CONTEXT, self.N, self.H)).astype(np.float32)
        return B, k, v, q, 1 + rng.permutation(used)

    def level(self, B, pages, lengths, max_entries=40):
        """Every group reads the first `lengths[g]` tokens of the same pages."""
        M = np.arange(max_entries)
        length = np.asarray(lengths)[:, None]
        used = length > M * B
        ids = np.pad(pages, (0, max_entries - len(pages)))
        entries = {
            "page": np.where(used, ids, 0),
            "begin": np.zeros_like(used, np.int32),
            "end": np.where(used, np.minimum(B, length - M * B), 0),
            "position": np.where(used, M * B, 0),
        }
        return as_level({n: x.astype(np.int32) for n, x in entries.items()}, int(used.sum(1).max()))

    def test_chunk_size_and_placement_change_no_bit(self, case):
        B, k, v, q, pages = case

        def chunk(start, rows):
            level = self.level(B, pages, [start + rows])
            position = np.arange(start, start + rows)[None]
            return run(q[None, start : start + rows], k, v, level, position)

        out, lse = chunk(0, self.CONTEXT)
        for start, rows in ((0, 64), (59, 64), (384, 64), (192, 256), (7, 100), (447, 1)):
            part_out, part_lse = chunk(start, rows)
            np.testing.assert_array_equal(part_out[0], out[0, start : start + rows])
            np.testing.assert_array_equal(part_lse[0], lse[0, start : start + rows])

    def test_other_groups_and_their_number_change_no_bit(self, case):
        B, k, v, q, pages = case
        first = None
        for groups in (2, 4, 8, 32):
            # Row 0 is the same, the others differ in number, query, length and so in trailing null entries.
            lengths = [201, *np.linspace(3, self.CONTEXT, groups - 1).astype(int)]
            rows = q[[200, *np.random.default_rng(groups).integers(0, self.CONTEXT, groups - 1)]]
            out, lse = run(rows[:, None], k, v, self.level(B, pages, lengths), np.array(lengths)[:, None] - 1)
            first = first or (out[0].tobytes(), lse[0].tobytes())
            assert (out[0].tobytes(), lse[0].tobytes()) == first, f"{groups} groups"

    def test_rows_that_share_a_group_change_no_bit(self, case):
        B, k, v, q, pages = case
        level, position = self.level(B, pages, [self.CONTEXT]), self.CONTEXT
        alone = [run(q[None, [i]], k, v, level, np.array([[position]]))[0][0, 0] for i in range(3)]
        for rows in (2, 3, 8):
            together, _ = run(q[None, :rows], k, v, level, np.full((1, rows), position))
            for i in range(min(rows, 3)):
                np.testing.assert_array_equal(together[0, i], alone[i])
