"""Which files hold the weights of a Hugging Face directory: one `model.safetensors`, or an index and its shards.

Knows which tensor lies in which file. Knows nothing of what tensors a model needs, nor of how a file is read.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inms_jax.errors import ConfigError, UnsupportedModelError, WeightsError

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = f"{WEIGHTS_FILE}.index.json"
# Everything else in a directory that a loaded model depends on.
SMALL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFiles:
    """`files` are the safetensors files, in order of name. `weight_map` is what the index says of each tensor's
    file; None without an index."""

    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: Mapping[str, Path] | None = None

    @property
    def everything(self) -> tuple[Path, ...]:
        """All that the weights depend on: the index, if there is one, and every file."""
        return self.files if self.index is None else (self.index, *self.files)


def weight_files(directory: Path, *, must_exist: bool = True) -> WeightFiles:
    """The files of a directory; raises `WeightsError` saying what there is instead, or which shard is missing if all
    `must_exist`."""
    single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if single.is_file():
        return WeightFiles((single,))
    if index.is_file():
        return _read_index(index, must_exist)
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{directory} has no {WEIGHTS_FILE}, only {', '.join(pickles)}: a pickle, which can run code when it"
            f" is loaded, is never read. Save the model with safetensors."
        )
    raise WeightsError(f"There is no {WEIGHTS_FILE} and no {INDEX_FILE} in {directory}.")


def _read_index(index: Path, must_exist: bool) -> WeightFiles:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ConfigError(f"{index} has no weight_map of tensor names to file names.")
    tensors: dict[str, list[str]] = {}
    for tensor, file in named.items():
        # A name from a stranger: it may not lead out of the directory.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{index} says that tensor {tensor!r} lies in {file!r}: not the name of a shard.")
        tensors.setdefault(file, []).append(tensor)
    missing = [file for file in sorted(tensors) if not (index.parent / file).is_file()]
    if missing and must_exist:
        raise WeightsError(
            f"Shard {missing[0]} is missing from {index.parent}: {index.name} says that it holds"
            f" {len(tensors[missing[0]])} tensors ({len(missing)} of {len(tensors)} shards are missing)."
            " Download the model again."
        )
    files = tuple(index.parent / file for file in sorted(tensors))
    return WeightFiles(files, index, {tensor: index.parent / file for tensor, file in named.items()})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"There is no {path.name} in {path.parent}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object.")
    return value
