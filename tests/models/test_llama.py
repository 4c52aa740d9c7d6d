"""The model over pages: what is computed where changes nothing, sharing is aliasing, the pool is never copied."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.cache.page_ops import copy_pages
from inms_jax.cache.page_table import KVPages, PageTable
from inms_jax.kernels.paged_attention.api import Level
from inms_jax.models.llama import forward, init_shapes, random_params, unstack_layers
from tests.oracles import PagedModel, golden

TOKENS = np.random.default_rng(0).integers(0, 256, 64).astype(np.int32)


@pytest.fixture(scope="module")
def model_parts():
    g = golden("llama_gqa_tied")
    return g.config, jax.device_put(g.params)


def test_shapes_are_the_contract_with_the_loader():
    for name in ("qwen2", "qwen3_tied", "llama_mha"):
        g = golden(name)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), init_shapes(g.config))
        assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype.name), g.params)


def test_random_params_have_the_shapes_and_give_finite_logits():
    config = golden("qwen2").config
    params = random_params(config, jax.random.key(0), jnp.float32)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, init_shapes(config))
    assert np.isfinite(PagedModel(config, params).prefill(TOKENS[:16], (1,))).all()


def test_unstacked_layers_are_views_that_the_device_aliases():
    g = golden("llama_gqa_tied")

    def aligned(x):
        raw = np.empty(x.nbytes + 64, np.uint8)
        offset = -raw.ctypes.data % 64
        view = raw[offset : offset + x.nbytes].view(x.dtype).reshape(x.shape)
        view[...] = x
        return view

    host = jax.tree.map(aligned, g.params)
    layers = jax.device_put(unstack_layers(host))["layers"]
    assert len(layers) == g.config.num_layers
    for i, layer in enumerate(layers):
        for name, array in layer.items():
            assert array.unsafe_buffer_pointer() == host["layers"][name][i].ctypes.data
            np.testing.assert_array_equal(array, g.params["layers"][name][i])


def test_scan_equals_unrolled_bit_for_bit(model_parts):
    config, params = model_parts
    unrolled = unstack_layers(jax.tree.map(np.asarray, params))
    scanned = PagedModel(config, params).prefill(TOKENS, (1, 2, 3, 4))
    np.testing.assert_array_equal(PagedModel(config, unrolled).prefill(TOKENS, (1, 2, 3, 4)), scanned)


def test_never_written_slots_are_never_read(model_parts):
    config, params = model_parts
    pages = (7, 3, 5)
    results = []
    for fill in (0.0, np.nan):
        model = PagedModel(config, params, fill=fill)
        chunks = [model.prefill(TOKENS[a:b], pages, a, bucket=32) for a, b in ((0, 19), (19, 37))]
        results.append((*chunks, model.decode([1, 2], [(pages, 37), ((9,), 0)])))
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, poisoned)


def test_sharing_is_index_aliasing_and_a_write_after_copy_is_invisible(model_parts):
    config, params = model_parts
    model = PagedModel(config, params)
    model.prefill(TOKENS[:24], (1, 2))
    # Two rows name the same pages; each goes on in its own copy of the last, partly filled one.
    reader, writer = ((1, 2), 24), ((1, 3), 24)

    def copied():
        src, dst = jnp.array([2, 0], jnp.int32), jnp.array([3, 0], jnp.int32)
        return copy_pages(jax.tree.map(jnp.copy, model.kv), src, dst)

    before, kv = model.kv, copied()
    model.kv = jax.tree.map(jnp.copy, kv)
    alone = model.decode([9, 0], [reader, ((5,), 0)])
    for token in (9, 77, 200):
        model.kv = jax.tree.map(jnp.copy, kv)
        both = model.decode([9, token], [reader, writer])
        np.testing.assert_array_equal(both[0], alone[0])
        same = token == 9
        assert np.array_equal(both[0], both[1]) == same
    # Without the copy the writer's token lands in the reader's page.
    model.kv = before
    aliased = model.decode([9, 77], [reader, ((1, 2), 24)])
    assert not np.array_equal(aliased[0], alone[0])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_levels_partition_what_a_row_reads(model_parts, implementation):
    config, params = model_parts
    model = PagedModel(config, params)
    model.prefill(TOKENS[:32], (1, 2))
    rows = [((1, 2, 3), 32), ((1, 2, 4), 32), ((1, 2, 5), 32)]
    tokens, kv = [5, 6, 7], jax.tree.map(jnp.copy, model.kv)
    expected = model.decode(tokens, rows)

    def level(rows, table, **rest):
        page, begin, end, position = (jnp.asarray(x, jnp.int32) for x in np.moveaxis(np.array(table), -1, 0))
        return Level(rows, page, begin, end, position, None, jnp.int32(page.shape[1]), **rest)

    # Page 1 is read once for all three, page 2 for rows 0 and 2; each row reads the rest by itself. A third group is
    # not in use.
    one, two, none = (1, 0, 16, 0), (2, 0, 16, 16), (0, 0, 0, 0)
    members = jnp.array([[0, 1, 2], [0, 3, 2], [3, 3, 3]], jnp.int32)
    shared = level(members, [[one], [two], [none]], num_groups=jnp.int32(2))
    own = level(None, [[(3, 0, 1, 32), none], [two, (4, 0, 1, 32)], [(5, 0, 1, 32), none]])
    pages, slot, at = jnp.array([3, 4, 5], jnp.int32), jnp.zeros(3, jnp.int32), jnp.full(3, 32, jnp.int32)
    step = jax.jit(forward, static_argnames=("config", "implementation"))
    logits, _ = step(
        params,
        config,
        jnp.asarray(tokens, jnp.int32),
        at,
        kv,
        (shared, own),
        pages,
        slot,
        jnp.arange(3, dtype=jnp.int32),
        implementation=implementation,
    )
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_logits_are_computed_for_the_rows_asked(model_parts):
    config, params = model_parts
    every = PagedModel(config, params).prefill(TOKENS[:16], (1,))
    model = PagedModel(config, params)
    slots = jnp.arange(16, dtype=jnp.int32)
    step = jax.jit(forward, static_argnames=("config",))
    for rows in ([15], [3, 3, 0]):
        logits, _ = step(
            params,
            config,
            jnp.asarray(TOKENS[:16]),
            slots,
            model.kv,
            (model.table([((1,), 16)]).level(16),),
            jnp.ones(16, jnp.int32),
            slots,
            jnp.asarray(rows, jnp.int32),
        )
        np.testing.assert_array_equal(logits, every[rows])


class TestBits:
    """Deterministic mode on a tiny model: decode beside any others, prefill in any chunks of 64 or more."""

    def test_decode_does_not_depend_on_the_batch(self, model_parts):
        config, params = model_parts
        model = PagedModel(config, params, num_pages=24)
        pages = (1, 2, 3)
        model.prefill(TOKENS[:40], pages, bucket=64)
        kv, seen = model.kv, set()
        for batch in (2, 4, 8, 16):
            model.kv = jax.tree.map(jnp.copy, kv)
            others = [((4 + i,), (5 * i) % 15) for i in range(batch - 1)]
            seen.add(model.decode([8, *range(batch - 1)], [(pages, 40), *others])[0].tobytes())
        assert len(seen) == 1

    def test_prefill_does_not_depend_on_the_chunks(self, model_parts):
        config, params = model_parts
        seen = set()
        tokens = np.concatenate([TOKENS, TOKENS])
        pages = tuple(range(1, 9))
        for bounds, bucket in (((0, 128), 128), ((0, 64, 128), 64), ((0, 9, 73, 100, 128), 64)):
            model = PagedModel(config, params)
            for start, stop in itertools.pairwise(bounds):
                logits = model.prefill(tokens[start:stop], pages, start, bucket=bucket)
            rows = np.asarray(model.kv.k).reshape(config.num_layers, -1, *model.kv.k.shape[1:])[:, 1:9]
            seen.add((logits[-1].tobytes(), rows.tobytes()))
        assert len(seen) == 1


@pytest.mark.parametrize("form", ["scan", "unrolled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_donated_pool_is_neither_copied_nor_widened(model_parts, form, dtype):
    config, _ = model_parts
    shapes = init_shapes(config)
    if form == "unrolled":
        stacked = shapes["layers"]
        layer = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in stacked.items()}
        shapes = {**shapes, "layers": [layer] * config.num_layers}

    def memory(num_pages):
        kv = jax.eval_shape(lambda: KVPages.create(config, num_pages, 16, dtype, "cpu"))
        row = jax.ShapeDtypeStruct((8,), jnp.int32)
        table = jax.eval_shape(lambda: PageTable.empty(8, 4))
        step = jax.jit(
            lambda params, kv, table, row: forward(params, config, row, row, kv, (table.level(),), row, row, row),
            donate_argnums=1,
        )
        analysis = step.lower(shapes, kv, table, row).compile().memory_analysis()
        assert analysis is not None
        pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kv))
        assert analysis.alias_size_in_bytes == pool
        return analysis.temp_size_in_bytes, pool

    (small, _), (large, pool) = memory(512), memory(4096)
    assert large == small
    assert large < pool / 20


def test_one_compilation_per_shape_whatever_the_context(model_parts):
    config, params = model_parts
    model = PagedModel(config, params)
    traces = []

    @functools.partial(jax.jit, donate_argnames=("kv",))
    def step(params, kv, table, row):
        traces.append(row.shape)
        return forward(params, config, row, row, kv, (table.level(),), row, row, row)

    kv = model.kv
    for lengths in ((1, 1), (16, 3), (100, 2), (128, 128)):
        table = model.table([(tuple(range(1, 9)), n) for n in lengths])
        _, kv = step(params, kv, table, jnp.zeros(2, jnp.int32))
    assert traces == [(2,)]


def test_rope_of_another_theta_gives_other_logits(model_parts):
    config, params = model_parts
    other = dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=500.0))
    a, b = (PagedModel(c, params).prefill(TOKENS[:16], (1,)) for c in (config, other))
    np.testing.assert_allclose(a[0], b[0], atol=1e-5)  # position 0 is not rotated
    assert np.abs(a[1:] - b[1:]).max() > 1e-3
