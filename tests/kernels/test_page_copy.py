"""Page copy against a loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax.kernels.page_copy import reference
from inms_jax.kernels.page_copy.api import page_copy


@pytest.mark.parametrize(
    "copies",
    [[(1, 2)], [(1, 3), (1, 4), (0, 0)], [(1, 2), (2, 1)], [(2, 3), (3, 4)], [(0, 0), (0, 0)]],
    ids=["one", "fan out and padding", "swap", "chain", "only padding"],
)
def test_equals_the_loop(copies):
    pages = np.random.default_rng(0).standard_normal((3 * 5, 2, 4, 6)).astype(np.float32)
    src, dst = (np.array(x, np.int32) for x in zip(*copies, strict=True))
    got = page_copy(jnp.asarray(pages), jnp.asarray(src), jnp.asarray(dst), num_layers=3)
    np.testing.assert_array_equal(got, reference.page_copy(pages, src, dst, num_layers=3))
