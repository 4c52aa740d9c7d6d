"""Make the golden logits: tiny models of each family, run by transformers in float32.

    python -m tests.goldens.make

Needs torch and transformers, which the tests do not. The committed files were made with transformers 5.24.0 and
torch 2.13.0 on CPU. Weights are drawn by `rule.py`; a file holds the config, the tokens and all logits.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

from tests.goldens.rule import tensor

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
# Wavelengths of a 16-wide head with theta 1e4 run from 6 to 2e4: some are kept, one is blended, others divided.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mha": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama_gqa_tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama3_rope": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
}
LENGTH = 80


def main() -> None:
    folder = Path(__file__).parent
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], LENGTH, dtype=np.int32)
    for name, (family, changes) in MODELS.items():
        config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(tensor(key, tuple(parameter.shape))))
            logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
        text = json.dumps({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}, sort_keys=True)
        np.savez_compressed(folder / f"{name}.npz", config=np.array(text), tokens=tokens, logits=logits)
        print(name, logits.shape, float(np.abs(logits).max()))


if __name__ == "__main__":
    main()
