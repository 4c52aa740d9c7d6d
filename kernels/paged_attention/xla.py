"""Paged attention for CPU in plain XLA: a loop over page entries with online softmax.

One entry of every group per iteration; the loop bound is data, so one compilation serves every context
length. KV heads lead and are batched, `[K, rows, H] x [K, B, H]`: the form in which XLA on CPU uses its GEMM.

A row's bits do not depend on other rows: products have at least two rows (one alone rounds differently), and
an entry that a row sees nothing of changes nothing, exactly: its weights are 0 and the correction factor is
1.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from inms_jax.kernels.rotation import rotate
from inms_jax.kernels.storage import decode

# Stands for "no key yet" in the running maximum: finite, so that subtracting it never gives NaN.
_NOTHING = -1e30


class _Running(NamedTuple):
    """Online softmax over the entries so far: maximum, sum of weights, weighted sum of values."""

    top: Float[Array, "G K Q"]
    total: Float[Array, "G K Q"]
    mixed: Float[Array, "G K Q H"]


def paged_attention(
    q: Float[Array, "G R N H"],
    k: Shaped[Array, "LP K B H"],
    v: Shaped[Array, "LP K B H"],
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
) -> tuple[Float[Array, "G R N H"], Float[Array, "G R N"]]:
    """See `api.paged_attention`."""
    G, R, N, H = q.shape
    K, B = k.shape[1:3]
    per_kv = N // K
    rows = max(R * per_kv, 2)  # Q
    queries = _fold_heads(q.astype(jnp.float32) * scale, K, rows)
    slot = jnp.arange(B, dtype=jnp.int32)

    def step(m: Int32[Array, ""], running: _Running) -> _Running:
        entry = [lax.dynamic_index_in_dim(x, m, axis=1, keepdims=False) for x in (page, begin, end, position)]
        ids, first, last, start = entry  # G
        limit = q_position - start[:, None]  # G R: the last slot that each row may see
        turned = queries
        if shift is not None:
            assert inv_freq is not None
            delta = lax.dynamic_index_in_dim(shift, m, axis=2, keepdims=False)  # G R
            limit = limit - delta
            angle = -delta.astype(jnp.float32)[..., None] * inv_freq[None, None]
            cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]  # G R 1 h
            turned = _fold_heads(rotate(q.astype(jnp.float32), cos, sin) * scale, K, rows)
        limit = jnp.minimum(limit, last[:, None] - 1)
        # Slots that no row sees may hold NaN, and 0 * NaN would spread.
        used = (first[:, None] <= slot[None]) & (slot[None] <= limit.max(axis=1, keepdims=True))  # G B
        values = jnp.where(used[:, None, :, None], _load(v, ids + page_offset), 0.0)  # G K B H
        visible = (first[:, None, None] <= slot[None, None]) & (slot[None, None] <= limit[..., None])
        keys = _load(k, ids + page_offset)
        return _absorb(running, turned, keys, values, _fold_mask(visible, per_kv, rows))

    start = _Running(
        top=jnp.full((G, K, rows), _NOTHING, jnp.float32),
        total=jnp.zeros((G, K, rows), jnp.float32),
        mixed=jnp.zeros((G, K, rows, H), jnp.float32),
    )
    end_state = lax.fori_loop(0, num_entries, step, start)
    divisor = jnp.where(end_state.total == 0, 1.0, end_state.total)
    out = end_state.mixed / divisor[..., None]
    lse = jnp.where(end_state.total == 0, -jnp.inf, end_state.top + jnp.log(divisor))
    return _unfold_heads(out, R, N), _unfold_heads(lse[..., None], R, N)[..., 0]


def _absorb(
    running: _Running,
    queries: Float[Array, "G K Q H"],
    keys: Float[Array, "G K B H"],
    values: Float[Array, "G K B H"],
    visible: Bool[Array, "G 1 Q B"],
) -> _Running:
    scores = jnp.einsum("gkqh,gkbh->gkqb", queries, keys, precision=lax.Precision.HIGHEST)
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.maximum(running.top, scores.max(axis=-1))
    weights = jnp.exp(scores - top[..., None])
    keep = jnp.exp(running.top - top)
    mixed = jnp.einsum("gkqb,gkbh->gkqh", weights, values, precision=lax.Precision.HIGHEST)
    return _Running(
        top=top,
        total=running.total * keep + weights.sum(axis=-1),
        mixed=running.mixed * keep[..., None] + mixed,
    )


def _load(pages: Shaped[Array, "LP K B H"], ids: Int32[Array, " G"]) -> Float[Array, "G K B H"]:
    """The pages of this iteration, in float32. Host code has validated the ids."""
    if ids.shape[0] == 1:  # a slice is cheaper than a gather
        return decode(lax.dynamic_slice_in_dim(pages, ids[0], 1, axis=0))
    return decode(pages.at[ids].get(mode="promise_in_bounds"))


def _fold_heads(q: Float[Array, "G R N H"], K: int, rows: int) -> Float[Array, "G K Q H"]:
    """Rows and the heads that share a kv head become one axis, padded to `rows`."""
    G, R, N, H = q.shape
    folded = q.reshape(G, R, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(G, K, R * (N // K), H)
    return jnp.pad(folded, ((0, 0), (0, 0), (0, rows - folded.shape[2]), (0, 0)))


def _unfold_heads(x: Float[Array, "G K Q F"], R: int, N: int) -> Float[Array, "G R N F"]:
    G, K, _, F = x.shape
    per_kv = N // K
    return x[:, :, : R * per_kv].reshape(G, K, R, per_kv, F).transpose(0, 2, 1, 3, 4).reshape(G, R, N, F)


def _fold_mask(visible: Bool[Array, "G R B"], per_kv: int, rows: int) -> Bool[Array, "G 1 Q B"]:
    folded = jnp.repeat(visible, per_kv, axis=1)
    return jnp.pad(folded, ((0, 0), (0, rows - folded.shape[1]), (0, 0)))[:, None]
