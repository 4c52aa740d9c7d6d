"""Live sequences by handle. Ids are used again, under the next generation, so a dead handle can touch nothing.

One for all tenants, locked by itself. Knows nothing of pages.
"""

import threading
from collections import OrderedDict

from inms_jax.errors import StaleHandleError
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope

_ENDS = 1000


class Registry:
    """Gives out handles and finds their sequences."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, Sequence] = {}
        self._generations: list[int] = []
        self._free_ids: list[int] = []
        # Why the last ones ended that did not end by themselves.
        self._ends: OrderedDict[SequenceHandle, str] = OrderedDict()

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
            if handle in self._ends:
                raise StaleHandleError(f"{self._ends[handle]} It was ended; register a new one.")
            known = 0 <= handle.id < len(self._generations)
            now = f"is at generation {self._generations[handle.id]}" if known else "was never given out"
            raise StaleHandleError(
                f"Sequence {handle.id} of generation {handle.generation} is not live: id {handle.id} {now}, "
                f"{len(self._live)} sequences are live. Register a new one."
            )
        return seq

    def remove(self, seq: Sequence, why: str | None = None) -> None:
        """`why`: what is said to those who still use its handle."""
        with self._lock:
            if why is not None:
                self._ends[seq.handle] = why
                if len(self._ends) > _ENDS:
                    self._ends.popitem(last=False)
            number = seq.handle.id
            del self._live[number]
            self._generations[number] += 1
            self._free_ids.append(number)
