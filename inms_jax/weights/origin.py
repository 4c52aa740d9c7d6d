"""The files that a model comes in: what names their bytes, and what they hold once they are opened.

Knows nothing of the forms that models are converted to.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inms_jax.errors import ConfigError
from inms_jax.models.config import ModelConfig
from inms_jax.text.chat import ChatTemplate
from inms_jax.text.tokenizer import Tokenizer, token_text
from inms_jax.weights.blocks import Rows
from inms_jax.weights.gguf import GgufFile
from inms_jax.weights.safetensors import HuggingFaceDirectory
from inms_jax.weights.shards import SMALL_FILES, read_json, weight_files
from inms_jax.weights.store import file_sha256


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    """`metadata` is the tokenizer, its special tokens and the chat template, fit for JSON."""

    config: ModelConfig
    metadata: dict[str, Any]
    rows: Rows


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """A `.gguf` file or a Hugging Face directory. `weights_version` names the bytes of the weights, `identity`
    everything that a converted model depends on."""

    model_id: str
    path: Path
    weights_version: str
    identity: str

    @classmethod
    def of(cls, model_id: str, path: Path, cache: Path) -> "Origin":
        """Reads every weight file once; their hashes are kept in `cache`."""
        if not path.is_dir():
            digest = file_sha256(path, cache)
            return cls(model_id, path, digest, digest)
        digests = [file_sha256(file, cache) for file in weight_files(path).everything]
        version = _combined("\n".join(digests), (path / "config.json",))
        return cls(model_id, path, version, _combined(version, tuple(path / name for name in SMALL_FILES)))

    def open(self) -> OpenedModel:
        """Check the files against their config; the tensors themselves are read as `rows` are asked for."""
        return (_open_directory if self.path.is_dir() else _open_gguf)(self.path, self.model_id)


def _open_gguf(path: Path, name: str) -> OpenedModel:
    file = GgufFile(path, name=name)
    tokenizer = Tokenizer.from_gguf_metadata(file.metadata)
    template = file.metadata.get("tokenizer.chat_template")
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    names = {"bos_token": tokenizer.token_text(tokenizer.bos_id), "eos_token": tokenizer.token_text(eos)}
    return OpenedModel(file.config, _metadata(file.config, tokenizer, template, names), file.rows)


def _open_directory(path: Path, name: str) -> OpenedModel:
    directory = HuggingFaceDirectory(path, name=name)
    tokenizer = Tokenizer.from_hf_dir(path)
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    file = path / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # named templates; the one without tools or documents is the model's own
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    names = {key: token_text(settings.get(key)) or "" for key in ("bos_token", "eos_token")}
    return OpenedModel(directory.config, _metadata(directory.config, tokenizer, template, names), directory.rows)


def _metadata(
    config: ModelConfig, tokenizer: Tokenizer, template: str | None, names: Mapping[str, str]
) -> dict[str, Any]:
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"The tokenizer of {config.name!r} has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}."
        )
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"The chat template of {config.name!r} is a {type(template).__name__}, not a text.")
    chat = None if template is None else {"source": template, **names}
    if chat is not None:
        ChatTemplate(**chat)  # refused now rather than after the conversion
    return {
        "tokenizer": tokenizer.to_json(),
        "special": dataclasses.asdict(tokenizer.special),
        "chat_template": chat,
    }


def _combined(digest: str, files: tuple[Path, ...]) -> str:
    parts = [digest, *(hashlib.sha256(f.read_bytes()).hexdigest() if f.is_file() else "-" for f in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
