"""Tiny models as files: one set of random tensors in Hugging Face's form, written as GGUF or safetensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES = {"D": 64, "F": 96, "L": 2, "N": 4, "K": 2, "H": 16, "V": 260}
WIDE = {"D": 256, "F": 512, "L": 2, "N": 4, "K": 2, "H": 64, "V": 260}  # rows of whole 256-value blocks
HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
}
TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}"


def byte_vocab() -> list[str]:
    """256 single bytes in GPT-2's letters, one merge, and three control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, "he", "<s>", "</s>", "<u>"]


def make_tensors(seed: int = 0, sizes: dict[str, int] = SIZES) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names, [out, in], untied."""
    s = sizes
    shapes = {
        "attn_norm": (s["D"],),
        "ffn_norm": (s["D"],),
        "attn_q": (s["N"] * s["H"], s["D"]),
        "attn_k": (s["K"] * s["H"], s["D"]),
        "attn_v": (s["K"] * s["H"], s["D"]),
        "attn_output": (s["D"], s["N"] * s["H"]),
        "ffn_gate": (s["F"], s["D"]),
        "ffn_up": (s["F"], s["D"]),
        "ffn_down": (s["D"], s["F"]),
    }
    rng = np.random.default_rng(seed)
    named = {
        "model.embed_tokens.weight": (s["V"], s["D"]),
        "model.norm.weight": (s["D"],),
        "lm_head.weight": (s["V"], s["D"]),
    }
    for layer in range(s["L"]):
        named |= {f"model.layers.{layer}.{HF_NAMES[key]}": shape for key, shape in shapes.items()}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in named.items()}


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    key = next(key for key, value in HF_NAMES.items() if value == rest)
    return f"blk.{layer}.{key}.weight"


def permute(w: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture (its `LlamaModel.permute`)."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return make_tensors()


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a llama GGUF; `kind` quantises the matrices, `change` may alter the writer or the tensors.

    Matrices of uint8 are raw blocks of `kind`, written as they are.
    """

    def write(
        tensors: dict[str, np.ndarray],
        *,
        kind: str = "F32",
        sizes: dict[str, int] = SIZES,
        architecture: str = "llama",
        name: str = "tiny.gguf",
        change: Change | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        s = sizes
        writer.add_context_length(512)
        writer.add_embedding_length(s["D"])
        writer.add_block_count(s["L"])
        writer.add_feed_forward_length(s["F"])
        writer.add_head_count(s["N"])
        writer.add_head_count_kv(s["K"])
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        vocab = byte_vocab()
        writer.add_token_list(vocab)
        writer.add_token_types([1] * (len(vocab) - 3) + [3] * 3)
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
        writer.add_chat_template(TEMPLATE)
        data = {gguf_name(key): value for key, value in tensors.items()}
        if architecture == "llama":
            for layer in range(s["L"]):
                for part, heads in (("q", s["N"]), ("k", s["K"])):
                    key = f"blk.{layer}.attn_{part}.weight"
                    data[key] = permute(data[key], heads)
        if change is not None:
            change(writer, data)
        for key, value in data.items():
            own = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
            blocks = value if value.dtype == np.uint8 else gguf.quantize(value, own)
            writer.add_tensor(key, blocks, raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def hf_config(**changes: Any) -> dict[str, Any]:
    s = SIZES
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s["V"],
        "hidden_size": s["D"],
        "intermediate_size": s["F"],
        "num_hidden_layers": s["L"],
        "num_attention_heads": s["N"],
        "num_key_value_heads": s["K"],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        **changes,
    }


def write_shards(path: Path, tensors: dict[str, np.ndarray], count: int) -> None:
    """Neighbouring tensors in different files, and an index as the Hub has it."""
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::count]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def write_directory(tmp_path: Path) -> Callable[..., Path]:
    """Write a Hugging Face directory; with `shards` the tensors are dealt to that many files and an index."""

    def write(tensors: dict[str, np.ndarray], *, shards: int = 0, name: str = "tiny-hf", **changes: Any) -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(hf_config(**changes)))
        if shards:
            write_shards(path, tensors, shards)
        else:
            save_file(tensors, path / "model.safetensors")
        vocab = {token: i for i, token in enumerate(byte_vocab())}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<s>", "</s>", "<u>"])
        backend.save(str(path / "tokenizer.json"))
        settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return path

    return write
