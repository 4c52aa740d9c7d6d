"""Frequencies against the published formulas, and the angles of large positions."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from inms_jax.models.config import Llama3Scaling, RopeConfig
from inms_jax.models.rope import angles, apply_rope, inverse_frequencies
from tests.oracles import golden, turn

CONFIG = golden("llama_mha").config


def test_llama3_keeps_fast_planes_divides_slow_ones_and_blends_between():
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    unscaled = dataclasses.replace(CONFIG, head_dim=128, rope=RopeConfig(theta=500000.0))
    scaled = inverse_frequencies(dataclasses.replace(unscaled, rope=RopeConfig(theta=500000.0, scaling=scaling)))
    plain = inverse_frequencies(unscaled)
    assert scaled.dtype == np.float32
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected = before
        elif wavelength > 8192 / 1:
            expected = before / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * before / 8 + smooth * before
        assert math.isclose(after, expected, rel_tol=1e-6)
    ratio = plain / scaled
    assert ratio.min() == 1
    assert np.isclose(ratio.max(), 8)
    assert ((ratio > 1.1) & (ratio < 7.9)).any()


def test_rotation_to_a_position_is_a_complex_product():
    inv_freq = inverse_frequencies(CONFIG)
    x = np.random.default_rng(0).standard_normal((3, 2, CONFIG.head_dim)).astype(np.float32)
    positions = np.array([0, 5, 8191], np.int32)
    got = apply_rope(jnp.asarray(x), *angles(jnp.asarray(positions), jnp.asarray(inv_freq)))
    expected = [[turn(head, int(p), inv_freq) for head in row] for p, row in zip(positions, x, strict=True)]
    np.testing.assert_allclose(got, expected, atol=2e-3)  # the angle itself is float32
    np.testing.assert_allclose(got[:2], expected[:2], atol=1e-6)
