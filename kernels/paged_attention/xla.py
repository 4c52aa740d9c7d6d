"""Paged attention in plain XLA, in the form that is fast on CPU: a loop over page entries with online
softmax.

Entries are taken from the first on in fixed splits of about 256 slots; the loop bound is data, so one
compilation serves every context length. KV heads lead and are batched, `[K, rows, H] x [K, slots, H]`, which
XLA on CPU turns into GEMMs. The position that each slot stands for is computed before the loop, so that
masking is one comparison inside it: computed inside, it kept the softmax from being vectorised and cost as
much as the products.

A row's bits do not depend on other rows: products have at least two rows (one alone rounds differently),
splits do not depend on the rows, and slots that a row may not see change nothing, exactly: their weights are
0 and the correction factor is 1. Sums run in a written-out order.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from inms_jax.kernels.paged_attention.running import LOG2_E, NEVER, Running, absorb, empty, finish, slot_positions
from inms_jax.kernels.rotation import rotate
from inms_jax.kernels.scaled import Pages

# Slots per iteration. 512 was 15% faster for a chunk of 256 rows behind 1,280 tokens and 30% slower for 8
# single rows. Part of the bits: the same for every program.
_SPLIT_SLOTS = 256


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
) -> tuple[Float[Array, "G R N H"], Float[Array, "G R N"]]:
    """See `api.paged_attention`."""
    G, R, N, H = q.shape
    K, B = k.shape[1:3]
    rows = max(R * (N // K), 2)  # Q
    split = 1 if shift is not None else max(1, _SPLIT_SLOTS // B)  # entries of one shift per product
    page = jnp.pad(page, ((0, 0), (0, -page.shape[1] % split)))
    slot_position = slot_positions(begin, end, position, num_entries, B)
    slot_position = jnp.pad(
        slot_position, ((0, 0), (0, page.shape[1] * B - slot_position.shape[1])), constant_values=NEVER
    )
    wide = q.astype(jnp.float32)
    plain_queries = fold_heads(wide * (scale * LOG2_E), K, rows)

    def step(index: Int32[Array, ""], running: Running) -> Running:
        ids = lax.dynamic_slice_in_dim(page, index * split, split, axis=1) + page_offset  # G n
        slots = lax.dynamic_slice_in_dim(slot_position, index * split * B, split * B, axis=1)  # G W
        queries, limit = plain_queries, q_position
        if shift is not None:
            assert inv_freq is not None
            delta = lax.dynamic_index_in_dim(shift, index, axis=2, keepdims=False)  # G R
            angle = -delta.astype(jnp.float32)[..., None] * inv_freq[None, None]
            cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]  # G R 1 h
            queries = fold_heads(rotate(wide, cos, sin) * (scale * LOG2_E), K, rows)
            limit = q_position - delta
        return absorb(running, queries, k, v, ids, slots, fold_rows(limit, N // K, rows))

    found = lax.fori_loop(0, splits(num_entries, split), step, empty(G, K, rows, H))
    out, lse = finish(found)
    return unfold_heads(out, R, N), unfold_heads(lse[..., None], R, N)[..., 0]


def splits(num_entries: Int32[Array, ""], split: int) -> Int32[Array, ""]:
    """Iterations that cover `num_entries`, `split` at a time."""
    return lax.div(num_entries + (split - 1), jnp.int32(split))


def fold_heads(q: Float[Array, "G R N H"], K: int, rows: int) -> Float[Array, "G K Q H"]:
    """Rows and the heads that share a kv head become one axis, padded to `rows`."""
    G, R, N, H = q.shape
    folded = q.reshape(G, R, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(G, K, R * (N // K), H)
    return jnp.pad(folded, ((0, 0), (0, 0), (0, rows - folded.shape[2]), (0, 0)))


def fold_rows(limit: Int32[Array, "G R"], per_kv: int, rows: int) -> Int32[Array, "G Q"]:
    folded = jnp.repeat(limit, per_kv, axis=1)
    return jnp.pad(folded, ((0, 0), (0, rows - folded.shape[1])), constant_values=-NEVER)


def unfold_heads(x: Float[Array, "G K Q F"], R: int, N: int) -> Float[Array, "G R N F"]:
    G, K, _, F = x.shape
    per_kv = N // K
    return x[:, :, : R * per_kv].reshape(G, K, R, per_kv, F).transpose(0, 2, 1, 3, 4).reshape(G, R, N, F)
