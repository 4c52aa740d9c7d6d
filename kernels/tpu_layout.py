"""How XLA lays out a page pool on a TPU, and which pools a Pallas kernel can therefore read in place.

A TPU array lies in tiles of 128 lanes, and XLA swaps the last two axes where that wastes fewer lanes; a kernel
whose operand lies otherwise gets a copy of the whole pool on every call (seen by compiling: `tests/kernels/
test_tpu_aot.py` counts the bytes). Knows nothing of what kernels do with a page.
"""

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Shaped

LANES: Final = 128
# Bytes of VMEM that a kernel may ask for: v5p and later have 64 MiB and more.
VMEM_BYTES: Final = 48 * 2**20


def slots_are_lanes(pages: Shaped[Array, "LP K B H"]) -> bool:
    """Whether pages lie as `[H, B]`, so that swapping the last two axes is a free view.

    NotImplementedError for dtypes that the TPU compiler does not take (float16; uint16 is the CPU's form of
    bfloat16), and where neither the slots nor the head dim are whole lanes: XLA then pads pages, or puts page ids
    into lanes, as it likes.
    """
    _, _, B, H = pages.shape
    if pages.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"Pallas TPU kernels take float32 and bfloat16 pages, not {pages.dtype}.")
    if B % 16 or (B % LANES and H % LANES):
        raise NotImplementedError(
            f"Pallas TPU kernels need a block size or a head dim of whole lanes ({LANES}), got pages of {B} x {H}."
        )
    return H % LANES != 0
