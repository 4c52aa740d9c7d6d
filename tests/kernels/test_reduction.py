"""The ordered sum is a sum, and rounds alike whatever else is in the array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.kernels.reduction import ordered_sum


@pytest.mark.parametrize("width", [1, 3, 64, 576, 1000])
def test_is_the_sum_whatever_the_batch(width):
    x = np.random.default_rng(width).standard_normal((64, width)).astype(np.float32)
    summed = jax.jit(ordered_sum)
    whole = np.asarray(summed(jnp.asarray(x)))
    np.testing.assert_allclose(whole, x.astype(np.float64).sum(-1), atol=1e-4)
    for rows in (1, 2, 8):
        np.testing.assert_array_equal(summed(jnp.asarray(x[:rows])), whole[:rows])
