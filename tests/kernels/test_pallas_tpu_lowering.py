"""TPU kernels lower from a host without a TPU, for every block size."""

import functools

import jax
import jax.numpy as jnp
import pytest

from inms_jax.kernels.page_copy.api import page_copy
from inms_jax.kernels.paged_attention.api import Level, paged_attention
from inms_jax.kernels.rope_shift.api import rope_shift

SIZES = [
    pytest.param(B, H, marks=() if (B, H) in ((16, 128), (128, 64), (512, 128)) else pytest.mark.full)
    for B in (16, 32, 64, 128, 256, 512)
    for H in (64, 80, 96, 128, 256)
    if not (B % 128 and H % 128)
]


def struct(*shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(call, *arguments):
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("B", "H"), SIZES)
def test_kernels_lower(B, H, dtype):
    pages, freq, ids = struct(40, 2, B, H, dtype=dtype), struct(H // 2, dtype="float32"), struct(3)
    table = struct(2, 4)

    def attend(q, k, v, page, begin, end, position, shift, num_entries, q_position, offset, freq):
        level = Level(None, page, begin, end, position, shift, num_entries)
        return paged_attention(
            q, k, v, level, q_position, offset, scale=1.0, inv_freq=freq, implementation="pallas_tpu"
        )

    for R, shift in ((1, None), (3, struct(2, 3, 4))):
        arguments = (struct(2, R, 6, H, dtype=dtype), pages, pages, *[table] * 4, shift, struct(), struct(2, R))
        assert lowered(attend, *arguments, struct(), freq).count("tpu_custom_call") == 1
    copy = functools.partial(page_copy, num_layers=4, implementation="pallas_tpu")
    assert lowered(copy, pages, ids, ids).count("tpu_custom_call") == 1

    def turn(pages, src, dst, delta, freq):
        return rope_shift(pages, src, dst, delta, inv_freq=freq, num_layers=4, implementation="pallas_tpu")

    assert lowered(turn, pages, ids, ids, ids, freq).count("tpu_custom_call") == 1


def test_a_kernel_asks_for_a_tpu():
    pages, ids = jnp.zeros((40, 2, 16, 128)), jnp.zeros((3,), jnp.int32)
    with pytest.raises(ValueError, match="interpret mode"):
        page_copy(pages, ids, ids, num_layers=4, implementation="pallas_tpu")
