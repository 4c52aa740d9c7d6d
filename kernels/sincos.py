"""Sine and cosine of float32 angles in additions and multiplications only.

For kernels on chips whose own functions promise nothing for the angles of far positions. Reduction to an
eighth of a turn in three exact steps and polynomials of the Cephes library (S. Moshier, `sinf.c`, `cosf.c`).
Within 2e-7 for angles up to 131,072; beyond, the reduction is no longer exact.
"""

from typing import Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# pi / 2 in parts: with the first three, of 7 bits each, the products with a count of up to 17 bits are exact.
_QUARTER: Final = (1.5625, 0.0081787109375, 0.00011730194091796875, 3.1391647326017846e-07)
_PER_QUARTER: Final = 0.6366197723675814


def sincos(angle: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """(sin, cos) of `angle`, in float32."""
    count = jnp.floor(angle * _PER_QUARTER + 0.5)
    x = angle
    for part in _QUARTER:
        x = x - count * part
    z = x * x
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    quadrant = lax.convert_element_type(count, jnp.int32) & 3
    swap, back = (quadrant & 1) == 1, quadrant >= 2
    a, b = jnp.where(swap, cosine, sine), jnp.where(swap, sine, cosine)
    return jnp.where(back, -a, a), jnp.where(back ^ swap, -b, b)
