"""What a decoder of the Llama family is: sizes, rotary embedding, and the switches that tell families apart.

Reads Hugging Face `config.json` dictionaries and the presets in `configs/models/`. An attribute that is
neither understood nor known to be harmless is refused by name: ignoring one that matters gives nonsense.
Knows nothing of arrays, weights or files other than presets, and imports no jax.
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inms_jax.errors import ConfigError, UnsupportedModelError

# Attributes that change nothing about inference in float arithmetic of our own choosing: training settings,
# how transformers stores or runs the model, and token ids, which come from the tokenizer.
IGNORED: Final = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
_LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope", "su", "yarn"})
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's change of the rotary frequencies; independent of the length of a sequence."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.factor < 1 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"llama3 rope scaling needs factor >= 1 and 0 < low_freq_factor < high_freq_factor, got {self}."
            )
        if self.original_max_position_embeddings < 1:
            raise ConfigError(f"original_max_position_embeddings must be at least 1, got {self}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding over the whole head in the rotate-half layout; `scaling` None is the plain form."""

    theta: float
    scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ConfigError(f"rope theta must be positive and finite, got {self.theta}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model. `attention_bias`: a bias on q, k and v only (Qwen2); `qk_norm`: RMSNorm per head (Qwen3)."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, got {getattr(self, field)} for {self.name!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
                f" for {self.name!r}."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}.")
        if self.rms_norm_eps <= 0:
            raise ConfigError(f"rms_norm_eps must be positive, got {self.rms_norm_eps} for {self.name!r}.")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes in all layers. Numbers of one byte are int8, which comes with a
        float32 scale per token and kv head.
        """
        scale = 4 if dtype_bytes == 1 else 0
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * dtype_bytes + scale)

    @classmethod
    def from_toml(cls, path: str | Path) -> "ModelConfig":
        """Read a preset of `configs/models/`: exactly these fields and `source`, where they are from."""
        with open(path, "rb") as file:
            values = tomllib.load(file)
        values.pop("source", None)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of `dataclasses.asdict`."""
        try:
            rope = dict(values["rope"])
            if rope.get("scaling") is not None:
                rope["scaling"] = Llama3Scaling(**rope["scaling"])
            return cls(**{**values, "rope": RopeConfig(**rope)})
        except (TypeError, KeyError) as error:
            raise ConfigError(f"These are not the fields of ModelConfig: {error}.") from error

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str = "model") -> "ModelConfig":
        """Read a `config.json` written by transformers 4 or 5.

        Raises `UnsupportedModelError` for what is not implemented, `ConfigError` for missing or impossible
        values.
        """
        reader = _Reader(config, name)
        family = reader.family()
        hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
        context = reader.size("max_position_embeddings")
        # Only Llama's own default is "as many as heads"; other families always write the number.
        kv_heads = reader.take("num_key_value_heads") if family == "llama" else reader.size("num_key_value_heads")
        head_dim = reader.take("head_dim") or (128 if family == "qwen3" else hidden // heads)
        reader.demand("hidden_act", "silu")
        reader.demand("mlp_bias", False)
        # Qwen2 always has the qkv bias; elsewhere the attribute would also put one on the output projection.
        reader.demand("attention_bias", family == "qwen2")
        for flag in ("use_mrope", "rope_interleaved"):
            reader.demand(flag, False)
        reader.refuse_sliding_window(context)
        result = cls(
            name=name,
            vocab_size=reader.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.size("intermediate_size"),
            num_layers=reader.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=float(reader.need("rms_norm_eps")),
            rope=reader.rope(10000.0 if family == "llama" else None),
            tie_word_embeddings=bool(reader.take("tie_word_embeddings", False)),
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
        reader.finish()
        return result


_FAMILIES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class _Reader:
    """Takes attributes out of one config dictionary; what is left at the end is what nobody read."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._left = dict(config)
        self._name = name

    def take(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(key, None)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.take(key)
        if value is None:
            raise ConfigError(f"The config of {self._name!r} has no {key!r}; it is needed.")
        return value

    def size(self, key: str) -> int:
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} of {self._name!r} must be a positive whole number, got {value!r}.")
        return value

    def demand(self, key: str, only: object) -> None:
        value = self.take(key, only)
        if value != only:
            raise UnsupportedModelError(
                f"{self._name!r} has {key} = {value!r}; only {only!r} is supported for this architecture."
            )

    def family(self) -> str:
        architectures, kind = self.take("architectures", []), self.take("model_type")
        if architectures:
            found = _FAMILIES.get(architectures[0])
            if found is None or len(architectures) != 1:
                raise self._unsupported_architecture(", ".join(map(str, architectures)))
            if kind not in (None, found):
                raise ConfigError(f"{self._name!r} has architecture {architectures[0]} but model_type {kind!r}.")
            return found
        if kind not in _FAMILIES.values():
            raise self._unsupported_architecture(str(kind))
        return str(kind)

    def _unsupported_architecture(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._name!r} has architecture {what}; supported are {', '.join(_FAMILIES)}.")

    def refuse_sliding_window(self, context: int) -> None:
        used, window = self.take("use_sliding_window"), self.take("sliding_window")
        kinds = set(self.take("layer_types", ()))
        if kinds - {"full_attention"}:
            raise UnsupportedModelError(
                f"{self._name!r} has layer_types {sorted(kinds)}; only full_attention is supported."
            )
        if used is not False and window is not None and window < context:
            raise UnsupportedModelError(
                f"{self._name!r} attends to a sliding window of {window} of {context} positions;"
                " only full attention is supported."
            )

    def rope(self, default_theta: float | None) -> RopeConfig:
        # transformers 4: rope_theta and rope_scaling ("type", later "rope_type"); 5: all in rope_parameters.
        old, new = self.take("rope_scaling"), self.take("rope_parameters")
        if old is not None and new is not None and old != new:
            raise ConfigError(f"{self._name!r} has both rope_scaling {old} and rope_parameters {new}.")
        values = dict(new if new is not None else old or {})
        theta, inner = self.take("rope_theta", default_theta), values.pop("rope_theta", None)
        theta = theta if inner is None else inner
        if theta is None:
            raise ConfigError(f"The config of {self._name!r} has no 'rope_theta'; it is needed.")
        names = {values.pop(key) for key in ("rope_type", "type") if key in values} or {"default"}
        kind = names.pop() if len(names) == 1 else " / ".join(sorted(map(str, names)))
        partial = values.pop("partial_rotary_factor", self.take("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"{self._name!r} rotates a part of each head ({partial}); only 1.0 is supported."
            )
        scaling = None
        if kind == "llama3":
            try:
                scaling = Llama3Scaling(**values)
            except TypeError as error:
                raise ConfigError(f"llama3 rope scaling of {self._name!r} is {values}: {error}.") from error
        elif kind != "default" or values:
            why = " (its frequencies depend on the length of the sequence)" if kind in _LENGTH_DEPENDENT_ROPE else ""
            raise UnsupportedModelError(
                f"{self._name!r} has rope scaling {kind!r} {values}{why}; supported are none and 'llama3'."
            )
        return RopeConfig(theta=float(theta), scaling=scaling)

    def finish(self) -> None:
        unknown = sorted(key for key, value in self._left.items() if key not in IGNORED and value is not None)
        if unknown:
            raise UnsupportedModelError(
                f"The config of {self._name!r} has attributes that are not known: {', '.join(unknown)}."
                " Remove them if they change nothing about inference."
            )
