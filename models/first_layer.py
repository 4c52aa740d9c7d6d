"""What enters layer 1, without any page: keys and values of layer 0 depend on the token alone.

So one layer of dense attention over the tokens of a context gives it, however the context is cached.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from inms_jax.models.config import ModelConfig
from inms_jax.models.layers import DecoderLayer
from inms_jax.models.rope import angles, apply_rope, inverse_frequencies

QUERIES = 128
"""Rows of scores that exist at once; T is a multiple of it."""


@partial(jax.jit, static_argnames=("config",))
def second_values(params: Any, tokens: Int32[Array, " T"], *, config: ModelConfig) -> Float[Array, "T K H"]:
    """The values that layer 1 computes, in float32; causal, so padding behind the tokens changes nothing."""
    layer = DecoderLayer(config, params["embed"].dtype)
    inv_freq = jnp.asarray(inverse_frequencies(config))
    cos, sin = angles(jnp.arange(len(tokens)), inv_freq)
    values: list[Array] = []

    def dense(q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"]) -> Float[Array, "T N H"]:
        return _causal(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)

    def keep_values(
        q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"]
    ) -> Float[Array, "T N H"]:
        values.append(v)
        return jnp.zeros_like(q)

    x = params["embed"].at[tokens].get(mode="clip")
    x = layer.apply({"params": _weights(params, 0)}, x, dense)
    layer.apply({"params": _weights(params, min(1, config.num_layers - 1))}, x, keep_values)
    return values[0].astype(jnp.float32)


def _weights(params: Any, index: int) -> Mapping[str, Array]:
    return {name: stacked[index] for name, stacked in params["layers"].items()}


def _causal(q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"]) -> Float[Array, "T N H"]:
    """Dense causal attention, some rows of queries at a time."""
    T, N, H = q.shape
    K = k.shape[1]
    keys = jnp.arange(T)

    def rows(start: Int32[Array, ""]) -> Float[Array, "Q N H"]:
        part = lax.dynamic_slice_in_dim(q, start, QUERIES).reshape(QUERIES, K, N // K, H)
        scores = jnp.einsum("qkgh,tkh->kgqt", part, k, preferred_element_type=jnp.float32) * H**-0.5
        seen = keys[None] <= start + jnp.arange(QUERIES)[:, None]
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("kgqt,tkh->qkgh", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return mixed.reshape(QUERIES, N, H).astype(q.dtype)

    mixed: Array = lax.map(rows, jnp.arange(0, T, QUERIES))
    return mixed.reshape(T, N, H)
