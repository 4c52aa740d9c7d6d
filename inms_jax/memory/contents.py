"""Which texts have a key anywhere, whoever owns them: only to tell the operator why a block was missed.

Shared by all tenants and locked by itself, so what it says may be a moment old. Knows nothing of pages.
"""

import threading
from collections import Counter
from typing import TypeVar

from inms_jax.memory.tier import Scope

Head = tuple[int, Scope, bytes]
K = TypeVar("K")


class Contents:
    """Counts of keyed blocks by content, and by how they begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: Counter[int] = Counter()
        self._heads: Counter[Head] = Counter()

    def add(self, content: int, head: Head) -> None:
        with self._lock:
            self._contents[content] += 1
            self._heads[head] += 1

    def remove(self, content: int, head: Head) -> None:
        with self._lock:
            _decrement(self._contents, content)
            _decrement(self._heads, head)

    def has(self, content: int) -> bool:
        """Whether a block of this content has a key under some scope."""
        return content in self._contents

    def has_head(self, head: Head) -> bool:
        """Whether a block that begins like this has a key under the scope in `head`."""
        return head in self._heads


def _decrement(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
