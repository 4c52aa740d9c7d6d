"""A fragment at another position three ways, and copies of pages: timed on the pools of a whole model.

Part of `kernels.py`. Knows nothing of attention over more than the fragment.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode_work import BLOCK, Pool
from timing import Timings, interleaved

from inms_jax.cache.page_ops import copy_pages, shift_pages
from inms_jax.cache.page_table import KVPages, PageTable
from inms_jax.engine.runner import COPY_BUCKET
from inms_jax.kernels.paged_attention.api import Level, paged_attention
from inms_jax.models.config import ModelConfig
from inms_jax.models.llama import forward, random_params
from inms_jax.models.rope import inverse_frequencies

CHUNK = 256
"""Prompt tokens of one step, the engine's default."""


def relocation(
    model: ModelConfig, fragments: Sequence[int], pool: Pool, rng: np.random.Generator, *, rounds: int
) -> Iterator[dict[str, Any]]:
    """A fragment at another position: rotate queries on each read, or copy it rotated once, or compute it anew."""
    c = model
    scale, inv_freq = c.head_dim**-0.5, jnp.asarray(inverse_frequencies(c))
    params = jax.jit(partial(random_params, c))(jax.random.key(0))
    read = jax.jit(partial(paged_attention, scale=scale, inv_freq=inv_freq, implementation="xla"))
    for n in fragments:
        readers: dict[str, Callable[[], Any]] = {}
        for name, (G, R) in {"decode": (8, 1), "chunk": (1, CHUNK)}.items():
            q = jnp.asarray(rng.standard_normal((G, R, c.num_heads, c.head_dim), np.float32))
            level = _fragment_level(G, n)
            shift = jnp.full((G, R, n), 1000, jnp.int32)
            q_position = jnp.full((G, R), 1000 + n * BLOCK, jnp.int32)
            for kind, some in (("plain", level), ("shifted", dataclasses.replace(level, shift=shift))):
                readers[f"{name} {kind}"] = partial(read, q, pool.k, pool.v, some, q_position, jnp.int32(0))
        kv = _Held(_filled(c, 1 + 2 * n))
        src, dst = (jnp.arange(first, first + n, dtype=jnp.int32) for first in (1, 1 + n))
        delta = jnp.full((n,), 1000, jnp.int32)
        once = interleaved(
            {
                **readers,
                "rope_shift": partial(kv.change, lambda kv, *lists: shift_pages(kv, *lists), src, dst, delta, inv_freq),
            },
            rounds=rounds,
        )
        anew = interleaved({"recompute": partial(_prefill, params, c, kv, n)}, rounds=3)
        extra = {
            name: _difference(once, f"{name} shifted", f"{name} plain") * c.num_layers for name in ("decode", "chunk")
        }
        copy_s = once.median("rope_shift")
        yield {
            "pages": n,
            "rotate_decode_ms": extra["decode"] * 1e3,
            "rotate_chunk_ms": extra["chunk"] * 1e3,
            "decode_ratio": once.ratio("decode shifted", "decode plain"),
            "chunk_ratio": once.ratio("chunk shifted", "chunk plain"),
            "rope_shift_ms": copy_s * 1e3,
            "recompute_ms": anew.median("recompute") * 1e3,
            "recompute_over_rope_shift": anew.median("recompute") / copy_s,
            "steps_that_pay_a_copy": copy_s / extra["decode"] if extra["decode"] > 0 else None,
        }


def _difference(times: Timings, slow: str, fast: str) -> float:
    """Median over rounds of how many seconds longer `slow` takes."""
    pairs = zip(times.seconds[slow], times.seconds[fast], strict=True)
    return float(np.median([a - b for a, b in pairs]))


