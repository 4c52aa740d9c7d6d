"""Rotary position embedding: frequencies of a model, and the rotation of queries and keys to integer
positions.

Rotate-half layout (Su et al. 2021, arXiv:2104.09864, in the form of GPT-NeoX); Llama 3.1's frequency scaling
follows `transformers.modeling_rope_utils`. Angles are float32 from int32 positions, computed inside the step.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from inms_jax.kernels.rotation import rotate
from inms_jax.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Float[np.ndarray, " h"]:
    """Angle per position of each of the H/2 planes, in float32."""
    frequency = config.rope.theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope.scaling
    if scaling is not None:
        wavelength = 2 * math.pi / frequency
        turns = scaling.original_max_position_embeddings / wavelength
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # 0: slower than low_freq_factor turns, divided by `factor`; 1: faster than high_freq_factor turns,
        # kept.
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    return frequency.astype(np.float32)


def angles(
    positions: Int32[Array, " T"], inv_freq: Float[Array, " h"]
) -> tuple[Float[Array, "T 1 h"], Float[Array, "T 1 h"]]:
    """Cosine and sine of T positions, with an axis for the heads."""
    angle = positions.astype(jnp.float32)[:, None] * inv_freq[None]
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def apply_rope(
    x: Float[Array, "T N H"], cos: Float[Array, "T 1 h"], sin: Float[Array, "T 1 h"]
) -> Float[Array, "T N H"]:
    """Rotate each head in float32; dtype is kept."""
    return rotate(x.astype(jnp.float32), cos, sin).astype(x.dtype)
