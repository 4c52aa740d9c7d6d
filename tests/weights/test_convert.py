"""`convert`: the same tree as a load of the original, where it is put, and that a failure leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from inms_jax.errors import ConfigError, WeightsError
from inms_jax.weights import LoadedModel, load
from inms_jax.weights.convert import convert
from inms_jax.weights.int8 import with_int8_matrices
from inms_jax.weights.safetensors import HuggingFaceDirectory
from tests.weights.conftest import make_tensors

Tensors = dict[str, np.ndarray]
Write = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]


def flat(model: LoadedModel) -> dict[str, Any]:
    return {k: v for k, v in model.params.items() if k != "layers"} | {
        f"layers/{k}": v for k, v in model.params["layers"].items()
    }


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ["gguf", "shards"])
def test_a_checkpoint_is_the_tree_that_load_gives(
    form: str, dtype: str, tensors: Tensors, write_gguf: Write, write_directory: Write, tmp_path: Path
) -> None:
    source = write_gguf(tensors) if form == "gguf" else write_directory(tensors, shards=3)
    original = load(source, dtype=dtype, cache_dir=tmp_path / "c")
    convert(source, tmp_path / "out", dtype=dtype, cache_dir=tmp_path / "c", progress=False)
    restored = load(tmp_path / "out", dtype=dtype)
    assert flat(restored).keys() == flat(original).keys()
    for name, value in flat(original).items():
        found = flat(restored)[name]
        assert isinstance(found, np.ndarray), name
        assert found.ctypes.data % 64 == 0, f"{name} would be copied by device_put"
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value, err_msg=name)
    assert (restored.config, restored.model_id) == (original.config, original.model_id)
    assert restored.tokenizer.encode("he<s>") == original.tokenizer.encode("he<s>")
    assert restored.chat_template is not None


def test_int8_matrices_are_those_that_an_engine_would_make(
    tensors: Tensors, write_directory: Write, tmp_path: Path
) -> None:
    source = write_directory(tensors, shards=2)
    original = load(source, cache_dir=tmp_path / "c")
    options: dict[str, Any] = {"dtype": "float32", "cache_dir": tmp_path / "c", "progress": False}
    plain = convert(source, tmp_path / "plain", **options)
    convert(source, tmp_path / "out", weight_dtype="int8", **options)
    restored = load(tmp_path / "out")
    expected = flat(with_int8_matrices(original))
    assert flat(restored).keys() == expected.keys()
    for name, value in expected.items():
        found = flat(restored)[name]
        assert found.dtype == value.dtype
        assert found.ctypes.data % 64 == 0, f"{name} would be copied by device_put"
        np.testing.assert_array_equal(found, value, err_msg=name)
    assert len({x.weights_version for x in (restored, plain, original)}) == 3
    assert with_int8_matrices(restored) is restored
    kinds = {name: str(x.dtype) for name, x in flat(load(tmp_path / "out", dtype="bfloat16")).items()}
    assert (kinds["layers/q"], kinds["layers/q_scale"], kinds["embed"]) == ("int8", "float32", "bfloat16")
    size = sum(file.stat().st_size for file in (tmp_path / "out" / "params").rglob("*") if file.is_file())
    assert size < 0.7 * sum(x.nbytes for x in flat(original).values())
    with pytest.raises(ConfigError, match="weight_dtype must be auto or int8, got 'int4'"):
        convert(source, tmp_path / "no", weight_dtype="int4", **options)
    assert not (tmp_path / "no").exists()


def test_other_programs_can_restore_it(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    convert(write_directory(tensors), tmp_path / "out", cache_dir=tmp_path / "c", progress=False)
    found = ocp.StandardCheckpointer().restore(tmp_path / "out" / "params")
    down = tensors["model.layers.1.mlp.down_proj.weight"].T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(found["layers"]["down"][1]), down)


def test_another_dtype_than_the_stored_one(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    convert(write_directory(tensors), tmp_path / "out", cache_dir=tmp_path / "c", progress=False)
    embed = load(tmp_path / "out", dtype="float32").params["embed"]
    assert embed.dtype == np.float32
    rounded = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(embed, rounded)


def test_the_version_is_stable_and_of_the_stored_numbers(
    tensors: Tensors, write_directory: Write, tmp_path: Path
) -> None:
    source = write_directory(tensors, shards=2)
    options: dict[str, Any] = {"cache_dir": tmp_path / "c", "progress": False}
    first = convert(source, tmp_path / "a", **options).weights_version
    assert convert(source, tmp_path / "b", **options).weights_version == first
    (tmp_path / "b").rename(tmp_path / "moved")
    for dtype in ("float32", "bfloat16"):
        assert load(tmp_path / "moved", dtype=dtype).weights_version == first
    wide = convert(source, tmp_path / "wide", dtype="float32", **options).weights_version
    assert len({first, wide, load(source, cache_dir=tmp_path / "c").weights_version}) == 3


def test_chunks_are_written_once_whatever_the_tables_are_divided_by(
    tensors: Tensors, write_directory: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 260 rows of 128 bytes in chunks of at most 10 kB: 65 rows a chunk; files come in runs of 7 rows.
    monkeypatch.setattr("inms_jax.weights.checkpoint._CHUNK_BYTES", 10_000)
    monkeypatch.setattr("inms_jax.weights.safetensors._ROWS", 7)
    source = write_directory(tensors)
    convert(source, tmp_path / "out", cache_dir=tmp_path / "c", progress=False)
    np.testing.assert_array_equal(
        load(tmp_path / "out", dtype="bfloat16").params["embed"],
        tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16),
    )
    chunks = [file for file in (tmp_path / "out" / "params" / "embed").rglob("*") if file.name.isdigit()]
    assert len([file for file in chunks if file.is_file()]) == 4


SHARDED = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from inms_jax.weights import load
mesh = jax.make_mesh((4,), ("model",))
axes = {"layers/q": P(None, None, "model"), "layers/down": P(None, "model"), "embed": P("model")}
place = lambda name: NamedSharding(mesh, axes.get(name, P()))
whole = load(sys.argv[1], dtype="bfloat16").params
for spec in sys.argv[1:]:
    parts = load(spec, dtype="bfloat16", place=place).params
    for name in ("q", "down", "up", "attn_norm"):
        found = parts["layers"][name]
        assert found.sharding == place("layers/" + name), name
        np.testing.assert_array_equal(np.asarray(found), np.asarray(whole["layers"][name]))
    assert [s.data.shape for s in parts["embed"].addressable_shards] == [(65, 64)] * 4
    assert [s.data.shape for s in parts["layers"]["q"].addressable_shards] == [(2, 64, 16)] * 4
print("ok")
"""


