"""Pages relocated: against a loop, against keys computed anew, and against attention that shifts its queries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.cache.page_ops import copy_pages, shift_pages
from inms_jax.cache.page_table import KVPages
from inms_jax.kernels.paged_attention.api import Level, paged_attention
from inms_jax.kernels.rope_shift import reference
from inms_jax.kernels.rope_shift.api import rope_shift
from inms_jax.kernels.storage import decode, encode
from inms_jax.models.rope import inverse_frequencies
from tests.oracles import PagedModel, golden

SHIFT: Any = jax.jit(rope_shift, static_argnames=("num_layers", "interleaved", "rotary_dim", "implementation"))
LAYERS, P = 2, 6
# A swap, a page turned in place and copied elsewhere as it was before, padding.
SRC = np.array([1, 2, 3, 3, 0, 0], np.int32)
DST = np.array([2, 1, 3, 4, 0, 0], np.int32)
DELTA = np.array([5, -70, 9, 1000, 0, 0], np.int32)


def pages_of(H, dtype=np.float32, *, K=2, B=16, seed=0):
    shape = (LAYERS * P, K, B, H)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def frequencies(width):
    return (1e4 ** -(np.arange(width // 2) / (width // 2))).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("H", "rotary_dim"), [(64, None), (80, 32), (96, 34)])
def test_equals_the_loop(H, rotary_dim, interleaved):
    pages, options = pages_of(H), {"num_layers": LAYERS, "interleaved": interleaved, "rotary_dim": rotary_dim}
    inv_freq = frequencies(rotary_dim or H)
    got = SHIFT(jnp.asarray(pages), SRC, DST, DELTA, inv_freq=jnp.asarray(inv_freq), **options)
    expected = reference.rope_shift(pages, SRC, DST, DELTA, inv_freq=inv_freq, **options)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    untouched = [layer * P + page for layer in range(LAYERS) for page in (0, 5)]
    np.testing.assert_array_equal(got[np.array(untouched)], pages[untouched])


def test_the_two_conventions_are_one_rotation_with_components_in_another_order():
    pages, inv_freq = pages_of(64), frequencies(64)
    order = np.arange(64).reshape(2, 32).T.reshape(-1)  # 0, 32, 1, 33, ...
    halves, pairs = (
        SHIFT(jnp.asarray(x), SRC, DST, DELTA, inv_freq=jnp.asarray(inv_freq), num_layers=LAYERS, interleaved=pair)
        for x, pair in ((pages, False), (pages[..., order], True))
    )
    np.testing.assert_allclose(halves[..., order], pairs, atol=1e-6)


@pytest.mark.parametrize("stored", [jnp.uint16, jnp.float16, jnp.bfloat16])
def test_sixteen_bits_are_rotated_in_float32_and_rounded_once(stored):
    pages, inv_freq = encode(jnp.asarray(pages_of(64)), stored), frequencies(64)
    got = SHIFT(pages, SRC, DST, DELTA, inv_freq=jnp.asarray(inv_freq), num_layers=LAYERS)
    wide = reference.rope_shift(np.asarray(decode(pages)), SRC, DST, DELTA, inv_freq=inv_freq, num_layers=LAYERS)
    step = float(jnp.finfo(jnp.float16 if stored == jnp.float16 else jnp.bfloat16).eps)
    np.testing.assert_allclose(decode(got), wide, rtol=0.51 * step, atol=1e-6)
    copied = SHIFT(pages, SRC, DST, 0 * DELTA, inv_freq=jnp.asarray(inv_freq), num_layers=LAYERS)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(copied[layer * P + DST], pages[layer * P + SRC])


@pytest.mark.parametrize("name", ["llama_mha", "llama3_rope"])
class TestAgainstTheModel:
    """Layer-0 keys are a function of token and position alone, so a page moved is a page computed there."""

    @pytest.fixture
    def model(self, name):
        found = golden(name)
        return PagedModel(found.config, found.params, num_pages=P)

    def keys_at(self, model, tokens, page, block):
        """Compute the tokens as the `block`-th block of a sequence; layer-0 keys of that page."""
        B = model.block_size
        model.prefill(tokens, [0] * block + [page], start=block * B)
        return np.asarray(model.kv.k[page]).copy()

    def moved(self, model, page, delta, inv_freq):
        kv = jax.tree.map(jnp.copy, model.kv)
        src, dst = jnp.array([page, 0], jnp.int32), jnp.array([P - 1, 0], jnp.int32)
        return shift_pages(kv, src, dst, jnp.array([delta, 0], jnp.int32), inv_freq)

    def test_moved_keys_are_the_keys_computed_there(self, model):
        B = model.block_size
        inv_freq = jnp.asarray(inverse_frequencies(model.config))
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, B)
        low, high = self.keys_at(model, tokens, 1, 0), self.keys_at(model, tokens, 2, 5)
        largest = np.abs(low).max()
        for page, delta, expected in ((1, 5 * B, high), (2, -5 * B, low)):
            right = self.moved(model, page, delta, inv_freq)
            np.testing.assert_allclose(right.k[P - 1], expected, atol=1e-5 * largest)
            np.testing.assert_array_equal(right.v[P - 1], model.kv.v[page])
            wrong = self.moved(model, page, -delta, inv_freq)
            assert np.abs(wrong.k[P - 1] - expected).max() > 0.1 * largest, "the wrong sign must show"

    def test_a_hundred_moves_do_not_drift(self, model):
        """Each from the page that was computed: the last is as good as the first, bit for bit."""
        inv_freq = jnp.asarray(inverse_frequencies(model.config))
        B = model.block_size
        tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, B)
        expected, original = self.keys_at(model, tokens, 2, 3), self.keys_at(model, tokens, 1, 0)
        once = self.moved(model, 1, 3 * B, inv_freq).k[P - 1]
        chained = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.kv)
        src, dst = jnp.array([1], jnp.int32), jnp.array([P - 1], jnp.int32)
        steps = [*np.random.default_rng(2).integers(-200, 200, 99).tolist(), 3 * B]
        for i, delta in enumerate(steps):
            model.kv = shift_pages(model.kv, src, dst, jnp.array([delta], jnp.int32), inv_freq)
            further = jnp.array([delta - (steps[i - 1] if i else 0)], jnp.int32)
            chained = shift_pages(chained, dst if i else src, dst, further, inv_freq)
        np.testing.assert_array_equal(model.kv.k[1], original)
        np.testing.assert_array_equal(model.kv.k[P - 1], once)
        np.testing.assert_allclose(once, expected, atol=1e-5 * np.abs(original).max())
        # What the rule is for: moved from where it last was, a page of 16 bits loses more with every move.
        step = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(original).max()
        assert np.abs(chained.k[P - 1].astype(jnp.float32) - expected).max() > 2 * step


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("scaled", [False, True])
def test_shifted_attention_is_attention_on_moved_keys(implementation, scaled):
    inv_freq = frequencies(16)
    if scaled:
        config = golden("llama3_rope").config
        inv_freq = inverse_frequencies(config)
    H, B, rng = 2 * len(inv_freq), 16, np.random.default_rng(3)
    pages, values = pages_of(H, seed=4), jnp.asarray(pages_of(H, seed=5))
    q = jnp.asarray(rng.standard_normal((1, 3, 4, H)), jnp.float32)
    attend = functools.partial(
        paged_attention, scale=H**-0.5, inv_freq=jnp.asarray(inv_freq), implementation=implementation
    )
    ids, moved = np.array([1, 3], np.int32), np.array([4, 5], np.int32)
    for delta in (40, -40):
        shifted = SHIFT(
            jnp.asarray(pages), ids, moved, np.full(2, delta, np.int32), inv_freq=jnp.asarray(inv_freq), num_layers=2
        )
        # Queries before, inside and after the two pages.
        stored = np.array([[50, 50 + B]], np.int32)
        q_position = jnp.asarray(stored[:, :1] + delta + np.array([[-1, B + 5, 90]]), jnp.int32)
        zero = jnp.zeros((1, 2), jnp.int32)

        def read(keys, page, position, shift, q_position=q_position, zero=zero):
            level = Level(
                rows=None,
                page=jnp.asarray(page)[None],
                begin=zero,
                end=zero + B,
                position=jnp.asarray(position),
                shift=jnp.full((1, 3, 2), shift, jnp.int32) if shift else None,
                num_entries=jnp.int32(2),
            )
            copied = values.at[moved].set(values[ids])
            return attend(q, keys, copied, level, q_position, jnp.int32(0))

        by_query = read(jnp.asarray(pages), ids, stored, delta)
        by_key = read(shifted, moved, stored + delta, 0)
        for a, b in zip(by_query, by_key, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        assert (by_query[1][0, 0] == -np.inf).all()
        wrong = read(jnp.asarray(pages), ids, stored + 2 * delta, -delta)  # the same slots, turned the other way
        assert np.abs(wrong[0] - by_key[0]).max() > 1e-2, "the wrong sign must show"


def test_shifts_and_copies_do_not_copy_the_pool():
    config = golden("llama_mha").config
    lists = jax.ShapeDtypeStruct((4,), jnp.int32)
    inv_freq = jax.ShapeDtypeStruct((config.head_dim // 2,), jnp.float32)
    temps = []
    for num_pages in (256, 2048):
        kv = jax.eval_shape(lambda n=num_pages: KVPages.create(config, n, 8, jnp.float32, "cpu"))
        shifted = shift_pages.lower(kv, lists, lists, lists, inv_freq).compile().memory_analysis()
        copied = copy_pages.lower(kv, lists, lists).compile().memory_analysis()
        assert shifted is not None
        assert copied is not None
        pool = 2 * kv.k.size * 4
        assert shifted.alias_size_in_bytes == copied.alias_size_in_bytes == pool
        temps.append((shifted.temp_size_in_bytes, copied.temp_size_in_bytes))
    assert temps[0] == temps[1]
    assert max(temps[1]) < pool / 20


@pytest.mark.parametrize("B", [8, 16])
def test_one_compilation_per_block_size(B):
    pages, inv_freq = pages_of(16, B=B), jnp.asarray(frequencies(16))
    SHIFT(jnp.asarray(pages), SRC, DST, DELTA, inv_freq=inv_freq, num_layers=LAYERS)
    before = SHIFT._cache_size()
    for used in range(1, 4):
        lists = [np.where(np.arange(6) < used, x, 0).astype(np.int32) for x in (SRC, DST, DELTA)]
        got = SHIFT(jnp.asarray(pages), *lists, inv_freq=inv_freq, num_layers=LAYERS)
        expected = reference.rope_shift(pages, *lists, inv_freq=np.asarray(inv_freq), num_layers=LAYERS)
        np.testing.assert_allclose(got, expected, atol=2e-6)
    assert SHIFT._cache_size() == before


def test_sizes_that_do_not_fit_are_refused():
    pages, ids = jnp.zeros((4, 1, 8, 16)), jnp.zeros(2, jnp.int32)
    inv_freq = jnp.asarray(frequencies(16))
    with pytest.raises(ValueError, match=r"2\.\.16.*got 18"):
        rope_shift(pages, ids, ids, ids, inv_freq=inv_freq, num_layers=2, rotary_dim=18)
    with pytest.raises(ValueError, match=r"16 rotary components needs 8 frequencies, got 4"):
        rope_shift(pages, ids, ids, ids, inv_freq=inv_freq[:4], num_layers=2)
    with pytest.raises(ValueError, match="4 pages cannot be split over 3 layers"):
        rope_shift(pages, ids, ids, ids, inv_freq=inv_freq, num_layers=3)
    with pytest.raises(ValueError, match=r"'fast'.*pallas_gpu.*pallas_tpu.*xla"):
        rope_shift(pages, ids, ids, ids, inv_freq=inv_freq, num_layers=2, implementation="fast")
