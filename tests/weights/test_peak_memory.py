"""How much host memory loading takes, measured on a generated model of several shards in a process of its own.

Measured is the peak of the resident set (VmHWM, reset through /proc/self/clear_refs) above what was resident before,
mapped files included, after a small model has gone through the same code. Where the arrays end in host memory because
the devices are the host's own, their bytes are subtracted: on an accelerator they would not be there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import pytest

from tests.weights.conftest import hf_config, make_tensors, write_shards

Write = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
SIZES = {"D": 768, "F": 2048, "L": 8, "N": 12, "K": 4, "H": 64, "V": 4096}

SCRIPT = """
import gc, json, sys
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from inms_jax.weights import load
from inms_jax.weights.convert import convert

small, large, work = map(Path, sys.argv[1:])
mesh = jax.make_mesh((4,), ("model",))
axes = dict.fromkeys(("layers/o", "layers/down"), P(None, "model"))
axes |= {f"layers/{name}": P(None, None, "model") for name in ("q", "k", "v", "gate", "up")}
axes |= dict.fromkeys(("embed", "lm_head"), P("model"))
place = lambda name: NamedSharding(mesh, axes.get(name, P()))
once = lambda name: jax.sharding.SingleDeviceSharding(jax.devices()[1])


def resident(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024


def peak(step):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS:")
    kept = step()
    return kept, resident("VmHWM:") - before


def bytes_of(model):
    return sum(s.data.nbytes for x in jax.tree.leaves(model.params) for s in getattr(x, "addressable_shards", ()))


found = {}
for spec in (small, large):
    out, options = work / f"{spec.name}.out", {"cache_dir": work / "cache", "progress": False}
    steps = {
        "first load": lambda: load(spec, dtype="bfloat16", **options),
        "convert": lambda: convert(spec, out, **options),
        "restore": lambda: load(out, dtype="bfloat16", place=once),
        "restore in parts": lambda: load(out, dtype="bfloat16", place=place),
        "load in parts": lambda: load(spec, dtype="bfloat16", place=place, **options),
    }
    for name, step in steps.items():
        kept, taken = peak(step)
        found[name] = taken - (bytes_of(kept) if "restore" in name or "parts" in name else 0)
        del kept
print(json.dumps(found))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel keeps no peak to be reset")
def test_loading_takes_less_than_a_third_more_than_the_largest_shard(write_directory: Write, tmp_path: Path) -> None:
    small = write_directory(make_tensors(), shards=3)
    large = write_directory(make_tensors(), name="large")
    (large / "model.safetensors").unlink()
    sizes = {
        "vocab_size": "V",
        "hidden_size": "D",
        "intermediate_size": "F",
        "num_hidden_layers": "L",
        "num_attention_heads": "N",
        "num_key_value_heads": "K",
    }
    changes = {key: SIZES[letter] for key, letter in sizes.items()}
    (large / "config.json").write_text(json.dumps(hf_config(**changes, head_dim=SIZES["H"])))
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in make_tensors(sizes=SIZES).items()}
    alike = sorted(tensors, key=lambda name: name.split(".")[3:])  # dealt in turn, shards are of about one size
    write_shards(large, {name: tensors[name] for name in alike}, 3)
    shard = max(file.stat().st_size for file in large.glob("*.safetensors"))
    total = sum(value.nbytes for value in tensors.values())
    assert total > 2.7 * shard > 100e6, "the measurement would be lost in the noise"

    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        # Freed blocks go back at once, as those of real models do: glibc keeps some of those below 32 MiB.
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
    command = [sys.executable, "-c", SCRIPT, str(small), str(large), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert set(taken) == {"first load", "convert", "restore", "restore in parts", "load in parts"}
    print({name: f"{size / shard:.2f}" for name, size in taken.items()}, f"of a shard of {shard:,} bytes")
    for name, size in taken.items():
        assert size < 1.3 * shard, f"{name} took {size:,} bytes, {size / shard:.2f} of the largest shard"
