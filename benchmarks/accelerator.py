"""All that needs the real chip, in one command of a few minutes: are the kernels right, how fast, what they bring.

    PYTHONPATH=. python benchmarks/accelerator.py --json benchmarks/results/NAME.json

Checks every kernel against its float32 reference, times them against the copy bandwidth measured in the same run, and
decodes with a random-weight model of Llama-2-7B's shape, each of 8 agents with its own pages and then sharing. Needs
jax for the chip and this checkout, no network. A stage that fails is recorded and the next one runs; the file is
written after each. `--tiny` runs all of it on small shapes, on a CPU too.
"""

import argparse
import dataclasses
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

# Before jax starts: by default it takes three quarters of the memory, and the model is sized by what is there.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import big_decode
import checks
import jax
import jax.numpy as jnp
import numpy as np
from decode_work import agents, tables
from timing import Timings, copy_gb_per_s, gemm_gflops, interleaved, machine

from inms_jax.cache.page_table import PageTable
from inms_jax.kernels.choice import first_choice
from inms_jax.kernels.page_copy.api import page_copy
from inms_jax.kernels.paged_attention.api import Level, paged_attention
from inms_jax.kernels.rope_shift.api import rope_shift
from inms_jax.models.config import ModelConfig

PRESET = Path(__file__).resolve().parents[1] / "configs/models/llama-2-7b.toml"
# Parts of the budget after which a stage starts nothing new; the model gets the rest.
_CHECKS_END, _TIMES_END = 0.45, 0.65
# Seconds that compiling and running the smallest model needs at most.
_MODEL_SECONDS = 40.0


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Wall clock of the whole run."""

    start: float
    seconds: float

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the budget is used."""
        return self.start + share * self.seconds - time.monotonic()


def run_checks(tiny: bool, budget: Budget) -> dict[str, Any]:
    """Every kernel against its reference, several at once: most of the time goes to compiling."""
    wanted = list(checks.cases(tiny))

    def one(case: checks.Case) -> dict[str, Any] | None:
        if budget.left(_CHECKS_END) < 0:
            return None
        try:
            return checks.check(case)
        except Exception as error:
            return dataclasses.asdict(case) | {"status": "failed", "why": _short(error)}

    with ThreadPoolExecutor(2 if tiny else 6) as threads:
        lines = [line for line in threads.map(one, wanted) if line is not None]
    counts = {status: sum(x["status"] == status for x in lines) for status in sorted({x["status"] for x in lines})}
    for line in lines:
        if line["status"] in ("WRONG", "failed"):
            print(f"  {line['status']}: {line}", flush=True)
    return {"counts": counts, "left_out_for_time": len(wanted) - len(lines), "cases": lines}


def time_kernels(tiny: bool, budget: Budget, copy_rate: float) -> dict[str, Any]:
    """Medians of the platform's kernels and of plain XLA, and the bytes they move per second."""
    lines: list[dict[str, Any]] = []
    left_out = 0
    for what, form, work in _timed(tiny):
        if budget.left(_TIMES_END) < 0:
            left_out += 1
            continue
        try:
            times = form()
        except Exception as error:
            lines.append(what | {"status": "refused" if isinstance(error, NotImplementedError) else "failed"})
            lines[-1]["why"] = _short(error)
            continue
        seconds = times.median("kernel")
        rate = work["bytes"] / seconds / 1e9
        line = (
            what | work | {"status": "timed", "ms": seconds * 1e3, "gb_per_s": rate, "of_copy_rate": rate / copy_rate}
        )
        if "flops" in work:
            line["tflops"] = work["flops"] / seconds / 1e12
        lines.append(line)
        print(f"  {line['kernel']} {line['shape']} {line['implementation']}: {line['ms']:.3f} ms, {rate:.0f} GB/s")
        gc.collect()
    return {"cases": lines, "left_out_for_time": left_out}


Timed = tuple[dict[str, Any], Callable[[], Timings], dict[str, Any]]


