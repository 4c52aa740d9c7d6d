"""Int8 pages: how near their numbers are, that a slot depends on nothing beside it, and attention over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.kernels.paged_attention.api import paged_attention
from inms_jax.kernels.scaled import ScaledPages, empty_pages, put_slots, quantise, take_pages
from tests.kernels.test_paged_attention import INV_FREQ, POOL, SHAPES, as_level, pool, random_entries, run
from tests.oracles import dense_attention


def scaled(x: np.ndarray) -> ScaledPages:
    numbers, scale = quantise(jnp.asarray(x))
    return ScaledPages(numbers, scale)


def numbers(pages: ScaledPages) -> np.ndarray:
    """What the pages hold, in numpy's own float32."""
    found: np.ndarray = np.asarray(pages.numbers).astype(np.float32) * np.asarray(pages.scale)[..., None]
    return found


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4])
def test_numbers_are_within_half_a_scale_and_the_largest_is_exact(size: float) -> None:
    x = (size * np.random.default_rng(0).standard_normal((50, 3, 64))).astype(np.float32)
    found = scaled(x[:, :, None])
    largest = np.abs(x).max(axis=-1)
    np.testing.assert_allclose(np.asarray(found.scale)[..., 0], largest / 127, rtol=1e-6)
    error = np.abs(numbers(found)[:, :, 0] - x)
    assert (error <= 0.5001 * np.asarray(found.scale)).all()
    assert (np.abs(np.asarray(found.numbers)).max(axis=-1) == 127).all()


def test_zeros_stay_zeros_and_nan_stays_in_its_slot() -> None:
    x = np.ones((2, 1, 3, 4), np.float32)
    x[0, 0, 1], x[1, 0, 2, 3] = 0, np.nan
    found = numbers(scaled(x))
    assert (found[0, 0, 1] == 0).all()
    assert np.isnan(found[1, 0, 2]).all()
    assert (np.delete(found.reshape(6, 4), (1, 5), axis=0) == 1).all()


def test_a_slot_is_written_with_its_scale_and_does_not_depend_on_others() -> None:
    rng = np.random.default_rng(1)
    new = jnp.asarray(rng.standard_normal((64, 2, 16)), jnp.float32)
    page, slot = jnp.arange(64, dtype=jnp.int32) // 8, jnp.arange(64, dtype=jnp.int32) % 8
    put = jax.jit(put_slots)
    together = put(empty_pages((9, 2, 8, 16), "int8"), page, slot, new)
    apart = empty_pages((9, 2, 8, 16), "int8")
    for i in (3, 17, 63):
        apart = put(apart, page[i : i + 1], slot[i : i + 1], new[i : i + 1])
    assert isinstance(together, ScaledPages)
    assert isinstance(apart, ScaledPages)
    for i in (3, 17, 63):
        for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
            np.testing.assert_array_equal(x[i // 8, :, i % 8], y[i // 8, :, i % 8])
    assert np.count_nonzero(apart.scale) == 3 * 2
    dropped = put(apart, page[:1] + 9, slot[:1], new[:1])
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, dropped, apart)))
    two = np.asarray(take_pages(together, jnp.asarray([[3, 1]], jnp.int32)))
    np.testing.assert_array_equal(two[0], np.concatenate(numbers(together)[[3, 1]], axis=1))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("shape", SHAPES[1::2])
def test_attention_equals_dense_numpy_over_the_same_numbers(implementation, shape, shifted):
    G, R, N, K, B = shape
    rng = np.random.default_rng(2)
    k, v = (scaled(x) for x in pool(rng, K, B))
    q = rng.standard_normal((G, R, N, 16)).astype(np.float32)
    entries = random_entries(rng, G, R, B, shifted=shifted)
    q_position = rng.integers(0, 80, (G, R))
    level = as_level(entries)
    got = jax.jit(paged_attention, static_argnames=("scale", "implementation"))(
        jnp.asarray(q),
        k,
        v,
        level,
        jnp.asarray(q_position, jnp.int32),
        jnp.int32(POOL),
        scale=0.25,
        inv_freq=jnp.asarray(INV_FREQ) if shifted else None,
        implementation=implementation,
    )
    dense = dense_attention(q, numbers(k)[POOL:], numbers(v)[POOL:], entries, q_position, scale=0.25, inv_freq=INV_FREQ)
    for a, b in zip(got, dense, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    plain = run(q, numbers(k), numbers(v), level, q_position, offset=POOL, implementation=implementation)
    for a, b in zip(got, plain, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_tpu"])
def test_kernels_of_chips_leave_int8_pages_to_plain_xla(implementation):
    rng = np.random.default_rng(3)
    k, v = (scaled(x) for x in pool(rng, 1, 16))
    entries = random_entries(rng, 1, 2, 16, shifted=False)
    q = jnp.zeros((1, 2, 1, 16))
    with pytest.raises(NotImplementedError, match="attention does not take int8 pages with scales"):
        paged_attention(
            q,
            k,
            v,
            as_level(entries),
            jnp.zeros((1, 2), jnp.int32),
            jnp.int32(0),
            scale=1.0,
            implementation=implementation,
        )
