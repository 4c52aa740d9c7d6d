"""A small byte-level tokenizer and a SentencePiece-like one, trained here, and the templates of model families."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from inms_jax.text.tokenizer import SpecialTokens, Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"
TEXT = [
    "The agents agreed on port 8443 for the billing service, and the frontend calls it over HTTPS.",
    "A decision is a decision: the record says who decided, when, and why. Größe, naïve, 日本語, emoji 🙂.",
    "system user assistant You are a helpful assistant. Keep your answers short. Hello there, how are you?",
]
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return Tokenizer(backend.to_str(), SpecialTokens(bos_id=0, eos_ids=(1,), add_bos=False))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> Tokenizer:
    """BPE with byte fallback, as Llama 2 and Mistral have it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(TEXT).replace(" ", "")) - set("日🙂"))
    vocab = {token: i for i, token in enumerate([*words, "\u2581", *letters, "\u2581t", "\u2581th", "he"])}
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("h", "e")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend.to_str(), SpecialTokens(bos_id=1, eos_ids=(2,), add_bos=True))


@pytest.fixture(scope="session")
def golden() -> dict[str, dict[str, list[int] | str]]:
    """Prompts of SmolLM2 with their token ids; `provenance` in the file says where they are from."""
    cases = json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 4
    return dict(cases)
