"""Live sequences by handle. Ids are used again, under the next generation, so a dead handle can touch nothing.

One for all tenants, locked by itself. Knows nothing of pages.
"""

import threading

from inms_jax.errors import StaleHandleError
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope


class Registry:
    """Gives out handles and finds their sequences."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, Sequence] = {}
        self._generations: list[int] = []
        self._free_ids: list[int] = []

    def add(self, scope: Scope, readable: frozenset[Scope]) -> Sequence:
        with self._lock:
            if self._free_ids:
                number = self._free_ids.pop()
            else:
                number = len(self._generations)
                self._generations.append(0)
            seq = self._live[number] = Sequence(SequenceHandle(number, self._generations[number]), scope, readable)
            return seq

    def get(self, handle: SequenceHandle) -> Sequence:
        """Raises StaleHandleError for a handle whose sequence was released."""
        seq = self._live.get(handle.id)
        if seq is None or seq.handle.generation != handle.generation:
            known = 0 <= handle.id < len(self._generations)
            now = f"is at generation {self._generations[handle.id]}" if known else "was never given out"
            raise StaleHandleError(
                f"Sequence {handle.id} of generation {handle.generation} is not live: id {handle.id} {now}, "
                f"{len(self._live)} sequences are live. Register a new one."
            )
        return seq

    def remove(self, seq: Sequence) -> None:
        with self._lock:
            number = seq.handle.id
            del self._live[number]
            self._generations[number] += 1
            self._free_ids.append(number)
