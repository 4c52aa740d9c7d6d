"""Paged attention as a Pallas kernel for TPU.

The pool stays in HBM in the layout that XLA chose for it and is never copied: pages are streamed into VMEM,
double buffered, also from one grid step to the next. A grid step is one group, a few kv heads and one tile of
queries (rows times the heads that share a kv head). XLA stores a page whose head dim is no multiple of 128 but
whose slots are as `[H, B]`, because that wastes no lanes; the kernel then reads it as such, which is a free
view. What a page's entry means is worked out before the kernel and prefetched as scalars: the slots that some
row of the tile may see, and how many entries a tile must read at all.

A row's bits depend on its own query and entries only: entries are taken in fixed splits from the first on,
and a slot that the row may not see has weight 0, exactly.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32, Shaped

from inms_jax.kernels.scaled import Pages, without_scales
from inms_jax.kernels.sincos import sincos
from inms_jax.kernels.tpu_layout import LANES, VMEM_BYTES, slots_are_lanes

# Slots per split, if pages are smaller: enough lanes for a vector unit of 128, few enough to waste little.
_SPLIT_SLOTS: Final = 256
# Queries per tile: a page is read once per tile, and 512 rows keep the matrix unit as busy as the memory.
_TILE: Final = 512
# Bytes of VMEM for one of the four page buffers, and for the running sums.
_BUFFER_BYTES: Final = 2 * 2**20
# Bytes of VMEM for the shifts of a tile's queries, double buffered.
_SHIFT_BYTES: Final = 16 * 2**20
# Heads of one grid step are written out in the program.
_MAX_HEADS: Final = 8
# SMEM is 1 MiB on every chip from v4 on.
_SCALAR_BYTES: Final = 768 * 2**10
# Stands for "no key yet" in the running maximum: finite, so that subtracting it never gives NaN.
_NOTHING: Final = -1e30
# Position of a slot that nobody may see, and (negative) of a padding row.
_NEVER: Final = 2**30


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Static sizes of one kernel."""

    groups: int
    kv_heads: int
    entries: int  # M, padded to whole splits
    split: int  # entries per split
    block: int
    head_dim: int
    tile: int
    tiles: int
    heads: int  # kv heads per grid step
    transposed: bool  # pages are [H, B]
    shifted: bool
    scale: float

    @property
    def slots(self) -> int:
        """Slots of a split."""
        return self.split * self.block


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
    interpret: Any = False,
) -> tuple[Float[Array, "G R N H"], Float[Array, "G R N"]]:
    """See `api.paged_attention`. Products are taken in the pool's dtype when `q` has it too, else in float32.

    NotImplementedError as `slots_are_lanes` says, and for more entries than scalar memory holds. `interpret` is
    for tests.
    """
    k, v = without_scales(k, "Pallas TPU attention"), without_scales(v, "Pallas TPU attention")
    G, R, N, H = q.shape
    K, M = k.shape[1], page.shape[1]
    sizes = _plan(q, k, page, shifted=shift is not None, scale=scale)
    per_kv, rows = N // K, sizes.tiles * sizes.tile
    wide = k.dtype == jnp.float32 or q.dtype != k.dtype
    queries = _fold(q.astype(jnp.float32 if wide else k.dtype), K, rows)

    limit = jnp.pad(jnp.repeat(q_position, per_kv, axis=1), ((0, 0), (0, rows - R * per_kv)), constant_values=-_NEVER)
    target = jnp.broadcast_to(limit[:, None], (G, 1, rows))
    moved = None
    if shift is not None:
        moved = jnp.repeat(shift.transpose(0, 2, 1), per_kv, axis=2)
        moved = jnp.pad(moved, ((0, 0), (0, 0), (0, rows - R * per_kv)))  # G M Q
        target = target - moved
    farthest = target.reshape(G, -1, sizes.tiles, sizes.tile).max(axis=-1).transpose(0, 2, 1)  # G t M
    entry = jnp.arange(M, dtype=jnp.int32)[None, None]
    used = entry < num_entries
    stop = jnp.minimum(end[:, None], farthest - position[:, None] + 1)
    seen = used & (begin[:, None] < stop)
    count = jnp.where(seen, entry + 1, 0).max(axis=-1)
    splits = jnp.maximum(1, lax.div(count + (sizes.split - 1), jnp.int32(sizes.split)))
    span = jnp.where(seen, begin[:, None] | (stop << 16), 0)

    def scalars(x: Int32[Array, "... M"]) -> Int32[Array, " n"]:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, sizes.entries - M)]).reshape(-1)

    prefetched = [
        scalars(jnp.where(used[0], page, 0) + page_offset),
        scalars(position),
        scalars(span),
        splits.reshape(-1),
    ]
    inputs = [queries, limit.reshape(G, sizes.tiles, 1, sizes.tile)]
    if moved is not None:
        assert inv_freq is not None
        turned = jnp.any(moved[:, 1:] != moved[:, :-1], axis=-1)
        prefetched.append(scalars(jnp.pad(turned.astype(jnp.int32), ((0, 0), (1, 0)), constant_values=1)))
        quarter = jnp.concatenate([-queries[..., H // 2 :], queries[..., : H // 2]], axis=-1)
        inputs += [quarter, moved, jnp.tile(inv_freq.astype(jnp.float32), 2)[None]]
    if sizes.transposed:
        k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
    out, lse = _call(sizes, prefetched, inputs, k, v, interpret)
    return _unfold(out, R, N), _unfold(lse.reshape(G, K, rows, 1), R, N)[..., 0]


def _plan(
    q: Float[Array, "G R N H"], k: Shaped[Array, "LP K B H"], page: Int32[Array, "G M"], *, shifted: bool, scale: float
) -> _Sizes:
    G, R, N, H = q.shape
    _, K, B, _ = k.shape
    transposed = slots_are_lanes(k)
    split = 1 if shifted else max(1, _SPLIT_SLOTS // B)
    split = min(split, page.shape[1])
    rows = R * (N // K)
    tiles = -(-rows // _TILE)
    tile = -(-rows // (tiles * LANES)) * LANES if rows > LANES else -(-rows // 16) * 16
    lanes = -(-H // LANES) * LANES
    page_bytes = split * B * (H if transposed else lanes) * k.dtype.itemsize
    head_bytes = max(page_bytes, tile * lanes * 4)
    heads = max(
        n for n in range(1, min(K, _MAX_HEADS) + 1) if K % n == 0 and (n == 1 or n * head_bytes <= _BUFFER_BYTES)
    )
    entries = -(-page.shape[1] // split) * split
    scalar_bytes = 4 * G * (entries * (2 + tiles + shifted) + tiles)
    if scalar_bytes > _SCALAR_BYTES:
        raise NotImplementedError(
            f"Pallas TPU attention of {G} groups with {entries} entries needs {scalar_bytes} bytes of scalar memory, "
            f"more than {_SCALAR_BYTES}; use fewer rows or larger blocks."
        )
    if shifted and 2 * 4 * entries * tile > _SHIFT_BYTES:
        raise NotImplementedError(
            f"Pallas TPU attention of {entries} entries with shifts for {tile} queries at once needs more than "
            f"{_SHIFT_BYTES} bytes for the shifts; use larger blocks."
        )
    return _Sizes(
        groups=G,
        kv_heads=K,
        entries=entries,
        split=split,
        block=B,
        head_dim=H,
        tile=tile,
        tiles=tiles,
        heads=heads,
        transposed=transposed,
        shifted=shifted,
        scale=scale,
    )


def _call(
    sizes: _Sizes,
    prefetched: list[Array],
    inputs: list[Array],
    k: Shaped[Array, "LP K X Y"],
    v: Shaped[Array, "LP K X Y"],
    interpret: Any,
) -> tuple[Float[Array, "G K Q H"], Float[Array, "G K t 1 q"]]:
    s = sizes
    per_head = pl.BlockSpec((1, s.heads, s.tile, s.head_dim), lambda g, h, t, *_: (g, h, t, 0))
    in_specs = [per_head, pl.BlockSpec((1, 1, 1, s.tile), lambda g, h, t, *_: (g, t, 0, 0))]
    if s.shifted:
        in_specs += [
            per_head,
            pl.BlockSpec((1, inputs[3].shape[1], s.tile), lambda g, h, t, *_: (g, 0, t)),
            pl.BlockSpec((1, s.head_dim), lambda g, h, t, *_: (0, 0)),
        ]
    in_specs += [pl.BlockSpec(memory_space=pltpu.HBM)] * 2
    width = (s.head_dim, s.slots) if s.transposed else (s.slots, s.head_dim)
    buffer = pltpu.VMEM((2, s.heads, *width), k.dtype)
    running = pltpu.VMEM((s.heads, s.tile, 1), jnp.float32)
    scratch = [
        buffer,
        buffer,
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((1,), jnp.int32),
        running,
        running,
        pltpu.VMEM((s.heads, s.tile, s.head_dim), jnp.float32),
    ]
    if s.shifted:
        scratch.append(pltpu.VMEM((s.heads, s.tile, s.head_dim), inputs[0].dtype))
    rows = s.tiles * s.tile
    result = pl.pallas_call(
        functools.partial(_kernel, s),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(s.groups, s.kv_heads // s.heads, s.tiles),
            in_specs=in_specs,
            out_specs=(
                per_head,
                pl.BlockSpec((1, s.heads, 1, 1, s.tile), lambda g, h, t, *_: (g, h, t, 0, 0)),
            ),
            scratch_shapes=scratch,
        ),
        out_shape=(
            jax.ShapeDtypeStruct((s.groups, s.kv_heads, rows, s.head_dim), jnp.float32),  # type: ignore[no-untyped-call]
            jax.ShapeDtypeStruct((s.groups, s.kv_heads, s.tiles, 1, s.tile), jnp.float32),  # type: ignore[no-untyped-call]
        ),
        # In order: a step starts the copies that the next one waits for.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name=f"paged_attention_{s.block}",
    )(*prefetched, *inputs, k, v)
    return result[0], result[1]


def _kernel(s: _Sizes, *refs: Any) -> None:
    """One group, `heads` kv heads, one tile of queries; the loop is over splits of entries."""
    page, position, span, splits, *rest = refs
    turned: Any = None
    quarter: Any = None
    shift: Any = None
    freq: Any = None
    rotated: Any = None
    if s.shifted:
        turned, q, limit, quarter, shift, freq, k_pool, v_pool, out, lse, *scratch, rotated = rest
    else:
        q, limit, k_pool, v_pool, out, lse, *scratch = rest
    k_buffer, v_buffer, sems, side, top, total, mixed = scratch
    g, hb, t = (pl.program_id(i) for i in range(3))
    num_hb = s.kv_heads // s.heads
    count = splits[g * s.tiles + t]

    def copies(group: Any, head_block: Any, split: Any, to: Any) -> list[Any]:
        made = []
        for i in range(s.split):
            id_ = page[group * s.entries + split * s.split + i]
            for pool, buffer, which in ((k_pool, k_buffer, 0), (v_pool, v_buffer, 1)):
                slots = pl.ds(i * s.block, s.block)
                window = buffer.at[to, :, :, slots] if s.transposed else buffer.at[to, :, slots, :]
                source = pool.at[id_, pl.ds(head_block * s.heads, s.heads)]
                made.append(pltpu.make_async_copy(source, window, sems.at[to, which]))
        return made

    def start(group: Any, head_block: Any, split: Any, to: Any) -> None:
        for copy in copies(group, head_block, split, to):
            copy.start()

    @pl.when((g == 0) & (hb == 0) & (t == 0))
    def first_step() -> None:
        side[0] = 0
        start(0, 0, 0, 0)

    top[...] = jnp.full_like(top, _NOTHING)
    total[...] = jnp.zeros_like(total)
    mixed[...] = jnp.zeros_like(mixed)
    row_limit = _column(limit[0, 0])
    last_tile = t + 1 == s.tiles
    last_heads = last_tile & (hb + 1 == num_hb)
    next_hb = jnp.where(last_tile, jnp.where(last_heads, 0, hb + 1), hb)
    next_g = jnp.where(last_heads, g + 1, g)

    def step(split: Any, _: None) -> None:
        here = side[0]
        more = split + 1 < count

        @pl.when(more)
        def next_split() -> None:
            start(g, hb, split + 1, 1 - here)

        @pl.when(jnp.logical_not(more) & (next_g < s.groups))
        def next_step() -> None:
            start(next_g, next_hb, 0, 1 - here)

        for copy in copies(g, hb, split, here):
            copy.wait()
        side[0] = 1 - here

        first = split * s.split
        base, span_base = g * s.entries + first, (g * s.tiles + t) * s.entries + first
        spans = [span[span_base + i] for i in range(s.split)]
        origin = [position[base + i] for i in range(s.split)]
        queries, limits = q, row_limit
        if s.shifted:
            delta = _column(shift[0, pl.ds(split, 1), :])
            limits = row_limit - delta

            @pl.when((split == 0) | (turned[base] != 0))
            def turn() -> None:
                sine, cosine = sincos(-delta.astype(jnp.float32) * freq[...])
                for h in range(s.heads):
                    plain, ahead = q[0, h].astype(jnp.float32), quarter[0, h].astype(jnp.float32)
                    rotated[h] = (plain * cosine + ahead * sine).astype(rotated.dtype)

            queries = rotated

        # Slots that no row sees may hold NaN, and 0 * NaN would spread.
        whole = functools.reduce(jnp.logical_and, [x == s.block << 16 for x in spans])

        @pl.when(jnp.logical_not(whole))
        def blank() -> None:
            shape = (1, s.slots) if s.transposed else (s.slots, 1)
            known = _slot_positions(s, spans, origin, shape) < _NEVER
            for h in range(s.heads):
                values = v_buffer[here, h].astype(jnp.float32)
                v_buffer[here, h] = jnp.where(known, values, 0.0).astype(v_buffer.dtype)

        visible = _slot_positions(s, spans, origin, (1, s.slots)) <= limits  # q W
        for h in range(s.heads):
            queries_h = queries[h] if s.shifted else queries[0, h]
            keys, values = k_buffer[here, h].astype(q.dtype), v_buffer[here, h].astype(q.dtype)
            scores = _dot(queries_h, keys, 0 if s.transposed else 1) * s.scale
            scores = jnp.where(visible, scores, -jnp.inf)
            highest = jnp.maximum(top[h], scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - highest)
            keep = jnp.exp(top[h] - highest)
            total[h] = total[h] * keep + weights.sum(axis=1, keepdims=True)
            mixed[h] = mixed[h] * keep + _dot(weights.astype(q.dtype), values, 1 if s.transposed else 0)
            top[h] = highest

    lax.fori_loop(0, count, step, None)
    for h in range(s.heads):
        nothing = total[h] == 0.0
        divisor = jnp.where(nothing, 1.0, total[h])
        out[0, h] = mixed[h] / divisor
        lse[0, h, 0] = _row(jnp.where(nothing, -jnp.inf, top[h] + jnp.log(divisor)))


def _slot_positions(s: _Sizes, spans: list[Any], origin: list[Any], shape: tuple[int, int]) -> Int32[Array, "a b"]:
    """Stored position of each slot of a split; slots that no row sees have one that no row reaches."""
    slot = lax.broadcasted_iota(jnp.int32, shape, 0 if shape[1] == 1 else 1)
    result = jnp.full(shape, _NEVER, jnp.int32)
    for i, (packed, first) in enumerate(zip(spans, origin, strict=True)):
        begin, stop = i * s.block + (packed & 0xFFFF), i * s.block + (packed >> 16)
        result = jnp.where((slot >= begin) & (slot < stop), slot + (first - i * s.block), result)
    return result


def _dot(a: Float[Array, "m n"], b: Float[Array, "x y"], contract: int) -> Float[Array, "m z"]:
    """Product over axis 1 of `a` and axis `contract` of `b`, summed in float32; float32 inputs are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _column(row: Shaped[Array, "1 n"]) -> Shaped[Array, "n 1"]:
    """Lanes to sublanes, in pieces of at most 128: the diagonal of the row laid out n times, summed."""
    pieces = [row[:, i : i + LANES] for i in range(0, row.shape[1], LANES)]
    return jnp.concatenate([jnp.where(_diagonal(p.shape[1]), p, 0).sum(axis=1, keepdims=True) for p in pieces], axis=0)


def _row(column: Shaped[Array, "n 1"]) -> Shaped[Array, "1 n"]:
    """Sublanes to lanes, the inverse of `_column`."""
    pieces = [column[i : i + LANES] for i in range(0, column.shape[0], LANES)]
    return jnp.concatenate([jnp.where(_diagonal(p.shape[0]), p, 0).sum(axis=0, keepdims=True) for p in pieces], axis=1)


def _diagonal(n: int) -> Shaped[Array, "n n"]:
    return lax.broadcasted_iota(jnp.int32, (n, n), 0) == lax.broadcasted_iota(jnp.int32, (n, n), 1)


def _fold(q: Float[Array, "G R N H"], K: int, rows: int) -> Float[Array, "G K Q H"]:
    """Rows and the heads that share a kv head become one axis, padded to `rows`."""
    G, R, N, H = q.shape
    folded = q.reshape(G, R, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(G, K, R * (N // K), H)
    return jnp.pad(folded, ((0, 0), (0, 0), (0, rows - folded.shape[2]), (0, 0)))


def _unfold(x: Float[Array, "G K Q F"], R: int, N: int) -> Float[Array, "G R N F"]:
    G, K, _, F = x.shape
    per_kv = N // K
    return x[:, :, : R * per_kv].reshape(G, K, R, per_kv, F).transpose(0, 2, 1, 3, 4).reshape(G, R, N, F)
