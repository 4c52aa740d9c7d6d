"""Decode attention with levels: splits that several rows read are read once for all of them.

Each row continues one running softmax: first over the shared splits in their order, then over its own. Since a split is
reduced by itself before it is joined, a row gets the same bits whether its splits were shared or not; who else runs
changes the grouping only. Plain XLA; knows nothing of how rows were put into levels.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from inms_jax.kernels.paged_attention.api import Level
from inms_jax.kernels.paged_attention.running import LOG2_E, NEVER, Running, absorb, empty, finish, join, one_split
from inms_jax.kernels.paged_attention.running import slot_positions as positions_of
from inms_jax.kernels.paged_attention.xla import fold_heads, splits, unfold_heads
from inms_jax.kernels.scaled import Pages

# Rows of one product. With a head dim of 32, products of 96 and more rows round differently from smaller ones.
MOST_PRODUCT_ROWS = 32


def shared_attention(
    q: Float[Array, "S N H"],
    k: Pages,
    v: Pages,
    shared: Level,
    own: Level,
    q_position: Int32[Array, " S"],
    page_offset: Int32[Array, ""],
    *,
    scale: float,
) -> tuple[Float[Array, "S N H"], Float[Array, "S N"]]:
    """Softmax attention of S rows over shared splits and then over their own entries; natural-log lse.

    shared: one group per split of n pages. `rows[g, s]` is s if row s reads the split, else at least S; groups at and
        after `num_groups` are never read.
    own: one group per row (`rows` None), taken n pages at a time from its first entry.
    Neither has shifts. The rest is as in `api.paged_attention`.
    """
    S, N, H = q.shape
    K, B = k.shape[1:3]
    assert shared.rows is not None
    assert shared.num_groups is not None
    split = shared.page.shape[1]  # n
    Q = max(N // K, 2)  # a product of one row rounds differently from all larger ones
    queries = fold_heads(q.astype(jnp.float32)[:, None] * (scale * LOG2_E), K, Q)  # S K Q H
    tile = max(1, MOST_PRODUCT_ROWS // Q)
    tiles = [queries[at : at + tile].transpose(1, 0, 2, 3).reshape(1, K, -1, H) for at in range(0, S, tile)]
    takes = shared.rows < S  # U S
    shared_slots = positions_of(shared.begin, shared.end, shared.position, jnp.int32(split), B)  # U W

    def shared_step(index: Int32[Array, ""], running: Running) -> Running:
        ids = lax.dynamic_slice_in_dim(shared.page, index, 1) + page_offset  # 1 n
        slots = lax.dynamic_slice_in_dim(shared_slots, index, 1)  # 1 W
        limit = jnp.where(lax.dynamic_index_in_dim(takes, index, keepdims=False), q_position, -NEVER)  # S
        found = [
            one_split(some, k, v, ids, slots, jnp.repeat(limit[at * tile : (at + 1) * tile], Q)[None])
            for at, some in enumerate(tiles)
        ]

        def by_row(*parts: Float[Array, "..."]) -> Float[Array, "..."]:
            every = jnp.concatenate(parts, axis=2)[0]  # K S*Q ...
            return jnp.moveaxis(every.reshape(K, S, Q, *every.shape[2:]), 1, 0)

        return join(running, Running(*(by_row(*parts) for parts in zip(*found, strict=True))))

    padding = -own.page.shape[1] % split
    page = jnp.pad(own.page, ((0, 0), (0, padding)))
    own_slots = positions_of(own.begin, own.end, own.position, own.num_entries, B)
    own_slots = jnp.pad(own_slots, ((0, 0), (0, padding * B)), constant_values=NEVER)
    limits = jnp.broadcast_to(q_position[:, None], (S, Q))

    def own_step(index: Int32[Array, ""], running: Running) -> Running:
        ids = lax.dynamic_slice_in_dim(page, index * split, split, axis=1) + page_offset  # S n
        slots = lax.dynamic_slice_in_dim(own_slots, index * split * B, split * B, axis=1)  # S W
        return absorb(running, queries, k, v, ids, slots, limits)

    running = lax.fori_loop(0, shared.num_groups, shared_step, empty(S, K, Q, H))
    running = lax.fori_loop(0, splits(own.num_entries, split), own_step, running)
    out, lse = finish(running)
    return unfold_heads(out, 1, N)[:, 0], unfold_heads(lse[..., None], 1, N)[:, 0, :, 0]
