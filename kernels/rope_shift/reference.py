"""Rope shift, one page and one plane at a time in plain numpy: the oracle."""

import numpy as np
from jaxtyping import Float, Int32


def rope_shift(
    pages: Float[np.ndarray, "LP K B H"],
    src: Int32[np.ndarray, " C"],
    dst: Int32[np.ndarray, " C"],
    delta: Int32[np.ndarray, " C"],
    *,
    inv_freq: Float[np.ndarray, " h"],
    num_layers: int,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Float[np.ndarray, "LP K B H"]:
    """See `api.rope_shift`; a new array."""
    result = pages.copy()
    per_layer = pages.shape[0] // num_layers
    half = (pages.shape[3] if rotary_dim is None else rotary_dim) // 2
    for layer in range(num_layers):
        for source, target, distance in zip(src.tolist(), dst.tolist(), delta.tolist(), strict=True):
            keys = pages[source + layer * per_layer].astype(np.float32)  # K B H
            turned = keys.copy()
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                angle = np.float32(distance) * inv_freq[i]
                turned[..., a] = keys[..., a] * np.cos(angle) - keys[..., b] * np.sin(angle)
                turned[..., b] = keys[..., b] * np.cos(angle) + keys[..., a] * np.sin(angle)
            result[target + layer * per_layer] = turned.astype(pages.dtype)
    return result
