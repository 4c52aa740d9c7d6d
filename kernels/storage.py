"""How numbers lie in the page pool, where that differs from their own dtype.

XLA on CPU lifts the upcast of a bfloat16 pool out of the page loop, so the whole pool is converted on every
call. A CPU pool therefore keeps bfloat16 bits as uint16, and each page is bitcast where it is read. Knows
nothing of pages.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped


def storage_dtype(dtype: DTypeLike, platform: str) -> jnp.dtype:
    """The dtype of the pool's arrays for numbers of `dtype` on `platform`."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else dtype


def number_dtype(stored: DTypeLike) -> jnp.dtype:
    """The dtype of the numbers that a pool of `stored` dtype holds."""
    return jnp.dtype(jnp.bfloat16) if jnp.dtype(stored) == jnp.uint16 else jnp.dtype(stored)


def encode(values: Float[Array, "..."], stored: DTypeLike) -> Shaped[Array, "..."]:
    """Round `values` to what a pool of `stored` dtype holds."""
    values = values.astype(number_dtype(stored))
    return lax.bitcast_convert_type(values, jnp.uint16) if jnp.dtype(stored) == jnp.uint16 else values


def decode(stored: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """Numbers of a pool, in float32."""
    if stored.dtype == jnp.uint16:  # bfloat16 is the upper half of a float32
        return lax.bitcast_convert_type(stored.astype(jnp.uint32) << jnp.uint32(16), jnp.float32)
    return stored.astype(jnp.float32)
