"""Join attention over disjoint sets of keys by their log-sum-exp. Knows nothing of pages.

The logarithm is natural. No keys at all is (0, -inf), which is the neutral element, exactly: joining it
changes no bit.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_states(
    out_a: Float[Array, "... N H"],
    lse_a: Float[Array, "... N"],
    out_b: Float[Array, "... N H"],
    lse_b: Float[Array, "... N"],
) -> tuple[Float[Array, "... N H"], Float[Array, "... N"]]:
    """Attention over the union of the keys behind (out_a, lse_a) and (out_b, lse_b)."""
    top = jnp.maximum(lse_a, lse_b)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - base), jnp.exp(lse_b - base)
    total = weight_a + weight_b
    divisor = jnp.where(total == 0, 1.0, total)
    out = (out_a * weight_a[..., None] + out_b * weight_b[..., None]) / divisor[..., None]
    return out, base + jnp.log(total)


def merge_groups(
    out: Float[Array, "G R N H"], lse: Float[Array, "G R N"]
) -> tuple[Float[Array, "R N H"], Float[Array, "R N"]]:
    """Attention of each row over the keys of all G groups; a row that is not in a group brings (0, -inf) there."""
    top = lse.max(axis=0)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(lse - base[None])  # G R N
    total = weight.sum(axis=0)
    divisor = jnp.where(total == 0, 1.0, total)
    return (out * weight[..., None]).sum(axis=0) / divisor[..., None], base + jnp.log(total)
