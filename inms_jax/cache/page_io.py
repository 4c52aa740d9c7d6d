"""Whole pages to the host and back, bit by bit: for what must outlive the pool.

Knows nothing of why. On the host a page is [L, K, B, H], as the pool stores it.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from inms_jax.cache.page_table import KVPages

_BATCH = 8
"""Pages of one transfer: so the programs are compiled once."""


def read_pages(
    kv: KVPages, pages: Sequence[int]
) -> tuple[Shaped[np.ndarray, "P L K B H"], Shaped[np.ndarray, "P L K B H"]]:
    """Keys and values of `pages`, all layers."""
    keys, values = [], []
    for start in range(0, len(pages), _BATCH):
        ids = pages[start : start + _BATCH]
        k, v = _get(kv, _padded(ids))
        keys.append(np.asarray(k)[: len(ids)])
        values.append(np.asarray(v)[: len(ids)])
    empty = np.zeros((0, kv.num_layers, *kv.k.shape[1:]), kv.k.dtype)
    return np.concatenate([empty, *keys]), np.concatenate([empty, *values])


def write_pages(
    kv: KVPages,
    pages: Sequence[int],
    k: Shaped[np.ndarray, "P L K B H"],
    v: Shaped[np.ndarray, "P L K B H"],
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
def _get(kv: KVPages, pages: Int32[Array, " C"]) -> tuple[Shaped[Array, "C L K B H"], Shaped[Array, "C L K B H"]]:
    rows = _rows(kv, pages)
    return kv.k[rows], kv.v[rows]


@partial(jax.jit, donate_argnames=("kv",))
def _put(
    kv: KVPages, pages: Int32[Array, " C"], k: Shaped[Array, "C L K B H"], v: Shaped[Array, "C L K B H"]
) -> KVPages:
    # Padding points past the pool, where a scatter drops it: the null page stays as it is.
    rows = jnp.where(pages[:, None] == 0, jnp.int32(kv.k.shape[0]), _rows(kv, pages))
    return KVPages(k=kv.k.at[rows].set(k, mode="drop"), v=kv.v.at[rows].set(v, mode="drop"), num_layers=kv.num_layers)
