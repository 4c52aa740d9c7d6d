"""7B and 8B models by the book: whole prefill and decode programs, compiled from shapes, hold weights and pages once.

For CPU, for a TPU v5p that is not there, and for four TPU v5e that share the model (both need libtpu, which `make test`
installs aside under `.venv/aot`).
"""

import functools
import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inms_jax.capacity import model_preset, weight_bytes

PRESETS = ("llama-2-7b", "llama-3.1-8b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-8b")
AOT = str(Path(sys.prefix) / "aot")
needs_libtpu = pytest.mark.skipif(
    importlib.machinery.PathFinder.find_spec("libtpu", [AOT, *sys.path]) is None,
    reason="NOT TESTED: that programs of 7B models compile for TPUs and copy neither pool nor weights. There is no "
    "libtpu; `make test` brings it on Linux x86-64.",
)


@functools.cache
def programs(*arguments: str) -> list[dict[str, Any]]:
    """What `program_memory` prints, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.program_memory", *arguments],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "PYTHONPATH": "" if arguments[0] == "cpu" else AOT,
            "TPU_SKIP_MDS_QUERY": "1",
            "JAX_PLATFORMS": "cpu",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(found: dict[str, Any], weight_dtype: str) -> None:
    model = model_preset(found["model"])
    on_cpu = found["platform"] == "cpu"
    devices = 4 if found["platform"] == "v5e" else 1
    # Norms and biases, which every device has whole or in part, are little.
    assert found["weights"] == pytest.approx(
        weight_bytes(model, "float32" if on_cpu else "bfloat16", weight_dtype) / devices, rel=1e-3
    )
    for pool, arguments, temporaries, in_place in zip(
        found["pool"], found["arguments"], found["temporaries"], found["in_place"], strict=True
    ):
        held = found["weights"] + pool
        assert held <= arguments <= 1.02 * held, found
        assert in_place == pool, f"not in place: {found}"
        assert temporaries < 0.1 * pool, f"temporaries of the pool's size: {found}"
    assert found["temporaries"][0] >= found["temporaries"][1], f"temporaries grow with the pool: {found}"
    # Hidden states cross between devices, and logits; a page or a matrix is larger than both.
    assert max(found["gathered"]) <= 8 * model.vocab_size
    layer = (found["weights"] - _tables(found) // devices) // model.num_layers
    if on_cpu and weight_dtype == "int8":
        # Widened to float32, a layer at a time.
        assert found["temporaries"][0] < 1.1 * 4 * layer, f"more than one layer's weights are widened: {found}"
    elif on_cpu and found["prefill"]:
        # XLA on CPU copies what a scan slices: the weights of the layer at hand. Written out layer by layer, as decode
        # is, a program copies nothing and takes far longer to compile; a chunk does more work than such a copy.
        assert found["temporaries"][0] < 1.1 * layer, f"more than one layer's weights are copied: {found}"
    else:
        assert found["temporaries"][0] < 0.1 * layer, f"weights are copied: {found}"


def _tables(found: dict[str, Any]) -> int:
    """Bytes of the embedding and of the head; no preset ties them."""
    model = model_preset(found["model"])
    return 2 * model.vocab_size * model.hidden_size * (4 if found["platform"] == "cpu" else 2)


def check_all(platform: str, *presets: str, options: tuple[str, ...] = ()) -> None:
    found = programs(platform, *presets, *options)
    assert [(x["model"], x["prefill"] is None) for x in found] == [(p, d) for p in presets for d in (False, True)]
    for program in found:
        check(program, "int8" if "--int8-weights" in options else "auto")


def test_programs_for_cpu() -> None:
    check_all("cpu", "llama-2-7b")


@needs_libtpu
def test_programs_for_a_tpu() -> None:
    check_all("v5p", "llama-2-7b", "qwen3-8b")


@needs_libtpu
def test_programs_for_four_tpus_that_share_a_model() -> None:
    """A chip has 15.75 GiB: were the larger pool, of 8 GiB, copied, the program would not compile."""
    check_all("v5e", "llama-2-7b")


@pytest.mark.full
@pytest.mark.parametrize("option", ["--int8-kv", "--int8-weights"])
@pytest.mark.parametrize("platform", ["cpu", *(pytest.param(chip, marks=needs_libtpu) for chip in ("v5p", "v5e"))])
def test_programs_with_int8(platform: str, option: str) -> None:
    """Neither pool nor weights are copied or widened as a whole; attention over int8 pages is plain XLA everywhere."""
    check_all(platform, "llama-2-7b", options=(option,))


@pytest.mark.full
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("platform", ["cpu", *(pytest.param(chip, marks=needs_libtpu) for chip in ("v5p", "v5e"))])
def test_programs_with_full_chunks(platform: str, preset: str) -> None:
    check_all(platform, preset, options=("--full",))