def page_copies(model: ModelConfig, counts: Sequence[int], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Copies of n pages in all layers, keys and values, against plain copies of as many bytes."""
    c = model
    kv = _Held(_filled(c, 1 + 2 * max(counts)))
    for n in counts:
        padded = -(-n // COPY_BUCKET) * COPY_BUCKET
        src, dst = np.zeros((2, padded), np.int32)
        src[:n], dst[:n] = np.arange(1, 1 + n), np.arange(1 + n, 1 + 2 * n)

        def engine(src: np.ndarray = src, dst: np.ndarray = dst) -> Any:
            for start in range(0, len(src), COPY_BUCKET):
                part = slice(start, start + COPY_BUCKET)
                kv.change(lambda kv, *lists: copy_pages(kv, *lists), jnp.asarray(src[part]), jnp.asarray(dst[part]))
            return kv.pages

        num_bytes = n * c.kv_bytes_per_token(4) * BLOCK
        plain = np.ones(num_bytes // 4, np.float32)
        target = np.zeros_like(plain)
        on_device = jnp.asarray(plain)
        copy = jax.jit(jnp.copy)
        exact = (jnp.asarray(src[:n]), jnp.asarray(dst[:n]))
        times = interleaved(
            {
                "engine": engine,
                "one_call": partial(kv.change, lambda kv, *lists: copy_pages(kv, *lists), *exact),
                "numpy": partial(np.copyto, target, plain),
                "jnp": partial(copy, on_device),
            },
            rounds=rounds,
        )
        pages = np.asarray(kv.pages.k).reshape(c.num_layers, kv.pages.num_pages, -1)
        yield {
            "pages": n,
            "megabytes": num_bytes / 1e6,
            **{f"{name}_ms": times.median(name) * 1e3 for name in times.seconds},
            "engine_over_numpy": times.ratio("engine", "numpy"),
            "one_call_over_numpy": times.ratio("one_call", "numpy"),
            "one_call_gb_per_s": 2 * num_bytes / times.median("one_call") / 1e9,
            "copied": bool(np.array_equal(pages[:, src[:n]], pages[:, dst[:n]])),
        }


class _Held:
    """Pages that programs take over and give back."""

    def __init__(self, pages: KVPages) -> None:
        self.pages = pages

    def change(self, program: Callable[..., KVPages], *arguments: Any) -> KVPages:
        self.pages = program(self.pages, *arguments)
        return self.pages


def _filled(model: ModelConfig, num_pages: int) -> KVPages:
    """A pool whose page p of every layer holds p: memory that was written to, and copies that can be checked."""
    empty = KVPages.create(model, num_pages, BLOCK, jnp.float32, jax.default_backend())
    number = jnp.tile(jnp.arange(num_pages, dtype=jnp.float32), model.num_layers)[:, None, None, None]
    return KVPages(k=empty.k + number, v=empty.v + number, num_layers=model.num_layers)


def _fragment_level(groups: int, pages: int) -> Level:
    entry = np.tile(np.arange(pages, dtype=np.int32), (groups, 1))
    zero = jnp.zeros((groups, pages), jnp.int32)
    return Level(
        rows=None,
        page=jnp.asarray(1 + entry),
        begin=zero,
        end=zero + BLOCK,
        position=jnp.asarray(entry * BLOCK),
        shift=None,
        num_entries=jnp.int32(pages),
    )


def _prefill(params: Any, model: ModelConfig, kv: _Held, pages: int) -> Any:
    """Compute `pages` pages of tokens, nothing before them, chunk by chunk as the engine does."""
    logits: Any = None
    for start in range(0, pages * BLOCK, CHUNK):
        count = min(CHUNK, pages * BLOCK - start)
        position = np.arange(start, start + count, dtype=np.int32)
        used = np.clip(start + count - np.arange(pages) * BLOCK, 0, BLOCK).astype(np.int32)
        table = PageTable.empty(1, pages).set_row(
            0,
            page=jnp.arange(1, 1 + pages, dtype=jnp.int32),
            begin=jnp.zeros(pages, jnp.int32),
            end=jnp.asarray(used),
            position=jnp.arange(pages, dtype=jnp.int32) * BLOCK,
        )
        columns = (position % model.vocab_size, position, 1 + position // BLOCK, position % BLOCK)
        ids = [jnp.asarray(x, jnp.int32) for x in columns]
        last = jnp.full((2,), count - 1, jnp.int32)
        logits, kv.pages = _chunk(params, kv.pages, table, *ids, last, config=model)
    return logits


@partial(jax.jit, static_argnames=("config",), donate_argnames=("kv",))
def _chunk(
    params: Any,
    kv: KVPages,
    table: PageTable,
    tokens: Any,
    positions: Any,
    write_page: Any,
    write_slot: Any,
    logit_rows: Any,
    *,
    config: ModelConfig,
) -> tuple[Any, KVPages]:
    own = (table.level(tokens.shape[0]),)
    return forward(params, config, tokens, positions, kv, own, write_page, write_slot, logit_rows)
