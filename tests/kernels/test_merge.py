"""Attention over two parts, merged, is attention over the whole."""

import jax.numpy as jnp
import numpy as np

from inms_jax.kernels.paged_attention.merge import merge_groups, merge_states


def attention(scores, values):
    """(out [T N H], lse [T N]) of scores [T N S] over values [S H], in float64."""
    weights = np.exp(scores)
    total = weights.sum(-1)
    return weights @ values / total[..., None], np.log(total)


def as_f32(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def test_parts_make_the_whole():
    rng = np.random.default_rng(0)
    scores, values = 4 * rng.standard_normal((3, 2, 10)), rng.standard_normal((10, 4))
    a, b = attention(scores[..., :3], values[:3]), attention(scores[..., 3:], values[3:])
    out, lse = merge_states(*as_f32(*a), *as_f32(*b))
    np.testing.assert_allclose(out, attention(scores, values)[0], atol=1e-6)
    np.testing.assert_allclose(lse, attention(scores, values)[1], atol=1e-6)


def test_far_apart_parts_neither_overflow_nor_vanish():
    out_a, out_b = np.ones((1, 1, 2)), np.full((1, 1, 2), 3.0)
    for low, high in ((-200.0, 200.0), (200.0, 200.0)):
        out, lse = merge_states(*as_f32(out_a, np.full((1, 1), low)), *as_f32(out_b, np.full((1, 1), high)))
        equal = low == high
        np.testing.assert_allclose(out, 2.0 if equal else 3.0)
        np.testing.assert_allclose(lse, 200 + (np.log(2) if equal else 0), rtol=1e-6)


def test_nothing_is_the_neutral_element_exactly():
    rng = np.random.default_rng(1)
    nothing = as_f32(np.zeros((5, 2, 4)), np.full((5, 2), -np.inf))
    some = as_f32(rng.standard_normal((5, 2, 4)), rng.standard_normal((5, 2)))
    for merged in (merge_states(*some, *nothing), merge_states(*nothing, *some)):
        np.testing.assert_array_equal(merged[0], some[0])
        np.testing.assert_array_equal(merged[1], some[1])


def test_two_nothings_are_nothing():
    nothing = as_f32(np.zeros((1, 2, 4)), np.full((1, 2), -np.inf))
    out, lse = merge_states(*nothing, *nothing)
    np.testing.assert_array_equal(out, nothing[0])
    np.testing.assert_array_equal(lse, nothing[1])


def test_merging_groups_is_merging_them_one_by_one():
    rng = np.random.default_rng(2)
    out, lse = rng.standard_normal((5, 3, 2, 4)), 3 * rng.standard_normal((5, 3, 2))
    lse[1:4, 0], lse[:, 2] = -np.inf, -np.inf  # a row that is in two groups, one that is in none
    out[lse == -np.inf] = 0
    out, lse = as_f32(out, lse)
    expected = (out[0], lse[0])
    for g in range(1, 5):
        expected = merge_states(*expected, out[g], lse[g])
    found = merge_groups(out, lse)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)
    assert (found[0][2] == 0).all()
    assert (found[1][2] == -np.inf).all()
