"""Machine code of the GPU kernels, compiled on this host: no spills, tensor cores used, and the table says so.

Needs the `triton` package, which exists for Linux; without it the compiling tests skip and say why.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.gpu_code import CAPABILITIES, Case, cases, machine_code

RESULTS = Path(__file__).parents[2] / "benchmarks/results/gpu_code.json"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="GPU MACHINE CODE NOT CHECKED: the triton package is not installed (pip install triton, Linux only)",
)
# In CI: the tile that is nearest to spilling, single rows, and the two that move pages.
FEW = [
    Case(kernel="paged_attention", shape="prefill, shifted", dtype="bfloat16", head_dim=128, block_size=512),
    Case(kernel="paged_attention", shape="decode", dtype="float16", head_dim=64, block_size=128),
    Case(kernel="page_copy", shape="8 pages", dtype="bfloat16", head_dim=128, block_size=128),
    Case(kernel="rope_shift", shape="8 pages", dtype="float16", head_dim=64, block_size=256),
]


def name(case):
    return "-".join(str(x) for x in dataclasses.astuple(case))


def assert_good(case, capability):
    code = machine_code(case.lower(), capability)
    assert code.stack == 0
    assert code.shared_bytes <= 99 * 1024  # what every chip from 8.0 on gives one block
    assert (code.tensor_core_instructions > 0) == (case.kernel == "paged_attention")


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", FEW, ids=name)
def test_no_spills_and_tensor_cores(case, capability):
    assert_good(case, capability)


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", list(cases()), ids=name)
def test_no_spills_and_tensor_cores_at_every_size(case, capability):
    assert_good(case, capability)


class TestTheTable:
    """What is committed: `benchmarks/results/gpu_code.json`."""

    @pytest.fixture
    def rows(self):
        return json.loads(RESULTS.read_text())["kernels"]

    def test_has_every_kernel_size_and_chip(self, rows):
        fields = [field.name for field in dataclasses.fields(Case)]
        listed = {(Case(**{field: row[field] for field in fields}), row["capability"]) for row in rows}
        assert listed == {(case, capability) for case in cases() for capability in CAPABILITIES}

    def test_is_good_where_the_kernels_are_chosen(self, rows):
        for row in rows:
            if row["capability"] >= 80:
                assert row["stack"] == 0, row
                assert (row["tensor_core_instructions"] > 0) == (row["kernel"] == "paged_attention"), row

    def test_says_that_turing_is_no_place_for_them(self, rows):
        """Attention there spills and has no tensor cores at any size (XLA refuses to try: `kernels/gpu.py`)."""
        turing = [row for row in rows if row["capability"] == 75]
        assert all(row["tensor_core_instructions"] == 0 for row in turing)
        assert all((row["stack"] > 0) == (row["kernel"] == "paged_attention") for row in turing)
