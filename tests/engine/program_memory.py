"""Compile the engine's prefill and decode programs of a large model from shapes alone, and print what memory they take.

A program of its own, because libtpu takes a lock and speaks on stderr: `TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu
ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.engine.program_memory v5p llama-2-7b [--full] [--int8-kv] [--int8-weights]`
prints a line of JSON per program, each compiled for two pools; `cpu` in place of a chip needs no libtpu, `v5e` is four
chips that share a model. No weight and no page is allocated. Bytes are those of one device.
"""

import functools
import json
import math
import re
import sys
import unittest.mock
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from inms_jax.cache.page_table import KVPages, PageTable
from inms_jax.capacity import model_preset
from inms_jax.engine.levels import split_entries
from inms_jax.engine.runner import step
from inms_jax.kernels.paged_attention.api import Level
from inms_jax.models.config import ModelConfig
from inms_jax.models.llama import init_shapes
from inms_jax.models.partition import Partition

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}
POOL_BYTES = {"cpu": 16 * 2**30, "v5p": 8 * 2**30, "v5e": 4 * 2**30}
TENSOR_PARALLEL = {"v5e": 4}
BLOCK = 128
AGENTS = 8
ENTRIES = 32  # of each row: 4,096 tokens


class Shapes:
    """Arrays without numbers, on one device or over the devices that share `model`."""

    def __init__(self, platform: str, model: ModelConfig, options: Collection[str]) -> None:
        on_cpu = platform == "cpu"
        topology = None if on_cpu else topologies.get_topology_desc(TOPOLOGIES[platform], "tpu")
        devices = jax.devices() if topology is None else topology.devices
        count = TENSOR_PARALLEL.get(platform, 1)
        self.partition = Partition.over(model, devices[:count]) if count > 1 else None
        self.model = model if self.partition is None else self.partition.stored
        self.everywhere: Any = SingleDeviceSharding(devices[0])
        if self.partition is not None:
            self.everywhere = NamedSharding(self.partition.mesh, PartitionSpec())
        self.platform = "cpu" if on_cpu else "tpu"
        self.dtype: Any = jnp.float32 if on_cpu else jnp.bfloat16  # what an engine takes there by default
        self.kv_dtype: Any = jnp.int8 if "--int8-kv" in options else self.dtype
        self.int8_weights = "--int8-weights" in options

    def array(self, shape: tuple[int, ...], dtype: Any = jnp.int32, sharding: Any = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.everywhere)

    def cut(self, x: Any, spec: PartitionSpec) -> Any:
        return self.array(x.shape, x.dtype, self.partition and NamedSharding(self.partition.mesh, spec))

    def params(self, *, by_layer: bool) -> Any:
        stacked = init_shapes(self.model, self.dtype)
        if self.int8_weights:
            layers = stacked["layers"]
            for name in [name for name, x in layers.items() if len(x.shape) == 3]:
                num_layers, _, outputs = layers[name].shape
                layers[name] = jax.ShapeDtypeStruct(layers[name].shape, jnp.int8)
                layers[f"{name}_scale"] = jax.ShapeDtypeStruct((num_layers, outputs), jnp.float32)
        if by_layer:
            layer = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in stacked["layers"].items()}
            stacked = {**stacked, "layers": [layer] * self.model.num_layers}
        specs = jax.tree.map(lambda _: PartitionSpec(), stacked)
        return jax.tree.map(self.cut, stacked, specs if self.partition is None else self.partition.param_specs(stacked))

    def pages(self, device_bytes: int) -> Any:
        local = self.model if self.partition is None else self.partition.local
        num_pages = device_bytes // (BLOCK * local.kv_bytes_per_token(jnp.dtype(self.kv_dtype).itemsize))
        create = functools.partial(KVPages.create, self.model, num_pages, BLOCK, self.kv_dtype, self.platform)
        spec = PartitionSpec() if self.partition is None else self.partition.pages.spec
        return jax.tree.map(lambda x: self.cut(x, spec), jax.eval_shape(create))

    def table(self, rows: int) -> PageTable:
        entries = self.array((rows, ENTRIES))
        return PageTable(entries, entries, entries, entries, entries, self.array((rows,)))

    def shared(self) -> Level:
        split = split_entries(BLOCK)
        entries = self.array((ENTRIES // split, split))
        return Level(
            rows=self.array((ENTRIES // split, AGENTS)),
            page=entries,
            begin=entries,
            end=entries,
            position=entries,
            shift=None,
            num_entries=self.array(()),
            num_groups=self.array(()),
        )


def size(tree: Any) -> int:
    """Bytes on one device."""
    parts = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)


def compile_step(shapes: Shapes, model: ModelConfig, tokens: int | None, pool_bytes: int) -> tuple[int, int, Any]:
    """Bytes of the weights and of the pool, and the program: a prefill chunk of `tokens`, or None for decode."""
    params = shapes.params(by_layer=tokens is None and shapes.platform == "cpu" and not shapes.int8_weights)
    pages = shapes.pages(pool_bytes)
    rows, width, logits = (1, tokens, 2) if tokens else (AGENTS, AGENTS, AGENTS)
    column = shapes.array((width,))
    with unittest.mock.patch.object(jax, "default_backend", return_value=shapes.platform):
        lowered = step.lower(
            params,
            pages,
            shapes.table(rows),
            None if tokens else shapes.shared(),
            column,
            column,
            column,
            column,
            shapes.array((logits,)),
            config=model,
            rows_per_group=tokens or 1,
            shifted=False,
            partition=shapes.partition,
        )
    return size(params), size(pages), lowered.compile()


def gathered(program: str) -> int:
    """Elements of the largest array that is gathered from several devices."""
    shapes = re.findall(r" = [a-z0-9]+\[([0-9,]*)\]\S* all-gather(?:-start)?\(", program)
    return max((math.prod(int(n) for n in shape.split(",")) for shape in shapes), default=0)


def measure(platform: str, model: ModelConfig, tokens: int | None, options: Collection[str] = ()) -> dict[str, Any]:
    shapes = Shapes(platform, model, options)
    found: dict[str, Any] = {"platform": platform, "model": model.name, "prefill": tokens}
    for name in ("pool", "arguments", "temporaries", "in_place", "gathered"):
        found[name] = []
    for pool_bytes in (POOL_BYTES[platform], 2 * POOL_BYTES[platform]):
        found["weights"], pool, program = compile_step(shapes, model, tokens, pool_bytes)
        memory = program.memory_analysis()
        found["pool"].append(pool)
        found["arguments"].append(memory.argument_size_in_bytes)
        found["temporaries"].append(memory.temp_size_in_bytes)
        found["in_place"].append(memory.alias_size_in_bytes)
        found["gathered"].append(gathered(program.as_text()))
    return found


def main(platform: str, presets: list[str], options: Collection[str]) -> None:
    for preset in presets:
        for tokens in (512 if "--full" in options else 64, None):
            print(json.dumps(measure(platform, model_preset(preset), tokens, options)), flush=True)


if __name__ == "__main__":
    names = [x for x in sys.argv[1:] if not x.startswith("-")]
    main(names[0], names[1:], sys.argv)
