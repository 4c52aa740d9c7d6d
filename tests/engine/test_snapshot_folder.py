"""A folder of snapshots: whatever is killed when, the latest complete version is there, whole."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from inms_jax.engine import snapshot_folder
from inms_jax.errors import SnapshotError

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from pathlib import Path
import numpy as np
from inms_jax.engine import snapshot_folder
for n in range(1, 10_000):
    pages = {name: np.full((40, 5000), n, np.uint32) for name in ("k", "v")}
    snapshot_folder.write(Path(sys.argv[1]), {"n": n, "text": "x" * n}, pages)
    print(n, flush=True)
"""


def check(folder: Path) -> int:
    """The number of the version that is read; it must be whole."""
    manifest, arrays = snapshot_folder.read(folder)
    n = int(manifest["n"])
    assert manifest["text"] == "x" * n
    for name in ("k", "v"):
        assert arrays[name].shape == (40, 5000)
        assert (arrays[name] == n).all()
    return n


def test_a_save_that_is_killed_anywhere_leaves_a_complete_version(tmp_path: Path) -> None:
    """What a killed process leaves is what a stopped one shows: the folder is copied at many moments of many saves."""
    folder = tmp_path / "kv"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    unfinished = 0
    try:
        done = int(writer.stdout.readline())
        random = np.random.default_rng(3)
        for number in range(20):
            time.sleep(float(random.uniform(0, 0.12)))
            writer.send_signal(signal.SIGSTOP)
            copy = tmp_path / f"copy {number}"
            shutil.copytree(folder, copy)
            unfinished += len(list(copy.iterdir())) > 1
            writer.send_signal(signal.SIGCONT)
            read = check(copy)
            assert read >= done, "an older version than one that was complete"
            done = read
            shutil.rmtree(copy)
        assert unfinished > 0, "no copy was made in the middle of a save"
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    last = check(folder)
    assert last >= done
    pages = {name: np.full((40, 5000), last + 1, np.uint32) for name in ("k", "v")}
    snapshot_folder.write(folder, {"n": last + 1, "text": "x" * (last + 1)}, pages)
    assert check(folder) == last + 1


@pytest.mark.parametrize("part", ["JsonCheckpointHandler", "StandardCheckpointHandler"])
def test_a_save_that_fails_leaves_the_version_before(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    snapshot_folder.write(folder, {"n": 1}, {"k": np.ones(3, np.float32)})

    async def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(ocp, part), "async_save", full)
        with pytest.raises(SnapshotError, match="cannot be written: no space left"):
            snapshot_folder.write(folder, {"n": 2}, {"k": np.zeros(3, np.float32)})
    manifest, arrays = snapshot_folder.read(folder)
    assert manifest == {"n": 1}
    assert arrays["k"].view(np.float32).tolist() == [1, 1, 1]
    snapshot_folder.write(folder, {"n": 3}, {})
    assert snapshot_folder.read(folder) == ({"n": 3}, {})


def test_a_version_whose_pages_were_exchanged_is_refused(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        snapshot_folder.write(tmp_path / name, {"n": 1}, {"k": np.full((8, 100), value, np.uint16)})
    for folder in (tmp_path / "a", tmp_path / "b"):
        snapshot_folder.read(folder)
    shutil.rmtree(tmp_path / "a" / "1" / "k")
    shutil.copytree(tmp_path / "b" / "1" / "k", tmp_path / "a" / "1" / "k")
    with pytest.raises(SnapshotError, match="are not those that were saved"):
        snapshot_folder.read(tmp_path / "a")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_bits_are_kept_whatever_number_they_are(dtype: Any, tmp_path: Path) -> None:
    bits = np.random.default_rng(1).integers(0, 256, (3, 4 * np.dtype(dtype).itemsize), np.uint8)  # NaN among them
    snapshot_folder.write(tmp_path / "kv", {}, {"k": bits.view(dtype)})
    assert snapshot_folder.read(tmp_path / "kv")[1]["k"].tobytes() == bits.tobytes()
