"""The TPU kernels that move pages, in interpret mode, against loops over pages and planes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inms_jax.kernels.page_copy import pallas_tpu as copying
from inms_jax.kernels.page_copy import reference as copy_reference
from inms_jax.kernels.rope_shift import pallas_tpu as shifting
from inms_jax.kernels.rope_shift import reference as shift_reference
from tests.kernels.test_pallas_tpu_attention import races_found

RACES = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
LAYERS, PAGES = 3, 6
# A chain, a swap, a fan out and padding.
COPIES = [[(2, 3), (3, 4), (0, 0)], [(1, 2), (2, 1), (0, 0)], [(1, 4), (1, 5), (1, 3)], [(0, 0), (0, 0), (2, 5)]]
# Layouts: head dim in lanes, slots in lanes.
LAYOUTS = [(16, 128), (128, 64)]


def pool(seed, B, H, dtype="float32"):
    return np.random.default_rng(seed).standard_normal((LAYERS * PAGES, 2, B, H)).astype(jnp.dtype(dtype))


def lists(copies):
    return tuple(np.array(x, np.int32) for x in zip(*copies, strict=True))


@pytest.mark.parametrize("interpret", [True, RACES], ids=["plain", "races"])
@pytest.mark.parametrize(("B", "H"), LAYOUTS)
def test_copy_equals_the_loop(B, H, interpret):
    copy = jax.jit(functools.partial(copying.page_copy, num_layers=LAYERS, interpret=interpret))
    for seed, copies in enumerate(COPIES):
        pages, (src, dst) = pool(seed, B, H), lists(copies)
        pages[1::PAGES, :, B // 2 :] = np.nan  # half a page was never written
        got = copy(jnp.asarray(pages), jnp.asarray(src), jnp.asarray(dst))
        np.testing.assert_array_equal(got, copy_reference.page_copy(pages, src, dst, num_layers=LAYERS))
        assert interpret is True or not races_found()


def test_copies_that_fill_vmem_go_head_by_head_and_more_are_refused(monkeypatch):
    pages, (src, dst) = pool(0, 16, 128), lists(COPIES[0])
    one_head = 3 * 16 * 128 * 4
    monkeypatch.setattr(copying, "_BUFFER_BYTES", one_head)
    got = copying.page_copy(jnp.asarray(pages), jnp.asarray(src), jnp.asarray(dst), num_layers=LAYERS, interpret=True)
    np.testing.assert_array_equal(got, copy_reference.page_copy(pages, src, dst, num_layers=LAYERS))
    monkeypatch.setattr(copying, "_BUFFER_BYTES", one_head - 1)
    with pytest.raises(NotImplementedError, match=f"3 copies of 16 x 128 slots take {one_head} bytes"):
        copying.page_copy(jnp.asarray(pages), jnp.asarray(src), jnp.asarray(dst), num_layers=LAYERS)


# (layout, interleaved, rotary components, dtype)
CONVENTIONS = [
    ((16, 128), False, 128, "float32"),
    ((16, 128), True, 32, "bfloat16"),
    ((128, 64), True, 64, "float32"),
    ((128, 80), False, 20, "float32"),
    *(
        pytest.param(layout, interleaved, rotary, dtype, marks=pytest.mark.full)
        for layout in ((16, 256), (512, 128), (512, 64), (256, 96), (128, 80))
        for interleaved in (False, True)
        for rotary in (layout[1], layout[1] // 2)
        for dtype in ("float32", "bfloat16")
    ),
]


@pytest.mark.parametrize(("layout", "interleaved", "rotary", "dtype"), CONVENTIONS)
def test_shift_equals_the_loop(layout, interleaved, rotary, dtype):
    freq = (1e4 ** -(np.arange(rotary // 2) / (rotary // 2))).astype(np.float32)
    shift = jax.jit(
        functools.partial(
            shifting.rope_shift,
            num_layers=LAYERS,
            inv_freq=jnp.asarray(freq),
            interleaved=interleaved,
            rotary_dim=rotary,
            interpret=True,
        )
    )
    for seed, copies in enumerate(COPIES):
        pages, (src, dst) = pool(seed, layout[0], layout[1], dtype), lists(copies)
        delta = np.where(dst == 0, 0, np.random.default_rng(seed).integers(-3000, 3000, 3)).astype(np.int32)
        got = np.asarray(shift(jnp.asarray(pages), jnp.asarray(src), jnp.asarray(dst), jnp.asarray(delta)))
        expected = shift_reference.rope_shift(
            pages,
            src,
            dst,
            delta,
            inv_freq=freq,
            num_layers=LAYERS,
            interleaved=interleaved,
            rotary_dim=rotary,
        )
        rtol, atol = (0, 3e-6) if dtype == "float32" else (2**-7, 1e-3)
        np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=rtol, atol=atol)
        assert np.array_equal(got[..., rotary:], expected[..., rotary:]), "what does not turn is copied"
        for page in np.setdiff1d(np.arange(PAGES), dst):
            np.testing.assert_array_equal(got[page::PAGES], pages[page::PAGES])


@pytest.mark.parametrize(("B", "H"), LAYOUTS)
def test_shift_of_nothing_keeps_bits_and_nan_stays_in_its_slot(B, H):
    pages = pool(0, B, H)
    pages[1::PAGES, :, 3] = -0.0
    pages[1::PAGES, :, 5:9] = np.nan
    src, dst = lists([(1, 2), (1, 3), (0, 0)])
    freq = jnp.asarray(1e4 ** -(np.arange(H // 2) / (H // 2)), jnp.float32)
    got = np.asarray(
        shifting.rope_shift(
            jnp.asarray(pages),
            jnp.asarray(src),
            jnp.asarray(dst),
            jnp.asarray([0, 40, 0], jnp.int32),
            inv_freq=freq,
            num_layers=LAYERS,
            interpret=RACES,
        )
    )
    assert not races_found()
    assert got[2::PAGES].tobytes() == got[1::PAGES].tobytes() == pages[1::PAGES].tobytes()
    assert np.isnan(got[3::PAGES, :, 5:9]).all()
    assert np.isfinite(np.delete(got[3::PAGES], range(5, 9), axis=2)).all()
