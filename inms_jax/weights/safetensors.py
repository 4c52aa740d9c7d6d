"""Hugging Face directories: `config.json` and safetensors files, read as float32 rows.

Never loads a pickle. Knows nothing of tokens or of where the result is kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from inms_jax.errors import UnsupportedModelError, WeightsError
from inms_jax.models.config import ModelConfig
from inms_jax.weights.shards import read_json, weight_files
from inms_jax.weights.tree import check_tensors

_NAMES: Final = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers/attn_norm": "model.layers.{}.input_layernorm.weight",
    "layers/mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers/q": "model.layers.{}.self_attn.q_proj.weight",
    "layers/k": "model.layers.{}.self_attn.k_proj.weight",
    "layers/v": "model.layers.{}.self_attn.v_proj.weight",
    "layers/o": "model.layers.{}.self_attn.o_proj.weight",
    "layers/q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers/k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers/v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers/q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "layers/k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "layers/gate": "model.layers.{}.mlp.gate_proj.weight",
    "layers/up": "model.layers.{}.mlp.up_proj.weight",
    "layers/down": "model.layers.{}.mlp.down_proj.weight",
}
_KINDS: Final = frozenset({"F32", "F16", "BF16"})
_ROWS: Final = 1024


class HuggingFaceDirectory:
    """One model directory, checked: every tensor that its config needs is there, nothing else is."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        self.config = ModelConfig.from_hf(read_json(path / "config.json"), name=name or path.name)
        found = weight_files(path)
        shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in found.files:
            for key, shape in _read_shapes(file).items():
                if found.weight_map is None or found.weight_map.get(key, file) == file:
                    shapes[key], self._files[key] = shape, file
        for key, file in (found.weight_map or {}).items():
            if key not in shapes:
                raise WeightsError(
                    f"Tensor {key!r} is not in {file}, where {found.index} says that it is. Download the model again."
                )
        ignored = [key for key in shapes if key.endswith("rotary_emb.inv_freq")]  # old files; computed here
        if self.config.tie_word_embeddings:
            ignored.append("lm_head.weight")  # a copy of the embeddings
        check_tensors(self.config, shapes, self._file_name, ignored)

    def rows(self, name: str, layer: int | None) -> Iterator[np.ndarray]:
        """The tensor `name` of the tree in float32, a run of rows at a time.

        The file is mapped while the tensor is read and no longer: what stays mapped stays in memory.
        """
        key = self._file_name(name, layer)
        file = self._files[key]
        with _open(file) as opened:
            tensor = opened.get_slice(key)
            count = tensor.get_shape()[0]
            for start in range(0, count, _ROWS):
                yield np.asarray(tensor[start : min(start + _ROWS, count)]).astype(np.float32)

    @staticmethod
    def _file_name(name: str, layer: int | None) -> str:
        return _NAMES[name].format(layer)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"Cannot read {path}: {error}.") from error


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a file, from its header alone."""
    shapes = {}
    with _open(path) as opened:
        for key in opened.keys():  # noqa: SIM118  (not a mapping)
            part = opened.get_slice(key)
            shapes[key] = tuple(part.get_shape())
            if (kind := part.get_dtype()) not in _KINDS:
                raise UnsupportedModelError(
                    f"Tensor {key!r} of {path} is {kind}; supported are {', '.join(sorted(_KINDS))}."
                )
    return shapes
