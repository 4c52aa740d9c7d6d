"""Converted models as orbax checkpoints: written tensor by tensor, restored straight to where they will be used.

A checkpoint is a directory: `inms-jax.json` (config, tokenizer, versions) and `params`, a PyTree checkpoint in Zarr
chunks that any program with orbax can restore. It is there whole or not at all. Knows nothing of the files that it was
made of.
"""

import contextlib
import logging
import math
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from inms_jax.errors import WeightsError
from inms_jax.weights.blocks import Block, Rows, named_dtype
from inms_jax.weights.record import CheckpointRecord, Place
from inms_jax.weights.store import SPARE_BYTES, progress_bar
from inms_jax.weights.stored import StoredTensor, stored_tensors
from inms_jax.weights.tree import nest

_PARAMS: Final = "params"
_CHUNK_BYTES: Final = 16 * 2**20


def read_params(path: Path, record: CheckpointRecord, dtype: str, place: Place) -> dict[str, Any]:
    """The parameter tree as `jax.Array`s of `dtype`, each device given its part.

    One tensor at a time: beside the arrays themselves the host holds about as much as the largest of them.
    """
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True))
    flat: dict[str, Any] = {}
    for tensor in stored_tensors(record.config, named_dtype(dtype), int8=record.weight_dtype == "int8"):
        wanted = ocp.ArrayRestoreArgs(sharding=place(tensor.name), global_shape=tensor.shape, dtype=tensor.dtype)
        arguments = ocp.args.PyTreeRestore(
            nest({tensor.name: 0}), restore_args=nest({tensor.name: wanted}), partial_restore=True
        )
        try:
            with _quiet_orbax():
                found = reader.restore(path / _PARAMS, args=arguments)
        except Exception as error:  # whatever orbax or tensorstore meets; the tensor is what the reader can act on
            raise WeightsError(
                f"Cannot restore tensor {tensor.name!r} of {path}: {_reason(error)}. Convert the model again."
            ) from error
        group, _, leaf = tensor.name.rpartition("/")
        flat[tensor.name] = (found[group] if group else found)[leaf].block_until_ready()
    return nest(flat)


def write_checkpoint(path: Path, record: CheckpointRecord, rows: Rows, *, progress: bool = False) -> None:
    """Convert every tensor that `rows(name, layer)` yields into a new directory, which appears when all is written.

    Raises `WeightsError` if the disk is full or a tensor cannot be read, and then leaves nothing.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = stored_tensors(record.config, named_dtype(record.dtype), int8=record.weight_dtype == "int8")
    total = sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(path.parent).free
    if free < total + SPARE_BYTES:
        raise WeightsError(
            f"Converting {record.config.name!r} needs {total:,} bytes in {path.parent}, {free:,} are free."
            " Make room or choose another place."
        )
    work = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    work.mkdir()
    bar = progress_bar(progress)
    task = bar.add_task(f"converting {record.config.name}", total=total)
    handler = _StreamHandler(lambda done: bar.advance(task, done))
    try:
        with bar, _quiet_orbax():
            registry = ocp.type_handlers.create_type_handler_registry((_Stream, handler))
            # Weights hardly compress (bfloat16 by a fifth), and are then restored two to three times slower.
            layout = {"use_ocdbt": False, "use_zarr3": True, "use_compression": False}
            writer = ocp.PyTreeCheckpointHandler(**layout, type_handler_registry=registry)
            leaves = nest({tensor.name: _Stream(tensor, rows) for tensor in tensors})
            chunks = nest({tensor.name: _chunks(tensor) for tensor in tensors})
            ocp.Checkpointer(writer).save(work / _PARAMS, args=ocp.args.PyTreeSave(leaves, save_args=chunks))
        record.write(work)
        os.rename(work, path)  # fails if another conversion was first
    except (OSError, ValueError) as error:  # of the disk, directly or as tensorstore words it
        free = shutil.disk_usage(path.parent).free
        raise WeightsError(
            f"Cannot write {path}: {_reason(error)} ({total:,} bytes are needed, {free:,} are free)."
            " Nothing was left behind."
        ) from error
    finally:
        handler.stop()
        shutil.rmtree(work, ignore_errors=True)


class _Stream:
    """A tensor that is read while it is written; for orbax an array with a shape and a dtype."""

    def __init__(self, tensor: StoredTensor, rows: Rows) -> None:
        self.tensor, self.rows = tensor, rows
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.size = math.prod(self.shape)

    def blocks(self, rows_per_block: int) -> Iterator[Block]:
        """Blocks of whole chunks, so that no chunk is written twice."""
        waiting: list[Block] = []
        for block in self.tensor.blocks(self.rows):
            waiting.append(block)
            if sum(len(b.values) for b in waiting) % rows_per_block == 0:
                yield _joined(waiting)
                waiting = []
        if waiting:
            yield _joined(waiting)


class _StreamHandler(ocp.type_handlers.NumpyHandler):
    """Writes `_Stream`s as orbax writes numpy arrays, but one after the other and block by block."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._advance = advance
        self._writing = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """Write nothing from now on: orbax's thread lives on where the caller's is interrupted or one tensor fails."""
        with self._writing:
            self._stopped = True

    async def _open_and_write(self, value: _Stream, tspec: Mapping[str, Any], ts_context: Any) -> None:
        # Nothing is awaited: tensors would take turns, and all be held at once.
        try:
            with self._step():
                array = tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context).result()
            chunk: Any = array.chunk_layout.write_chunk.shape
            rows = chunk[0 if value.tensor.spec.layers is None else 1]
            for block in value.blocks(rows):
                with self._step():
                    target = array if block.layer is None else array[block.layer]
                    target[block.start : block.start + len(block.values)].write(block.values).result()
                self._advance(block.values.nbytes)
        except BaseException:
            self._stopped = True
            raise

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        with self._writing:
            if self._stopped:
                raise _StoppedError
            yield


class _StoppedError(Exception):
    """Ends the writing of the other tensors after one has failed."""


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Without orbax's log: warnings of parts that only other checkpoints have, and errors that are raised as well."""

    def keep(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _joined(blocks: list[Block]) -> Block:
    values = blocks[0].values if len(blocks) == 1 else np.concatenate([block.values for block in blocks])
    return Block(blocks[0].layer, blocks[0].start, values)


def _chunks(tensor: StoredTensor) -> ocp.SaveArgs:
    # A chunk is of one layer, so that it is written once and a part of a matrix can be read alone.
    return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=() if tensor.spec.layers is None else (0,))


def _reason(error: Exception) -> str:
    """What the operating system said, where tensorstore says that it did; else the first line or so."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else " ".join(str(error).split())[:300].rstrip(".")
