"""Rotary rotation in the rotate-half layout: the one place that says which components turn together.

Component i and component i + H/2 are one plane, turned by `angle[i]`. Rotations compose by adding angles,
which is what lets a stored key be read at another position. Knows nothing of positions or of how frequencies
are chosen.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(x: Float[Array, "... H"], cos: Float[Array, "... h"], sin: Float[Array, "... h"]) -> Float[Array, "... H"]:
    """Turn each plane of `x` by the angle with this cosine and sine; `h` is H/2, other axes must match in
    rank.
    """
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
