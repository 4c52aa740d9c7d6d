"""What the GPU kernels of several operations share: the choice by chip, and sines inside a kernel.

Knows no operation.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Larger than any position: where nobody stands.
NEVER: Final = 2**30
# pi / 2 in parts of few bits, so that multiples up to 2**16 of the first are exact in float32 (Cody and Waite).
_HALF_PI: Final = (1.5703125, 4.837512969970703125e-4, 7.54978995489188216e-8)


def require_tensor_cores() -> None:
    """NotImplementedError on a GPU before compute capability 8.0.

    Triton gives such chips no tensor cores and spills there (docs/gpu_code.md), so plain XLA, whose products
    go to cuBLAS, is the better form. A host without a GPU passes: there code is lowered for other machines.
    """
    if jax.default_backend() != "gpu":
        return
    capability = str(getattr(jax.devices()[0], "compute_capability", "0"))
    if float(capability) < 8.0:
        raise NotImplementedError(f"This GPU has compute capability {capability}; the Pallas kernels need 8.0.")


def sine_and_cosine(angle: Float[Array, "... h"]) -> tuple[Float[Array, "... h"], Float[Array, "... h"]]:
    """Both, to about 1e-7 plus 2e-11 of the angle for angles up to 1e5, without the local memory and branches
    of CUDA's own; polynomials of Cephes' `sinf` and `cosf`.
    """
    quarter = (angle * (2 / jnp.pi) + jnp.where(angle < 0, -0.5, 0.5)).astype(jnp.int32)
    turns = quarter.astype(jnp.float32)
    x = ((angle - turns * _HALF_PI[0]) - turns * _HALF_PI[1]) - turns * _HALF_PI[2]
    square = x * x
    sine = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 + square * -1.9515295891e-4))
    cosine = (
        1.0
        - 0.5 * square
        + square * square * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    swapped = (quarter & 1) == 1
    sine, cosine = jnp.where(swapped, cosine, sine), jnp.where(swapped, sine, cosine)
    sine = jnp.where((quarter & 2) == 2, -sine, sine)
    cosine = jnp.where(((quarter + 1) & 2) == 2, -cosine, cosine)
    return sine, cosine
