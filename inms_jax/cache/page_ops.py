"""Writes to the pool: scatter new tokens into their slots, copy pages, copy them to other positions.

Knows nothing of why, or of attention.

Pure functions; under a jit that donates KVPages they write in place.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from inms_jax.cache.page_cut import PageCut
from inms_jax.cache.page_table import KVPages
from inms_jax.kernels.page_copy.api import page_copy
from inms_jax.kernels.rope_shift.api import rope_shift
from inms_jax.kernels.scaled import ScaledPages, put_slots, without_scales
from inms_jax.kernels.storage import encode


def write_tokens(
    kv: KVPages,
    layer: int | Int32[Array, ""],
    write_page: Int32[Array, " T"],
    write_slot: Int32[Array, " T"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
) -> KVPages:
    """Put the keys and values of T tokens into (page, slot) of one layer. Rows of page 0 are dropped."""
    # An index past the pool: scatter drops it, so padding costs nothing and the null page stays as it is.
    row = jnp.where(write_page == 0, kv.k.shape[0], write_page + layer * kv.num_pages)
    return KVPages(
        k=put_slots(kv.k, row, write_slot, k), v=put_slots(kv.v, row, write_slot, v), num_layers=kv.num_layers
    )


@partial(jax.jit, donate_argnames=("kv",), static_argnames=("cut",))
def copy_pages(kv: KVPages, src: Int32[Array, " C"], dst: Int32[Array, " C"], *, cut: PageCut | None = None) -> KVPages:
    """Copy page `src[i]` to page `dst[i]` in all layers; pad with 0 -> 0. `kv` is donated. One caller: the
    runner. `cut`: over several devices, each of which copies its part.
    """
    return _copy(kv, src, dst) if cut is None else cut.on_each_device(_copy, kv, src, dst)


def _copy(kv: KVPages, src: Int32[Array, " C"], dst: Int32[Array, " C"]) -> KVPages:
    # Scales have no head dim, which the kernels of chips cut pages by.
    kind = "xla" if isinstance(kv.k, ScaledPages) else None

    def copy(pages: Shaped[Array, "LP K B *H"]) -> Shaped[Array, "LP K B *H"]:
        return page_copy(pages, src, dst, num_layers=kv.num_layers, implementation=kind)

    copied: KVPages = jax.tree.map(copy, kv)
    return copied


@partial(jax.jit, donate_argnames=("kv",), static_argnames=("cut",))
def fill_pages(
    kv: KVPages, pages: Int32[Array, " C"], value: Float[Array, ""], *, cut: PageCut | None = None
) -> KVPages:
    """Set every number of `pages` to `value` in all layers; pad with 0. `kv` is donated. One caller: the runner."""
    return _fill(kv, pages, value) if cut is None else cut.on_each_device(_fill, kv, pages, value)


def _fill(kv: KVPages, pages: Int32[Array, " C"], value: Float[Array, ""]) -> KVPages:
    layers = jnp.arange(kv.num_layers, dtype=jnp.int32) * jnp.int32(kv.num_pages)
    # An index past the pool: scatter drops it, so padding leaves the null page as it is.
    rows = jnp.where(pages[:, None] == 0, jnp.int32(kv.k.shape[0]), pages[:, None] + layers[None])

    def fill(pages: Shaped[Array, "LP K B *H"]) -> Shaped[Array, "LP K B *H"]:
        # Of int8 pages the scales carry the value.
        number = jnp.int8(0) if pages.dtype == jnp.int8 else encode(value, pages.dtype)
        return pages.at[rows].set(number, mode="drop")

    filled: KVPages = jax.tree.map(fill, kv)
    return filled


@partial(jax.jit, donate_argnames=("kv",), static_argnames=("cut",))
def shift_pages(
    kv: KVPages,
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    delta: Int32[Array, " C"],
    inv_freq: Float[Array, " h"],
    *,
    cut: PageCut | None = None,
) -> KVPages:
    """Copy page `src[i]` to page `dst[i]` in all layers, its keys rotated to stand `delta[i]` positions later;
    pad with 0 -> 0, delta 0. `kv` is donated. Give the page that was computed, not an earlier shift of it.
    ValueError for int8 pages.
    """
    if cut is not None:
        return cut.on_each_device(_shift, kv, src, dst, delta, inv_freq)
    return _shift(kv, src, dst, delta, inv_freq)


def _shift(
    kv: KVPages,
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    delta: Int32[Array, " C"],
    inv_freq: Float[Array, " h"],
) -> KVPages:
    return KVPages(
        k=rope_shift(kv.k, src, dst, delta, inv_freq=inv_freq, num_layers=kv.num_layers),
        v=page_copy(without_scales(kv.v, "rope_shift"), src, dst, num_layers=kv.num_layers),
        num_layers=kv.num_layers,
    )
