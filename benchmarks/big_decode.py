"""One decode step of several agents on a large model with random weights: each with its own pages, then sharing.

Uses the engine's runner on page tables made by the engine's own code. Pages hold random numbers, the same ones for both
ways, so that logits can be compared. Part of `accelerator.py`.
"""

import dataclasses
import gc
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode_work import DecodeWork, agents, tables
from timing import interleaved

from inms_jax.cache.page_table import KVPages
from inms_jax.config import EngineConfig
from inms_jax.engine.runner import Runner
from inms_jax.kernels.storage import encode, storage_dtype
from inms_jax.models.config import ModelConfig
from inms_jax.models.llama import init_shapes, random_params

# Different pages; every page of the pool holds what one of them holds.
_PATTERNS = 61
# Left for programs, logits and what the framework keeps.
_SLACK_BYTES = 3 * 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BigDecode:
    """What is decoded."""

    model: ModelConfig
    agents: int = 8
    context: int = 16384
    public: float = 0.6
    block_size: int = 128
    dtype: str = "bfloat16"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values without sharing."""
        return self.agents * self.context * self.model.kv_bytes_per_token(jnp.dtype(self.dtype).itemsize)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters."""
        shapes = jax.tree.leaves(init_shapes(self.model, self.dtype))
        return sum(x.size * x.dtype.itemsize for x in shapes)

    def fitted(self, memory: int | None) -> "BigDecode":
        """The same with the context, then the layers, halved until it fits into `memory` bytes (None: as it is)."""
        work = self
        while memory is not None and work.kv_bytes + work.weight_bytes + _SLACK_BYTES > memory:
            smaller = work.smaller()
            if smaller is None:
                break
            work = smaller
        return work

    def smaller(self) -> "BigDecode | None":
        """Half the context down to 2048 tokens, then half the layers down to 2."""
        if self.context > 2048:
            return dataclasses.replace(self, context=self.context // 2)
        if self.model.num_layers > 2:
            model = dataclasses.replace(self.model, num_layers=self.model.num_layers // 2)
            return dataclasses.replace(self, model=model)
        return None


def measure(work: BigDecode, rounds: int) -> dict[str, Any]:
    """KV bytes, step time, tokens per second both ways; how far the logits are apart."""
    c = work.model
    params = jax.jit(partial(random_params, c, dtype=jnp.dtype(work.dtype)))(jax.random.key(0))
    # On CPU the runner slices the layers on the host.
    params = jax.tree.map(np.asarray, params) if jax.default_backend() == "cpu" else params
    result: dict[str, Any] = {
        "model": c.name,
        "layers": c.num_layers,
        "agents": work.agents,
        "context": work.context,
        "public": work.public,
        "dtype": work.dtype,
        "block_size": work.block_size,
        "weight_bytes": work.weight_bytes,
    }
    logits = {}
    for mode, sharing in (("independent", False), ("shared", True)):
        rows = agents(work.agents, work.context, work.public, work.block_size, copies=not sharing)
        step = tables(rows, work.context // work.block_size + 2, sharing=sharing)
        config = EngineConfig(block_size=work.block_size, max_num_seqs=work.agents, max_model_len=work.context)
        runner = Runner(c, params, config, num_pages=2)  # its own pages are replaced
        runner.kv = _pages(work, rows)
        first = runner.decode(step.plan, step.splits)
        logits[mode] = np.asarray(first.logits, np.float32)[: work.agents]
        times = interleaved({mode: partial(runner.decode, step.plan, step.splits)}, rounds=rounds)
        page_bytes = work.block_size * c.kv_bytes_per_token(jnp.dtype(work.dtype).itemsize)
        seconds = times.median(mode)
        result[mode] = {
            "kv_bytes": (rows.num_pages - 1) * page_bytes,
            "kv_bytes_read": step.pages_read * page_bytes,
            "step_ms": seconds * 1e3,
            "tokens_per_s": work.agents / seconds,
            "bytes_per_s": (step.pages_read * page_bytes + work.weight_bytes) / seconds,
            "all_step_ms": [x * 1e3 for x in times.seconds[mode]],
        }
        if not sharing:
            # The engine's program has a place for shared splits, which costs a little when there are none.
            plain = interleaved({mode: partial(runner.decode, step.plan, None)}, rounds=rounds)
            result[mode]["plain_step_ms"] = plain.median(mode) * 1e3
        del runner, first
        gc.collect()
    a, b = logits["independent"], logits["shared"]
    spread = float(np.std(a))
    error = float(np.abs(a - b).max() / spread) if spread > 0 else float("nan")
    alone = result["independent"]
    result["speedup"] = min(alone["step_ms"], alone["plain_step_ms"]) / result["shared"]["step_ms"]
    result["kv_bytes_ratio"] = result["shared"]["kv_bytes"] / result["independent"]["kv_bytes"]
    # Sums in another order, in 16 bits, through all layers; a wrong read moves logits by their whole spread.
    result["logits_error"] = error if np.isfinite(error) else str(error)
    result["logits_agree"] = bool(error < (0.2 if work.dtype != "float32" else 1e-3))
    result["same_bits"] = bool(np.array_equal(a, b))
    return result


def _pages(work: BigDecode, rows: DecodeWork) -> KVPages:
    c = work.model
    stored = storage_dtype(work.dtype, jax.default_backend())
    layers = np.arange(c.num_layers, dtype=np.int64)[:, None]
    pattern = 1 + (rows.content[None].astype(np.int64) * 7919 + layers * 104_729) % _PATTERNS
    pattern[:, 0] = 0  # the null page: NaN, to show that nobody reads it
    index = jnp.asarray(pattern.reshape(-1), jnp.int32)

    @jax.jit
    def fill(key: jax.Array, index: jax.Array) -> jax.Array:
        shape = (1 + _PATTERNS, c.num_kv_heads, work.block_size, c.head_dim)
        numbers = jax.random.normal(key, shape, jnp.float32).at[0].set(jnp.nan)
        return encode(numbers, stored).at[index].get(mode="promise_in_bounds")

    key_k, key_v = jax.random.split(jax.random.key(1))
    return KVPages(k=fill(key_k, index), v=fill(key_v, index), num_layers=c.num_layers)
