"""Pages go to the host and come back bit by bit, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.cache.page_io import _put, read_pages, write_pages
from inms_jax.cache.page_table import KVPages
from tests.tiny import tiny_model


def pool(dtype: str, num_pages: int = 20) -> KVPages:
    empty = KVPages.create(tiny_model().config, num_pages, 8, jnp.dtype(dtype), "cpu")
    rng = np.random.default_rng(0)

    def bits(x: jax.Array) -> jax.Array:
        raw = rng.integers(0, 2**16, x.shape, np.uint16)
        return jnp.asarray(raw.view(x.dtype) if x.dtype.itemsize == 2 else raw.astype(x.dtype))

    filled: KVPages = jax.tree.map(bits, empty)
    return filled


def by_page(x: jax.Array) -> np.ndarray:
    """[L, P, ...], a copy."""
    return np.asarray(x).reshape(2, -1, *x.shape[1:]).copy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("pages", [[], [3], list(range(1, 20)), [7, 2, 19]])
def test_pages_survive_the_way_to_the_host_and_back(dtype: str, pages: list[int]) -> None:
    kv = pool(dtype)
    before = jax.tree.map(by_page, kv)
    k, v = read_pages(kv, pages)
    assert k.shape == v.shape == (len(pages), 2, 2, 8, 20 if dtype == "int8" else 16)
    if dtype != "int8":
        for i, page in enumerate(pages):
            assert k[i].tobytes() == before.k[:, page].tobytes()
            assert v[i].tobytes() == before.v[:, page].tobytes()
    back = jax.tree.map(by_page, write_pages(jax.tree.map(jnp.zeros_like, kv), pages, k, v))
    others = np.setdiff1d(np.arange(20), pages)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(back), strict=True):
        assert new[:, pages].tobytes() == old[:, pages].tobytes()
        assert not new[:, others].any()


def test_writing_pages_does_not_copy_the_pool() -> None:
    kv = jax.eval_shape(lambda: pool("float32", 2000))
    part = jax.ShapeDtypeStruct((8, 2, 2, 8, 16), jnp.float32)
    memory = _put.lower(kv, jax.ShapeDtypeStruct((8,), jnp.int32), part, part).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < kv.k.size
