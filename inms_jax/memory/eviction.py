"""The order in which cached pages are evicted. Knows page numbers only: not their keys, owners or tokens.

First what a later turn of its own agent has replaced, then pages that were never found again since they were written
(*probation*), then pages that were (*protected*), each oldest first: a flood of prompts that nobody asks for twice
passes through probation and leaves a prefix that many use where it is. Protected pages are bounded, so that what was
once popular gives way in the end. This is the segmented LRU of Karedla, Love and Wherry (1994).
"""

from collections import OrderedDict

_PROTECTED_SHARE = 0.8
"""Of the pool, at most: the rest is always there for pages that are new."""


class EvictionOrder:
    """Pages that nobody holds, the next victim first."""

    def __init__(self, num_pages: int) -> None:
        self._most_protected = int(_PROTECTED_SHARE * num_pages)
        self._superseded: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._found: set[int] = set()

    def park(self, page: int, *, superseded: bool = False) -> None:
        """Nobody holds the page any more. `superseded`: its agent's own next turn no longer has it."""
        if superseded:
            self._superseded[page] = None
        elif page in self._found:
            self._protected[page] = None
            if len(self._protected) > self._most_protected:
                oldest, _ = self._protected.popitem(last=False)
                self._found.discard(oldest)
                self._probation[oldest] = None
        else:
            self._probation[page] = None

    def found(self, page: int) -> None:
        """Somebody found the page in the index and holds it now, alone or beside others."""
        self._found.add(page)
        self._remove(page)

    def forget(self, page: int) -> None:
        """The page lost its key: whatever is written into it next begins anew."""
        self._found.discard(page)
        self._remove(page)

    def next_victim(self) -> int:
        """Raises StopIteration when nothing is cached."""
        return next(page for queue in self._queues for page in queue)

    def pages(self) -> tuple[int, ...]:
        """Every cached page, in order."""
        return tuple(page for queue in self._queues for page in queue)

    @property
    def rank(self) -> int:
        """How readily the next victim is given up: 0 replaced, 1 found by nobody, 2 found before."""
        return next(rank for rank, queue in enumerate(self._queues) if queue)

    @property
    def _queues(self) -> tuple[OrderedDict[int, None], ...]:
        return self._superseded, self._probation, self._protected

    def _remove(self, page: int) -> None:
        for queue in self._queues:
            queue.pop(page, None)
