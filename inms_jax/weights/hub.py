"""Models of the Hugging Face Hub: an id such as "owner/name" or "owner/name@revision" to a local directory.

Fetches through huggingface_hub (extra `hub`) into its own cache, which other programs share; only safetensors and small
text files are ever asked for. Its settings are its own: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE. Knows nothing of what the
files contain.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from inms_jax.errors import WeightsError
from inms_jax.weights.shards import INDEX_FILE, SMALL_FILES, WEIGHTS_FILE, weight_files

_ID: Final = re.compile(r"(?!.*\.\.)(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)


def is_hub_id(spec: str) -> bool:
    """Whether a text that names nothing on this disk could be the id of a model on the Hub."""
    return _ID.fullmatch(spec) is not None and not spec.endswith(".gguf")


def fetch_from_hub(spec: str) -> Path:
    """The directory of a snapshot: fetched, or what the cache holds where the Hub cannot be reached.

    Raises `WeightsError` saying what the Hub, or huggingface_hub, said.
    """
    match = _ID.fullmatch(spec)
    if match is None:
        raise WeightsError(f"{spec!r} is not the id of a model on the Hub; those look like owner/name@revision.")
    small = _snapshot(spec, match["repository"], match["revision"], [*SMALL_FILES, INDEX_FILE, WEIGHTS_FILE])
    if (small / WEIGHTS_FILE).is_file() or not (small / INDEX_FILE).is_file():
        return small
    # The directory is named after the commit: index and shards are of one commit even if the branch moves meanwhile.
    shards = [file.name for file in weight_files(small, must_exist=False).files]
    return _snapshot(spec, match["repository"], small.name, [*SMALL_FILES, INDEX_FILE, *shards])


def _snapshot(spec: str, repository: str, revision: str | None, files: Sequence[str]) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise WeightsError(
            f'Model {spec!r} is not on this disk. To fetch it from the Hugging Face Hub: pip install "inms-jax[hub]".'
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # of the Hub, of HTTP, of the cache: their one common base
        raise WeightsError(
            f"Model {spec!r} is not on this disk and cannot be had from the Hugging Face Hub:"
            f" {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
