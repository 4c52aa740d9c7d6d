"""Fragments computed densely, in float64 numpy: canonical keys and values at their true positions, nothing paged.

The body of a fragment has the keys (before rotation) and values of a context of its root and itself alone; all other
tokens see those where the fragment stands. For tiny models without biases, norms of q and k, or scaled RoPE.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inms_jax.memory.plan import Span
from inms_jax.models.config import ModelConfig
from inms_jax.models.llama import Params


@dataclass(frozen=True)
class Seen:
    """What other tokens see of some tokens: keys before rotation and values, per layer `[T, K, H]`."""

    keys: list[np.ndarray]
    values: list[np.ndarray]

    def __getitem__(self, part: slice) -> "Seen":
        return Seen([k[part] for k in self.keys], [v[part] for v in self.values])


def log_probabilities(config: ModelConfig, params: Params, context: Sequence[Span]) -> np.ndarray:
    """Natural-log probabilities `[T, V]` after each own token of the context; those of bodies are NaN."""
    flat = np.array([token for span in context for token in span.tokens])
    given: dict[int, tuple[Seen, int]] = {}
    start = 0
    for span in context:
        length = len(span.tokens)
        if span.root is not None:
            alone = [token for part in span.root for token in part.tokens] + list(span.tokens)
            seen = _run(config, params, np.array(alone), {})[1]
            for low, high, in_place in span.runs():
                if not in_place:
                    given |= {start + i: (seen, len(alone) - length + i) for i in range(low, high)}
        start += length
    logits = _run(config, params, flat, given)[0]
    top = logits.max(-1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)))


def values(config: ModelConfig, params: Params, tokens: Sequence[int], layer: int) -> np.ndarray:
    """The values `[T, K, H]` of one layer, of a context without fragments."""
    return _run(config, params, np.array(tokens), {})[1].values[layer]


def _run(
    config: ModelConfig, params: Params, tokens: np.ndarray, given: dict[int, tuple[Seen, int]]
) -> tuple[np.ndarray, Seen]:
    """Logits of a context in which some positions have the keys and values given for them, and its own."""
    T, N, K, H = len(tokens), config.num_heads, config.num_kv_heads, config.head_dim
    x = np.asarray(params["embed"], np.float64)[tokens]
    keys, values = [], []
    causal = np.tril(np.ones((T, T), bool))
    for i in range(config.num_layers):
        weights = {name: np.asarray(array[i], np.float64) for name, array in params["layers"].items()}
        h = _norm(x, weights["attn_norm"], config)
        q, k, v = ((h @ weights[name]).reshape(T, heads, H) for name, heads in (("q", N), ("k", K), ("v", K)))
        for position, (seen, index) in given.items():
            k[position], v[position] = seen.keys[i][index], seen.values[i][index]
        keys.append(k)
        values.append(v)
        q, k = _rotate(q, config), _rotate(k, config)
        k, v = np.repeat(k, N // K, 1), np.repeat(v, N // K, 1)
        scores = np.where(causal, np.einsum("tnh,snh->nts", q, k) / np.sqrt(H), -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh->tnh", shares, v).reshape(T, N * H) @ weights["o"]
        h = _norm(x, weights["mlp_norm"], config)
        gate = h @ weights["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weights["up"])) @ weights["down"]
    x = _norm(x, np.asarray(params["final_norm"], np.float64), config)
    table = params["embed"] if config.tie_word_embeddings else params["lm_head"]
    logits = x @ np.asarray(table, np.float64).T
    logits[list(given)] = np.nan
    return logits, Seen(keys, values)


def _norm(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight)


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    half = config.head_dim // 2
    angles = np.arange(len(x))[:, None] / config.rope.theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
