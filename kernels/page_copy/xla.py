"""Page copy as one gather and one scatter, which XLA does in place when the pool is donated."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def page_copy(
    pages: Shaped[Array, "LP K B *H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    *,
    num_layers: int,
) -> Shaped[Array, "LP K B *H"]:
    """See `api.page_copy`."""
    per_layer = pages.shape[0] // num_layers
    offset = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * per_layer  # L 1
    source, target = (src[None] + offset).reshape(-1), (dst[None] + offset).reshape(-1)
    return pages.at[target].set(pages[source], mode="promise_in_bounds")
