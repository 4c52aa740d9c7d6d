"""One model on several (virtual CPU) devices says what it says on one, and no page crosses between devices."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from inms_jax import LLM
from inms_jax.errors import ConfigError
from inms_jax.models.partition import Partition
from tests.engine.test_smollm2 import GOLDEN
from tests.tiny import tiny_model


@functools.cache
def run(devices: int, *arguments: str) -> list[dict[str, Any]]:
    """What `tensor_parallel` prints, from a process with so many devices."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.tensor_parallel", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tokens(found: dict[str, Any]) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in found["said"]]


def check(model: str, *sizes: int, options: tuple[str, ...] = (), tolerance: float = 2e-5) -> None:
    """The same tokens at each size, log-probabilities to rounding, and only sums and logits between devices."""
    found = run(max(sizes), f"{model}:{','.join(str(n) for n in (1, *sizes))}", *options)
    one, *others = [x for x in found if "said" in x]
    assert [x["size"] for x in others] == list(sizes)
    assert all(len(answer) == 20 for answer in one["said"])
    for other in others:
        assert tokens(other) == tokens(one), other["size"]
        for mine, its in zip(other["said"], one["said"], strict=True):
            assert [p for _, p in mine] == pytest.approx([p for _, p in its], abs=tolerance)
        assert other["devices"] == other["size"]
        assert other["part_bytes"] == other["expected_bytes"], "kv_cache_memory is that of each device"
        check_programs(other)


def check_programs(found: dict[str, Any]) -> None:
    assert {p["program"] for p in found["programs"]} == {"step", "copy_pages"}
    for program in found["programs"]:
        for kind, elements in program["crossing"]:
            assert kind in ("all-reduce", "all-gather")
            # The largest thing that may cross: hidden states of a prefill chunk (64 x 64), and logits of 4 rows.
            assert elements <= (4096 if kind == "all-reduce" else 4 * 320), program
        gathers = [kind for kind, _ in program["crossing"] if kind == "all-gather"]
        assert len(gathers) == (program["program"] == "step"), "logits alone are gathered"
        assert program["temporaries"] < found["part_bytes"], program


def test_more_devices_than_kv_heads() -> None:
    """2 kv heads on 2, 4 and 8 devices; on 8 also the three agents: sharing changes no bit within one size."""
    check("8/2", 2, 4, 8, options=("--demo",))
    [demo] = [x for x in run(8, "8/2:1,2,4,8", "--demo") if "demo" in x]
    assert demo["demo"], "texts or log-probabilities differ between the independent and the shared run"
    assert demo["pages"][1] < demo["pages"][0]


def test_heads_that_do_not_divide_stay_whole_and_the_log_says_so() -> None:
    check("6/2", 4)
    [found] = [x for x in run(4, "6/2:1,4") if x["size"] == 4]
    assert found["log"] == [
        "attention (6 query heads and 2 kv heads) is whole on each of 4 devices: 4 does not divide it"
    ]
    sums = [sum(kind == "all-reduce" for kind, _ in p["crossing"]) for p in found["programs"] if p["program"] == "step"]
    assert max(sums) == 3, "the embedding and two layers' MLPs; nothing of attention crosses"


def test_int8_pages_and_weights_are_cut_with_their_scales() -> None:
    """Sums over devices round otherwise, which moves a number of a page to the next of 255 now and then."""
    check("8/2", 4, options=("kv_cache_dtype=int8", "weight_dtype=int8"), tolerance=2e-3)


@pytest.mark.full
def test_int8_weights_are_cut_with_their_scales() -> None:
    check("8/2", 2, 8, options=("weight_dtype=int8",))
    check("6/2", 4, options=("weight_dtype=int8",))


@pytest.mark.full
def test_as_many_kv_heads_as_devices_or_more() -> None:
    check("8/8", 2, 4, 8)


@pytest.mark.full
@pytest.mark.model
def test_the_real_model_on_three_devices(smollm2_spec: str) -> None:
    golden, demo = run(3, "smollm2:3")
    assert golden["golden"] == {name: case["greedy_token_ids"] for name, case in GOLDEN.items()}
    assert demo["demo"]
    assert demo["pages"][1] < demo["pages"][0]


def test_too_few_devices_are_said_with_their_number() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, and this process has 1 device\(s\) .*'cpu'"):
        LLM(tiny_model(), kv_cache_memory="1MiB", tensor_parallel_size=3)


def test_a_new_array_needs_a_row_in_the_table() -> None:
    partition = Partition.over(tiny_model().config, jax.devices()[:1])
    with pytest.raises(ConfigError, match="no axes are known for the array 'gate_bias'"):
        partition.param_specs({"layers": {"gate_bias": jax.numpy.zeros((2, 96))}})
