"""Rope shift for NVIDIA GPUs, in Pallas' Triton form, in place.

A program owns the same few slots of one kv head in every page of a layer, and reads them from all sources
before it writes the first destination. So lists in which a page is both need no second buffer and no order
between programs. Both components of a plane are in one thread. Sines and cosines are made before the kernel:
they are few.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32, Shaped

from inms_jax.kernels.gpu import require_ampere

# Bytes of a page per program: 16 per thread.
_PART: Final = 2048
# Every copy's part is in registers at once.
MOST_COPIES: Final = 16


class _Columns(NamedTuple):
    """Components of a head that a program takes together, as they lie in `[components / lanes, lanes]`."""

    start: int
    size: int
    lane: int

    @property
    def padded(self) -> int:
        """A power of two of at least `size`."""
        return pl.next_power_of_2(self.size)


def _columns(H: int, width: int, interleaved: bool) -> tuple[_Columns, ...]:
    """First and second components of the planes, then those that do not turn, if any."""
    half, rest = width // 2, H - width
    parts: tuple[_Columns, ...]
    if interleaved:
        parts = (_Columns(0, half, 0), _Columns(0, half, 1), _Columns(half, rest // 2, 0), _Columns(half, rest // 2, 1))
    else:
        parts = (_Columns(0, half, 0), _Columns(half, half, 0), _Columns(width, rest, 0))
    return tuple(part for part in parts if part.size)


def rope_shift(
    pages: Shaped[Array, "LP K B H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    delta: Int32[Array, " C"],
    *,
    inv_freq: Float[Array, " h"],
    num_layers: int,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    interpret: bool = False,
) -> Shaped[Array, "LP K B H"]:
    """See `api.rope_shift`. NotImplementedError for lists of more than 16, for block sizes that are not powers
    of two and for pools stored as bits.
    """
    LP, K, B, H = pages.shape
    C = src.shape[0]
    if C > MOST_COPIES or B & (B - 1) or pages.dtype == jnp.uint16 or (interleaved and H % 2):
        raise NotImplementedError(f"No GPU kernel for {C} pages of {B} slots, heads of {H}, stored as {pages.dtype}.")
    if not interpret:
        require_ampere()
    columns = _columns(H, 2 * inv_freq.shape[0] if rotary_dim is None else rotary_dim, interleaved)
    padded = pl.next_power_of_2(H)
    lanes = 2 if interleaved else 1
    slots = min(B, max(1, _PART // (padded * pages.dtype.itemsize)))
    angle = delta.astype(jnp.float32)[:, None] * inv_freq.astype(jnp.float32)[None]  # C h
    ids = pl.BlockSpec((C,), lambda part, head, layer: (0,))
    angles = pl.BlockSpec((C, columns[0].padded), lambda part, head, layer: (0, 0))
    whole = pl.BlockSpec((LP, None, B, 2 * padded, lanes), lambda part, head, layer: (0, head, 0, 0, 0))
    shifted: Array = pl.pallas_call(
        functools.partial(_kernel, per_layer=LP // num_layers, slots=slots, columns=columns),
        grid=(B // slots, K, num_layers),
        in_specs=[ids, ids, angles, angles, whole],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((LP, K, B, H // lanes, lanes), pages.dtype),  # type: ignore[no-untyped-call]
        input_output_aliases={4: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rope_shift",
    )(src, dst, jnp.cos(angle), jnp.sin(angle), pages.reshape(LP, K, B, H // lanes, lanes))
    return shifted.reshape(pages.shape)


def _kernel(
    src_ref: Any,
    dst_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    pages_ref: Any,
    out_ref: Any,
    *,
    per_layer: int,
    slots: int,
    columns: tuple[_Columns, ...],
) -> None:
    first_page = pl.program_id(2) * per_layer
    rows = pl.ds(pl.program_id(0) * slots, slots)

    def part(ref: Any, page: Array, column: _Columns) -> tuple[Any, Array]:
        inside = jnp.arange(column.padded, dtype=jnp.int32) < column.size
        mask = jnp.broadcast_to(inside[None], (slots, column.padded))
        return ref.at[page + first_page, rows, pl.ds(column.start, column.padded), jnp.int32(column.lane)], mask

    held = []
    for i in range(src_ref.shape[0]):
        places = [part(pages_ref, src_ref[i], column) for column in columns]
        held.append([plt.load(place, mask=mask, other=0) for place, mask in places])
    inside = (jnp.arange(columns[0].padded, dtype=jnp.int32) < columns[0].size)[None]
    for i, (first, second, *rest) in enumerate(held):
        cos = plt.load(cos_ref.at[pl.ds(i, 1), :], mask=inside, other=0.0)
        sin = plt.load(sin_ref.at[pl.ds(i, 1), :], mask=inside, other=0.0)
        a, b = first.astype(jnp.float32), second.astype(jnp.float32)
        turned = [(a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(first.dtype), *rest]
        for numbers, column in zip(turned, columns, strict=True):
            place, mask = part(out_ref, dst_ref[i], column)
            plt.store(place, numbers, mask=mask)
