"""No TPU kernel copies the pool: compiled for chips that are not there, temporaries are small and equal for two pools.

Needs libtpu, which `make test` installs aside, under `.venv/aot`, on Linux x86-64.
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

CHIPS = ("v5e", "v6e")
AOT = str(Path(sys.prefix) / "aot")
pytestmark = pytest.mark.skipif(
    importlib.machinery.PathFinder.find_spec("libtpu", [AOT, *sys.path]) is None,
    reason="NOT TESTED: that TPU kernels compile and copy no pool. There is no libtpu; "
    "`make test` brings it on Linux x86-64.",
)


@functools.cache
def compile_all(*arguments: str) -> list[dict[str, Any]]:
    """Every case of `tpu_aot`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.tpu_aot", *arguments],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "PYTHONPATH": AOT,
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


def results(name: str, *arguments: str) -> list[dict[str, Any]]:
    found = [x for x in compile_all(*CHIPS, *arguments) if x["name"] == name]
    assert {x["chip"] for x in found} == set(CHIPS)
    return found


def check(result: dict[str, Any]) -> None:
    small, large = result["temp"]
    if result["name"] == "layers":
        # Around the kernels XLA keeps small intermediates in VMEM, uncounted, or in HBM, and may choose anew per pool.
        assert abs(large - small) < (result["pool"][1] - result["pool"][0]) // 100, f"grow with the pool: {result}"
    else:
        assert small == large, f"temporaries grow with the pool: {result}"
    assert large < result["pool"][0] // 100, f"temporaries are of the pool's size: {result}"
    assert result["alias"] == [result["donated"] * x for x in result["pool"]], f"not in place: {result}"


@pytest.mark.parametrize("name", ["paged_attention", "page_copy", "rope_shift", "layers"])
def test_nothing_copies_the_pool(name: str) -> None:
    """`layers` is a step's own work: every layer writes its tokens and reads them."""
    for result in results(name):
        check(result)


def test_a_copy_would_be_seen() -> None:
    for result in results("control"):
        assert result["temp"][1] >= 2 * result["pool"][1]
        assert result["temp"][0] < result["temp"][1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["paged_attention", "page_copy", "rope_shift"])
def test_nothing_copies_the_pool_at_any_size(name: str) -> None:
    for result in results(name, "--full"):
        check(result)
