"""Whole pages to the host and back, bit by bit: for what must outlive the pool.

On the host a page is one array [L, K, B, W] of keys and one of values, as the pool stores it. W is the head dim; in an
int8 page four more, the bytes of the slot's scale. Knows nothing of why.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from inms_jax.cache.page_table import KVPages
from inms_jax.kernels.scaled import Pages, ScaledPages

_BATCH = 8
"""Pages of one transfer: so the programs are compiled once."""


def read_pages(
    kv: KVPages, pages: Sequence[int]
) -> tuple[Shaped[np.ndarray, "P L K B W"], Shaped[np.ndarray, "P L K B W"]]:
    """Keys and values of `pages`, all layers."""
    keys, values = [], []
    for start in range(0, len(pages), _BATCH):
        ids = pages[start : start + _BATCH]
        k, v = _get(kv, _padded(ids))
        keys.append(np.asarray(k)[: len(ids)])
        values.append(np.asarray(v)[: len(ids)])
    if not pages:
        k, v = (np.zeros((0, *x.shape[1:]), x.dtype) for x in jax.eval_shape(_get, kv, _padded([])))
        return k, v
    return np.concatenate(keys), np.concatenate(values)


def write_pages(
    kv: KVPages,
    pages: Sequence[int],
    k: Shaped[np.ndarray, "P L K B W"],
    v: Shaped[np.ndarray, "P L K B W"],
) -> KVPages:
    """The pool with `k` and `v` in `pages`; `kv` is donated. One caller: the runner."""
    for start in range(0, len(pages), _BATCH):
        ids = pages[start : start + _BATCH]
        shape = (_BATCH, *k.shape[1:])
        new_k, new_v = np.zeros(shape, k.dtype), np.zeros(shape, v.dtype)
        new_k[: len(ids)], new_v[: len(ids)] = k[start : start + _BATCH], v[start : start + _BATCH]
        kv = _put(kv, _padded(ids), jnp.asarray(new_k), jnp.asarray(new_v))
    return kv


def _padded(ids: Sequence[int]) -> Int32[Array, " C"]:
    return jnp.asarray(np.array([*ids, *[0] * (_BATCH - len(ids))], np.int32))


def _rows(kv: KVPages, pages: Int32[Array, " C"]) -> Int32[Array, "C L"]:
    layers = jnp.arange(kv.num_layers, dtype=jnp.int32) * jnp.int32(kv.num_pages)
    rows: Int32[Array, "C L"] = pages[:, None] + layers[None]
    return rows


@jax.jit
def _get(kv: KVPages, pages: Int32[Array, " C"]) -> tuple[Shaped[Array, "C L K B W"], Shaped[Array, "C L K B W"]]:
    rows = _rows(kv, pages)
    return _packed(kv.k, rows), _packed(kv.v, rows)


@partial(jax.jit, donate_argnames=("kv",))
def _put(
    kv: KVPages, pages: Int32[Array, " C"], k: Shaped[Array, "C L K B W"], v: Shaped[Array, "C L K B W"]
) -> KVPages:
    # Padding points past the pool, where a scatter drops it: the null page stays as it is.
    rows = jnp.where(pages[:, None] == 0, jnp.int32(kv.k.shape[0]), _rows(kv, pages))
    return KVPages(k=_with(kv.k, rows, k), v=_with(kv.v, rows, v), num_layers=kv.num_layers)


def _packed(pages: Pages, rows: Int32[Array, "C L"]) -> Shaped[Array, "C L K B W"]:
    if not isinstance(pages, ScaledPages):
        return pages[rows]
    return jnp.concatenate([pages.numbers[rows], lax.bitcast_convert_type(pages.scale[rows], jnp.int8)], axis=-1)


def _with(pages: Pages, rows: Int32[Array, "C L"], new: Shaped[Array, "C L K B W"]) -> Pages:
    if not isinstance(pages, ScaledPages):
        return pages.at[rows].set(new, mode="drop")
    H = pages.shape[-1]
    scale = lax.bitcast_convert_type(new[..., H:], jnp.float32)
    return ScaledPages(
        pages.numbers.at[rows].set(new[..., :H], mode="drop"), pages.scale.at[rows].set(scale, mode="drop")
    )
