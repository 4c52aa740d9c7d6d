"""The jit boundary: the one file that holds the KV pages and gives them to programs, which take them over.

A program is compiled once per row count, whatever the lengths of the contexts. Knows nothing of requests.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from inms_jax.cache import page_io
from inms_jax.cache.page_ops import copy_pages, fill_pages
from inms_jax.cache.page_table import KVPages, PageTable
from inms_jax.config import MAX_STOP_IDS, EngineConfig
from inms_jax.engine import sampling
from inms_jax.engine.buckets import COPY_BUCKET
from inms_jax.engine.levels import SharedSplits
from inms_jax.engine.request import RowSampling, SampledToken
from inms_jax.engine.sampling import Greedy, SamplingState
from inms_jax.kernels.choice import first_choice
from inms_jax.kernels.paged_attention.api import Level
from inms_jax.kernels.state import register_state
from inms_jax.memory.plan import StepPlan
from inms_jax.models.config import ModelConfig
from inms_jax.models.first_layer import QUERIES, second_values
from inms_jax.models.layers import WHOLE
from inms_jax.models.llama import forward, unstack_layers
from inms_jax.models.partition import Partition

log = logging.getLogger("inms_jax")

SCORE_BUCKET = 64
"""Fewest rows of a step whose logits are scored."""


@register_state
@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits of the sampled rows, and their greedy choice."""

    logits: Float[Array, "Z V"]
    greedy: Greedy


@partial(jax.jit, static_argnames=("config", "rows_per_group", "shifted", "partition"), donate_argnames=("kv",))
def step(
    params: Any,
    kv: KVPages,
    table: PageTable,
    shared: Level | None,
    tokens: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    write_page: Int32[Array, " T"],
    write_slot: Int32[Array, " T"],
    logit_rows: Int32[Array, " Z"],
    *,
    config: ModelConfig,
    rows_per_group: int,
    shifted: bool,
    partition: Partition | None = None,
) -> tuple[KVPages, StepResult]:
    """One forward pass: writes the KV of T tokens, returns logits of Z of them. `kv` is donated.

    `shared` is what several rows of a decode batch read before what `table` says of each. `shifted`: some page is read
    at another position than it was written at; a table without shifts pays nothing for the possibility. `partition`: on
    several devices, each with its part of params and pages; all compute the same logits.
    """

    def run(
        params: Any,
        kv: KVPages,
        table: PageTable,
        shared: Level | None,
        tokens: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        write_page: Int32[Array, " T"],
        write_slot: Int32[Array, " T"],
        logit_rows: Int32[Array, " Z"],
    ) -> tuple[KVPages, StepResult]:
        own = table.level(rows_per_group, shifted=shifted)
        levels = (own,) if shared is None else (shared, own)
        model, cut = (config, WHOLE) if partition is None else (partition.local, partition.cut)
        logits, kv = forward(params, model, tokens, positions, kv, levels, write_page, write_slot, logit_rows, cut=cut)
        return kv, StepResult(logits=logits, greedy=sampling.greedy(logits))

    rest = (table, shared, tokens, positions, write_page, write_slot, logit_rows)
    if partition is None:
        return run(params, kv, *rest)
    stepped: tuple[KVPages, StepResult] = partition.on_each_device(run, params, kv, *rest)
    return stepped


def compiled_programs() -> int:
    """Programs compiled so far in this process for steps, sampling and copies."""
    programs: tuple[Any, ...] = (step, sampling.sample, copy_pages)
    return sum(int(program._cache_size()) for program in programs)