def _timed(tiny: bool) -> Iterator[Timed]:
    """(names, what to run, bytes and operations), the important first."""
    own = first_choice(None)
    names = [own] if own == "xla" else [own, "xla"]
    heads = [("llama-2-7b", 32, 32, 128), ("llama-3-8b", 32, 8, 128), ("smollm2", 9, 3, 64)]
    sizes = [(heads[0], 128), (heads[1], 128), (heads[2], 128), (heads[0], 512)]
    context, chunk, layers, copies = 16384, 512, 32, 8
    if tiny:
        sizes = [(("tiny", 3, 1, 16), 16)]
        context, chunk, layers, copies = 64, 8, 2, 2
    for name in names:
        for (model, N, K, H), B in sizes:
            for shape, rows, groups in (("decode", 8, 8), ("decode shared", 8, 1), ("prefill", chunk, 1)):
                what: dict[str, Any] = {
                    "kernel": "paged_attention",
                    "implementation": name,
                    "shape": shape,
                    "heads": model,
                }
                what |= {"block_size": B, "context": context, "dtype": "bfloat16"}
                num_bytes = groups * context * 2 * K * H * 2
                work: dict[str, Any] = {"bytes": num_bytes, "flops": 4 * N * H * rows * context}
                yield what, partial(_time_attention, name, N, K, H, B, context, groups, rows), work
        (model, _, K, H), B = sizes[0]
        for kernel, function in (("rope_shift", rope_shift), ("page_copy", page_copy)):
            what = {"kernel": kernel, "implementation": name, "shape": f"{copies} pages", "heads": model}
            what |= {"block_size": B, "dtype": "bfloat16"}
            pool = (layers * (1 + 2 * copies), K, B, H)
            work = {"bytes": 2 * layers * copies * K * B * H * 2}
            yield what, partial(_time_move, function, name, pool, layers, copies), work


