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
    bits = np.random.default_rng(0).integers(0, 2**16, (2, *empty.k.shape), np.uint16)
    k, v = (jnp.asarray(b.view(empty.k.dtype) if empty.k.dtype.itemsize == 2 else b.astype(np.float32)) for b in bits)
    return KVPages(k=k, v=v, num_layers=empty.num_layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pages", [[], [3], list(range(1, 20)), [7, 2, 19]])
def test_pages_survive_the_way_to_the_host_and_back(dtype: str, pages: list[int]) -> None:
    kv = pool(dtype)
    before_k, before_v = np.asarray(kv.k).copy(), np.asarray(kv.v).copy()
    k, v = read_pages(kv, pages)
    assert k.shape == (len(pages), 2, 2, 8, 16)
    for i, page in enumerate(pages):
        for layer in range(2):
            assert k[i, layer].tobytes() == before_k[page + layer * 20].tobytes()
            assert v[i, layer].tobytes() == before_v[page + layer * 20].tobytes()
    empty = KVPages(k=jnp.zeros_like(kv.k), v=jnp.zeros_like(kv.v), num_layers=2)
    back = write_pages(empty, pages, k, v)
    rows = [page + layer * 20 for page in pages for layer in range(2)]
    others = np.setdiff1d(np.arange(40), rows)
    assert np.asarray(back.k)[rows].tobytes() == before_k[rows].tobytes()
    assert np.asarray(back.v)[rows].tobytes() == before_v[rows].tobytes()
    assert not np.asarray(back.k)[others].any()
    assert not np.asarray(back.v)[others].any()


def test_writing_pages_does_not_copy_the_pool() -> None:
    kv = jax.eval_shape(lambda: pool("float32", 2000))
    part = jax.ShapeDtypeStruct((8, 2, 2, 8, 16), jnp.float32)
    memory = _put.lower(kv, jax.ShapeDtypeStruct((8,), jnp.int32), part, part).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < kv.k.size
