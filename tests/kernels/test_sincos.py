"""Sine and cosine against float64 numpy, over the angles of every position a model may have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.kernels.sincos import sincos


@pytest.mark.parametrize("largest", [1.0, 100.0, 131_072.0])
def test_equals_numpy(largest):
    rng = np.random.default_rng(0)
    near_axes = np.arange(-200, 200) * (np.pi / 4)
    angle = np.concatenate([rng.uniform(-largest, largest, 200_000), near_axes, [largest, -largest]]).astype(np.float32)
    sine, cosine = jax.jit(sincos)(angle)
    np.testing.assert_allclose(sine, np.sin(angle.astype(np.float64)), atol=2e-7)
    np.testing.assert_allclose(cosine, np.cos(angle.astype(np.float64)), atol=2e-7)


def test_no_turn_is_exact():
    sine, cosine = sincos(jnp.zeros((1,)))
    assert float(sine[0]) == 0.0
    assert float(cosine[0]) == 1.0
