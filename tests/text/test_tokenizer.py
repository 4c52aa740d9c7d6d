"""Tokenizers: round trips, byte-exact streams, GGUF metadata, and the real vocabulary."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from inms_jax.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from inms_jax.text.tokenizer import IncrementalDetokenizer, SpecialTokens, Tokenizer
from inms_jax.weights import load

TEXTS = [
    "Hello there, 日本語 and emoji 🙂🙂 — naïve Größe.\n\n\tTabs  and   spaces, 8443.",
    "",
    " leading and trailing ",
    "\x00\x7f\u0080\uffff\U0010ffff",
]


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(text: str, tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer) -> None:
    for each in (tokenizer, sentencepiece_tokenizer):
        assert each.decode(each.encode(text)) == text


def test_decoding_equals_the_librarys_on_random_tokens(
    tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    rng = random.Random(0)
    for each in (tokenizer, sentencepiece_tokenizer):
        backend = tokenizers.Tokenizer.from_str(each.to_json())
        for _ in range(300):
            ids = [rng.randrange(each.vocab_size) for _ in range(rng.randrange(12))]
            if each is sentencepiece_tokenizer:
                # The library shows every byte of a broken run as U+FFFD; whole characters are compared.
                ids = [i for i in ids if i < 3 or i >= 259]
            for skip in (True, False):
                assert each.decode(ids, skip_special=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b")
    parts = stream(tokenizer, ids)
    assert len(ids) > 3, "the emoji must take several tokens for this test to say anything"
    assert [part for part in parts if part] == ["a", "🙂", "b"]


def test_streams_never_show_half_a_character(tokenizer: Tokenizer) -> None:
    text = "".join(TEXTS)
    parts = stream(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_unfinished_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    parts = stream(tokenizer, ids)
    assert parts[-1] == "\ufffd"
    assert "".join(parts) == "a\ufffd"


def test_broken_bytes_do_not_hold_the_stream_back(tokenizer: Tokenizer) -> None:
    continuation = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x99")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(continuation) for _ in range(3)] == ["\ufffd"] * 3
    assert detokenizer.push(tokenizer.encode("x")[0]) == "x"


def test_special_tokens_are_parsed_and_hidden(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>Hello</s>")
    assert (ids[0], ids[-1]) == (2, 1)
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>Hello</s>"


def test_only_the_very_first_space_of_a_sentencepiece_text_goes(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode("the theory")
    assert "".join(stream(sentencepiece_tokenizer, ids)) == "the theory"
    assert stream(sentencepiece_tokenizer, [*ids, *ids])[len(ids)] == " th"


def test_ids_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""  # models pad their embeddings
    with pytest.raises(InvalidRequestError, match="-1"):
        tokenizer.token_bytes(-1)


def metadata(**changes: Any) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*letters, "12", "he", "<s>", "</s>", "[tool]", "hey"],
        "merges": ["1 2", "h e"],
        "token_type": [1] * 258 + [3, 3, 4, 1],
        "bos_token_id": 258,
        "eos_token_id": 259,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (base | changes).items()}


def test_gguf_digits_are_split_before_merges() -> None:
    assert len(Tokenizer.from_gguf_metadata(metadata()).encode("12")) == 2
    assert Tokenizer.from_gguf_metadata(metadata(pre="gpt-2")).encode("12") == [256]
    assert len(Tokenizer.from_gguf_metadata(metadata(pre="qwen2")).encode("12")) == 2
    assert Tokenizer.from_gguf_metadata(metadata(pre="llama-bpe")).encode("12") == [256]


def test_gguf_llama3_takes_whole_words_without_merges() -> None:
    assert Tokenizer.from_gguf_metadata(metadata(pre="llama-bpe")).encode("hey") == [261]
    assert Tokenizer.from_gguf_metadata(metadata()).encode("hey")[0] == 257


def test_gguf_qwen2_normalises() -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    qwen = Tokenizer.from_gguf_metadata(metadata(pre="qwen2"))
    assert qwen.encode(decomposed) == qwen.encode(composed)


def test_gguf_token_types() -> None:
    tokenizer = Tokenizer.from_gguf_metadata(metadata(eot_token_id=260))
    assert tokenizer.encode("<s>[tool]") == [258, 260]
    assert tokenizer.special_ids == {258, 259}
    assert tokenizer.decode([258, 260]) == "[tool]"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (258, (259, 260))


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_gguf_bos(changes: dict[str, Any], add_bos: bool) -> None:
    assert Tokenizer.from_gguf_metadata(metadata(**changes)).add_bos is add_bos


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "llama"}, UnsupportedModelError, "'llama'.*gpt2"),
        ({"pre": "tekken"}, UnsupportedModelError, "'tekken'.*smollm"),
        ({"tokens": None}, ConfigError, "no tokenizer.ggml.tokens"),
        ({"merges": ["q u x"]}, ConfigError, "merges"),
        ({"merges": ["zz q"]}, ConfigError, "merges"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf_metadata(metadata(**changes))


def save(path: Path, *, bos: bool) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "<end>": 2, "a": 3}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<end>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize("bos", [True, False])
def test_hf_directory_tells_whether_bos_is_added(bos: bool, tmp_path: Path) -> None:
    save(tmp_path, bos=bos)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    tokenizer = Tokenizer.from_hf_dir(tmp_path)
    assert tokenizer.special == SpecialTokens(bos_id=0, eos_ids=(2, 1), add_bos=bos)
    assert tokenizer.encode("a") == [3]


def test_hf_directory_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer.json"):
        Tokenizer.from_hf_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_hf_dir(tmp_path)
    save(tmp_path, bos=False)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer.from_hf_dir(tmp_path)


@pytest.mark.model
def test_smollm2_prompts_have_the_golden_ids(golden: dict[str, dict[str, Any]]) -> None:
    tokenizer = load("smollm2-135m-instruct", progress=False).tokenizer
    for name, case in golden.items():
        assert tokenizer.encode(case["prompt"]) == case["prompt_token_ids"], name
    assert tokenizer.decode([33, 30, 378, 3575]) == "1. The capital"
    # Digits stand alone even after several spaces: tokens of ",", " ", " ", "8" or the like, never " 8".
    assert tokenizer.token_bytes(tokenizer.encode(",  8")[-1]) == b"8"
