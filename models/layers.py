"""One decoder layer of the Llama family as a Flax module with flat parameters, and the few functions it is
made of.

Matrices are stored [in, out]: on CPU 1.3 to 1.8 times faster than [out, in] for small batches, equal for
large ones. Knows nothing of pages: attention is a function passed in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8

from inms_jax.kernels.reduction import ordered_sum
from inms_jax.models.config import ModelConfig

# (q [T N H], k [T K H], v [T K H]), all unrotated -> [T N H]
Attention = Callable[[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]], Float[Array, "T N H"]]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Mesh axis that heads, the MLP's width and the vocabulary are cut over, inside a shard_map; None: whole."""

    heads: str | None = None
    mlp: str | None = None
    vocab: str | None = None


WHOLE: Final = Cut()
"""Everything on one device."""


def matmul(
    x: Float[Array, "T I"],
    weight: Float[Array, "I O"] | Int8[Array, "I O"],
    scale: Float32[Array, " O"] | None = None,
    *,
    over: str | None = None,
) -> Float[Array, "T O"]:
    """Product in float32 for float32 weights, on every platform; accumulated in float32 for shorter ones.

    `over` names the mesh axis that I is cut over: the parts are summed before they are rounded to `x`'s dtype. Int8
    weights come with the `scale` of each output, and are multiplied in `x`'s dtype, which holds them exactly.
    """
    if scale is not None:
        weight = weight.astype(x.dtype)
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = lax.dot_general(
        x, weight, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if over is not None:
        product = lax.psum(product, over)  # type: ignore[no-untyped-call]
    if scale is not None:
        product = product * scale[None]
    return product.astype(x.dtype)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Root-mean-square normalisation over the last axis, in float32 (Zhang and Sennrich 2019,
    arXiv:1910.07467).
    """
    wide = x.astype(jnp.float32)
    mean_square = ordered_sum(lax.square(wide))[..., None] / x.shape[-1]
    normed = (wide * lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return normed * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU block. Applied as `DecoderLayer(config).apply({"params": layer}, x,
    attention)`. A matrix `q` in int8 has its scales beside it, `q_scale`.
    """

    config: ModelConfig
    dtype: DTypeLike = jnp.float32
    cut: Cut = WHOLE

    def setup(self) -> None:
        c = self.config
        D, F = c.hidden_size, c.intermediate_size
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.attn_norm = self._ones(D, "attn_norm")
        self.q = self._matrix(D, queries, "q")
        self.k = self._matrix(D, keys, "k")
        self.v = self._matrix(D, keys, "v")
        self.o = self._matrix(queries, D, "o")
        if c.attention_bias:
            self.q_bias = self._vector(queries, "q_bias")
            self.k_bias = self._vector(keys, "k_bias")
            self.v_bias = self._vector(keys, "v_bias")
        if c.qk_norm:
            self.q_norm = self._ones(c.head_dim, "q_norm")
            self.k_norm = self._ones(c.head_dim, "k_norm")
        self.mlp_norm = self._ones(D, "mlp_norm")
        self.gate = self._matrix(D, F, "gate")
        self.up = self._matrix(D, F, "up")
        self.down = self._matrix(F, D, "down")

    def __call__(self, x: Float[Array, "T D"], attention: Attention) -> Float[Array, "T D"]:
        """Residual stream in, residual stream out."""
        eps = self.config.rms_norm_eps
        q, k, v = self._project(rms_norm(x, self.attn_norm, eps))
        mixed = attention(q, k, v)
        x = x + self._product(mixed.reshape(x.shape[0], -1), "o", over=self.cut.heads)
        hidden = rms_norm(x, self.mlp_norm, eps)
        gated = nn.silu(self._product(hidden, "gate")) * self._product(hidden, "up")
        return x + self._product(gated, "down", over=self.cut.mlp)

    def declare(self) -> None:
        """Create the parameters without running the layer: `init(key, method="declare")`."""

    def _project(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        c = self.config
        T = x.shape[0]
        q, k, v = (self._product(x, name) for name in "qkv")
        if c.attention_bias:
            q, k, v = q + self.q_bias[None], k + self.k_bias[None], v + self.v_bias[None]
        q = q.reshape(T, c.num_heads, c.head_dim)
        k = k.reshape(T, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = rms_norm(q, self.q_norm, c.rms_norm_eps), rms_norm(k, self.k_norm, c.rms_norm_eps)
        return q, k, v.reshape(T, c.num_kv_heads, c.head_dim)

    def _product(self, x: Float[Array, "T I"], name: str, *, over: str | None = None) -> Float[Array, "T O"]:
        return matmul(x, getattr(self, name), self.get_variable("params", f"{name}_scale"), over=over)

    def _matrix(self, inputs: int, outputs: int, name: str) -> Any:
        return self.param(name, nn.initializers.normal(0.5 * inputs**-0.5), (inputs, outputs), self.dtype)

    def _vector(self, size: int, name: str) -> Any:
        return self.param(name, nn.initializers.normal(0.02), (size,), self.dtype)

    def _ones(self, size: int, name: str) -> Any:
        return self.param(name, nn.initializers.ones_init(), (size,), self.dtype)