def test_each_device_is_given_its_part(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    source = write_directory(tensors)
    convert(source, tmp_path / "out", cache_dir=tmp_path / "c", progress=False)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "INMS_JAX_CACHE": str(tmp_path / "c"),
    }
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "out"), str(source)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


# ---- what can go wrong ---------------------------------------------------------------------------------------------


def test_what_exists_is_not_written_over(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    source = write_directory(tensors)
    (tmp_path / "out").mkdir()
    with pytest.raises(WeightsError, match=r"out exists: choose another place"):
        convert(source, tmp_path / "out", cache_dir=tmp_path / "c", progress=False)
    convert(source, tmp_path / "one", cache_dir=tmp_path / "c", progress=False)
    with pytest.raises(WeightsError, match=r"one was converted before"):
        convert(tmp_path / "one", tmp_path / "two", progress=False)
    with pytest.raises(ConfigError, match=r"'int4'.*bfloat16"):
        convert(source, tmp_path / "two", dtype="int4", progress=False)


def test_values_beyond_float16_are_refused(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = -70000.0
    source = write_directory(tensors)
    with pytest.raises(WeightsError, match=r"layers/down of layer 1 has values up to 7e\+04.*65504: choose bfloat16"):
        convert(source, tmp_path / "out", dtype="float16", cache_dir=tmp_path / "c", progress=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(WeightsError, match=r"choose bfloat16"):
        load(source, dtype="float16", cache_dir=tmp_path / "c")


def test_a_shard_that_becomes_unreadable_is_named_and_nothing_is_left(
    tensors: Tensors, write_directory: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_directory(tensors, shards=3)
    rows = HuggingFaceDirectory.rows

    def lose(self: HuggingFaceDirectory, name: str, layer: int | None) -> Iterator[np.ndarray]:
        if (name, layer) == ("layers/up", 1):
            for file in source.glob("*-00002-*"):
                file.write_bytes(b"")
        return rows(self, name, layer)

    monkeypatch.setattr(HuggingFaceDirectory, "rows", lose)
    with pytest.raises(WeightsError, match=r"Cannot read .*model-00002-of-00003.safetensors"):
        convert(source, tmp_path / "new" / "out", cache_dir=tmp_path / "c", progress=False)
    assert names(tmp_path / "new") == []


def test_a_full_disk_is_refused_before_anything_is_written(
    tensors: Tensors, write_directory: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    source = write_directory(tensors)
    monkeypatch.setattr("inms_jax.weights.checkpoint.shutil.disk_usage", lambda _: Usage)
    with pytest.raises(WeightsError, match=r"needs .* bytes in .*1,000 are free"):
        convert(source, tmp_path / "new" / "out", cache_dir=tmp_path / "c", progress=False)
    assert names(tmp_path / "new") == []


CONVERT = """
import resource, sys
from pathlib import Path
from inms_jax import cli
if sys.argv[3] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # a write past it fails as on a full disk
sys.exit(cli.main(["convert", sys.argv[1], sys.argv[2]]))
"""


def start(source: Path, out: Path, tmp_path: Path, limit: str = "none") -> subprocess.Popen[str]:
    environment = os.environ | {"INMS_JAX_CACHE": str(tmp_path / "c")}
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(source), str(out), limit],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_disk_that_fills_while_it_is_written(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    process = start(write_directory(tensors), out, tmp_path, "limit")
    _, error = process.communicate()
    assert process.returncode == 2
    assert error.startswith(f"inms-jax: error: Cannot write {out}: File too large (190,080 bytes are needed")
    assert error.count("\n") == 1, error
    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_conversion_is_no_checkpoint(
    how: signal.Signals, write_directory: Write, tmp_path: Path
) -> None:
    sizes = {"D": 64, "F": 96, "L": 60, "N": 4, "K": 2, "H": 16, "V": 260}
    source = write_directory(make_tensors(sizes=sizes), num_hidden_layers=60)
    out = tmp_path / "new" / "out"
    process = start(source, out, tmp_path)
    while not list((tmp_path / "new").rglob("*layers.*/c/*")):  # in the middle
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.002)
    process.send_signal(how)
    process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert not out.exists()
    left = names(tmp_path / "new")
    if how == signal.SIGINT:
        assert left == []
    else:
        assert len(left) == 1
        assert left[0].startswith(".out.")
    convert(source, out, cache_dir=tmp_path / "c", progress=False)
    assert load(out).config.num_layers == 60


def test_damage_is_named(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(write_directory(tensors), out, cache_dir=tmp_path / "c", progress=False)
    chunk = max((out / "params" / "layers.down").rglob("*"), key=lambda file: file.stat().st_size)
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:100])
    with pytest.raises(WeightsError, match=r"Cannot restore tensor 'layers/down' of .*out.*Convert the model again"):
        load(out)
    chunk.write_bytes(whole)
    record = out / "inms-jax.json"
    text = record.read_text()
    for content in (text[:50], text.replace('"format": 1', '"format": 2'), "[]"):
        record.write_text(content)
        with pytest.raises(WeightsError, match=r"Cannot read .*inms-jax.json"):
            load(out)


def test_an_engine_runs_on_a_checkpoint(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    from inms_jax import LLM

    assert jax.default_backend() == "cpu"
    source = write_directory(tensors)
    convert(source, tmp_path / "out", dtype="float32", cache_dir=tmp_path / "c", progress=False)
    said = []
    for model in (load(source, cache_dir=tmp_path / "c"), str(tmp_path / "out")):
        with LLM(model, block_size=16, kv_cache_memory="1MiB", max_num_batched_tokens=64, max_num_seqs=2) as llm:
            [answer] = llm.generate("hello", {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
            said.append(answer.outputs[0].token_ids)
    assert said[0] == said[1]
    assert len(said[0]) == 8
