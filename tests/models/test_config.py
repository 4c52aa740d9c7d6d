"""ModelConfig: presets, Hugging Face spellings of transformers 4 and 5, and what is refused."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inms_jax.errors import ConfigError, UnsupportedModelError
from inms_jax.models.config import Llama3Scaling, ModelConfig

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "models"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 300,
}
SCALING: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def family(architecture: str, **changes: Any) -> dict[str, Any]:
    kind = architecture.removesuffix("ForCausalLM").lower()
    own = {"architectures": [architecture], "model_type": kind, "rope_theta": 1e6}
    if kind == "qwen2":
        own["attention_bias"] = None  # not an attribute of this family: always there, on q, k and v
    return {**LLAMA, **own, **changes}


# Bytes in 16 bit, computed by hand: 2 * layers * kv heads * head size * 2.
@pytest.mark.parametrize(
    ("preset", "kv_bytes"),
    [
        ("smollm2-135m", 23_040),
        ("llama-2-7b", 524_288),
        ("llama-3.1-8b", 131_072),
        ("mistral-7b-v0.3", 131_072),
        ("qwen2.5-7b", 57_344),
        ("qwen3-8b", 147_456),
    ],
)
def test_preset_gives_the_published_kv_size(preset: str, kv_bytes: int) -> None:
    assert ModelConfig.from_toml(PRESETS / f"{preset}.toml").kv_bytes_per_token(2) == kv_bytes


def test_every_preset_is_listed_above_and_names_its_source() -> None:
    presets = sorted(PRESETS.glob("*.toml"))
    assert len(presets) == 6
    assert all(path.read_text().startswith('source = "') for path in presets)


def test_presets_differ_where_families_do() -> None:
    read = {path.stem: ModelConfig.from_toml(path) for path in PRESETS.glob("*.toml")}
    assert [name for name, c in read.items() if c.attention_bias] == ["qwen2.5-7b"]
    assert [name for name, c in read.items() if c.qk_norm] == ["qwen3-8b"]
    assert [name for name, c in read.items() if c.tie_word_embeddings] == ["smollm2-135m"]
    assert [name for name, c in read.items() if c.rope.scaling] == ["llama-3.1-8b"]


def test_llama_of_transformers_4() -> None:
    config = ModelConfig.from_hf(LLAMA, name="tiny")
    assert dataclasses.asdict(config) == {
        "name": "tiny",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope": {"theta": 500000.0, "scaling": None},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "qk_norm": False,
    }
    assert ModelConfig.from_dict(dataclasses.asdict(config)) == config
    assert config.queries_per_kv == 2


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_scaled_rope_agree(key: str) -> None:
    old = ModelConfig.from_hf({**LLAMA, "rope_scaling": {key: "llama3", **SCALING}})
    changed = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    parameters = {"rope_theta": 500000.0, "rope_type": "llama3", **SCALING}
    new = ModelConfig.from_hf({**changed, "dtype": "float32", "rope_parameters": parameters})
    assert old == new
    assert old.rope.scaling == Llama3Scaling(**SCALING)


def test_old_llama_without_theta_and_kv_heads_has_its_defaults() -> None:
    config = ModelConfig.from_hf({k: v for k, v in LLAMA.items() if k not in ("rope_theta", "num_key_value_heads")})
    assert (config.rope.theta, config.num_kv_heads) == (10000.0, 4)


def test_families() -> None:
    qwen2 = ModelConfig.from_hf(
        family("Qwen2ForCausalLM", use_sliding_window=False, sliding_window=1024, max_window_layers=2)
    )
    assert (qwen2.attention_bias, qwen2.qk_norm) == (True, False)
    qwen3 = ModelConfig.from_hf(family("Qwen3ForCausalLM", layer_types=["full_attention"] * 2))
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    mistral = ModelConfig.from_hf(family("MistralForCausalLM", sliding_window=2048, head_dim=32))
    assert (mistral.head_dim, mistral.attention_bias) == (32, False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "residual_multiplier": 0.2}, "residual_multiplier"),
        ({**LLAMA, "attention_bias": True}, "attention_bias = True"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias = True"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn.*depend on the length"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.*depend on the length"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope"}}, "longrope.*depend on the length"),
        ({**LLAMA, "rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "0.5"),
        (family("MistralForCausalLM", sliding_window=512), "sliding window of 512 of 2048"),
        (family("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=512), "window of 512"),
        (family("Qwen3ForCausalLM", layer_types=["sliding_attention"]), "sliding_attention"),
        (family("GemmaForCausalLM"), "GemmaForCausalLM.*LlamaForCausalLM"),
        ({**LLAMA, "architectures": None, "model_type": "gpt2"}, "gpt2"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"hidden_size": "64"}, "hidden_size.*'64'"),
        ({"num_key_value_heads": 3}, "4 and 3"),
        ({"head_dim": 15}, "even.*15"),
        ({"rope_theta": -1.0}, "-1.0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps.*0.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **SCALING, "factor": 0.5}}, "factor=0.5"),
        ({"model_type": "qwen2"}, "LlamaForCausalLM but model_type 'qwen2'"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**LLAMA, **changes})


def test_preset_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text((PRESETS / "qwen3-8b.toml").read_text().replace("qk_norm", "qk_norms"))
    with pytest.raises(ConfigError, match=r"m.toml.*qk_norms"):
        ModelConfig.from_toml(path)


def test_config_imports_no_jax() -> None:
    code = "import sys, inms_jax.models.config; sys.exit('jax' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
