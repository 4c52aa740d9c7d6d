"""Rope shift as one gather, a rotation and one scatter, which XLA does in place when the pool is donated."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from inms_jax.kernels.rotation import rotate
from inms_jax.kernels.storage import decode, encode


def rope_shift(
    pages: Shaped[Array, "LP K B H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    delta: Int32[Array, " C"],
    *,
    inv_freq: Float[Array, " h"],
    num_layers: int,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Shaped[Array, "LP K B H"]:
    """See `api.rope_shift`."""
    per_layer = pages.shape[0] // num_layers
    offset = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * per_layer  # L 1
    source, target = (src[None] + offset).reshape(-1), (dst[None] + offset).reshape(-1)
    keys = decode(pages.at[source].get(mode="promise_in_bounds"))  # LC K B H
    angle = delta.astype(jnp.float32)[:, None] * inv_freq.astype(jnp.float32)[None]  # C h
    angle = jnp.tile(angle, (num_layers, 1))[:, None, None]  # LC 1 1 h
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    width = 2 * inv_freq.shape[0] if rotary_dim is None else rotary_dim
    head, rest = keys[..., :width], keys[..., width:]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        head = turned.reshape(head.shape)
    else:
        head = rotate(head, cos, sin)
    shifted = encode(jnp.concatenate([head, rest], axis=-1), pages.dtype)
    return pages.at[target].set(shifted, mode="promise_in_bounds")
