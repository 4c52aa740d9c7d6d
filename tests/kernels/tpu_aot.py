"""Compile the TPU kernels ahead of time for chips that are not there, and print what memory they take.

A program of its own, because libtpu takes a lock and speaks on stderr: `TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu
ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.kernels.tpu_aot v5e v6e [--full]` prints a line of JSON per case.
Each case is compiled for two pools, both too large for a chip's VMEM: in a small pool XLA hides a copy there, where
`memory_analysis` does not count it.
"""

import functools
import json
import sys
import unittest.mock
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from inms_jax.cache.page_ops import write_tokens
from inms_jax.cache.page_table import KVPages
from inms_jax.kernels.page_copy import pallas_tpu as copying
from inms_jax.kernels.paged_attention import pallas_tpu as attention
from inms_jax.kernels.rope_shift import pallas_tpu as shifting

LAYERS = 4
ENTRIES = 32
COPIES = 8
POOL_BYTES = 384 * 2**20  # of keys; v5e and v6e have 128 MiB of VMEM

# (groups, rows, query heads, kv heads, block size, head dim, dtype, shifted)
QUICK = [
    (8, 1, 8, 2, 16, 128, "bfloat16", False),
    (8, 1, 9, 3, 128, 64, "bfloat16", True),
    (8, 1, 9, 3, 128, 64, "float32", False),
    (1, 8, 4, 4, 512, 128, "bfloat16", False),
    (2, 1, 8, 2, 256, 96, "float32", False),
    (2, 1, 8, 2, 128, 80, "bfloat16", False),
    (1, 64, 16, 2, 256, 128, "bfloat16", True),
]
FULL = [
    (*rows, B, H, dtype, shifted)
    for *rows, shifted in ((8, 1, 14, 2, True), (1, 300, 4, 4, False))
    for B in (16, 32, 64, 128, 256, 512)
    for H in (64, 80, 96, 128, 256)
    if not (B % 128 and H % 128)
    for dtype in ("float32", "bfloat16")
]


def attention_case(array, G, R, N, K, B, H, dtype, shifted, LP):
    pages, table = array((LP, K, B, H), dtype), array((G, ENTRIES))

    def call(freq, *args):
        return attention.paged_attention(*args, scale=H**-0.5, inv_freq=freq if shifted else None)

    shift = array((G, R, ENTRIES)) if shifted else None
    q = array((G, R, N, H), dtype)
    args = (q, pages, pages, table, table, table, table, shift, array(()), array((G, R)), array(()))
    return call, (array((H // 2,), "float32"), *args), ()


def layers_case(array, G, R, N, K, B, H, dtype, shifted, LP):
    """What a step does: every layer writes its tokens, then reads them with the rest."""
    T, pages, table = G * R, array((LP, K, B, H), dtype), array((G, ENTRIES))

    def call(k, v, write_page, write_slot, new_k, new_v, q, page, begin, end, position, num_entries, q_position):
        def layer(kv: KVPages, index: Any) -> Any:
            kv = write_tokens(kv, index, write_page, write_slot, new_k, new_v)
            out, _ = attention.paged_attention(
                q,
                kv.k,
                kv.v,
                page,
                begin,
                end,
                position,
                None,
                num_entries,
                q_position,
                index * kv.num_pages,
                scale=H**-0.5,
            )
            return kv, out

        kv, out = lax.scan(layer, KVPages(k, v, num_layers=LAYERS), jnp.arange(LAYERS, dtype=jnp.int32))
        return kv, out[-1]

    token, new = array((T,)), array((T, K, H), dtype)
    q = array((G, R, N, H), dtype)
    return call, (pages, pages, token, token, new, new, q, *[table] * 4, array(()), array((G, R))), (0, 1)


def copy_case(array, K, B, H, dtype, LP):
    call = functools.partial(copying.page_copy, num_layers=LAYERS)
    return call, (array((LP, K, B, H), dtype), array((COPIES,)), array((COPIES,))), (0,)


def shift_case(array, K, B, H, dtype, LP):
    def call(pages, src, dst, delta, freq):
        return shifting.rope_shift(pages, src, dst, delta, inv_freq=freq, num_layers=LAYERS)

    ids = array((COPIES,))
    return call, (array((LP, K, B, H), dtype), ids, ids, ids, array((H // 2,), "float32")), (0,)


def cases(full: bool) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, builder and sizes of each."""
    for sizes in [*QUICK, *(FULL if full else [])]:
        yield "paged_attention", attention_case, sizes
    for step in ((8, 1, 8, 2, 256, 128, "bfloat16", False), (1, 64, 9, 3, 128, 64, "bfloat16", False)):
        yield "layers", layers_case, step
    more = [(2, 512, 96, "float32"), (8, 512, 128, "bfloat16"), (2, 128, 256, "bfloat16")] if full else []
    for pages in ((8, 16, 128, "bfloat16"), (3, 128, 64, "float32"), *more):
        yield "page_copy", copy_case, pages
        yield "rope_shift", shift_case, pages


def compile_for(device: Any, case: Any, sizes: tuple[Any, ...]) -> dict[str, Any]:
    sharding = SingleDeviceSharding(device)

    def array(shape: tuple[int, ...], dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    K, B, H, dtype = sizes[-5:-1] if isinstance(sizes[-1], bool) else sizes
    page_bytes = K * B * H * jnp.dtype(dtype).itemsize
    pools, temp, alias = [], [], []
    for pool_bytes in (POOL_BYTES, 2 * POOL_BYTES):
        num_pages = pool_bytes // (page_bytes * LAYERS)
        call, args, donated = case(array, *sizes, LP=LAYERS * num_pages)
        memory = jax.jit(call, donate_argnums=donated).lower(*args).compile().memory_analysis()
        assert memory is not None
        pools.append(LAYERS * num_pages * page_bytes)
        temp.append(memory.temp_size_in_bytes)
        alias.append(memory.alias_size_in_bytes)
    return {"sizes": sizes, "pool": pools, "temp": temp, "alias": alias, "donated": len(donated)}


def main(chips: list[str], full: bool) -> None:
    for chip in chips:
        device = topologies.get_topology_desc(topology_name=f"{chip}:2x2", platform="tpu").devices[0]
        for name, case, sizes in cases(full):
            print(json.dumps({"chip": chip, "name": name, **compile_for(device, case, sizes)}), flush=True)
        # The control: had the kernel not seen that XLA put slots into lanes, this is what a pool copy looks like.
        with unittest.mock.patch.object(attention, "slots_are_lanes", return_value=False):
            control = compile_for(device, attention_case, (1, 1, 2, 2, 128, 64, "float32", False))
        print(json.dumps({"chip": chip, "name": "control", **control}), flush=True)


if __name__ == "__main__":
    main([x for x in sys.argv[1:] if not x.startswith("-")], "--full" in sys.argv)
