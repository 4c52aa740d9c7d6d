"""Weights in several files with an index: the same model, and every way in which index and shards can disagree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inms_jax.errors import ConfigError, UnsupportedModelError, WeightsError
from inms_jax.weights import load
from inms_jax.weights.safetensors import HuggingFaceDirectory
from inms_jax.weights.shards import INDEX_FILE, weight_files

Tensors = dict[str, np.ndarray]
Write = Callable[..., Path]
SECOND = "model-00002-of-00003.safetensors"


def change_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((path / INDEX_FILE).read_text())
    change(index)
    (path / INDEX_FILE).write_text(json.dumps(index))


def test_shards_are_the_same_model_as_one_file(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    one = load(write_directory(tensors), cache_dir=tmp_path / "c")
    many = load(write_directory(tensors, shards=3, name="sharded"), cache_dir=tmp_path / "c")
    assert one.params["layers"].keys() == many.params["layers"].keys()
    for name, value in one.params["layers"].items():
        np.testing.assert_array_equal(value, many.params["layers"][name], err_msg=name)
    for name in ("embed", "final_norm", "lm_head"):
        np.testing.assert_array_equal(one.params[name], many.params[name], err_msg=name)


def test_one_file_goes_before_an_index(tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors, shards=3)
    write_directory(tensors)
    assert [file.name for file in weight_files(path).everything] == ["model.safetensors"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_version_depends_on_every_shard(
    number: int, tensors: Tensors, write_directory: Write, tmp_path: Path
) -> None:
    first = load(write_directory(tensors, shards=3), cache_dir=tmp_path / "c")
    key = list(tensors)[number - 1]  # the tensors are dealt in turn
    tensors[key] = tensors[key] + 1
    second = load(write_directory(tensors, shards=3), cache_dir=tmp_path / "c")
    assert first.weights_version != second.weights_version
    again = load(write_directory(tensors, shards=3), cache_dir=tmp_path / "other")
    assert again.weights_version == second.weights_version


def test_the_version_depends_on_the_index(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    path = write_directory(tensors, shards=3)
    first = load(path, cache_dir=tmp_path / "c")
    change_index(path, lambda index: index["metadata"].update(total_size=1))
    assert load(path, cache_dir=tmp_path / "c").weights_version != first.weights_version


def test_a_missing_shard_is_named(tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    path = write_directory(tensors, shards=3)
    (path / SECOND).unlink()
    with pytest.raises(WeightsError, match=rf"Shard {SECOND} is missing from .*tiny-hf.*7 tensors \(1 of 3 shards"):
        load(path, cache_dir=tmp_path / "c")
    assert not (tmp_path / "c" / "converted").exists()


@pytest.mark.parametrize("keep", [0, 5, 400, -1])
def test_an_unreadable_shard_is_named(keep: int, tensors: Tensors, write_directory: Write, tmp_path: Path) -> None:
    path = write_directory(tensors, shards=3)
    (path / SECOND).write_bytes((path / SECOND).read_bytes()[:keep])
    with pytest.raises(WeightsError, match=rf"Cannot read .*{SECOND}"):
        load(path, cache_dir=tmp_path / "c")


def test_a_tensor_that_its_shard_lacks_is_named_with_the_shard(tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors, shards=3)

    def move(index: dict[str, Any]) -> None:
        index["weight_map"]["model.embed_tokens.weight"] = SECOND

    change_index(path, move)
    with pytest.raises(WeightsError, match=rf"'model.embed_tokens.weight' is not in .*{SECOND}, where .*index.json"):
        HuggingFaceDirectory(path)


def test_a_tensor_in_no_shard_is_missing(tensors: Tensors, write_directory: Write) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"'model.layers.1.mlp.up_proj.weight' is missing"):
        HuggingFaceDirectory(write_directory(tensors, shards=3))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", "", None, 3])
def test_names_that_lead_elsewhere_are_refused(file: Any, tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors, shards=2)
    change_index(path, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    with pytest.raises(ConfigError, match=r"'lm_head.weight' lies in .*not the name of a shard"):
        weight_files(path)


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_a_map_is_refused(content: Any, tensors: Tensors, write_directory: Write) -> None:
    path = write_directory(tensors, shards=2)
    (path / INDEX_FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no weight_map"):
        weight_files(path)


def test_kinds_are_checked_in_every_shard(tensors: Tensors, write_directory: Write) -> None:
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    with pytest.raises(UnsupportedModelError, match=rf"'model.norm.weight' of .*{SECOND} is I8"):
        HuggingFaceDirectory(write_directory(tensors, shards=3))
