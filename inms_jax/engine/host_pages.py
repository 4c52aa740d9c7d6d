"""Copies in host memory of pages that paused agents have given up, and their way back.

Content is kept by the key of its block, so it can only come back as the very same block of the same sequence. Engine
thread only. Knows nothing of why an agent pauses.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from inms_jax.memory.manager import MemoryManager, SequenceHandle


@runtime_checkable
class PageTransfer(Protocol):
    """What moves whole pages between the device and the host: the runner."""

    def read_pages(self, pages: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values."""

    def write_pages(self, pages: Sequence[int], k: np.ndarray, v: np.ndarray) -> None:
        """The same, back."""


class HostPages:
    """Pages of each sequence that has some in host memory."""

    def __init__(self, memory: MemoryManager, device: PageTransfer) -> None:
        self._memory = memory
        self._device = device
        self._kept: dict[SequenceHandle, dict[bytes, tuple[np.ndarray, np.ndarray]]] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return sum(k.nbytes + v.nbytes for kept in self._kept.values() for k, v in kept.values())

    def offload(self, handle: SequenceHandle) -> int:
        """Copy the private pages of a paused sequence and let the device have them; the number of pages."""
        copied: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}

        def download(pages: list[int], keys: list[bytes]) -> None:
            k, v = self._device.read_pages(pages)
            copied.update({key: (k[i].copy(), v[i].copy()) for i, key in enumerate(keys)})

        count = self._memory.offload(handle, download)
        if copied:
            self._kept.setdefault(handle, {}).update(copied)
        return count

    def restore(self, handle: SequenceHandle) -> None:
        """Bring back what the turn of this sequence needs next, if it has anything here."""
        kept = self._kept.get(handle)
        if kept is None:
            return

        def upload(pages: list[int], keys: list[bytes]) -> None:
            content = [kept[key] for key in keys]
            self._device.write_pages(pages, np.stack([k for k, _ in content]), np.stack([v for _, v in content]))

        self._memory.restore(handle, upload)

    def forget(self, handle: SequenceHandle) -> None:
        """The sequence has ended, or has its pages back."""
        self._kept.pop(handle, None)
