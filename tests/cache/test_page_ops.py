"""Writes land in their slot of their layer and nowhere else, in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.cache.page_ops import copy_pages, shift_pages, write_tokens
from inms_jax.cache.page_table import KVPages
from tests.oracles import golden

CONFIG = golden("llama_gqa_tied").config
LAYERS, K, H = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_written_to_one_layer_and_padding_is_dropped(dtype):
    kv = KVPages.create(CONFIG, 5, 8, dtype, "cpu")
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((4, K, H)), jnp.float32) for _ in range(2))
    page, slot = jnp.array([3, 1, 0, 3], jnp.int32), jnp.array([7, 0, 0, 2], jnp.int32)
    written = jax.jit(write_tokens)(kv, jnp.int32(1), page, slot, k, v)
    for pages, new in ((written.k, k), (written.v, v)):
        numbers = pages.view(jnp.bfloat16) if dtype == "bfloat16" else pages
        expected = np.zeros((LAYERS, 5, K, 8, H), np.float32)
        rounded = np.asarray(new.astype(dtype).astype(jnp.float32))
        for row, where in ((0, (3, 7)), (1, (1, 0)), (3, (3, 2))):
            expected[1, where[0], :, where[1]] = rounded[row]
        np.testing.assert_array_equal(numbers.astype(jnp.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_copied_pages_are_equal_in_every_layer(dtype):
    rng = np.random.default_rng(1)
    kv = KVPages.create(CONFIG, 5, 8, dtype, "cpu")
    kv = jax.tree.map(lambda x: jnp.asarray(100 * rng.standard_normal(x.shape), x.dtype), kv)
    old = jax.tree.map(lambda x: np.asarray(x).reshape(LAYERS, 5, *x.shape[1:]).copy(), kv)
    new = copy_pages(kv, jnp.array([2, 0, 0], jnp.int32), jnp.array([4, 0, 0], jnp.int32))
    assert len(jax.tree.leaves(new)) == (4 if dtype == "int8" else 2)
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        expected = before.copy()
        expected[:, 4] = before[:, 2]
        np.testing.assert_array_equal(np.asarray(after).reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_writes_and_copies_do_not_copy_the_pool(dtype):
    lists = jax.ShapeDtypeStruct((4,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((4, K, H), jnp.float32)
    write = jax.jit(functools.partial(write_tokens, layer=1), donate_argnames=("kv",))
    temps = []
    for num_pages in (256, 2048):
        kv = jax.eval_shape(lambda n=num_pages: KVPages.create(CONFIG, n, 8, dtype, "cpu"))
        copied = copy_pages.lower(kv, lists, lists).compile().memory_analysis()
        written = write.lower(kv, write_page=lists, write_slot=lists, k=tokens, v=tokens).compile().memory_analysis()
        assert copied is not None
        assert written is not None
        pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kv))
        assert copied.alias_size_in_bytes == written.alias_size_in_bytes == pool
        temps.append((copied.temp_size_in_bytes, written.temp_size_in_bytes))
    assert temps[0] == temps[1]
    assert max(temps[1]) < pool / 20


def test_int8_pages_are_not_moved_to_other_positions():
    kv = KVPages.create(CONFIG, 5, 8, jnp.int8, "cpu")
    none = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="rope_shift of int8 pages would round rotated keys to int8 a second time"):
        shift_pages(kv, none, none, none, jnp.ones(H // 2))
    assert not any(x.is_deleted() for x in jax.tree.leaves(kv))


def test_use_of_a_donated_pool_is_an_error():
    kv = KVPages.create(CONFIG, 5, 8, jnp.float32, "cpu")
    none = jnp.zeros(2, jnp.int32)
    copy_pages(kv, none, none)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(kv.k)
