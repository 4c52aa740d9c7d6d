"""A sum whose rounding does not depend on the shape around it.

How XLA on CPU splits a reduction over the last axis depends on the other axes, so the same row would round
differently in a batch of 2 and of 8. Elementwise additions in a written-out order do not.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def ordered_sum(x: Float[Array, "... W"]) -> Float[Array, "..."]:
    """Sum over the last axis, halving it until one element is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if x.shape[-1] % 2:
            folded = jnp.concatenate([folded, x[..., -1:]], axis=-1)
        x = folded
    return x[..., 0]
