"""Which row counts round alike on this machine: the start-up self-test of deterministic mode.

A row's result must not depend on how many rows are computed with it. On CPU that holds within a class of row counts
(DESIGN, section 10), which is a fact about a build of XLA on one machine, so it is checked where the engine starts.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from inms_jax.kernels.paged_attention.shared import MOST_PRODUCT_ROWS
from inms_jax.models.config import ModelConfig


@jax.jit
def _products(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    return [
        jax.lax.dot_general(x[:, : w.shape[1]], w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
        for w in weights
    ]


def agreeing_buckets(model: ModelConfig, buckets: Sequence[int]) -> tuple[int, ...]:
    """`buckets` if the same row gives the same bits in each of them, else only the largest.

    Multiplies random rows with random matrices of the model's shapes (vocabulary cut to 4096 rows), float32.
    """
    rng = np.random.default_rng(0)
    d, f, a = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    shapes = sorted({(a, d), (model.num_kv_heads * model.head_dim, d), (d, a), (f, d), (d, f), (4096, d)})
    weights = [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]
    rows = rng.standard_normal((buckets[-1], max(d, f, a)), np.float32)
    expected = [np.asarray(y) for y in _products(jnp.asarray(rows), weights)]
    for size in buckets[:-1]:
        # The last rows too: a row's place in the batch must not matter either.
        for start in (0, buckets[-1] - size):
            found = _products(jnp.asarray(rows[start : start + size]), weights)
            if any(not np.array_equal(y, e[start : start + size]) for y, e in zip(found, expected, strict=True)):
                return (buckets[-1],)
    return tuple(buckets)


@jax.jit
def _attention_products(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("gkqh,gkwh->gkqw", q, k, precision=exact)
    return scores, jnp.einsum("gkqw,gkwh->gkqh", scores, k, precision=exact)


def shared_rows_agree(model: ModelConfig, slots: int) -> bool:
    """True if attention products give a row the same bits alone and in the largest product of shared splits."""
    rng = np.random.default_rng(0)
    K, H = model.num_kv_heads, model.head_dim
    alone = max(2, model.num_heads // K)
    k = rng.standard_normal((1, K, slots, H), np.float32)
    q = rng.standard_normal((1, K, max(alone, MOST_PRODUCT_ROWS), H), np.float32)
    many = _attention_products(jnp.asarray(q), jnp.asarray(k))
    for batch in (1, 2):  # own splits are a batch of rows
        few = _attention_products(
            jnp.asarray(np.repeat(q[:, :, :alone], batch, 0)), jnp.asarray(np.repeat(k, batch, 0))
        )
        if any(not np.array_equal(a[0, :, :alone], b[0]) for a, b in zip(many, few, strict=True)):
            return False
    return True
