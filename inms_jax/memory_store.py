"""Long-term memory of agents: what a store must offer, and how what it finds enters a context.

A store is asked in the names of the handle that asks, never in names that stand in a request. What it returns has the
tier that its author gave it: GLOBAL and GROUP snippets enter as published text, as fragments where the engine may read
them, so that a snippet that many agents recall is stored once; PRIVATE ones are the agent's own text. Knows no store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from inms_jax.engine.segment import Published, Segment
from inms_jax.errors import InvalidRequestError, VisibilityError
from inms_jax.memory.tier import Scope, Tier
from inms_jax.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of long-term memory. `version` changes with the text; a new version is another text in a context."""

    id: str
    version: str
    tier: Tier
    text: str


@runtime_checkable
class MemoryStore(Protocol):
    """Where agents' long-term memory is kept."""

    def search(self, query: str, scope: Scope, k: int) -> Sequence[Snippet]:
        """The at most `k` best snippets for `query` among those that `scope` may read, the best first.

        `scope` holds the names of the agent that asks, of its group (None without one) and of its tenant. A store
        that returns a snippet of someone else's has published it to this scope.
        """


def found_in(store: MemoryStore, query: str, scope: Scope, k: int) -> tuple[Snippet, ...]:
    """What a store found, checked."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidRequestError(f"k snippets are at least 1, got {k!r}")
    found = tuple(store.search(query, scope, k))
    if len(found) > k:
        raise InvalidRequestError(f"the store returned {len(found)} snippets, {k} were asked for")
    for snippet in found:
        if not isinstance(snippet, Snippet) or not snippet.text:
            raise InvalidRequestError(f"a store returns Snippets with a text, got {snippet!r}")
        if snippet.tier is Tier.GROUP and scope.group is None:
            raise VisibilityError(f"snippet {snippet.id!r} belongs to a group, and agent {scope.agent!r} is in none")
    return found


def as_text(snippet: Snippet, role: str, shelf: Shelf, *, fragments: bool) -> Segment | Published:
    """A snippet as it enters a context of a reader of `shelf`."""
    if snippet.tier is Tier.PRIVATE:
        return Segment(snippet.text, role=role)
    owner = shelf if snippet.tier is Tier.GROUP or shelf.outer is None else shelf.outer
    return owner.unlisted(f"memory {snippet.id} version {snippet.version}", snippet.text, role, fragment=fragments)
