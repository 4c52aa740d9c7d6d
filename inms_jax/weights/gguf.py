"""GGUF files: metadata to a `ModelConfig`, tensors to float32 rows in Hugging Face's row order.

Reads through the gguf library. Undoes what llama.cpp's converter did to q and k of the llama architecture.
Knows nothing of tokens (the tokenizer's metadata is handed on as it is) or of where the result is kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from inms_jax.errors import ConfigError, UnsupportedModelError, WeightsError
from inms_jax.models.config import Llama3Scaling, ModelConfig, RopeConfig
from inms_jax.weights.tree import check_tensors

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
# Files of a K kind hold the rows that are no multiple of 256 values in the kinds ending in _0 and _1.
_KINDS: Final = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
_NAMES: Final = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers/attn_norm": "blk.{}.attn_norm.weight",
    "layers/mlp_norm": "blk.{}.ffn_norm.weight",
    "layers/q": "blk.{}.attn_q.weight",
    "layers/k": "blk.{}.attn_k.weight",
    "layers/v": "blk.{}.attn_v.weight",
    "layers/o": "blk.{}.attn_output.weight",
    "layers/q_bias": "blk.{}.attn_q.bias",
    "layers/k_bias": "blk.{}.attn_k.bias",
    "layers/v_bias": "blk.{}.attn_v.bias",
    "layers/q_norm": "blk.{}.attn_q_norm.weight",
    "layers/k_norm": "blk.{}.attn_k_norm.weight",
    "layers/gate": "blk.{}.ffn_gate.weight",
    "layers/up": "blk.{}.ffn_up.weight",
    "layers/down": "blk.{}.ffn_down.weight",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_ROWS: Final = 1024  # rows dequantised at a time: bounds the memory that a conversion takes
# GGUF keeps the factors that Llama 3's scaling gives, not the numbers behind them: these, as published.
_LLAMA3: Final = tuple(
    Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    for factor in (8.0, 32.0)
)


class _Reader(gguf.GGUFReader):
    """The library's reader slices past the end of a file without a word; here that is an error at once."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, {end} are needed: truncated")
        return super()._get(offset, dtype, count, override_order)


class GgufFile:
    """One open GGUF file, checked: every tensor that its config needs is there, nothing else is."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        try:
            reader = _Reader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except FileNotFoundError as error:
            raise WeightsError(f"There is no file {path}.") from error
        except Exception as error:  # the library raises whatever numpy or the enum at hand does
            raise WeightsError(f"Cannot read {path} as GGUF: {error}.") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        for tensor in reader.tensors:
            if tensor.tensor_type.name not in _KINDS:
                raise UnsupportedModelError(
                    f"Tensor {tensor.name!r} of {path} is {tensor.tensor_type.name};"
                    f" supported are {', '.join(sorted(_KINDS))}."
                )
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path} has architecture {self.architecture!r}; supported are {', '.join(ARCHITECTURES)}."
            )
        self.config = self._read_config(name or path.stem)
        check_tensors(self.config, self._shapes(), self._file_name, ignored=(_ROPE_FACTORS,))

    def rows(self, name: str, layer: int | None) -> Iterator[np.ndarray]:
        """The tensor `name` of the tree in float32, a run of rows at a time; a vector comes in one."""
        tensor = self._tensors[self._file_name(name, layer)]
        data, kind = tensor.data, tensor.tensor_type
        if self.architecture == "llama" and name in ("layers/q", "layers/k"):
            heads = self.config.num_heads if name == "layers/q" else self.config.num_kv_heads
            data = undo_permutation(data, heads)
        if data.ndim == 1:
            yield _dequantise(data, kind)
            return
        for start in range(0, len(data), _ROWS):
            yield _dequantise(data[start : start + _ROWS], kind)

    @staticmethod
    def _file_name(name: str, layer: int | None) -> str:
        return _NAMES[name].format(layer)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()}

    def _key(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._key(key)
        if value is None:
            raise ConfigError(f"{self.path} has no metadata {self.architecture}.{key}; it is needed.")
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._need(key) if default is None else self._key(key, default)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(
                f"{self.path} has {self.architecture}.{key} = {value!r}; one positive whole number is supported."
            )
        return value

    def _read_config(self, name: str) -> ModelConfig:
        hidden, heads, context = (
            self._size(key) for key in ("embedding_length", "attention.head_count", "context_length")
        )
        head_dim = self._size("attention.key_length", hidden // heads)
        window = self._key("attention.sliding_window")
        if window is not None and 0 < window < context:
            raise UnsupportedModelError(
                f"{self.path} attends to a sliding window of {window} of {context} positions;"
                " only full attention is supported."
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._key(key, head_dim) != head_dim:
                raise UnsupportedModelError(
                    f"{self.path} has {key} {self._key(key)}; only the head size, {head_dim}, is supported."
                )
        if self._key("expert_count", 0):
            raise UnsupportedModelError(
                f"{self.path} is a mixture of {self._key('expert_count')} experts; only dense models work."
            )
        scaling = self._key("rope.scaling.type", "none")
        if scaling != "none":
            raise UnsupportedModelError(f"{self.path} has rope scaling {scaling!r}; it is not supported here.")
        embed = self._tensors.get("token_embd.weight")
        if embed is None:
            raise WeightsError(f"Tensor 'token_embd.weight' is missing from {self.path}.")
        theta = float(self._key("rope.freq_base", 10000.0))
        return ModelConfig(
            name=name,
            vocab_size=int(embed.shape[-1]),
            hidden_size=hidden,
            intermediate_size=self._size("feed_forward_length"),
            num_layers=self._size("block_count"),
            num_heads=heads,
            num_kv_heads=self._size("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=context,
            # Written as float32: the shortest decimal that gives the same float32 is what was meant.
            rms_norm_eps=float(str(np.float32(self._need("attention.layer_norm_rms_epsilon")))),
            rope=RopeConfig(theta=theta, scaling=self._read_scaling(head_dim, theta)),
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias=self.architecture == "qwen2",
            qk_norm=self.architecture == "qwen3",
        )

    def _read_scaling(self, head_dim: int, theta: float) -> Llama3Scaling | None:
        tensor = self._tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        factors = np.asarray(tensor.data, np.float32).ravel()
        for scaling in _LLAMA3:
            expected = llama3_factors(scaling, head_dim, theta)
            if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5):
                return scaling
        raise UnsupportedModelError(
            f"Tensor {_ROPE_FACTORS!r} of {self.path} is not a Llama 3 scaling by"
            f" {' or '.join(str(scaling.factor) for scaling in _LLAMA3)}; no other is supported."
        )


def undo_permutation(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's interleaved pairs to rotate-half order; rows may be quantised bytes."""
    return rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(scaling: Llama3Scaling, head_dim: int, theta: float) -> np.ndarray:
    """What each rotary frequency is divided by, [head_dim / 2]; Llama 3.1's reference `apply_scaling`."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position_embeddings / wavelength
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / scaling.factor + smooth), np.float32)


def _dequantise(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return np.asarray(gguf.dequantize(np.ascontiguousarray(data), kind), np.float32)
