"""What a converted checkpoint says of itself, beside its tensors. Knows nothing of how those are kept."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from inms_jax.errors import WeightsError
from inms_jax.models.config import ModelConfig

RECORD_FILE: Final = "inms-jax.json"
FORMAT_VERSION: Final = 1

Place = Callable[[str], Any]
"""From the name of a tensor, such as "layers/q", to the `jax.sharding.Sharding` that says where it is put."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint says of itself; `weights_version` names the bytes that it holds, wherever it lies."""

    config: ModelConfig
    metadata: dict[str, Any]
    dtype: str
    model_id: str
    weights_version: str
    weight_dtype: str = "auto"
    """"int8": matrices of layers are int8 with scales, and `dtype` is that of everything else."""

    @classmethod
    def read(cls, path: Path) -> "CheckpointRecord":
        """Of the checkpoint in the directory `path`."""
        try:
            values = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT_VERSION:
                raise ValueError(f"it is not of format {FORMAT_VERSION}")
            return cls(**{**values, "config": ModelConfig.from_dict(values["config"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"Cannot read {path / RECORD_FILE}: {error}. Convert the model again.") from error

    def write(self, path: Path) -> None:
        """Into the directory `path`."""
        values = {"format": FORMAT_VERSION, **dataclasses.asdict(self)}
        (path / RECORD_FILE).write_text(json.dumps(values), encoding="utf-8")


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a converted checkpoint."""
    return (path / RECORD_FILE).is_file()
