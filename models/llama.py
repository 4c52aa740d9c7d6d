"""The Llama family as one pure function of (params, tokens, positions, pages): Llama, Mistral, Qwen2.5,
Qwen3, SmolLM2.

Parameters are a plain tree: {"embed" [V, D], "final_norm" [D], "lm_head" [V, D] unless tied, "layers"}.
"layers" is either one dict of arrays with a leading L axis (a scan: one layer is compiled, for prefill) or a
list of L dicts (unrolled: faster for decode, where slicing a stacked weight costs as much as using it). Knows
nothing of requests, page ownership or sampling.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from inms_jax.cache.page_table import KVPages
from inms_jax.kernels.paged_attention.api import Level
from inms_jax.models.attention import attend
from inms_jax.models.config import ModelConfig
from inms_jax.models.layers import WHOLE, Cut, DecoderLayer, rms_norm
from inms_jax.models.rope import angles, apply_rope, inverse_frequencies

Params: TypeAlias = dict[str, Any]


def init_shapes(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The parameter tree with stacked layers, as `jax.ShapeDtypeStruct`: the contract with weight loaders."""
    shapes: Params = jax.eval_shape(lambda key: random_params(config, key, dtype), jax.random.key(0))
    return shapes


def random_params(config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters with stacked layers, scaled so that activations stay of order one. For tests."""
    layer_key, embed_key, head_key = jax.random.split(key, 3)
    layer = DecoderLayer(config, dtype)
    layers = jax.vmap(lambda k: layer.init(k, method="declare")["params"])(
        jax.random.split(layer_key, config.num_layers)
    )
    table = (config.vocab_size, config.hidden_size)
    params = {
        "embed": jax.random.normal(embed_key, table, dtype),
        "final_norm": jnp.ones((config.hidden_size,), dtype),
        "layers": layers,
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = jax.random.normal(head_key, table, dtype) * jnp.asarray(config.hidden_size**-0.5, dtype)
    return params


def unstack_layers(params: Params) -> Params:
    """The same parameters as host arrays with a list of layers, each a view of the stacked numpy arrays.

    `jax.device_put` of a 64-byte aligned numpy array aliases it on CPU, memory maps included, so putting both
    forms on the device holds the weights once.
    """
    stacked: Mapping[str, np.ndarray] = params["layers"]
    depth = next(iter(stacked.values())).shape[0]
    return {**params, "layers": [{name: x[i] for name, x in stacked.items()} for i in range(depth)]}


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    kv_pages: KVPages,
    levels: tuple[Level, ...],
    write_page: Int32[Array, " T"],
    write_slot: Int32[Array, " T"],
    logit_rows: Int32[Array, " Z"],
    *,
    cut: Cut = WHOLE,
    implementation: str | None = None,
) -> tuple[Float[Array, "Z V"], KVPages]:
    """Logits of the rows named by `logit_rows`, in float32, and the pages with T tokens written.

    Every row reads its levels after all T tokens of the layer are written; rows with `write_page` 0 write
    nothing. `levels` partition what a row may read, itself included. `kv_pages` should be donated by the
    caller's jit. With a `cut`, params, pages and `config` are one device's part inside a shard_map, and so are
    not the logits, which are whole.
    """
    inv_freq = jnp.asarray(inverse_frequencies(config))
    cos, sin = angles(positions, inv_freq)
    layer = DecoderLayer(config, params["embed"].dtype, cut)

    def run_layer(
        weights: Mapping[str, Array], x: Float[Array, "T D"], kv: KVPages, index: int | Int32[Array, ""]
    ) -> tuple[Float[Array, "T D"], KVPages]:
        written = kv

        def attention(
            q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"]
        ) -> Float[Array, "T N H"]:
            nonlocal written
            out, written = attend(
                apply_rope(q, cos, sin),
                apply_rope(k, cos, sin),
                v,
                kv,
                index,
                positions,
                levels,
                write_page,
                write_slot,
                inv_freq=inv_freq,
                implementation=implementation,
            )
            return out

        out: Array = layer.apply({"params": weights}, x, attention)  # type: ignore[assignment]
        return out, written

    x = _embed(params["embed"], tokens, cut)  # T D
    if isinstance(params["layers"], Mapping):

        def body(
            carry: tuple[Array, KVPages], xs: tuple[Mapping[str, Array], Array]
        ) -> tuple[tuple[Array, KVPages], None]:
            weights, index = xs
            return run_layer(weights, *carry, index), None

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, kv_pages), _ = lax.scan(body, (x, kv_pages), (params["layers"], indices))
    else:
        for index, weights in enumerate(params["layers"]):
            x, kv_pages = run_layer(weights, x, kv_pages, index)

    return _head(params, config, x, logit_rows, cut), kv_pages


def _embed(table: Float[Array, "V D"], tokens: Int32[Array, " T"], cut: Cut) -> Float[Array, "T D"]:
    if cut.vocab is None:
        return table.at[tokens].get(mode="clip")
    # One device has the row, the others add zeros.
    row = tokens - lax.axis_index(cut.vocab) * table.shape[0]
    here = (row >= 0) & (row < table.shape[0])
    part = jnp.where(here[:, None], table.at[row].get(mode="clip"), jnp.zeros((), table.dtype))
    found: Array = lax.psum(part, cut.vocab)  # type: ignore[no-untyped-call]
    return found


def _head(
    params: Params, config: ModelConfig, x: Float[Array, "T D"], logit_rows: Int32[Array, " Z"], cut: Cut
) -> Float[Array, "Z V"]:
    Z = logit_rows.shape[0]
    # A product of one row rounds differently from all larger ones, so there are always two.
    x = x.at[jnp.pad(logit_rows, (0, max(0, 2 - Z)))].get(mode="clip")
    x = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    table = params["embed"] if config.tie_word_embeddings else params["lm_head"]
    precision = lax.Precision.HIGHEST if table.dtype == jnp.float32 else lax.Precision.DEFAULT
    logits = lax.dot_general(
        x, table, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    logits = logits[:Z]
    return logits if cut.vocab is None else lax.all_gather(logits, cut.vocab, axis=1, tiled=True)
