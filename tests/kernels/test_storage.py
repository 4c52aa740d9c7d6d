"""Round trips of what the pool holds."""

import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.kernels.storage import decode, encode, number_dtype, storage_dtype


def test_only_bfloat16_on_cpu_is_stored_as_bits():
    assert storage_dtype("bfloat16", "cpu") == jnp.uint16
    assert number_dtype(jnp.uint16) == jnp.bfloat16
    for dtype, platform in (("bfloat16", "gpu"), ("bfloat16", "tpu"), ("float16", "cpu"), ("float32", "cpu")):
        assert storage_dtype(dtype, platform) == number_dtype(dtype) == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decode_gives_the_rounded_numbers(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
    stored = encode(x, storage_dtype(dtype, "cpu"))
    np.testing.assert_array_equal(decode(stored), x.astype(dtype).astype(jnp.float32))
