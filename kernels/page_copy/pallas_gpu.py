"""Page copy for NVIDIA GPUs, in Pallas' Triton form, in place.

A program owns the same few numbers of every page of a layer, and reads them from all sources before it writes
the first destination. So lists in which a page is both need no second buffer and no order between programs.
"""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32, Shaped

from inms_jax.kernels.gpu import require_ampere

# Bytes of a page per program: 16 per thread.
_PART: Final = 2048
# Every copy's part is in registers at once.
MOST_COPIES: Final = 16


def page_copy(
    pages: Shaped[Array, "LP K B H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    *,
    num_layers: int,
    interpret: bool = False,
) -> Shaped[Array, "LP K B H"]:
    """See `api.page_copy`. NotImplementedError for lists of more than 16."""
    LP, K, B, H = pages.shape
    C = src.shape[0]
    if C > MOST_COPIES:
        raise NotImplementedError(f"The GPU page copy takes lists of at most {MOST_COPIES}, got {C}.")
    if not interpret:
        require_ampere()
    size = K * B * H
    part = min(_PART // pages.dtype.itemsize, pl.next_power_of_2(size))
    whole = pl.BlockSpec((LP, part), lambda part, layer: (0, part))
    ids = pl.BlockSpec((C,), lambda part, layer: (0,))
    copied: Array = pl.pallas_call(
        functools.partial(_kernel, per_layer=LP // num_layers, size=size),
        grid=(pl.cdiv(size, part), num_layers),
        in_specs=[ids, ids, whole],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((LP, size), pages.dtype),  # type: ignore[no-untyped-call]
        input_output_aliases={2: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="page_copy",
    )(src, dst, pages.reshape(LP, size))
    return copied.reshape(LP, K, B, H)


def _kernel(src_ref: Any, dst_ref: Any, pages_ref: Any, out_ref: Any, *, per_layer: int, size: int) -> None:
    part = pages_ref.shape[1]
    first_page = pl.program_id(1) * per_layer
    inside = pl.program_id(0) * part + jnp.arange(part, dtype=jnp.int32) < size
    held = [plt.load(pages_ref.at[src_ref[i] + first_page, :], mask=inside) for i in range(src_ref.shape[0])]
    for i, numbers in enumerate(held):
        plt.store(out_ref.at[dst_ref[i] + first_page, :], numbers, mask=inside)