def _time_attention(name: str, N: int, K: int, H: int, B: int, context: int, groups: int, rows: int) -> Timings:
    """One layer: 8 rows alone, 8 rows on one context, or the last rows of one context."""
    work = agents(groups, context, 0.0, B)
    plan = tables(work, context // B, sharing=False).plan
    columns = ("page", "begin", "end", "position", "shift", "num_entries")
    table = PageTable(**{column: jnp.asarray(getattr(plan, column)[:groups]) for column in columns})
    level: Level = table.level(rows // groups)
    keys = jax.random.split(jax.random.key(0), 3)
    pool_shape = (work.num_pages, K, B, H)
    k, v = (jax.jit(partial(jax.random.normal, shape=pool_shape, dtype=jnp.bfloat16))(key) for key in keys[:2])
    q = jax.random.normal(keys[2], (groups, rows // groups, N, H), jnp.bfloat16)
    q_position = jnp.full((groups, rows // groups), context - 1, jnp.int32)
    kernel = jax.jit(partial(paged_attention, scale=H**-0.5, implementation=name))
    form = partial(kernel, q, k, v, level, q_position, jnp.int32(0))
    return interleaved({"kernel": form}, rounds=7, calls=10, warmup=2)


def _time_move(function: Callable[..., Any], name: str, shape: tuple[int, ...], layers: int, copies: int) -> Timings:
    ids = np.arange(1, 1 + 2 * copies, dtype=np.int32)
    lists = [jnp.asarray(ids[:copies]), jnp.asarray(ids[copies:])]
    options: dict[str, Any] = {"num_layers": layers, "implementation": name}
    if function is rope_shift:
        lists.append(jnp.full((copies,), 1000, jnp.int32))
        options["inv_freq"] = jnp.ones((shape[3] // 2,), jnp.float32)
    program = jax.jit(partial(function, **options), donate_argnums=0)
    pages = jnp.ones(shape, jnp.bfloat16)

    def form() -> Any:
        nonlocal pages
        pages = program(pages, *lists)
        return pages

    return interleaved({"kernel": form}, rounds=7, calls=10, warmup=2)


def run_model(tiny: bool, budget: Budget, memory: int | None) -> dict[str, Any]:
    """The largest decode that fits; smaller ones after running out of memory, as long as there is time."""
    model = ModelConfig.from_toml(PRESET)
    asked = big_decode.BigDecode(model=model)
    if tiny:
        small = dataclasses.replace(
            model, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
        )
        small = dataclasses.replace(small, vocab_size=128)
        asked = big_decode.BigDecode(model=small, context=256, block_size=16)
    work: big_decode.BigDecode | None = asked if tiny else asked.fitted(memory)
    failures: list[str] = []
    while work is not None:
        if not tiny and budget.left() < _MODEL_SECONDS:
            raise TimeoutError(f"{budget.left():.0f} s left, a model needs {_MODEL_SECONDS:.0f}; tried: {failures}")
        try:
            found = big_decode.measure(work, rounds=3 if tiny else 20)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            failures.append(f"{work.context} tokens, {work.model.num_layers} layers: out of memory")
            work = work.smaller()
            gc.collect()
            continue
        changed = [
            f"{name} {after} instead of {before}"
            for name, before, after in (
                ("context", asked.context, work.context),
                ("layers", asked.model.num_layers, work.model.num_layers),
            )
            if before != after
        ]
        return found | {"smaller_than_asked": changed, "out_of_memory": failures}
    raise MemoryError(f"Not even the smallest model fits: {failures}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def main() -> None:
    """Run the stages; write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it works")
    parser.add_argument("--minutes", type=float, default=6.0, help="start nothing new after this long")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    if jax.default_backend() == "cpu" and not tiny:
        parser.error("jax finds no accelerator here, only the CPU: use --tiny, or benchmarks/kernels.py")
    # Ends before the limit: what runs at the end of the budget still has to finish.
    budget = Budget(time.monotonic(), 60 * arguments.minutes - (0 if tiny else 15))
    result: dict[str, Any] = {"tiny": tiny, "stages": {}, "failures": {}}

    def stage(name: str, run: Callable[[], Any]) -> Any:
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        try:
            result["stages"][name] = run()
        except Exception as error:
            result["failures"][name] = {"error": _short(error), "where": traceback.format_exc()[-2000:]}
            print(f"  failed: {_short(error)}", flush=True)
        result.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        return result["stages"].get(name)

    facts = stage("machine", machine) or {}
    rates = stage(
        "rates",
        lambda: {
            "copy_gb_per_s": copy_gb_per_s(2**20 if tiny else 2**30, calls=10),
            "gemm_float32_gflops": gemm_gflops(128 if tiny else 4096),
        },
    )
    stage("checks", lambda: run_checks(tiny, budget))
    stage("times", lambda: time_kernels(tiny, budget, (rates or {}).get("copy_gb_per_s", float("inf"))))
    gc.collect()
    model = stage("model", lambda: run_model(tiny, budget, facts.get("device_memory")))
    print(f"{facts.get('device')}: {rates}; checks {result['stages'].get('checks', {}).get('counts')}")
    if model is not None:
        for mode in ("independent", "shared"):
            line = model[mode]
            print(
                f"{mode:12} KV {line['kv_bytes'] / 1e9:.2f} GB, step {line['step_ms']:.2f} ms,"
                f" {line['tokens_per_s']:.0f} tokens/s"
            )
        print(
            f"{model['agents']} agents at {model['context']} tokens, {model['public']:.0%} public,"
            f" {model['layers']} layers {model['smaller_than_asked']}: {model['speedup']:.2f} times faster,"
            f" KV {model['kv_bytes_ratio']:.2f}, logits agree: {model['logits_agree']}"
        )
    print(f"{sum(result['seconds'].values()):.0f} s; failed stages: {sorted(result['failures']) or 'none'}")


if __name__ == "__main__":
    main()
