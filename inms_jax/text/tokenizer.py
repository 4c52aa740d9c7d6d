"""Text to token ids and back, from a GGUF file's metadata or a Hugging Face `tokenizer.json`.

Built on the tokenizers library. Detokenises by bytes, so that a token that ends inside a character is held back
and the cost of a stream is linear. Adds no BOS: the engine does, once, where `add_bos` says so. Knows nothing of
messages or templates.
"""

import codecs
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from inms_jax.errors import ConfigError, InvalidRequestError, UnsupportedModelError

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL: Final = 3  # token types of GGUF
_USER_DEFINED: Final = 4
_SPARSEST: Final = 16  # ids per token; a table by id is built, which a stranger's file must not make huge


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What a generation loop must know of a vocabulary; `eos_ids` end a turn, `add_bos` asks for BOS at the head."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool


class Tokenizer:
    """One vocabulary. `backend` is the JSON form of the tokenizers library."""

    def __init__(self, backend: str, special: SpecialTokens) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_str(backend)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"The tokenizer cannot be built: {error}.") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special = special
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1
        if self.vocab_size > _SPARSEST * len(ids) + _SPARSEST:
            raise ConfigError(f"The tokenizer's {len(ids)} tokens have ids up to {self.vocab_size - 1}: it is damaged.")
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes = _token_bytes(self._backend, json.loads(backend).get("decoder"), added, self.vocab_size)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.ggml.*` entries of a GGUF file; byte-level BPE only."""

        def get(key: str, default: Any = None) -> Any:
            return metadata.get(f"tokenizer.ggml.{key}", default)

        kind, pre = get("model"), get("pre", "default")
        if kind != "gpt2":
            raise UnsupportedModelError(
                f"GGUF tokenizer {kind!r} is not supported, only 'gpt2' (byte-level BPE) is."
                " Load the model from its Hugging Face directory, which has a tokenizer.json."
            )
        tokens, merges = get("tokens"), get("merges")
        if not tokens or merges is None:
            raise ConfigError("The GGUF file has no tokenizer.ggml.tokens or no tokenizer.ggml.merges.")
        types = get("token_type", [1] * len(tokens))
        if len(types) != len(tokens):
            raise ConfigError(f"The GGUF file has {len(tokens)} tokens and {len(types)} token types: it is damaged.")
        vocab = {token: i for i, token in enumerate(tokens)}
        try:
            pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
            # Llama 3 has words in its vocabulary that its merges do not lead to.
            model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
        except Exception as error:  # ValueError here, bare Exception from the library
            raise ConfigError(f"The merges of the GGUF tokenizer are not usable: {error}.") from error
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = _pre_tokenizer(pre)
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        for special, number in ((True, _CONTROL), (False, _USER_DEFINED)):
            added = [t for t, kind in zip(tokens, types, strict=True) if kind == number]
            backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
        ends = dict.fromkeys(i for key in ("eos", "eot", "eom") if (i := get(f"{key}_token_id")) is not None)
        special_tokens = SpecialTokens(
            bos_id=get("bos_token_id"),
            eos_ids=tuple(ends),
            add_bos=bool(get("add_bos_token", pre == "llama-bpe")),
        )
        return cls(backend.to_str(), special_tokens)

    @classmethod
    def from_hf_dir(cls, path: Path) -> "Tokenizer":
        """From `tokenizer.json`, with the ids of `generation_config.json`, `config.json`, `tokenizer_config.json`."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"There is no tokenizer.json in {path}; other kinds of tokenizer are not read.")
        text = file.read_text(encoding="utf-8")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from error
        own = _read_optional(path / "tokenizer_config.json")
        configs = [_read_optional(path / name) for name in ("generation_config.json", "config.json")]

        def ids(which: str) -> tuple[int, ...]:
            found: list[int] = []
            for config in configs:
                value = config.get(f"{which}_token_id")
                found += value if isinstance(value, list) else [] if value is None else [value]
            token = token_text(own.get(f"{which}_token"))
            named = None if token is None else backend.token_to_id(token)
            return tuple(dict.fromkeys(found if named is None else [*found, named]))

        bos = next(iter(ids("bos")), None)
        head = backend.encode("a", add_special_tokens=True).ids[:1]
        return cls(text, SpecialTokens(bos_id=bos, eos_ids=ids("eos"), add_bos=bos is not None and head == [bos]))

    @property
    def bos_id(self) -> int | None:
        """The token at the head of a context, if the vocabulary has one."""
        return self.special.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self.special.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether plain text is to be preceded by `bos_id`."""
        return self.special.add_bos

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, left out of detokenised text by default."""
        return self._special_ids

    def to_json(self) -> str:
        """The tokenizers library's form, what `Tokenizer(...)` takes."""
        return str(self._backend.to_str())

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; names of special tokens in it become those tokens, nothing is added."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text is not valid Unicode at character {error.start}: {error.reason}."
            ) from error
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, skip_special=skip_special)
        return "".join([*(detokenizer.push(i) for i in ids), detokenizer.finish()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for ids above the vocabulary, which padded models have."""
        if token_id < 0:
            raise InvalidRequestError(f"Token id {token_id} is negative.")
        return self._bytes.of[token_id] if token_id < self.vocab_size else b""

    def token_text(self, token_id: int | None) -> str:
        """The name of a token as templates write it, empty for None."""
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""

    @property
    def strips_head(self) -> bool:
        """Whether text loses the space at its very start (SentencePiece vocabularies write one)."""
        return self._bytes.strips_head


class IncrementalDetokenizer:
    """Tokens of one stream to text: what `push` returns is final, and never ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_head = tokenizer.strips_head

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._strip(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What is held back, an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _strip(self, piece: bytes) -> bytes:
        if self._at_head and piece:
            self._at_head = False
            return piece.removeprefix(b" ")
        return piece


@dataclasses.dataclass(frozen=True, slots=True)
class _Bytes:
    of: tuple[bytes, ...]
    strips_head: bool


def _token_bytes(backend: Any, decoder: Mapping[str, Any] | None, added: Mapping[int, AddedToken], size: int) -> _Bytes:
    parts = [decoder or {}, *((decoder or {}).get("decoders") or [])]
    kinds = {part.get("type") for part in parts}
    unknown = kinds - {"ByteLevel", "Sequence", "Replace", "ByteFallback", "Fuse", "Strip"}
    byte_level, fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
    if unknown or byte_level == fallback:
        raise UnsupportedModelError(
            f"The tokenizer decodes by {sorted(map(str, kinds))}; only ByteLevel, and ByteFallback with"
            " Replace, Fuse and Strip, are supported."
        )
    table = _byte_level_table()

    def piece(token_id: int) -> bytes:
        text = backend.id_to_token(token_id)
        if text is None:
            return b""
        if token_id in added:
            return str(text).encode()
        if byte_level:
            return bytes(table[c] for c in text) if all(c in table for c in text) else str(text).encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return str(text).replace("\u2581", " ").encode()

    return _Bytes(tuple(piece(i) for i in range(size)), "Strip" in kinds)


def _byte_level_table() -> dict[str, int]:
    """GPT-2's one printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return whole
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    splits = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if name not in splits:
        known = ", ".join(("default", "gpt-2", "smollm", *splits))
        raise UnsupportedModelError(f"GGUF pre-tokenizer {name!r} is not supported; supported are {known}.")
    split = pre_tokenizers.Split(Regex(splits[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def token_text(value: Any) -> str | None:
    """A token of `tokenizer_config.json`: a string, or an object with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    return value if isinstance(value, dict) else {}
