"""The GPU kernels in interpret mode against the references, and that they lower for CUDA.

Interpret mode runs the kernel's own arithmetic, masks and loops; what it cannot show is compiled in
`test_gpu_code`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.kernels.page_copy import pallas_gpu as page_copy_gpu
from inms_jax.kernels.page_copy import reference as page_copy_reference
from inms_jax.kernels.paged_attention import pallas_gpu, reference
from inms_jax.kernels.rope_shift import pallas_gpu as rope_shift_gpu
from inms_jax.kernels.rope_shift import reference as rope_shift_reference

NAMES = ("scale", "interpret")
KERNEL = functools.partial(jax.jit(pallas_gpu.paged_attention, static_argnames=NAMES), interpret=True)
REFERENCE = jax.jit(reference.paged_attention, static_argnames=("scale",))
LAYERS, P = 2, 9
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
NOTHING = ("page", "begin", "end", "position")


def frequencies(H):
    return jnp.asarray(1e4 ** -(np.arange(H // 2) / (H // 2)), jnp.float32)


def pool(rng, K, B, H, dtype):
    return tuple(rng.standard_normal((LAYERS * P, K, B, H)).astype(jnp.dtype(dtype)) for _ in range(2))


def random_table(rng, G, R, M, B, *, shifted):
    """Rows of 0 to M - 1 entries: partial pages, begin > 0, ids that repeat, empty entries, runs of one shift."""
    used = np.arange(M) < rng.integers(0, M, (G, 1))
    used[0] = np.arange(M) < M - 1
    begin = rng.integers(0, B, (G, M)) * rng.integers(0, 2, (G, M))
    end = np.minimum(B, begin + rng.integers(0, B + 1, (G, M)))
    end[0, 0], begin[0, 0] = B, 0
    table = {"page": rng.integers(1, P, (G, M)), "begin": begin, "end": end}
    table["position"] = rng.integers(0, 3 * B, (G, M))
    table = {name: np.where(used, x, 0).astype(np.int32) for name, x in table.items()}
    shift = np.sort(rng.integers(-2, 3, (G, R, M)), axis=-1) * B if shifted else None
    return table, None if shift is None else shift.astype(np.int32)


def read(function, q, k, v, table, shift, q_position, num_entries):
    H = q.shape[-1]
    out, lse = function(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        *(jnp.asarray(table[name]) for name in NOTHING),
        None if shift is None else jnp.asarray(shift),
        jnp.int32(num_entries),
        jnp.asarray(q_position, jnp.int32),
        jnp.int32(P),
        scale=H**-0.5,
        inv_freq=frequencies(H),
    )
    return np.asarray(out), np.asarray(lse)


def assert_equals_reference(dtype, B, H, N, K, G, R, *, shifted, M=5):
    rng = np.random.default_rng(B + H + N)
    k, v = pool(rng, K, B, H, dtype)
    q = rng.standard_normal((G, R, N, H)).astype(np.float32)
    table, shift = random_table(rng, G, R, M, B, shifted=shifted)
    q_position = rng.integers(0, 4 * B, (G, R))
    got, expected = (read(f, q, k, v, table, shift, q_position, M - 1) for f in (KERNEL, REFERENCE))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# dtype, block size, head dim, query heads, kv heads, groups, rows, shifted
CASES = [
    ("float32", 16, 64, 4, 2, 3, 1, False),  # decode; more entries than a split holds, see below
    ("float32", 16, 64, 3, 1, 1, 25, True),  # two tiles of rows, a group of heads that is no power of two
    ("float32", 128, 128, 2, 2, 1, 2, False),  # tiles inside a page
    ("float32", 32, 80, 2, 1, 2, 2, True),  # halves of 40
    ("float32", 16, 256, 2, 1, 1, 3, False),
    ("float16", 64, 96, 4, 4, 1, 2, True),
    ("bfloat16", 128, 64, 8, 1, 1, 5, False),
    ("bfloat16", 16, 128, 4, 1, 2, 1, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_attention_equals_the_reference(case):
    dtype, B, H, N, K, G, R, shifted = case
    assert_equals_reference(dtype, B, H, N, K, G, R, shifted=shifted)


@pytest.mark.full
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("H", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("B", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_equals_the_reference_everywhere(dtype, B, H, shifted):
    turn = B.bit_length() + H // 16 + shifted  # every size meets every ratio and every shape of rows
    (N, K), (G, R) = [(3, 3), (8, 2), (9, 1)][turn % 3], [(1, 20), (3, 1), (2, 3), (1, 1)][turn % 4]
    assert_equals_reference(dtype, B, H, N, K, G, R, shifted=shifted, M=4)


def test_entries_beyond_one_split_are_joined():
    assert_equals_reference("float32", 16, 64, 2, 1, 2, 2, shifted=False, M=70)


def test_rows_of_one_group_with_different_shifts_before_inside_and_after_the_fragment():
    rng = np.random.default_rng(0)
    B, H = 16, 64
    k, v = pool(rng, 1, B, H, "float32")
    q = rng.standard_normal((1, 6, 2, H)).astype(np.float32)
    table = {"page": [[1, 2, 3]], "begin": [[0, 3, 0]], "end": [[B, B, 7]], "position": [[0, 40, 40 + B]]}
    entries = {name: np.array(x, np.int32) for name, x in table.items()}
    # The head of the context is not shifted; the fragment of pages 2 and 3 stands 24 earlier or 100 later.
    shift = np.array([[[0, -24, -24]] * 3 + [[0, 100, 100]] * 3], np.int32)
    q_position = np.array([[17, 16 + B // 2, 60, 139, 140 + B, 200]])
    got, expected = (read(f, q, k, v, entries, shift, q_position, 3) for f in (KERNEL, REFERENCE))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    alone = read(KERNEL, q, k, v, entries, shift, q_position, 1)
    sees_fragment = (got[1] != alone[1]).any(axis=-1)
    assert sees_fragment.tolist() == [[False, True, True, False, True, True]]


def test_nothing_to_see_is_zero_and_minus_infinity():
    rng = np.random.default_rng(1)
    k, v = pool(rng, 1, 16, 64, "float32")
    q = rng.standard_normal((2, 2, 2, 64)).astype(np.float32)
    table = {name: np.zeros((2, 3), np.int32) for name in NOTHING}
    table["page"][:, :2], table["end"][0, :2], table["position"][0] = 1, 16, 50
    for num_entries in (0, 2):
        # Group 0 has slots from position 50 on, group 1 has none at all.
        out, lse = read(KERNEL, q, k, v, table, None, [[49, 50 if num_entries else 49], [99, 99]], num_entries)
        empty = np.array([[True, num_entries == 0], [True, True]])
        assert (out[empty] == 0).all()
        assert (lse[empty] == -np.inf).all()
        assert np.isfinite(lse[~empty]).all()


@pytest.mark.parametrize("shifted", [False, True])
def test_slots_that_nobody_may_see_can_hold_nan(shifted):
    rng = np.random.default_rng(2)
    k, v = pool(rng, 2, 16, 80, "float32")
    q = rng.standard_normal((1, 3, 4, 80)).astype(np.float32)
    values = [[1, 2, 3, 0], [0, 5, 0, 0], [16, 9, 16, 0], [0, 11, 30, 0]]
    table = {name: np.array([x], np.int32) for name, x in zip(NOTHING, values, strict=True)}
    shift = np.array([[[0, 2, 2, 0]] * 3], np.int32) if shifted else None
    q_position = np.array([[20, 31, 38]])
    clean = read(KERNEL, q, k, v, table, shift, q_position, 4)
    for pages in (k[P:], v[P:]):
        pages[[0, *range(4, P)]] = np.nan
        pages[2, :, :5], pages[2, :, 9:] = np.nan, np.nan
        pages[3, :, 7 if shifted else 9 :] = np.nan
    k[:P], v[:P] = np.nan, np.nan  # the other layer
    for a, b in zip(clean, read(KERNEL, q, k, v, table, shift, q_position, 4), strict=True):
        np.testing.assert_array_equal(a, b)


# A swap, a page turned in place and copied elsewhere as it was before, padding.
SRC = np.array([1, 2, 3, 3, 0], np.int32)
DST = np.array([2, 1, 3, 4, 0], np.int32)
DELTA = np.array([5, -70, 9, 1000, 0], np.int32)


@pytest.mark.parametrize(("B", "H", "dtype"), [(16, 64, "float32"), (32, 80, "float16"), (16, 96, "bfloat16")])
def test_page_copy_equals_the_reference(B, H, dtype):
    pages, _ = pool(np.random.default_rng(3), 3, B, H, dtype)
    copy = jax.jit(functools.partial(page_copy_gpu.page_copy, num_layers=LAYERS, interpret=True))
    expected = page_copy_reference.page_copy(pages, SRC, DST, num_layers=LAYERS)
    np.testing.assert_array_equal(np.asarray(copy(pages, SRC, DST)), expected)


@pytest.mark.parametrize(
    ("H", "rotary_dim", "interleaved", "dtype"),
    [(64, 64, False, "float32"), (80, 32, False, "float32"), (96, 34, True, "float32"), (64, 64, True, "bfloat16")],
)
def test_rope_shift_equals_the_reference(H, rotary_dim, interleaved, dtype):
    pages, _ = pool(np.random.default_rng(4), 2, 16, H, dtype)
    options = {"num_layers": LAYERS, "interleaved": interleaved, "rotary_dim": rotary_dim}
    inv_freq = frequencies(rotary_dim)
    shift = jax.jit(functools.partial(rope_shift_gpu.rope_shift, **options, interpret=True))
    got = shift(pages, SRC, DST, DELTA, inv_freq=inv_freq)
    expected = rope_shift_reference.rope_shift(pages, SRC, DST, DELTA, inv_freq=np.asarray(inv_freq), **options)
    exact = dtype == "float32"
    np.testing.assert_allclose(
        np.asarray(got, np.float32),
        expected.astype(np.float32),
        atol=2e-6 if exact else 1e-5,
        rtol=0 if exact else 8e-3,
    )


def test_what_the_kernels_do_not_take_is_said():
    ids, inv_freq = jnp.zeros(17, jnp.int32), frequencies(64)
    pages = jnp.zeros((2, 1, 16, 64))
    with pytest.raises(NotImplementedError, match="at most 16, got 17"):
        page_copy_gpu.page_copy(pages, ids, ids, num_layers=1)
    with pytest.raises(NotImplementedError, match="17 pages"):
        rope_shift_gpu.rope_shift(pages, ids, ids, ids, inv_freq=inv_freq, num_layers=1)
    with pytest.raises(NotImplementedError, match="24 slots"):
        rope_shift_gpu.rope_shift(jnp.zeros((2, 1, 24, 64)), ids[:1], ids[:1], ids[:1], inv_freq=inv_freq, num_layers=1)
    table = {name: np.zeros((1, 1), np.int32) for name in NOTHING}
    for shape, dtype in (((2, 1, 8, 64), jnp.float32), ((2, 1, 16, 288), jnp.float32), ((2, 1, 16, 64), jnp.uint16)):
        pages, q = jnp.zeros(shape, dtype), jnp.zeros((1, 1, 1, shape[-1]))
        with pytest.raises(NotImplementedError, match=rf"{shape[2]} slots, heads of {shape[3]}.*{pages.dtype}"):
            read(pallas_gpu.paged_attention, q, pages, pages, table, None, [[0]], 1)


def cuda_module(function, *arguments, donate=()):
    """StableHLO text of `function` lowered for CUDA on this host."""
    traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def lower_all(B, H, dtype):
    """Every operation in its shapes; each must become one Triton kernel."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pages = jax.ShapeDtypeStruct((LAYERS * P, 2, B, H), jnp.dtype(dtype))
    for (G, R), shifted in itertools.product([(4, 1), (1, 70)], [False, True]):
        q = jax.ShapeDtypeStruct((G, R, 6, H), jnp.float32)
        attend = functools.partial(pallas_gpu.paged_attention, scale=1.0, inv_freq=frequencies(H))
        shift = ints((G, R, 8)) if shifted else None
        module = cuda_module(attend, q, pages, pages, *[ints((G, 8))] * 4, shift, ints(()), ints((G, R)), ints(()))
        assert module.count("__gpu$xla.gpu.triton") == 1
    copy = functools.partial(page_copy_gpu.page_copy, num_layers=LAYERS)
    move = functools.partial(rope_shift_gpu.rope_shift, inv_freq=frequencies(H), num_layers=LAYERS)
    for function, lists in ((copy, 2), (move, 3)):
        module = cuda_module(function, pages, *[ints((8,))] * lists, donate=(0,))
        assert module.count("__gpu$xla.gpu.triton") == 1
        # In place: the kernel's result is the pool's own buffer, which the caller gave away.
        assert "output_operand_alias" in module
        assert "tf.aliasing_output" in module


@pytest.mark.parametrize(("B", "dtype"), [(16, "bfloat16"), (128, "float32"), (512, "float16")])
def test_kernels_lower_for_cuda(B, dtype):
    lower_all(B, 64, dtype)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("H", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("B", [16, 32, 64, 128, 256, 512])
def test_kernels_lower_for_cuda_at_every_size(B, H, dtype):
    lower_all(B, H, dtype)
