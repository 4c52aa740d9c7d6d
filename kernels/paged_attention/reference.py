"""Paged attention, dense and obvious: the oracle for every other implementation.

Gathers all pages, rotates the keys (not the queries) by the shift, and takes one masked softmax. Materialises
everything; knows nothing of speed.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from inms_jax.kernels.rotation import rotate
from inms_jax.kernels.scaled import Pages, ScaledPages
from inms_jax.kernels.storage import decode


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
    M = page.shape[1]
    heads_per_kv = N // K
    shifts = jnp.zeros((G, R, M), jnp.int32) if shift is None else shift

    slot = jnp.arange(B, dtype=jnp.int32)[None, None]  # 1 1 B
    used = (begin[..., None] <= slot) & (slot < end[..., None])  # G M B
    used &= (jnp.arange(M, dtype=jnp.int32) < num_entries)[None, :, None]
    target = (position[..., None] + slot)[:, None] + shifts[..., None]  # G R M B
    visible = used[:, None] & (target <= q_position[..., None, None])

    keys = _numbers(k, page + page_offset)  # G M K B H
    keys = jnp.broadcast_to(keys[:, None], (G, R, M, K, B, H))
    if shift is not None:
        assert inv_freq is not None
        angle = shift.astype(jnp.float32)[..., None] * inv_freq[None, None, None]  # G R M h
        cos, sin = jnp.cos(angle)[:, :, :, None, None], jnp.sin(angle)[:, :, :, None, None]
        keys = rotate(keys, cos, sin)
    values = _numbers(v, page + page_offset)
    values = jnp.where(visible.any(axis=1)[:, :, None, :, None], values, 0.0)

    queries = q.astype(jnp.float32).reshape(G, R, K, heads_per_kv, H) * scale
    exact = lax.Precision.HIGHEST
    scores = jnp.einsum("grkqh,grmkbh->grkqmb", queries, keys, precision=exact)
    scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf).reshape(G, R, N, M * B)
    top = scores.max(axis=-1, keepdims=True)
    weight = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = weight.sum(axis=-1)
    mixed = jnp.einsum(
        "grkqmb,gmkbh->grkqh", weight.reshape(G, R, K, heads_per_kv, M, B), values, precision=exact
    ).reshape(G, R, N, H)
    out = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return out, jnp.where(top[..., 0] == -jnp.inf, 0.0, top[..., 0]) + jnp.log(total)


def _numbers(pages: Pages, ids: Int32[Array, "G M"]) -> Float[Array, "G M K B H"]:
    if isinstance(pages, ScaledPages):
        return pages.numbers[ids].astype(jnp.float32) * pages.scale[ids][..., None]
    return decode(pages[ids])