class Runner:
    """Runs step plans on the device, or on the devices of `partition`. Not thread-safe: the engine thread is its one
    caller.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Any,
        config: EngineConfig,
        *,
        num_pages: int,
        partition: Partition | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.num_pages = num_pages
        self.partition = partition
        platform = jax.default_backend()
        put = jax.device_put if partition is None else partition.place
        self._stacked = put(params)
        # Unrolled layers decode twice as fast on CPU, where device_put of host memory is an alias and costs nothing;
        # elsewhere it would be a second copy of the weights. XLA on CPU widens int8 matrices before it multiplies them,
        # which takes memory for all layers at once unless these are in a loop.
        by_layer = platform == "cpu" and not any(x.dtype == jnp.int8 for x in params["layers"].values())
        self._by_layer = put(unstack_layers(params)) if by_layer else self._stacked
        self._no_seen: dict[int, Array] = {}
        self.freed: Callable[[], Sequence[int]] = lambda: ()
        """Pages to wipe before anything else is written."""
        self.wiped_with = 0.0
        self.kv = self._empty_pages()
        if self.kv.dtype == jnp.int8 and first_choice(None) != "xla":
            log.warning("there is no Pallas kernel for int8 pages: attention runs in plain XLA on this %s", platform)

    def _empty_pages(self) -> KVPages:
        dtype, size, platform = kv_dtype(self.config, self._stacked), self.config.block_size, jax.default_backend()
        if self.partition is not None:
            return self.partition.empty_pages(self.num_pages, size, dtype, platform)
        return KVPages.create(self.model, self.num_pages, size, dtype, platform)

    def lost_pages(self, error: Exception) -> bool:
        """Whether a failed step may have damaged the pages: it had taken them over, or the device itself failed."""
        deleted = any(x.is_deleted() for x in jax.tree.leaves(self.kv))
        return bool(deleted or isinstance(error, jax.errors.JaxRuntimeError))

    def release(self) -> None:
        """Give the device memory back: pages and weights. Nothing runs after it."""
        self.kv = self._stacked = self._by_layer = None  # type: ignore[assignment]
        self._no_seen = {}

    def reset_pages(self) -> None:
        """Begin with empty pages."""
        self.kv = self._empty_pages()

    def wipe(self) -> None:
        """Overwrite the pages that were freed."""
        pages = self.freed()
        for start in range(0, len(pages), COPY_BUCKET):
            part = np.zeros(COPY_BUCKET, np.int32)
            part[: len(pages) - start] = pages[start : start + COPY_BUCKET]
            cut = self.partition and self.partition.pages
            self.kv = fill_pages(self.kv, jnp.asarray(part), jnp.float32(self.wiped_with), cut=cut)

    def read_pages(self, pages: Sequence[int]) -> tuple[Shaped[np.ndarray, "..."], Shaped[np.ndarray, "..."]]:
        """Keys and values of whole pages, on the host."""
        return page_io.read_pages(self.kv, pages)

    def write_pages(self, pages: Sequence[int], k: Shaped[np.ndarray, "..."], v: Shaped[np.ndarray, "..."]) -> None:
        """Whole pages from the host, as numbers of the pool or as their bits."""
        self.wipe()
        dtype = self.kv.k.dtype
        self.kv = page_io.write_pages(self.kv, pages, k.view(dtype), v.view(dtype))

    def prefill(self, plan: StepPlan, last_row: int, scored: Sequence[int] = ()) -> StepResult:
        """One chunk of one sequence; logits of `last_row`, twice (one row alone would round differently), or of the
        `scored` rows, padded to a power of two from 64.
        """
        rows = np.full(max(SCORE_BUCKET, 1 << (len(scored) - 1).bit_length()) if len(scored) else 2, last_row, np.int32)
        rows[: len(scored)] = scored
        return self._step(self._stacked, plan, None, rows, rows_per_group=len(plan.tokens))

    def second_values(self, tokens: Int32[np.ndarray, " T"]) -> Float[np.ndarray, "T K H"]:
        """The values that layer 1 computes for a context, from its tokens alone. Any thread: it reads weights only."""
        padded = np.zeros(max(QUERIES, 1 << (len(tokens) - 1).bit_length()), np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(second_values(self._stacked, jnp.asarray(padded), config=self.model))[: len(tokens)]

    def decode(self, plan: StepPlan, splits: SharedSplits | None) -> StepResult:
        """One token of each of S sequences, which read `splits` together; logits of every row. None: nothing is shared,
        and rows may have shifts.
        """
        rows = np.arange(len(plan.tokens), dtype=np.int32)
        if splits is None:
            return self._step(self._by_layer, plan, None, rows, rows_per_group=1)
        shared = Level(
            rows=jnp.asarray(splits.rows),
            page=jnp.asarray(splits.page),
            begin=jnp.asarray(splits.begin),
            end=jnp.asarray(splits.end),
            position=jnp.asarray(splits.position),
            shift=None,
            num_entries=jnp.asarray(splits.page.shape[1], jnp.int32),
            num_groups=jnp.asarray(splits.num_groups, jnp.int32),
        )
        return self._step(self._by_layer, plan, shared, rows, rows_per_group=1)

    def _step(
        self, params: Any, plan: StepPlan, shared: Level | None, logit_rows: Any, *, rows_per_group: int
    ) -> StepResult:
        self.wipe()
        for start in range(0, len(plan.copy_src), COPY_BUCKET):
            part = slice(start, start + COPY_BUCKET)
            src, dst = jnp.asarray(plan.copy_src[part]), jnp.asarray(plan.copy_dst[part])
            self.kv = copy_pages(self.kv, src, dst, cut=self.partition and self.partition.pages)
        result: StepResult
        self.kv, result = step(
            params,
            self.kv,
            PageTable(
                page=jnp.asarray(plan.page),
                begin=jnp.asarray(plan.begin),
                end=jnp.asarray(plan.end),
                position=jnp.asarray(plan.position),
                shift=jnp.asarray(plan.shift),
                num_entries=jnp.asarray(plan.num_entries),
            ),
            shared,
            jnp.asarray(plan.tokens),
            jnp.asarray(plan.positions),
            jnp.asarray(plan.write_page),
            jnp.asarray(plan.write_slot),
            jnp.asarray(logit_rows),
            config=self.model,
            rows_per_group=rows_per_group,
            shifted=bool(plan.shift.any()),
            partition=self.partition,
        )
        return result

    def choose(self, result: StepResult, rows: Sequence[RowSampling | None]) -> list[SampledToken]:
        """The token of each row; None means the greedy one, which every such row gets from the step itself."""
        tokens, logprobs = np.asarray(result.greedy.token), np.asarray(result.greedy.logprob)
        chosen = [SampledToken(int(tokens[i]), float(logprobs[i])) for i in range(len(rows))]
        if all(row is None for row in rows):
            return chosen
        sampled = jax.device_get(sampling.sample(result.logits, result.greedy.lse, self._state(result, rows)))
        for i, row in enumerate(rows):
            if row is not None:
                top = zip(sampled.top_ids[i].tolist(), sampled.top_logprobs[i].tolist(), strict=True)
                chosen[i] = SampledToken(int(sampled.token[i]), float(sampled.logprob[i]), tuple(top))
        return chosen

    def _state(self, result: StepResult, rows: Sequence[RowSampling | None]) -> SamplingState:
        size, vocab = result.logits.shape

        def column(name: str, default: int | float, dtype: Any) -> Array:
            values = [default if row is None else getattr(row, name) for row in rows]
            return jnp.asarray(np.array([*values, *[default] * (size - len(rows))], dtype))

        key = np.zeros((size, 2), np.uint32)
        banned = np.full((size, 2 * MAX_STOP_IDS), vocab, np.int32)  # end tokens of the model, and of the request
        seen = np.zeros((size, vocab), bool) if any(row and row.seen for row in rows) else None
        for i, row in enumerate(rows):
            if row is None:
                continue
            key[i] = row.key
            banned[i, : len(row.banned)] = row.banned
            if row.seen and seen is not None:
                seen[i, list(row.seen)] = True
        if seen is None and size not in self._no_seen:
            self._no_seen[size] = jnp.zeros((size, vocab), bool)
        return SamplingState(
            key=jnp.asarray(key),
            token_index=column("token_index", 0, np.int32),
            temperature=column("temperature", 0.0, np.float32),
            top_k=column("top_k", 0, np.int32),
            top_p=column("top_p", 1.0, np.float32),
            min_p=column("min_p", 0.0, np.float32),
            repetition_penalty=column("repetition_penalty", 1.0, np.float32),
            seen=self._no_seen[size] if seen is None else jnp.asarray(seen),
            banned=jnp.asarray(banned),
        )


def kv_dtype(config: EngineConfig, params: Any) -> Any:
    """Dtype of the numbers in the pages."""
    return params["embed"].dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)
