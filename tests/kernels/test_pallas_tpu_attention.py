"""The TPU attention kernel in interpret mode against the dense reference, and against a simulated chip's memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inms_jax.kernels.paged_attention import pallas_tpu, reference

POOL = 9  # pages of layer 0; layer 1 follows
ENTRIES = 5
# Memory of a chip as it may be: what was never written is NaN, an id outside the pool raises.
CHIP = pltpu.InterpretParams(uninitialized_memory="nan")
RACES = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


def frequencies(H):
    return jnp.asarray(1e4 ** -(np.arange(H // 2) / (H // 2)), jnp.float32)


def random_case(seed, shape, dtype="float32", *, shifted=False, num_entries=ENTRIES):
    """Arguments after the pattern of a real step: partial pages, begin > 0, repeated ids, empty entries and rows."""
    G, R, N, K, B, H = shape
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.standard_normal((2 * POOL, K, B, H)), dtype) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((G, R, N, H)), dtype)
    begin = np.where(rng.random((G, ENTRIES)) < 0.5, 0, rng.integers(0, B, (G, ENTRIES)))
    end = np.minimum(B, begin + rng.integers(0, 2 * B, (G, ENTRIES)))
    lengths = rng.integers(1, ENTRIES + 1, (G, 1))
    lengths[1:2] = 0
    used = np.arange(ENTRIES) < lengths
    begin[:, 0], end[:, 0] = 0, B  # which every row of a used group sees, wherever it stands
    position = np.where(np.arange(ENTRIES) == 0, 0, rng.integers(0, 3 * B, (G, ENTRIES)))
    fields = [rng.integers(1, 6, (G, ENTRIES)), begin, end, position]
    table = [jnp.asarray(np.where(used, x, 0), jnp.int32) for x in fields]
    shift = jnp.asarray(rng.integers(-300, B, (G, R, ENTRIES)), jnp.int32) if shifted else None
    q_position = jnp.asarray(rng.integers(B, 4 * B, (G, R)), jnp.int32)
    return [q, k, v, *table, shift, jnp.int32(num_entries), q_position, jnp.int32(POOL)]


@functools.cache
def compiled(implementation, H, shifted, interpret):
    kwargs: dict[str, Any] = {"scale": H**-0.5, "inv_freq": frequencies(H) if shifted else None}
    if interpret is not None:
        kwargs["interpret"] = interpret
    # What is slow is compiling the interpreter's program, not running it.
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(functools.partial(implementation.paged_attention, **kwargs), compiler_options=options)


def run(arguments, interpret=True):
    H, shifted = arguments[0].shape[3], arguments[7] is not None
    out, lse = compiled(pallas_tpu, H, shifted, interpret)(*arguments)
    return np.asarray(out), np.asarray(lse)


def expect(arguments):
    H, shifted = arguments[0].shape[3], arguments[7] is not None
    out, lse = compiled(reference, H, shifted, None)(*arguments)
    return np.asarray(out), np.asarray(lse)


def compare(arguments, interpret=True):
    tolerance = 2e-5 if arguments[1].dtype == jnp.float32 else 2e-2
    got, expected = run(arguments, interpret), expect(arguments)
    assert np.isfinite(expected[1]).any(), "nobody sees anything"
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


# (groups, rows, query heads, kv heads, block size, head dim)
QUICK = [
    pytest.param((2, 1, 4, 2, 16, 128), "float32", False, id="pages of 16, several per split"),
    pytest.param((2, 3, 6, 2, 128, 64), "float32", True, id="slots in lanes, shifts"),
    pytest.param((1, 2, 2, 2, 128, 80), "bfloat16", False, id="MHA, head dim 80"),
    pytest.param((2, 2, 3, 1, 16, 256), "bfloat16", True, id="MQA, head dim 256, shifts"),
    pytest.param((1, 33, 4, 2, 128, 96), "float32", False, id="a chunk of rows"),
    pytest.param((1, 520, 1, 1, 16, 128), "float32", False, id="two tiles of rows"),
]
WIDE = [
    pytest.param((2, R, N, 2, B, H), dtype, shifted, id=f"{dtype}-{H}-{B}-R{R}-N{N}-{shifted}", marks=pytest.mark.full)
    for dtype in ("float32", "bfloat16")
    for H in (64, 80, 96, 128, 256)
    for B in (16, 32, 64, 128, 256, 512)
    if not (B % 128 and H % 128)
    for R, N in ((1, 2), (3, 14))
    for shifted in (False, True)
]


@pytest.mark.parametrize(("shape", "dtype", "shifted"), [*QUICK, *WIDE])
def test_equals_the_reference(shape, dtype, shifted):
    for seed in range(3):
        compare(random_case(seed, shape, dtype, shifted=shifted))


def test_float32_queries_over_bfloat16_pages_are_not_rounded():
    arguments = random_case(0, (2, 1, 4, 2, 16, 128), "bfloat16")
    arguments[0] = arguments[0].astype(jnp.float32) * jnp.float32(1.001)
    for a, b in zip(run(arguments), expect(arguments), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_nothing_to_see_is_zero_and_minus_infinity():
    for num_entries in (0, ENTRIES):
        arguments = random_case(0, (2, 1, 4, 2, 16, 128), num_entries=num_entries)
        out, lse = run(arguments)
        assert (out[1] == 0).all()
        assert (lse[1] == -np.inf).all()
        assert np.isfinite(lse[0]).all() == (num_entries > 0)


def whole_pages(pages, R, N, K, B, H):
    """A case of one group that reads whole pages in a row."""
    arguments = random_case(1, (1, R, N, K, B, H))
    M = len(pages)
    position = np.arange(M) * B
    for index, values in enumerate((pages, np.zeros(M), np.full(M, B), position)):
        arguments[3 + index] = jnp.asarray(np.pad(values, (0, ENTRIES - M))[None], jnp.int32)
    arguments[8] = jnp.int32(M)
    return arguments


def test_a_fully_cached_prompt_of_whole_blocks():
    B = 16
    arguments = whole_pages([3, 4, 3], 1, 2, 2, B, 128)
    arguments[9] = jnp.full((1, 1), 3 * B - 1, jnp.int32)
    compare(arguments, CHIP)


@pytest.mark.parametrize(("B", "H"), [(16, 128), (128, 64)])
def test_rows_of_one_group_before_inside_and_after_a_fragment(B, H):
    rows = [  # shift of page 2, which was encoded at B, and query position
        (100, 50),  # before it
        (100, B + 100 + 5),  # inside
        (100, 4 * B + 100),  # after
        (-B, 7),  # moved to the front: inside, and after
        (-B, B + 20),
        (0, B + 3),  # in place
    ]
    arguments = whole_pages([1, 2], len(rows), 2, 1, B, H)
    shift = np.array([[0, s, 0, 0, 0] for s, _ in rows])[None]
    arguments[7] = jnp.asarray(shift, jnp.int32)
    arguments[9] = jnp.asarray([[p for _, p in rows]], jnp.int32)
    compare(arguments)
    arguments[7] = -arguments[7]
    wrong = run(arguments)
    arguments[7] = -arguments[7]
    assert np.abs(wrong[0] - expect(arguments)[0]).max() > 1e-2, "the sign of the shift does not matter"


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("B", "H"), [(16, 128), (128, 64)])
def test_slots_that_nobody_may_see_can_hold_nan(B, H, shifted):
    arguments = random_case(2, (1, 3, 4, 2, B, H), shifted=shifted)
    table = np.array([[1, 2, 3], [0, 5, 0], [B, 9, B], [0, B, 2 * B]])
    for index, values in enumerate(table):
        arguments[3 + index] = jnp.asarray(np.pad(values, (0, 2))[None], jnp.int32)
    arguments[8] = jnp.int32(4)
    if shifted:
        arguments[7] = jnp.asarray(np.tile([0, 2, 2, 0, 0], (1, 3, 1)), jnp.int32)
    arguments[9] = jnp.asarray([[B - 3, B + 8, 2 * B + 6]], jnp.int32)  # of the third page, slots up to 6 (4)
    clean = run(arguments, CHIP)
    for index in (1, 2):
        pages = np.array(arguments[index])
        pages[:POOL], pages[[POOL, *range(POOL + 4, 2 * POOL)]] = np.nan, np.nan
        pages[POOL + 2, :, :5], pages[POOL + 2, :, 9:] = np.nan, np.nan
        pages[POOL + 3, :, 5 if shifted else 7 :] = np.nan
        arguments[index] = jnp.asarray(pages)
    poisoned = run(arguments, CHIP)
    assert np.isfinite(poisoned[1]).all()
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shifted", [False, True])
def test_copies_and_reads_never_race(monkeypatch, shifted):
    """Three groups, one of them empty, and two steps of heads per group: copies cross every kind of step."""
    monkeypatch.setattr(pallas_tpu, "_MAX_HEADS", 1)
    arguments = random_case(3, (3, 1, 2, 2, 128, 128), shifted=shifted)
    compare(arguments, RACES)
    assert not races_found()


def races_found():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert interpret_pallas_call.races is not None
    return interpret_pallas_call.races.races_found


def test_a_page_outside_the_pool_is_an_error_on_the_simulated_chip():
    arguments = whole_pages([1, POOL + 1], 1, 2, 2, 16, 128)
    arguments[9] = jnp.full((1, 1), 31, jnp.int32)
    try:
        with pytest.raises(Exception, match=r"[Oo]ut-of-bounds"):
            run(arguments, CHIP)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 1, 2, 2, 16, 64), "float32", r"got pages of 16 x 64"),
        ((1, 1, 2, 2, 8, 128), "float32", r"got pages of 8 x 128"),
        ((1, 1, 2, 2, 128, 128), "float16", r"not float16"),
        ((1, 1, 2, 2, 128, 128), "uint16", r"not uint16"),
        ((20_000, 1, 2, 2, 128, 128), "float32", r"20000 groups with 6 entries needs \d+ bytes"),
    ],
)
def test_what_a_tpu_does_not_take_is_said_in_numbers(shape, dtype, message):
    G, R, N, K, B, H = shape
    q, pages = jax.ShapeDtypeStruct((G, R, N, H), jnp.float32), jax.ShapeDtypeStruct((9, K, B, H), dtype)
    table, scalar = jax.ShapeDtypeStruct((G, ENTRIES), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    position = jax.ShapeDtypeStruct((G, R), jnp.int32)
    call = functools.partial(pallas_tpu.paged_attention, scale=1.0)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(call, q, pages, pages, table, table, table, table, None, scalar, position, scalar)
