"""What the device code is compared with, and the smallest driver that runs a model over pages.

`dense_attention` is numpy in float64. Golden models come from transformers (`goldens/make.py`).
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from inms_jax.cache.page_table import KVPages, PageTable
from inms_jax.models.config import ModelConfig
from inms_jax.models.llama import Params, forward
from tests.goldens.rule import tensor

GOLDENS = sorted(path.stem for path in (Path(__file__).parent / "goldens").glob("*.npz"))


@dataclasses.dataclass(frozen=True)
class Golden:
    """One tiny model of transformers and what it said."""

    config: ModelConfig
    params: Params
    tokens: np.ndarray
    logits: np.ndarray


@functools.cache
def golden(name: str) -> Golden:
    """The golden model of that name with its weights drawn anew."""
    with np.load(Path(__file__).parent / "goldens" / f"{name}.npz") as file:
        config = ModelConfig.from_hf(json.loads(str(file["config"])), name=name)
        return Golden(config, rule_params(config), file["tokens"], file["logits"])


def rule_params(config: ModelConfig) -> Params:
    """Stacked parameters drawn by the rule of the golden models."""
    c = config
    D, F, H = c.hidden_size, c.intermediate_size, c.head_dim
    names = {
        "attn_norm": ("input_layernorm.weight", (D,)),
        "q": ("self_attn.q_proj.weight", (c.num_heads * H, D)),
        "k": ("self_attn.k_proj.weight", (c.num_kv_heads * H, D)),
        "v": ("self_attn.v_proj.weight", (c.num_kv_heads * H, D)),
        "o": ("self_attn.o_proj.weight", (D, c.num_heads * H)),
        "mlp_norm": ("post_attention_layernorm.weight", (D,)),
        "gate": ("mlp.gate_proj.weight", (F, D)),
        "up": ("mlp.up_proj.weight", (F, D)),
        "down": ("mlp.down_proj.weight", (D, F)),
    }
    if c.attention_bias:
        names |= {f"{x}_bias": (f"self_attn.{x}_proj.bias", names[x][1][:1]) for x in "qkv"}
    if c.qk_norm:
        names |= {f"{x}_norm": (f"self_attn.{x}_norm.weight", (H,)) for x in "qk"}

    def stacked(name: str, shape: tuple[int, ...]) -> np.ndarray:
        layers = [tensor(f"model.layers.{i}.{name}", shape) for i in range(c.num_layers)]
        return np.stack([np.ascontiguousarray(x.T) for x in layers])

    params: Params = {
        "embed": tensor("model.embed_tokens.weight", (c.vocab_size, D)),
        "final_norm": tensor("model.norm.weight", (D,)),
        "layers": {ours: stacked(*theirs) for ours, theirs in names.items()},
    }
    if not c.tie_word_embeddings:
        params["lm_head"] = tensor("lm_head.weight", (c.vocab_size, D))
    return params


@functools.partial(jax.jit, static_argnames=("config", "rows_per_group", "implementation"), donate_argnames=("kv",))
def _step(
    params: Params,
    kv: KVPages,
    table: PageTable,
    tokens: jax.Array,
    positions: jax.Array,
    write_page: jax.Array,
    write_slot: jax.Array,
    *,
    config: ModelConfig,
    rows_per_group: int,
    implementation: str | None,
) -> tuple[jax.Array, KVPages]:
    return forward(
        params,
        config,
        tokens,
        positions,
        kv,
        (table.level(rows_per_group),),
        write_page,
        write_slot,
        jnp.arange(tokens.shape[0], dtype=jnp.int32),
        implementation=implementation,
    )


class PagedModel:
    """A model and a pool; the caller says which pages a sequence has. No manager, no sharing rules."""

    def __init__(
        self, config: ModelConfig, params: Params, *, num_pages: int = 24, block_size: int = 16, fill: float = 0.0
    ) -> None:
        self.config, self.params, self.block_size = config, params, block_size
        kv = KVPages.create(config, num_pages, block_size, jnp.float32, "cpu")
        self.kv = jax.tree.map(lambda x: jnp.full_like(x, fill), kv)
        self.max_entries = 8

    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray,
        pages: Sequence[int],
        start: int = 0,
        *,
        bucket: int | None = None,
        params: Params | None = None,
        implementation: str | None = None,
    ) -> np.ndarray:
        """Logits of tokens at `start`, `start` + 1, ... of the sequence in `pages`; padded to `bucket` rows."""
        n = len(tokens)
        bucket = bucket or n
        positions = np.arange(start, start + n)
        write_page = np.asarray(pages)[positions // self.block_size]

        def padded(x: np.ndarray) -> jax.Array:
            return jnp.asarray(np.pad(x, (0, bucket - n)), jnp.int32)

        logits, self.kv = _step(
            self.params if params is None else params,
            self.kv,
            self.table([(pages, start + n)]),
            padded(np.asarray(tokens)),
            padded(positions),
            padded(write_page),
            padded(positions % self.block_size),
            config=self.config,
            rows_per_group=bucket,
            implementation=implementation,
        )
        return np.asarray(logits)[:n]

    def decode(
        self, tokens: Sequence[int], sequences: Sequence[tuple[Sequence[int], int]], *, params: Params | None = None
    ) -> np.ndarray:
        """Logits of one token per sequence; a sequence is (its pages, tokens it has so far)."""
        positions = np.array([length for _, length in sequences])
        write_page = [pages[length // self.block_size] for pages, length in sequences]
        logits, self.kv = _step(
            self.params if params is None else params,
            self.kv,
            self.table([(pages, length + 1) for pages, length in sequences]),
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(positions, jnp.int32),
            jnp.asarray(write_page, jnp.int32),
            jnp.asarray(positions % self.block_size, jnp.int32),
            config=self.config,
            rows_per_group=1,
            implementation=None,
        )
        return np.asarray(logits)

    def table(self, rows: Sequence[tuple[Sequence[int], int]]) -> PageTable:
        """Page table of rows that use the first `length` slots of their pages in order."""
        page, end, position = np.zeros((3, len(rows), self.max_entries), np.int32)
        num_entries = np.zeros(len(rows), np.int32)
        for row, (pages, length) in enumerate(rows):
            used = num_entries[row] = -(-length // self.block_size)
            page[row, :used] = pages[:used]
            position[row, :used] = np.arange(used) * self.block_size
            end[row, :used] = np.minimum(self.block_size, length - position[row, :used])
        zero = np.zeros_like(page)
        arrays = (page, zero, end, position, zero, num_entries)
        return PageTable(*(jnp.asarray(x) for x in arrays))


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    entries: dict[str, np.ndarray],
    q_position: np.ndarray,
    *,
    scale: float,
    inv_freq: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of `q` [G, R, N, H], one row, head, entry and slot at a time, in float64; keys are rotated."""
    G, R, N, H = q.shape
    per_kv = N // k.shape[1]
    out, lse = np.zeros((G, R, N, H)), np.full((G, R, N), -np.inf)
    shift = entries.get("shift")
    for g, r, n in np.ndindex(G, R, N):
        keys, values = [], []
        for m, page in enumerate(entries["page"][g]):
            delta = 0 if shift is None else int(shift[g, r, m])
            for j in range(int(entries["begin"][g, m]), int(entries["end"][g, m])):
                if entries["position"][g, m] + j + delta <= q_position[g, r]:
                    keys.append(turn(k[page, n // per_kv, j], delta, inv_freq))
                    values.append(v[page, n // per_kv, j])
        if keys:
            scores = np.array(keys, np.float64) @ q[g, r, n].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[g, r, n] = weights @ np.array(values, np.float64) / weights.sum()
            lse[g, r, n] = scores.max() + np.log(weights.sum())
    return out, lse


def turn(x: np.ndarray, position: int, inv_freq: np.ndarray | None) -> np.ndarray:
    """Rotate-half rotation of one vector by `position` steps, as complex numbers."""
    if inv_freq is None or position == 0:
        return x.astype(np.float64)
    half = x.shape[-1] // 2
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * inv_freq.astype(np.float64))
    return np.concatenate([turned.real, turned.imag])
