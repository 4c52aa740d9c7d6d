"""Hugging Face directories: values, the files that are refused, and what is never opened."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from inms_jax.errors import ConfigError, UnsupportedModelError, WeightsError
from inms_jax.weights.safetensors import HuggingFaceDirectory

Tensors = dict[str, np.ndarray]
Write = Callable[..., Path]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_are_the_files_own(dtype: Any, tensors: Tensors, write_directory: Write) -> None:
    stored = {name: value.astype(dtype) for name, value in tensors.items()}
    directory = HuggingFaceDirectory(write_directory(stored))
    for name, layer, key in (
        ("embed", None, "model.embed_tokens.weight"),
        ("layers/q", 1, "model.layers.1.self_attn.q_proj.weight"),
        ("layers/mlp_norm", 0, "model.layers.0.post_attention_layernorm.weight"),
    ):
        found = np.concatenate(list(directory.rows(name, layer)))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, stored[key].astype(np.float32))


def test_what_old_and_tied_files_hold_besides_is_ignored(tensors: Tensors, write_directory: Write) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert HuggingFaceDirectory(write_directory(tensors, tie_word_embeddings=True)).config.tie_word_embeddings


def test_missing_unexpected_and_misshapen_tensors_are_named(tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors | {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)})
    with pytest.raises(WeightsError, match=r"'model.layers.0.self_attn.q_proj.bias' has no place"):
        HuggingFaceDirectory(path)
    wide = tensors | {"model.embed_tokens.weight": np.ones((300, 64), np.float32)}
    path = write_directory(wide, vocab_size=300)
    with pytest.raises(WeightsError, match=r"'lm_head.weight' has shape \(260, 64\).*\(300, 64\)"):
        HuggingFaceDirectory(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"'model.layers.1.mlp.up_proj.weight' is missing"):
        HuggingFaceDirectory(write_directory(tensors))


def test_integer_tensors_are_refused(tensors: Tensors, write_directory: Write) -> None:
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    with pytest.raises(UnsupportedModelError, match=r"'model.norm.weight'.*I8"):
        HuggingFaceDirectory(write_directory(tensors))


def test_a_truncated_file_is_refused(tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"Cannot read .*model.safetensors"):
        HuggingFaceDirectory(path.parent)


def test_a_pickle_is_named_and_never_loaded(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "loaded",)

    path = write_directory(tensors)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UnsupportedModelError, match=r"only pytorch_model.bin: a pickle"):
        HuggingFaceDirectory(path)
    assert not (tmp_path / "loaded").exists()


def test_an_empty_directory_is_refused(tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors)
    (path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no model.safetensors and no model.safetensors.index.json"):
        HuggingFaceDirectory(path)


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), ("[]", "holds a list")])
def test_a_broken_config_is_named(content: str, message: str, tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors)
    (path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"config.json.*{message}"):
        HuggingFaceDirectory(path)


def test_an_unknown_attribute_stops_before_the_weights(tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"logit_scale": 2.0}))
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="logit_scale"):
        HuggingFaceDirectory(path)
