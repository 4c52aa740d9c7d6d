"""From logits to tokens: pure functions of (logits, key, settings per row), one row never reads another.

Knows nothing of requests or pages. Token choice is Gumbel-max over the kept tokens: for a temperature t,
argmax(x / t + Gumbel noise) is a draw from softmax(x / t).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from inms_jax.config import MAX_LOGPROBS
from inms_jax.kernels.reduction import ordered_sum
from inms_jax.kernels.state import register_state


@register_state
@dataclass(frozen=True, slots=True)
class SamplingState:
    """Settings of S rows. `banned` ids at or above V are padding. `seen` marks tokens to penalise."""

    key: UInt32[Array, "S 2"]
    token_index: Int32[Array, " S"]
    temperature: Float[Array, " S"]
    top_k: Int32[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    repetition_penalty: Float[Array, " S"]
    seen: Bool[Array, "S V"]
    banned: Int32[Array, "S C"]


@register_state
@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row; log-probabilities are of the raw logits (before penalty, ban and temperature)."""

    token: Int32[Array, " S"]
    logprob: Float[Array, " S"]
    top_ids: Int32[Array, "S E"]
    top_logprobs: Float[Array, "S E"]


@register_state
@dataclass(frozen=True, slots=True)
class Greedy:
    """The most likely token of each row with its log-probability; `lse` is the natural log normaliser."""

    token: Int32[Array, " S"]
    logprob: Float[Array, " S"]
    lse: Float[Array, " S"]


def _ordered_lse(logits: Float[Array, "S V"]) -> Float[Array, " S"]:
    most = jnp.max(logits, axis=-1, keepdims=True)
    return most[:, 0] + jnp.log(ordered_sum(jnp.exp(logits - most)))


def greedy(logits: Float[Array, "S V"]) -> Greedy:
    """Argmax and its log-probability. Part of the step program, so every row takes this one path."""
    # On CPU a plain sum over the vocabulary rounds by the number of rows, from 16 of them on.
    lse: Float[Array, " S"] = jax.lax.platform_dependent(
        logits, cpu=_ordered_lse, default=partial(jax.nn.logsumexp, axis=-1)
    )
    return Greedy(token=jnp.argmax(logits, axis=-1).astype(jnp.int32), logprob=jnp.max(logits, axis=-1) - lse, lse=lse)


def _keep(
    scaled: Float[Array, " V"], top_k: Int32[Array, ""], top_p: Float[Array, ""], min_p: Float[Array, ""]
) -> Bool[Array, " V"]:
    """Tokens that survive top-k, then top-p, then min-p, as vLLM orders them. Ties at a limit survive."""
    vocab = scaled.shape[0]
    ordered = jnp.sort(scaled, descending=True)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    in_k = jnp.arange(vocab) < k
    kept = jnp.where(in_k, ordered, -jnp.inf)
    weight = jnp.exp(kept - kept[0])
    probability = weight / ordered_sum(weight)
    before = jnp.cumsum(probability) - probability
    in_p = (in_k & (before < top_p)).at[0].set(True)
    enough = probability >= min_p * probability[0]
    lowest = jnp.min(jnp.where(in_p & enough, ordered, jnp.inf))
    return scaled >= lowest


def _sample_row(
    logits: Float[Array, " V"],
    lse: Float[Array, ""],
    key: UInt32[Array, " 2"],
    token_index: Int32[Array, ""],
    temperature: Float[Array, ""],
    top_k: Int32[Array, ""],
    top_p: Float[Array, ""],
    min_p: Float[Array, ""],
    penalty: Float[Array, ""],
    seen: Bool[Array, " V"],
    banned: Int32[Array, " C"],
) -> tuple[Int32[Array, ""], Float[Array, ""], Int32[Array, " E"], Float[Array, " E"]]:
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    x = jnp.where(seen, penalised, logits).at[banned].set(-jnp.inf, mode="drop")
    hot = temperature > 0
    scaled = x / jnp.where(hot, temperature, 1.0)
    noise = jax.random.gumbel(
        jax.random.fold_in(jax.random.wrap_key_data(key), token_index), x.shape, dtype=jnp.float32
    )
    drawn = jnp.argmax(jnp.where(_keep(scaled, top_k, top_p, min_p), scaled + noise, -jnp.inf))
    token = jnp.where(hot, drawn, jnp.argmax(x)).astype(jnp.int32)
    top, ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[0]))
    return token, logits[token] - lse, ids, top - lse


@jax.jit
def sample(logits: Float[Array, "S V"], lse: Float[Array, " S"], state: SamplingState) -> Sampled:
    """Draw one token per row. `lse` is the normaliser that the step program computed (see `greedy`)."""
    token, logprob, top_ids, top_logprobs = jax.vmap(_sample_row)(
        logits,
        lse,
        state.key,
        state.token_index,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.repetition_penalty,
        state.seen,
        state.banned,
    )
    return Sampled(token=token, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs)
