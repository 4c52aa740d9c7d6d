"""Page copy as a Pallas kernel for TPU: pages move through VMEM, in place in the pool.

A grid step is one layer and one kv head (or a few): it reads its part of all source pages, and only then writes,
so chains and swaps see what was there before. Copies of a page to itself, which is what padding is, move
nothing. Where XLA stores pages as `[H, B]` the kernel sees them as such, which is a free view.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from inms_jax.kernels.tpu_layout import VMEM_BYTES, slots_are_lanes

# Bytes of VMEM that the parts of all pages of a call may take.
_BUFFER_BYTES: Final = 16 * 2**20


def page_copy(
    pages: Shaped[Array, "LP K B H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    *,
    num_layers: int,
    interpret: Any = False,
) -> Shaped[Array, "LP K B H"]:
    """See `api.page_copy`. NotImplementedError as `slots_are_lanes` says, and for more copies than fit VMEM.
    `interpret` is for tests.
    """
    return edit_pages("page_copy", pages, src, dst, num_layers=num_layers, interpret=interpret)


def edit_pages(
    name: str,
    pages: Shaped[Array, "LP K B H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    *extra: Shaped[Array, "..."],
    num_layers: int,
    interpret: Any,
    edit: Callable[..., None] | None = None,
) -> Shaped[Array, "LP K B H"]:
    """Copy pages, and change each on the way by `edit(copy index, page ref [heads, B, H], *extra refs)`.

    `extra` arrays are in VMEM as they are. The page ref is `[heads, H, B]` where `slots_are_lanes`. With `edit` a
    copy of a page to itself is skipped only if it is the null page.
    """
    _, K, B, H = pages.shape
    C = src.shape[0]
    turned = slots_are_lanes(pages)
    view = pages.swapaxes(2, 3) if turned else pages
    part = C * B * H * pages.dtype.itemsize
    if part > _BUFFER_BYTES:
        raise NotImplementedError(
            f"{C} copies of {B} x {H} slots take {part} bytes of VMEM, more than {_BUFFER_BYTES}."
        )
    heads = max(n for n in range(1, K + 1) if K % n == 0 and (n == 1 or n * part <= _BUFFER_BYTES // 4))
    result: Array = pl.pallas_call(
        functools.partial(_kernel, C, heads, pages.shape[0] // num_layers, edit),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_layers, K // heads),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(extra),
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((C, heads, *view.shape[2:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(view.shape, view.dtype),  # type: ignore[no-untyped-call]
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2, vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name=name,
    )(src, dst, view, *extra)
    return result.swapaxes(2, 3) if turned else result


def _kernel(
    copies: int, heads: int, per_layer: int, edit: Callable[..., None] | None, src: Any, dst: Any, _: Any, *refs: Any
) -> None:
    *extra, pages, buffer, sems = refs
    offset = pl.program_id(0) * per_layer
    part = pl.ds(pl.program_id(1) * heads, heads)

    def read(i: Any) -> Any:
        return pltpu.make_async_copy(pages.at[src[i] + offset, part], buffer.at[i], sems.at[0])

    def write(i: Any) -> Any:
        return pltpu.make_async_copy(buffer.at[i], pages.at[dst[i] + offset, part], sems.at[1])

    def each(action: Callable[[Any], None]) -> None:
        def visit(i: Any, carry: None) -> None:
            moves = src[i] != dst[i] if edit is None else (src[i] != 0) | (dst[i] != 0)

            @pl.when(moves)
            def act() -> None:
                action(i)

        lax.fori_loop(0, copies, visit, None)

    each(lambda i: read(i).start())
    each(lambda i: read(i).wait())
    if edit is not None:
        each(lambda i: edit(i, buffer.at[i], *extra))
    each(lambda i: write(i).start())
    each(lambda i: write(i).wait())
