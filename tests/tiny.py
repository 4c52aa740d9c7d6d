"""A complete model that loads in milliseconds: random weights, a byte tokenizer, ChatML. For tests of the engine."""

import functools
import json
from typing import Any

import jax
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from inms_jax.llm import LLM
from inms_jax.models.config import ModelConfig, RopeConfig
from inms_jax.models.llama import random_params
from inms_jax.text.chat import ChatTemplate
from inms_jax.text.tokenizer import SpecialTokens, Tokenizer
from inms_jax.weights import LoadedModel

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """One token per byte, then <|im_start|> = 256 and <|im_end|> = 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    special = SpecialTokens(bos_id=256, eos_ids=(257,), add_bos=False)
    return Tokenizer(json.dumps(json.loads(backend.to_str())), special)


@functools.cache
def tiny_model() -> LoadedModel:
    """Two layers, grouped queries, 1024 positions; float32 with fixed random weights."""
    config = ModelConfig(
        name="tiny",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(theta=10000.0),
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        attention_bias=False,
        qk_norm=False,
    )
    params = jax.tree.map(np.asarray, random_params(config, jax.random.key(7)))
    return LoadedModel(
        config=config,
        params=params,
        tokenizer=tiny_tokenizer(),
        chat_template=ChatTemplate(CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>"),
        weights_version="random-7",
        model_id="tiny",
    )


def tiny_llm(**options: Any) -> LLM:
    """An engine on the tiny model: blocks of 16, room for 127 pages, unless `options` say otherwise."""
    page = 2 * 2 * 2 * 16 * 4 * options.get("block_size", 16)
    pages = options.pop("num_pages", 128)
    defaults = {"block_size": 16, "kv_cache_memory": pages * page, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLM(tiny_model(), **{**defaults, **options})
