"""Converted models in the cache directory: one `.npy` a tensor, written once, mapped read-only ever after.

Two processes that convert the same model at once are both right: each writes a directory of its own, and the one
that is renamed first is kept. Knows nothing of what the files that are converted look like.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from inms_jax.errors import WeightsError
from inms_jax.models.config import ModelConfig
from inms_jax.weights.blocks import Rows, named_dtype, tensor_blocks
from inms_jax.weights.tree import TensorSpec, nest, tensor_specs

FORMAT_VERSION: Final = 1
SPARE_BYTES: Final = 64 * 2**20


def default_cache_dir() -> Path:
    """`INMS_JAX_CACHE`, else `inms-jax` in the user's cache directory."""
    own = os.environ.get("INMS_JAX_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "inms-jax"


def progress_bar(enabled: bool) -> Progress:
    """Bytes done of bytes to do, on stderr; silent where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not (enabled and console.is_terminal), transient=True)


def file_sha256(path: Path, cache_dir: Path) -> str:
    """SHA-256 of a file, remembered by its path, size and time of change so that it is read once."""
    status = path.stat()
    stamp = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    record = cache_dir / "digests" / hashlib.sha256(stamp.encode()).hexdigest()
    if record.is_file() and len(known := record.read_text()) == 64:
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_atomically(record, digest.encode())
    return digest


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that every reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    part.write_bytes(content)
    part.replace(path)


class ConvertedModel:
    """The place of one converted model: `identity` is whatever its bytes depend on."""

    def __init__(self, cache_dir: Path, identity: str, dtype: str) -> None:
        self._dtype = named_dtype(dtype)
        key = hashlib.sha256(json.dumps([FORMAT_VERSION, identity, dtype]).encode()).hexdigest()[:32]
        self.path = cache_dir / "converted" / key

    def exists(self) -> bool:
        """Whether the model was converted before; a directory is there whole or not at all."""
        return (self.path / "model.json").is_file()

    def read(self) -> tuple[ModelConfig, dict[str, Any], dict[str, Any]]:
        """Config, metadata and the parameter tree, its arrays mapped read-only from disk."""
        try:
            record = json.loads((self.path / "model.json").read_text(encoding="utf-8"))
            config = ModelConfig.from_dict(record["config"])
            flat = {spec.name: self._map(spec) for spec in tensor_specs(config)}
        except (OSError, ValueError, KeyError) as error:
            raise WeightsError(
                f"The converted model in {self.path} is damaged ({error}). Delete that directory and load again."
            ) from error
        return config, record["metadata"], nest(flat)

    def write(self, config: ModelConfig, metadata: Mapping[str, Any], rows: Rows, *, progress: bool = False) -> None:
        """Convert every tensor that `rows(name, layer)` yields, several at a time, then publish the directory."""
        specs = tensor_specs(config)
        total = sum(int(np.prod(spec.stored_shape)) for spec in specs) * self._dtype.itemsize
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if free < total + SPARE_BYTES:
            raise WeightsError(
                f"Converting {config.name!r} needs {total:,} bytes in {self.path.parent}, {free:,} are free."
                " Make room or point INMS_JAX_CACHE elsewhere."
            )
        work = Path(tempfile.mkdtemp(prefix=".part-", dir=self.path.parent))
        try:
            with progress_bar(progress) as bar, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                task = bar.add_task(f"converting {config.name}", total=total)

                def convert(spec: TensorSpec) -> None:
                    with (work / _file_name(spec)).open("wb") as file:
                        self._write_tensor(file, spec, rows, lambda done: bar.advance(task, done))

                for _ in pool.map(convert, specs):
                    pass
            record = {"config": dataclasses.asdict(config), "metadata": dict(metadata)}
            (work / "model.json").write_text(json.dumps(record), encoding="utf-8")
            try:
                work.rename(self.path)
            except OSError:
                if not self.exists():  # else another process was first, with the same bytes
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _write_tensor(self, file: BinaryIO, spec: TensorSpec, rows: Rows, advance: Callable[[int], None]) -> None:
        # .npy pads its header so that data start at a multiple of 64 bytes: JAX on CPU then aliases the mapping.
        header = {"descr": self._disk_dtype.str, "fortran_order": False, "shape": spec.stored_shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in tensor_blocks(spec, rows, self._dtype):
            file.write(block.values.view(self._disk_dtype).data)
            advance(block.values.nbytes)

    @property
    def _disk_dtype(self) -> np.dtype[Any]:
        # .npy has no bfloat16: the bits are kept as uint16.
        return np.dtype(np.uint16) if self._dtype.kind == "V" else self._dtype

    def _map(self, spec: TensorSpec) -> np.ndarray:
        path = self.path / _file_name(spec)
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        if array.shape != spec.stored_shape or array.dtype != self._disk_dtype:
            raise ValueError(f"{path.name} is {array.dtype}{array.shape}, not {spec.stored_shape}")
        return array.view(self._dtype)


def _file_name(spec: TensorSpec) -> str:
    return spec.name.replace("/", ".") + ".npy"
