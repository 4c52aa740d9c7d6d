"""The glue between a layer and its pages: write the new keys and values, read every level, merge.

Keys are written before they are read, so a token finds itself and its chunk in the pages like any other.
Knows nothing of weights or of how rows were put into levels.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from inms_jax.cache.page_ops import write_tokens
from inms_jax.cache.page_table import KVPages
from inms_jax.kernels.choice import first_choice
from inms_jax.kernels.paged_attention.api import Level, paged_attention
from inms_jax.kernels.paged_attention.merge import merge_groups, merge_states
from inms_jax.kernels.paged_attention.shared import shared_attention
from inms_jax.kernels.scaled import ScaledPages


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv: KVPages,
    layer: int | Int32[Array, ""],
    positions: Int32[Array, " T"],
    levels: tuple[Level, ...],
    write_page: Int32[Array, " T"],
    write_slot: Int32[Array, " T"],
    *,
    inv_freq: Float[Array, " h"],
    implementation: str | None = None,
) -> tuple[Float[Array, "T N H"], KVPages]:
    """Attention of T rotated queries over all levels, after writing T rotated keys and their values.

    Two levels are decode: what rows share, then one group per row of what it has besides.
    """
    kv = write_tokens(kv, layer, write_page, write_slot, k, v)
    offset = jnp.asarray(layer * kv.num_pages, jnp.int32)
    plain = first_choice(implementation) == "xla" or (implementation is None and isinstance(kv.k, ScaledPages))
    if len(levels) == 2 and plain:
        shared, own = levels
        out, _ = shared_attention(q, kv.k, kv.v, shared, own, positions, offset, scale=q.shape[-1] ** -0.5)
        return out.astype(q.dtype), kv
    states = [_read_level(q, kv, offset, positions, level, inv_freq, implementation) for level in levels]
    out, lse = states[0]
    for other_out, other_lse in states[1:]:
        out, lse = merge_states(out, lse, other_out, other_lse)
    return out.astype(q.dtype), kv


def _read_level(
    q: Float[Array, "T N H"],
    kv: KVPages,
    offset: Int32[Array, ""],
    positions: Int32[Array, " T"],
    level: Level,
    inv_freq: Float[Array, " h"],
    implementation: str | None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    T, N, H = q.shape
    G = level.page.shape[0]
    if level.rows is None:
        queries, q_position = q.reshape(G, T // G, N, H), positions.reshape(G, T // G)
    else:
        queries = jnp.broadcast_to(q[None], (G, T, N, H))
        # A row that is not in the group stands before every stored position there, so it sees nothing.
        q_position = jnp.where(level.rows < T, positions[None], -(2**30))
    out, lse = paged_attention(
        queries,
        kv.k,
        kv.v,
        level,
        q_position,
        offset,
        scale=H**-0.5,
        inv_freq=inv_freq,
        implementation=implementation,
    )
    if level.rows is None:
        return out.reshape(T, N, H), lse.reshape(T, N)
    return merge_groups(out, lse)
