"""Where a snapshot lies on disk: numbered versions in one folder, of which the latest complete one counts.

A version is written beside the one before, takes effect in one step, and only then is the older one removed: whatever
is killed when, there is a complete version to read. Knows nothing of what is saved. (orbax)
"""

import hashlib
import importlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from inms_jax.errors import SnapshotError

_BITS, _MANIFEST = "bits", "manifest"


def write(folder: Path, manifest: dict[str, Any], arrays: dict[str, Shaped[np.ndarray, "..."]]) -> None:
    """Make `manifest` (JSON) and `arrays` the latest version. Raises SnapshotError."""
    ocp = _orbax()
    bits = {name: _bits(array) for name, array in arrays.items()}
    shapes = {name: [str(array.dtype), *array.shape] for name, array in bits.items()}
    manifest = {**manifest, "arrays": shapes, "digest": _digest(bits)}
    options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True, enable_async_checkpointing=False)
    try:
        with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
            # One more than any that was begun: a version that was killed keeps its number.
            begun = [int(path.name.split(".")[0]) for path in folder.iterdir() if path.name.split(".")[0].isdecimal()]
            parts: dict[str, Any] = {_MANIFEST: ocp.args.JsonSave(manifest)}
            parts |= {name: ocp.args.StandardSave({_BITS: array}) for name, array in bits.items()}
            manager.save(max(begun, default=0) + 1, args=ocp.args.Composite(**parts))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{folder}: the snapshot cannot be written: {error}") from error


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Shaped[np.ndarray, "..."]]]:
    """The latest complete version; arrays as unsigned integers of their own width. Raises SnapshotError."""
    ocp = _orbax()
    if not folder.is_dir():
        raise SnapshotError(f"{folder}: there is no such folder: make a snapshot with llm.save")
    try:
        with ocp.CheckpointManager(folder.absolute()) as manager:
            latest = manager.latest_step()
            if latest is None:
                raise SnapshotError(f"{folder}: holds no complete snapshot: make one with llm.save")
            found = manager.restore(latest, args=ocp.args.Composite(**{_MANIFEST: ocp.args.JsonRestore()}))
            manifest = dict(found[_MANIFEST])
            shapes = manifest.pop("arrays")
            arrays: dict[str, np.ndarray] = {}
            # One after the other: of several reads at once, those behind the first that fails outlive their loop.
            for name, (dtype, *shape) in shapes.items():
                like = ocp.args.StandardRestore({_BITS: np.zeros(shape, dtype)})
                found = manager.restore(latest, args=ocp.args.Composite(**{name: like}))
                arrays[name] = np.asarray(found[name][_BITS])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{folder}: the snapshot cannot be read: {error}") from error
    if _digest(arrays) != manifest.pop("digest"):
        raise SnapshotError(f"{folder}: the pages are not those that were saved: the snapshot was damaged")
    return manifest, arrays


def _orbax() -> Any:
    return importlib.import_module("orbax.checkpoint")  # a third of a second, for those who save or restore


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
