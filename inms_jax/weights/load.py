"""One call from the name of a model to everything an engine needs of it, or an error and nothing.

The first load converts the files into the cache; later ones map the converted arrays and read neither weights nor
vocabulary of the original again. Knows nothing of devices.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inms_jax.errors import ConfigError
from inms_jax.models.config import ModelConfig
from inms_jax.text.chat import ChatTemplate
from inms_jax.text.tokenizer import SpecialTokens, Tokenizer, token_text
from inms_jax.weights.gguf import GgufFile
from inms_jax.weights.safetensors import HuggingFaceDirectory
from inms_jax.weights.shards import SMALL_FILES, read_json, weight_files
from inms_jax.weights.source import resolve
from inms_jax.weights.store import ConvertedModel, Rows, default_cache_dir, file_sha256


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """`params` is a tree of read-only numpy arrays with stacked layers; `weights_version` names their bytes."""

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    weights_version: str
    model_id: str


def load(
    spec: str | Path, *, dtype: str = "float32", cache_dir: Path | None = None, progress: bool = True
) -> LoadedModel:
    """Load a known model by name, a `.gguf` file, a Hugging Face directory or a model of the Hub by its id.

    Raises `WeightsError` (of which `UnsupportedModelError` is a kind) or `ConfigError`, naming the file and the
    tensor or attribute.
    """
    cache = cache_dir or default_cache_dir()
    model_id, path = resolve(spec, cache, progress=progress)
    if path.is_dir():
        digests = [file_sha256(file, cache) for file in weight_files(path).everything]
        weights_version = _combined("\n".join(digests), (path / "config.json",))
        identity = _combined(weights_version, tuple(path / name for name in SMALL_FILES))
    else:
        weights_version = identity = file_sha256(path, cache)
    converted = ConvertedModel(cache, f"{model_id}\0{identity}", dtype)
    if not converted.exists():
        config, metadata, rows = (_open_directory if path.is_dir() else _open_gguf)(path, model_id)
        converted.write(config, metadata, rows, progress=progress)
    config, metadata, params = converted.read()
    special = metadata["special"]
    template = metadata["chat_template"]
    return LoadedModel(
        config=config,
        params=params,
        tokenizer=Tokenizer(metadata["tokenizer"], SpecialTokens(**{**special, "eos_ids": tuple(special["eos_ids"])})),
        chat_template=None if template is None else ChatTemplate(**template),
        weights_version=weights_version,
        model_id=model_id,
    )


def _open_gguf(path: Path, name: str) -> tuple[ModelConfig, dict[str, Any], Rows]:
    file = GgufFile(path, name=name)
    tokenizer = Tokenizer.from_gguf_metadata(file.metadata)
    template = file.metadata.get("tokenizer.chat_template")
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    names = {"bos_token": tokenizer.token_text(tokenizer.bos_id), "eos_token": tokenizer.token_text(eos)}
    return file.config, _metadata(file.config, tokenizer, template, names), file.rows


def _open_directory(path: Path, name: str) -> tuple[ModelConfig, dict[str, Any], Rows]:
    directory = HuggingFaceDirectory(path, name=name)
    tokenizer = Tokenizer.from_hf_dir(path)
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    file = path / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # named templates; the one without tools or documents is the model's own
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    names = {key: token_text(settings.get(key)) or "" for key in ("bos_token", "eos_token")}
    return directory.config, _metadata(directory.config, tokenizer, template, names), directory.rows


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
