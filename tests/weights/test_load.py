"""`load`: the converted cache, its reuse and its races, and that a failure leaves nothing behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from inms_jax.errors import ConfigError, UnsupportedModelError, WeightsError
from inms_jax.text.chat import Message
from inms_jax.weights import LoadedModel, default_cache_dir, load
from inms_jax.weights.gguf import GgufFile
from inms_jax.weights.store import ConvertedModel
from inms_jax.weights.tree import tensor_specs

Tensors = dict[str, np.ndarray]
Write = Callable[..., Path]


def flat(model: LoadedModel) -> Tensors:
    return {k: v for k, v in model.params.items() if k != "layers"} | {
        f"layers/{k}": v for k, v in model.params["layers"].items()
    }


def test_both_formats_give_the_same_tree(
    tensors: Tensors, write_gguf: Write, write_directory: Write, tmp_path: Path
) -> None:
    one = load(write_gguf(tensors), cache_dir=tmp_path / "c")
    two = load(write_directory(tensors), cache_dir=tmp_path / "c")
    assert flat(one).keys() == flat(two).keys() == {spec.name for spec in tensor_specs(one.config)}
    for name, value in flat(one).items():
        np.testing.assert_array_equal(value, flat(two)[name], err_msg=name)
    assert one.model_id == "tiny"
    assert two.model_id == "tiny-hf"
    assert one.tokenizer.encode("he<s>") == two.tokenizer.encode("he<s>") == [256, 257]
    for model in (one, two):
        assert model.tokenizer.eos_ids == (258,)
        assert model.chat_template is not None
        assert model.chat_template.render([Message("user", "hi")]) == "<u>hi</u>"


def test_matrices_are_input_first_and_layers_lead(tensors: Tensors, write_gguf: Write, tmp_path: Path) -> None:
    params = load(write_gguf(tensors), cache_dir=tmp_path / "c").params
    assert params["layers"]["down"].shape == (2, 96, 64)
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(params["layers"]["down"][1], down.T)
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


def test_arrays_are_read_only_mappings_that_jax_can_alias(tensors: Tensors, write_gguf: Write, tmp_path: Path) -> None:
    for name, value in flat(load(write_gguf(tensors), cache_dir=tmp_path / "c")).items():
        assert value.ctypes.data % 64 == 0, name
        assert value.flags.c_contiguous, name
        assert not value.flags.writeable, name


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_16_bit_weights_are_rounded_once(
    dtype: str, numpy_dtype: Any, tensors: Tensors, write_gguf: Write, tmp_path: Path
) -> None:
    params = load(write_gguf(tensors), dtype=dtype, cache_dir=tmp_path / "c").params
    expected = tensors["model.embed_tokens.weight"].astype(numpy_dtype)
    assert params["embed"].dtype == expected.dtype
    np.testing.assert_array_equal(params["embed"], expected)


def test_the_second_load_does_not_convert(
    tensors: Tensors, write_gguf: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tensors)
    first = load(path, cache_dir=tmp_path / "c")

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the file was opened again")

    monkeypatch.setattr(GgufFile, "__init__", fail)
    second = load(path, cache_dir=tmp_path / "c")
    assert second.config == first.config
    assert second.weights_version == first.weights_version
    np.testing.assert_array_equal(second.params["embed"], first.params["embed"])


def test_changed_weights_are_another_version(tensors: Tensors, write_gguf: Write, tmp_path: Path) -> None:
    first = load(write_gguf(tensors), cache_dir=tmp_path / "c")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    second = load(write_gguf(tensors), cache_dir=tmp_path / "c")
    assert first.weights_version != second.weights_version
    assert not np.array_equal(first.params["final_norm"], second.params["final_norm"])


def test_changed_tokenizer_is_read_again_with_the_same_weights(
    tensors: Tensors, write_directory: Write, tmp_path: Path
) -> None:
    path = write_directory(tensors)
    first = load(path, cache_dir=tmp_path / "c")
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    second = load(path, cache_dir=tmp_path / "c")
    assert first.weights_version == second.weights_version
    assert second.chat_template is not None
    assert second.chat_template.render([Message("user", "hi")]) == "hi!"


def test_two_conversions_at_once_both_succeed(tensors: Tensors, write_gguf: Write, tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tensors))
    barrier = threading.Barrier(2, timeout=30)
    failures: list[BaseException] = []

    def rows(name: str, layer: int | None) -> Iterator[np.ndarray]:
        if name == "embed":
            barrier.wait()  # both are in the middle
        yield from file.rows(name, layer)

    def convert() -> None:
        try:
            ConvertedModel(tmp_path / "c", "same", "float32").write(file.config, {}, rows)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(list((tmp_path / "c" / "converted").iterdir())) == 1
    _, _, params = ConvertedModel(tmp_path / "c", "same", "float32").read()
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


def test_a_failed_conversion_leaves_nothing(tensors: Tensors, write_gguf: Write, tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tensors))

    def rows(name: str, layer: int | None) -> Iterator[np.ndarray]:
        if name == "layers/down":
            raise WeightsError("disk gone")
        yield from file.rows(name, layer)

    converted = ConvertedModel(tmp_path / "c", "same", "float32")
    with pytest.raises(WeightsError, match="disk gone"):
        converted.write(file.config, {}, rows)
    assert not converted.exists()
    assert list((tmp_path / "c" / "converted").iterdir()) == []


def test_a_full_disk_is_refused_with_the_numbers(
    tensors: Tensors, write_gguf: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("inms_jax.weights.store.shutil.disk_usage", lambda _: Usage)
    with pytest.raises(WeightsError, match=r"needs .* bytes.*1,000 are free"):
        load(write_gguf(tensors), cache_dir=tmp_path / "c")


@pytest.mark.parametrize("name", ["embed.npy", "layers.q.npy", "model.json"])
def test_a_damaged_cache_is_named(name: str, tensors: Tensors, write_gguf: Write, tmp_path: Path) -> None:
    path = write_gguf(tensors)
    load(path, cache_dir=tmp_path / "c")
    (file,) = (tmp_path / "c").rglob(name)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(WeightsError, match=f"{file.parent}.*damaged.*Delete"):
        load(path, cache_dir=tmp_path / "c")


def test_errors_leave_no_model_in_the_cache(
    tensors: Tensors, write_gguf: Write, write_directory: Write, tmp_path: Path
) -> None:
    cache = tmp_path / "c"
    with pytest.raises(ConfigError, match=r"'int8'.*float32"):
        load(write_gguf(tensors), dtype="int8", cache_dir=cache)
    with pytest.raises(UnsupportedModelError, match=r"'llama'.*tokenizer.json"):
        load(
            write_gguf(tensors, change=lambda w, _: w.kv_data[0]["tokenizer.ggml.model"].__setattr__("value", "llama")),
            cache_dir=cache,
        )
    small = {k: v[:200] if v.shape[0] == 260 else v for k, v in tensors.items()}
    with pytest.raises(ConfigError, match=r"260 tokens.*200"):
        load(write_directory(small, vocab_size=200), cache_dir=cache)
    assert not (cache / "converted").exists()


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INMS_JAX_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("INMS_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "inms-jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "inms-jax"


@pytest.mark.model
def test_smollm2_is_what_its_preset_says() -> None:
    from inms_jax.models.config import ModelConfig

    preset = Path(__file__).resolve().parents[2] / "configs" / "models" / "smollm2-135m.toml"
    model = load("smollm2-135m-instruct", progress=False)
    assert model.config == ModelConfig.from_toml(preset)
    assert sum(value.size for value in flat(model).values()) == 134_515_008
    assert model.weights_version.startswith("b179c9523d0e6a0f")
    tokenizer = model.tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (49152, 1, (2,), False)
