"""What happened to keyed pages, as numbered events for routers and other caches that follow this one.

The log keeps the latest events only. Numbers have no gap, so a reader who finds one knows that events were lost and
that it must begin anew from the page map. Knows nothing of who reads.
"""

import enum
import threading
from collections import deque
from dataclasses import dataclass, replace
from itertools import takewhile

from inms_jax.memory.tier import Scope


class KVEventKind(enum.StrEnum):
    """STORED: a page got its key. REMOVED: it lost it. CLEARED: all KV that no turn needs was forgotten."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class KVEvent:
    """The log gives `number`, from 1 on. Fingerprints are keyed digests that mean nothing outside this process.

    CLEARED comes after the REMOVED events of its pages and names no page.
    """

    kind: KVEventKind
    page: int | None = None
    fingerprint: bytes | None = None
    parent: bytes | None = None
    scope: Scope | None = None
    num_tokens: int = 0
    number: int = 0


class EventLog:
    """The latest `size` events."""

    def __init__(self, size: int) -> None:
        self._events: deque[KVEvent] = deque(maxlen=size)
        self._last = 0
        self._lock = threading.Lock()

    def add(self, event: KVEvent) -> None:
        """Number the event and keep it."""
        with self._lock:
            self._last += 1
            self._events.append(replace(event, number=self._last))

    def since(self, number: int) -> tuple[KVEvent, ...]:
        """Events after `number`, oldest first. When the first is not `number + 1`, some were lost."""
        with self._lock:
            newest_first = tuple(takewhile(lambda event: event.number > number, reversed(self._events)))
        return newest_first[::-1]
