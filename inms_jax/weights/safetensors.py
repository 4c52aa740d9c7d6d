"""Hugging Face directories: `config.json` and one `model.safetensors`, read as float32 rows.

Never loads a pickle. Knows nothing of tokens or of where the result is kept.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from inms_jax.errors import ConfigError, UnsupportedModelError, WeightsError
from inms_jax.models.config import ModelConfig
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
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
WEIGHTS_FILE: Final = "model.safetensors"


class HuggingFaceDirectory:
    """One model directory, checked: every tensor that its config needs is there, nothing else is."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        self.config = ModelConfig.from_hf(read_json(path / "config.json"), name=name or path.name)
        self.weights_path = weights_path(path)
        try:
            file: Any = safe_open(self.weights_path, framework="numpy")
            shapes, kinds = {}, {}
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(key)
                shapes[key], kinds[key] = tuple(part.get_shape()), part.get_dtype()
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"Cannot read {self.weights_path}: {error}.") from error
        self._file = file
        for key, kind in kinds.items():
            if kind not in _KINDS:
                raise UnsupportedModelError(
                    f"Tensor {key!r} of {self.weights_path} is {kind}; supported are {', '.join(sorted(_KINDS))}."
                )
        ignored = [key for key in shapes if key.endswith("rotary_emb.inv_freq")]  # old files; computed here
        if self.config.tie_word_embeddings:
            ignored.append("lm_head.weight")  # a copy of the embeddings
        check_tensors(self.config, shapes, self._file_name, ignored)

    def rows(self, name: str, layer: int | None) -> Iterator[np.ndarray]:
        """The tensor `name` of the tree in float32, a run of rows at a time."""
        tensor = self._file.get_slice(self._file_name(name, layer))
        count = tensor.get_shape()[0]
        for start in range(0, count, _ROWS):
            yield np.asarray(tensor[start : min(start + _ROWS, count)]).astype(np.float32)

    @staticmethod
    def _file_name(name: str, layer: int | None) -> str:
        return _NAMES[name].format(layer)


def weights_path(directory: Path) -> Path:
    """The one weights file of a directory; raises `WeightsError` saying what there is instead."""
    found = directory / WEIGHTS_FILE
    if found.is_file():
        return found
    if (directory / f"{WEIGHTS_FILE}.index.json").is_file():
        raise UnsupportedModelError(
            f"{directory} holds its weights in several files; only a single {WEIGHTS_FILE} is supported."
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{directory} has no {WEIGHTS_FILE}, only {', '.join(pickles)}: a pickle, which can run code when it"
            f" is loaded, is never read. Save the model with safetensors."
        )
    raise WeightsError(f"There is no {WEIGHTS_FILE} in {directory}.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"There is no {path.name} in {path.parent}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object.")
    return value
