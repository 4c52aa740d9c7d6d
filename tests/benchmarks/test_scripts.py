"""The benchmarks run and write what they say they write. Times are read by people, never by tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path, script, *options):
    """Output as JSON, and what was printed."""
    target = tmp_path / "found.json"
    command = [sys.executable, f"benchmarks/{script}.py", *options, "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(target.read_text()), done.stdout


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return run(tmp_path_factory.mktemp("kernels"), "kernels", "--quick")


@pytest.fixture(scope="module")
def accelerator(tmp_path_factory):
    return run(tmp_path_factory.mktemp("accelerator"), "accelerator", "--tiny")


def test_kernels_says_where_it_ran(kernels):
    found, printed = kernels
    assert {"cpu", "cores", "jax", "load_average", "date"} <= set(found["machine"])
    assert len(found["gemm_gflops"]) == 2
    assert found["quick"] is True
    for title in ("Decode attention", "Targets", "float32 GEMM"):
        assert title in printed


def test_levels_give_equal_bits_and_count_the_bytes_that_tables_name(kernels):
    cells = kernels[0]["decode_levels"]
    assert all(cell["equal_bits"] for cell in cells)
    by_name = {(cell["agents"], cell["team"], cell["public"]): cell for cell in cells}
    assert set(by_name) == {(1, 1, 0.0), (1, 1, 0.6), (3, 3, 0.0), (3, 3, 0.6), (4, 2, 0.6)}
    page = 2 * 4 * 3 * 128 * 64  # keys and values, float32, 3 kv heads
    # Contexts of 4 pages; 60% of 512 tokens are 2 whole pages.
    for name, without, with_levels in (
        ((3, 3, 0.0), 12, 12),
        ((3, 3, 0.6), 12, 2 + 3 * 2),
        ((4, 2, 0.6), 16, 16),  # two pairs: reading together would take as long, so everyone reads alone
        ((1, 1, 0.6), 4, 4),
    ):
        assert (by_name[name]["bytes_none"], by_name[name]["bytes_levels"]) == (without * page, with_levels * page)


def test_other_forms_do_the_same_work(kernels):
    found = kernels[0]
    assert {(line["form"], line["dtype"]) for line in found["page_loop"]} == {
        ("gather", "float32"),
        *((form, dtype) for form in ("loop", "levels") for dtype in ("float32", "bfloat16", "float16")),
    }
    assert all(line["close"] for line in found["page_loop"])
    assert all(line["copied"] for line in found["page_copy"])
    assert [line["pages"] for line in found["relocation"]] == [1]
    assert {"what", "target", "found", "met"} == set(found["targets"][0])


def test_accelerator_checks_every_kernel(accelerator):
    found, _ = accelerator
    assert found["failures"] == {}
    assert set(found["stages"]) == {"machine", "rates", "checks", "times", "model"}
    lines = found["stages"]["checks"]["cases"]
    assert {line["status"] for line in lines} == {"passed"}
    assert {(line["kernel"], line["implementation"]) for line in lines} == {
        (kernel, name) for kernel in ("paged_attention", "rope_shift", "page_copy") for name in ("xla", "pallas_gpu")
    }
    assert all(line["same_bits"] for line in lines)
    assert {line["status"] for line in found["stages"]["times"]["cases"]} == {"timed"}


def test_accelerator_decodes_both_ways(accelerator):
    model = accelerator[0]["stages"]["model"]
    assert model["logits_agree"]
    assert model["same_bits"]  # on CPU, where sharing promises it
    page = 2 * 2 * 2 * 4 * 16 * 16  # keys and values, 2 bytes, 2 layers, 4 heads, 16 slots of 16
    # 8 agents of 16 pages; 60% of 256 tokens are 9 whole pages, of which the first 8 are one split.
    assert model["independent"]["kv_bytes"] == model["independent"]["kv_bytes_read"] == 8 * 16 * page
    assert model["shared"]["kv_bytes"] == (9 + 8 * 7) * page
    assert model["shared"]["kv_bytes_read"] == (8 + 8 * 8) * page


def test_accelerator_asks_for_an_accelerator():
    command = [sys.executable, "benchmarks/accelerator.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--tiny" in done.stderr


def test_memory_manager_times_lookups_and_locks(tmp_path):
    found, printed = run(tmp_path, "memory_manager", "--quick", "--tokens", "2048")
    assert set(found["lookup_s"]) == {"cached", "cached, given back", "held", "held, given back"}
    assert {(case["tenants"], len(case["ratios"])) for case in found["locks"]} == {(8, 1), (1, 1)}
    assert "turns/s with a lock per tenant" in printed


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("script", ["int8_kv", "int8_weights"])
def test_int8_is_compared_with_float32(tmp_path, monkeypatch, script):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found, _ = run(tmp_path, script, "--passages", "2", "--tokens", "64")
    lines = {line["form"]: line for line in found["forms"]}
    assert {line["tokens"] for line in lines.values()} == {128}
    assert lines["float32"]["kl_mean"] == 0
    assert 0 < lines["bfloat16"]["kl_mean"] < lines["int8"]["kl_mean"] < 2e-2
    sizes = {name: (line["kv_bytes_per_token"], line["weight_bytes"]) for name, line in lines.items()}
    if script == "int8_kv":
        assert [sizes[name][0] for name in ("float32", "bfloat16", "int8")] == [46080, 23040, 12240]
        assert lines["float16"]["kl_mean"] < lines["bfloat16"]["kl_mean"]
    else:
        # A quarter of 106,168,320 numbers in matrices, 184,320 scales, and the rest in float32.
        assert [sizes[name][1] for name in ("float32", "bfloat16", "int8")] == [538060032, 269030016, 220177152]


def test_a_long_run_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found, _ = run(tmp_path, "long_run", "--requests", "300", "--every", "100")
    assert len(found["samples"]) == 3
    assert found["samples"][-1]["requests"] >= 300
    assert [entry["pages_held"] for entry in found["samples"]] == [0, 0, 0]
    assert [entry["pages_reserved"] for entry in found["samples"]] == [0, 0, 0]
    assert len({entry["compiled_programs"] for entry in found["samples"]}) == 1, "something compiled late"
    kept = found["objects_at_end"]
    for name in ("Tenant", "Group", "Agent", "Membership", "Request", "Pending", "Stream", "Branch"):
        assert name not in kept, f"{kept[name]} objects {name} are kept"
    assert kept["Span"] < 60, "texts of closed tenants are kept"  # of 50 plain prompts
    assert found["grown"]["threads"] == 0


def test_memory_soak_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found, printed = run(tmp_path, "memory_soak", "--operations", "1500", "--seed", "5")
    assert found["counts"]["broken off"] > 20
    assert found["counts"]["expired"] > 5
    assert found["evictions"] > 100
    nothing = ("lost_updates", "reads_of_foreign_text", "held_at_the_end", "leaked_pages", "sequences_at_the_end")
    assert {name: found[name] for name in nothing} == dict.fromkeys(nothing, 0)
    assert "lost_updates: 0" in printed
