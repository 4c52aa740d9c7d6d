"""A cache as many have it: a text is found by its tokens, whoever it belongs to and whatever stood before it.

For experiments only, to show what leaks: the keys of every engine of this process are such while the context is open.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from inms_jax.memory.index import PrefixIndex
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope


@contextmanager
def keys_of_content_alone() -> Iterator[None]:
    """Within, blocks with equal tokens of one tenant are one block."""
    intern = PrefixIndex.intern

    def by_content(self: PrefixIndex, parent: Any, scope: Scope, tokens: bytes, *rest: Any) -> Any:
        return intern(self, None, Scope(scope.tenant), tokens, *rest)

    with (
        patch.object(PrefixIndex, "intern", by_content),
        patch.object(PageStore, "shares", lambda self, node: node is not None),
    ):
        yield
