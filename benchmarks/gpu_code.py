"""Machine code of the GPU kernels, without a GPU: registers, spills, shared memory, use of tensor cores.

    python benchmarks/gpu_code.py --json benchmarks/results/gpu_code.json

Lowers each kernel for CUDA, takes the Triton program out of the lowered module and has the `triton` package
compile it for a chip. The compiler inside jaxlib is another build of the same one: numbers can differ a
little. Nothing is run, so nothing here says that a result is right, or how long it takes.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from inms_jax.kernels.page_copy import pallas_gpu as page_copy_gpu
from inms_jax.kernels.paged_attention import pallas_gpu as attention_gpu
from inms_jax.kernels.rope_shift import pallas_gpu as rope_shift_gpu

CAPABILITIES = (75, 80, 90)
DTYPES = ("float16", "bfloat16")
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (128, 256, 512)
# Groups, rows of a group: 8 agents one by one, 8 agents on shared pages, a chunk of a prompt.
SHAPES = {"decode": (8, 1), "decode shared": (1, 8), "prefill": (1, 512)}
# Query heads and kv heads by head dim: SmolLM2-135M and Llama-3.1-8B.
_HEADS = {64: (9, 3), 128: (32, 8)}
_COPIES, _LAYERS, _PAGES, _ENTRIES = 8, 2, 64, 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size."""

    kernel: str
    shape: str
    dtype: str
    head_dim: int
    block_size: int

    def lower(self) -> Any:
        """The kernel lowered for CUDA."""
        build = {"paged_attention": _attention, "page_copy": _page_copy, "rope_shift": _rope_shift}[self.kernel]
        function, arguments = build(self)
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What the compiler made of one kernel for one chip. `stack` holds spilled registers, in bytes per thread."""

    capability: int
    warps: int
    registers: int
    stack: int
    shared_bytes: int
    tensor_core_instructions: int


def cases(
    dtypes: Iterable[str] = DTYPES, head_dims: Iterable[int] = HEAD_DIMS, block_sizes: Iterable[int] = BLOCK_SIZES
) -> Iterator[Case]:
    """Every kernel at these sizes."""
    shapes = [("paged_attention", name + suffix) for name in SHAPES for suffix in ("", ", shifted")]
    shapes += [("page_copy", "8 pages"), ("rope_shift", "8 pages")]
    for (kernel, shape), dtype, H, B in itertools.product(shapes, dtypes, head_dims, block_sizes):
        yield Case(kernel=kernel, shape=shape, dtype=dtype, head_dim=H, block_size=B)


def machine_code(lowered: Any, capability: int) -> Code:
    """Compile the one Triton kernel of a module lowered for CUDA. Needs the `triton` package."""
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    program, warps, stages = _triton_program(lowered)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttir"
        source.write_text(program)
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        compiled = triton.compile(str(source), target=target, options=options)
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        tool = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Code(
        capability=capability,
        warps=warps,
        registers=found["REG"],
        stack=found["STACK"] + found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        tensor_core_instructions=len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", compiled.asm["ptx"])),
    )


def _triton_program(lowered: Any) -> tuple[str, int, int]:
    """Triton IR, warps and stages of the one kernel in the module."""
    ir, dialect = importlib.import_module("jaxlib.mlir.ir"), importlib.import_module("jaxlib.triton.dialect")
    found: list[tuple[str, int, int]] = []

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and "triton" in str(attributes["call_target_name"]):
            config = ir.DictAttr(attributes["mhlo.backend_config"])
            context = ir.Context()
            dialect.register_dialect(context)
            with context:
                program = str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes))
            sizes = (ir.IntegerAttr(config[name]).value for name in ("num_warps", "num_stages"))
            found.append((program, *sizes))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    [program] = found
    return program


def _attention(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape, _, shifted = case.shape.partition(", ")
    (G, R), H, M = SHAPES[shape], case.head_dim, _ENTRIES
    N, K = _HEADS[H]
    pool = _array(case.dtype, _LAYERS * _PAGES, K, case.block_size, H)
    q = _array(case.dtype, G, R, N, H)
    shift = _ints(G, R, M) if shifted else None
    arguments = (q, pool, pool, *[_ints(G, M)] * 4, shift, _ints(), _ints(G, R), _ints())

    def function(*arrays: Any) -> Any:
        return attention_gpu.paged_attention(*arrays, scale=H**-0.5, inv_freq=jnp.ones(H // 2, jnp.float32))

    return function, arguments


def _page_copy(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return functools.partial(page_copy_gpu.page_copy, num_layers=_LAYERS), (_pool(case), *[_ints(_COPIES)] * 2)


def _rope_shift(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def function(*arrays: Any) -> Any:
        inv_freq = jnp.ones(case.head_dim // 2, jnp.float32)
        return rope_shift_gpu.rope_shift(*arrays, inv_freq=inv_freq, num_layers=_LAYERS)

    return function, (_pool(case), *[_ints(_COPIES)] * 3)


def _pool(case: Case) -> jax.ShapeDtypeStruct:
    kv_heads = _HEADS[case.head_dim][1]
    return _array(case.dtype, _LAYERS * _PAGES, kv_heads, case.block_size, case.head_dim)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return _array("int32", *shape)


def _array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def table(rows: list[tuple[Case, Code]]) -> str:
    """Markdown; one line per kernel, shape and head dim with the worst of all block sizes and dtypes."""
    worst: dict[tuple[str, str, int], dict[int, list[Code]]] = {}
    for case, code in rows:
        line = worst.setdefault((case.kernel, case.shape, case.head_dim), {})
        line.setdefault(code.capability, []).append(code)
    capabilities = sorted({code.capability for _, code in rows})
    lines = ["| kernel | shape | head dim | " + " | ".join(f"sm_{c}" for c in capabilities) + " |"]
    lines.append("|" + "---|" * (3 + len(capabilities)))
    for (kernel, shape, H), by_capability in worst.items():
        cells = []
        for capability in capabilities:
            codes = by_capability[capability]
            most = [max(getattr(c, name) for c in codes) for name in ("registers", "stack", "shared_bytes")]
            cores = min(c.tensor_core_instructions for c in codes)
            cells.append(f"{most[0]} / {most[1]} / {most[2] / 1024:.0f} KB / {cores or 'no'}")
        lines.append(f"| {kernel} | {shape} | {H} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compile everything, print the table, write every line of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for case in cases():
        lowered = case.lower()
        rows += [(case, machine_code(lowered, capability)) for capability in CAPABILITIES]
    print(table(rows))
    if arguments.json is not None:
        versions = {name: importlib.import_module(name).__version__ for name in ("jax", "triton")}
        lines = [dataclasses.asdict(case) | dataclasses.asdict(code) for case, code in rows]
        text = ",\n".join(json.dumps(line) for line in lines)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(f'{{"versions": {json.dumps(versions)}, "kernels": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
