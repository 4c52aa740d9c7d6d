"""Paged attention for NVIDIA GPUs, in Pallas' Triton form.

One program owns a tile of query rows of one kv head and walks over a range of page entries, tile by tile, with
online softmax: rows of a group that share a kv head are one tile, so a page is read once for all of them.
Single rows give few programs, so their entries are also split, each split giving (out, lse), joined after the
kernel; the length of a split does not depend on the other rows. Tiles outside [begin, end) or after the last
position any row of the tile sees are not visited; slots that nobody sees are not read.

Pages of 16 bits are multiplied in 16 bits and summed in float32, queries and weights rounded to the pages'
dtype; float32 pages are multiplied in full float32, off the tensor cores.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from inms_jax.kernels.gpu import require_ampere
from inms_jax.kernels.scaled import Pages, without_scales
from inms_jax.kernels.sincos import sincos

# Slots per split of a single tile of rows. Not a function of the other rows: part of the bits.
_SPLIT_SLOTS: Final = 512
# Stands for "no key yet" in the running maximum: finite, so that subtracting it never gives NaN.
_NOTHING: Final = -1e30
# Position before every other: a padding row sees nothing.
_NEVER: Final = 2**30
_LOG2E: Final = math.log2(math.e)


class _Tiles(NamedTuple):
    """Sizes of one program: query rows, slots per product, threads / 32, loads in flight."""

    rows: int
    slots: int
    warps: int
    stages: int


def _tiles(rows: int, B: int, H: int, itemsize: int, shifted: bool) -> _Tiles:
    """By what the compiler reports (docs/gpu_code.md): larger tiles, or full ones of rotated queries in the
    registers of 4 warps, spill.
    """
    most, slots, warps = 64, 64, 4
    if itemsize == 4 or H > 128:
        most, slots, warps = 32, 32, 8
    if itemsize == 4 and H > 128:
        most, slots = 16, 16
    rows = min(max(16, pl.next_power_of_2(rows)), most)
    if shifted and rows * H > 2048:
        warps = 8
    return _Tiles(rows=rows, slots=min(B, slots), warps=warps, stages=2)


def paged_attention(
    q: Float[Array, "G R N H"],
    k: Pages,
    v: Pages,
    page: Int32[Array, "G M"],
    begin: Int32[Array, "G M"],
    end: Int32[Array, "G M"],
    position: Int32[Array, "G M"],
    shift: Int32[Array, "G R M"] | None,
    num_entries: Int32[Array, ""],
    q_position: Int32[Array, "G R"],
    page_offset: Int32[Array, ""],
    *,
    scale: float,
    inv_freq: Float[Array, " h"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "G R N H"], Float[Array, "G R N"]]:
    """See `api.paged_attention`. NotImplementedError for block sizes that are not powers of two of at least
    16, for heads above 256 or odd, and for pools stored as bits.
    """
    k, v = without_scales(k, "Pallas GPU attention"), without_scales(v, "Pallas GPU attention")
    G, R, N, H = q.shape
    K, B = k.shape[1:3]
    M = page.shape[1]
    if B < 16 or B & (B - 1) or H > 256 or H % 2 or k.dtype == jnp.uint16:
        raise NotImplementedError(f"No GPU kernel for pages of {B} slots, heads of {H}, stored as {k.dtype}.")
    if not interpret:
        require_ampere()
    per_kv = N // K
    Q, wide = R * per_kv, pl.next_power_of_2(H)
    shifted = shift is not None
    tiles = _tiles(Q, B, H, k.dtype.itemsize, shifted)
    row_tiles = pl.cdiv(Q, tiles.rows)
    per_split = max(1, _SPLIT_SLOTS // B) if row_tiles == 1 else M
    splits = pl.cdiv(M, per_split)
    queries = q.astype(jnp.float32).reshape(G, R, K, per_kv, H).transpose(0, 2, 1, 3, 4).reshape(G, K, Q, H)

    def at(*block: int | None, where: str) -> pl.BlockSpec:
        """The part of an array that a program gets; one letter per axis: its index, or 0 for all."""

        def index_map(t: Any, h: Any, s: Any, g: Any) -> tuple[Any, ...]:
            return tuple({"t": t, "h": h, "s": s, "g": g, "0": 0}[letter] for letter in where)

        return pl.BlockSpec(block, index_map)

    entry = at(None, M, where="g0")
    pages = at(k.shape[0], None, B, wide, where="0h00")
    arrays: list[Any] = [jnp.stack([num_entries, page_offset]), jnp.repeat(q_position, per_kv, axis=1), queries, k, v]
    specs = [at(2, where="0"), at(None, tiles.rows, where="gt"), at(None, None, tiles.rows, wide, where="ght0")]
    specs += [pages, pages, entry, entry, entry, entry]
    arrays += [page, begin, end, position]
    if shift is not None:
        assert inv_freq is not None
        arrays += [shift, inv_freq.astype(jnp.float32)]
        specs += [at(None, R, M, where="g00"), at(pl.next_power_of_2(H // 2), where="0")]

    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, num_rows=Q, per_kv=per_kv, H=H, per_split=per_split, tile=tiles.slots, scale=scale, shifted=shifted
        ),
        grid=(row_tiles, K, splits, G),
        in_specs=specs,
        out_specs=[
            at(None, None, None, tiles.rows, wide, where="gsht0"),
            at(None, None, None, tiles.rows, where="gsht"),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((G, splits, K, Q, H), jnp.float32),  # type: ignore[no-untyped-call]
            jax.ShapeDtypeStruct((G, splits, K, Q), jnp.float32),  # type: ignore[no-untyped-call]
        ],
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="paged_attention",
    )(*arrays)
    out, lse = _join(out, lse)
    out = out.reshape(G, K, R, per_kv, H).transpose(0, 2, 1, 3, 4).reshape(G, R, N, H)
    return out, lse.reshape(G, K, R, per_kv).transpose(0, 2, 1, 3).reshape(G, R, N)


def _join(
    out: Float[Array, "G X K Q H"], lse: Float[Array, "G X K Q"]
) -> tuple[Float[Array, "G K Q H"], Float[Array, "G K Q"]]:
    """Attention over the union of all splits (axis X)."""
    if out.shape[1] == 1:
        return out[:, 0], lse[:, 0]
    top = lse.max(axis=1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(lse - top)
    total = weight.sum(axis=1)
    mixed = (out * weight[..., None]).sum(axis=1) / jnp.where(total == 0, 1.0, total)[..., None]
    return mixed, top[:, 0] + jnp.log(total)


class _Running(NamedTuple):
    """Online softmax over the slots so far, in base 2: maximum, sum of weights, weighted sum of values."""

    top: Float[Array, " q"]
    total: Float[Array, " q"]
    mixed: Float[Array, "q H"]


def _kernel(
    bounds_ref: Any,
    limit_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    page_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    position_ref: Any,
    *refs: Any,
    num_rows: int,
    per_kv: int,
    H: int,
    per_split: int,
    tile: int,
    scale: float,
    shifted: bool,
) -> None:
    *shift_refs, out_ref, lse_ref = refs
    rows, wide = q_ref.shape
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    real = row < num_rows
    plain_limit = plt.load(limit_ref.at[:], mask=real, other=-_NEVER)
    num_entries, page_offset = bounds_ref[0], bounds_ref[1]
    # Parts of a head that are multiplied on their own: (first component, components, padded components).
    half = H // 2
    parts = ((0, half), (half, half)) if shifted else ((0, H),)
    part_wide = pl.next_power_of_2(half) if shifted else wide
    inside = jnp.arange(part_wide, dtype=jnp.int32) < parts[0][1]
    inside_head = jnp.arange(wide, dtype=jnp.int32) < H
    precision = lax.Precision.HIGHEST if k_ref.dtype == jnp.float32 else None

    def stored() -> list[Array]:
        mask = real[:, None] & inside[None]
        return [plt.load(q_ref.at[:, pl.ds(start, part_wide)], mask=mask, other=0.0) for start, _ in parts]

    plain = tuple(part.astype(k_ref.dtype) for part in stored())

    def rotated(delta: Int32[Array, " q"]) -> tuple[Array, ...]:
        frequency = plt.load(shift_refs[1].at[:], mask=inside, other=0.0)
        sine, cosine = sincos(-delta.astype(jnp.float32)[:, None] * frequency[None])
        first, second = stored()  # read again: kept, it would take the registers of the tile
        return (
            (first * cosine - second * sine).astype(k_ref.dtype),
            (second * cosine + first * sine).astype(k_ref.dtype),
        )

    def read_entry(m: Array, running: _Running, queries: tuple[Array, ...], limit: Int32[Array, " q"]) -> _Running:
        page, position = page_ref[m] + page_offset, position_ref[m]
        first = begin_ref[m]
        # Slots at and after this one are seen by no row of the tile.
        last = jnp.minimum(end_ref[m], limit.max() - position + 1)

        def read_tile(i: Array, running: _Running) -> _Running:
            slot = i * tile + jnp.arange(tile, dtype=jnp.int32)
            used = (first <= slot) & (slot < last)
            scores = jnp.zeros((rows, tile), jnp.float32)
            for query, (start, _) in zip(queries, parts, strict=True):
                keys = plt.load(
                    k_ref.at[page, pl.ds(i * tile, tile), pl.ds(start, part_wide)],
                    mask=used[:, None] & inside[None],
                    other=0.0,
                )
                scores += plt.dot(query, keys, trans_b=True, precision=precision)
            visible = used[None] & ((position + slot)[None] <= limit[:, None])
            scores = jnp.where(visible, scores * (scale * _LOG2E), -jnp.inf)
            top = jnp.maximum(running.top, scores.max(axis=1))
            weights = jnp.exp2(scores - top[:, None])
            keep = jnp.exp2(running.top - top)
            values = plt.load(
                v_ref.at[page, pl.ds(i * tile, tile), pl.ds(0, wide)],
                mask=used[:, None] & inside_head[None],
                other=0.0,
            )
            mixed = plt.dot(weights.astype(values.dtype), values, precision=precision)
            return _Running(top, running.total * keep + weights.sum(axis=1), running.mixed * keep[:, None] + mixed)

        tiles = lax.div(first, tile), lax.div(last + (tile - 1), tile)
        found: _Running = lax.fori_loop(*tiles, read_tile, running)
        return found

    def step(m: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        running, queries, delta = carry
        if not shifted:
            return read_entry(m, running, plain, plain_limit), queries, delta
        wanted = plt.load(shift_refs[0].at[lax.div(row, per_kv), m], mask=real, other=0)
        # Entries in a row that share their shift, 0 above all, are rotated for once.
        queries = lax.cond(jnp.abs(wanted - delta).max() > 0, lambda: rotated(wanted), lambda: queries)
        return read_entry(m, running, queries, plain_limit - wanted), queries, wanted

    running = _Running(
        top=jnp.full((rows,), _NOTHING, jnp.float32),
        total=jnp.zeros((rows,), jnp.float32),
        mixed=jnp.zeros((rows, wide), jnp.float32),
    )
    start = pl.program_id(2) * per_split
    carried = (plain, jnp.zeros((rows,), jnp.int32)) if shifted else ((), ())
    running, _, _ = lax.fori_loop(start, jnp.minimum(start + per_split, num_entries), step, (running, *carried))
    empty = running.total == 0
    divisor = jnp.where(empty, 1.0, running.total)
    plt.store(out_ref.at[:, :], running.mixed / divisor[:, None], mask=real[:, None] & inside_head[None])
    lse = jnp.where(empty, -jnp.inf, running.top / _LOG2E + jnp.log(divisor))
    plt.store(lse_ref.at[:], lse, mask=real)
