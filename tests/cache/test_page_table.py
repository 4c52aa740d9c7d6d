"""Tables are values: an update is a new table; levels say what is really used."""

import jax
import jax.numpy as jnp
import numpy as np

from inms_jax.cache.page_table import KVPages, PageTable
from tests.oracles import golden

CONFIG = golden("llama_gqa_tied").config


def ints(*values):
    return jnp.array(values, jnp.int32)


def test_setting_a_row_gives_a_new_table_and_replaces_old_entries():
    empty = PageTable.empty(2, 3)
    three = empty.set_row(1, page=ints(4, 5, 6), begin=ints(0, 0, 1), end=ints(8, 8, 2), position=ints(0, 8, 16))
    one = three.set_row(1, page=ints(9), begin=ints(2), end=ints(3), position=ints(7), shift=ints(-2))
    assert not np.asarray(empty.page).any()
    np.testing.assert_array_equal(three.page, [[0, 0, 0], [4, 5, 6]])
    np.testing.assert_array_equal(three.num_entries, [0, 3])
    np.testing.assert_array_equal(one.page, [[0, 0, 0], [9, 0, 0]])
    np.testing.assert_array_equal(one.end, [[0, 0, 0], [3, 0, 0]])
    np.testing.assert_array_equal(one.shift, [[0, 0, 0], [-2, 0, 0]])
    np.testing.assert_array_equal(one.num_entries, [0, 1])


def test_level_has_the_largest_count_and_shifts_only_when_asked():
    table = PageTable.empty(2, 3).set_row(0, page=ints(1, 2), begin=ints(0, 0), end=ints(4, 4), position=ints(0, 4))
    level = table.level(5)
    assert level.shift is None
    assert int(level.num_entries) == 2
    shifted = table.level(5, shifted=True)
    assert shifted.shift is not None
    assert shifted.shift.shape == (2, 5, 3)


def test_states_survive_tree_maps_to_anything():
    kv = KVPages.create(CONFIG, 4, 8, jnp.float32, "cpu")
    names = jax.tree.map(lambda x: str(x.dtype), kv)
    assert names.k == names.v == "float32"
    assert names.num_layers == CONFIG.num_layers
    assert jax.tree.all(jax.tree.map(lambda a, b: a == str(b.dtype), names, kv))


def test_pool_sizes_are_read_from_the_arrays():
    kv = KVPages.create(CONFIG, 7, 8, jnp.bfloat16, "cpu")
    assert (kv.num_pages, kv.block_size, kv.dtype) == (7, 8, jnp.bfloat16)
    assert kv.k.shape == (CONFIG.num_layers * 7, CONFIG.num_kv_heads, 8, CONFIG.head_dim)
    assert kv.k.dtype == jnp.uint16
