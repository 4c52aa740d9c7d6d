"""LangGraph's stores (`InMemoryStore`, or one on a database) as the long-term memory of agents. Needs the extra
`langgraph`.

Each tenant, group and agent has a namespace of its own, and none lies inside another: a search in a LangGraph
namespace finds what lies deeper, too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inms_jax.agents import Agent
from inms_jax.errors import InvalidRequestError
from inms_jax.homes import Home
from inms_jax.memory.tier import Scope, Tier
from inms_jax.memory_store import Snippet

if TYPE_CHECKING:
    from langgraph.store.base import BaseStore, SearchItem

TEXT = "text"
"""Where the text stands in the value of an item."""


class LangGraphMemory:
    """A MemoryStore on a LangGraph store; `root` is the first label of its namespaces.

    With an index in the store, a search is by meaning; without one, the items changed last are found.
    """

    def __init__(self, store: "BaseStore", root: str = "inms-jax") -> None:
        self.store = store
        self._root = root

    def remember(self, owner: "Agent | Home[Any]", key: str, text: str) -> None:
        """Keep `text` for an agent (PRIVATE), for the members of a group or for every agent of a tenant."""
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"nothing to remember as {key!r}: the text is empty")
        owner._require_open()
        self.store.put(self.namespace(owner.names), key, {TEXT: text})

    def forget(self, owner: "Agent | Home[Any]", key: str) -> None:
        """Keep it no longer. Contexts that hold it already keep it."""
        owner._require_open()
        self.store.delete(self.namespace(owner.names), key)

    def search(self, query: str, scope: Scope, k: int) -> Sequence[Snippet]:
        """The best of the agent's own, its group's and its tenant's memory together."""
        homes = [scope, Scope(scope.tenant, scope.group), Scope(scope.tenant)]
        found: list[tuple[SearchItem, Tier]] = []
        for owner in dict.fromkeys(homes):
            namespace = self.namespace(owner)
            items = self.store.search(namespace, query=query or None, limit=k)
            found += [(item, owner.tier) for item in items if item.namespace == namespace]
        # Without scores the newest; among equals the narrowest, then by key, so that the order is always the same.
        found.sort(
            key=lambda entry: (-(entry[0].score or 0.0), -entry[0].updated_at.timestamp(), -entry[1], entry[0].key)
        )
        return [_snippet(item, tier) for item, tier in found[:k]]

    def namespace(self, names: Scope) -> tuple[str, ...]:
        """Where the memory of these names is kept."""
        parts = [part for part in (names.tenant, names.group, names.agent) if part is not None]
        kind = names.tier.name.lower() + ("" if names.group is None or names.tier is Tier.GROUP else " of a group")
        return (self._root, kind, *(_label(part) for part in parts))


def _label(name: str) -> str:
    """LangGraph's labels hold no periods."""
    return name.replace("%", "%25").replace(".", "%2E").replace("\0", "%00")


def _snippet(item: "SearchItem", tier: Tier) -> Snippet:
    text = item.value.get(TEXT)
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"item {item.key!r} of {item.namespace} has no text under {TEXT!r}: {item.value!r}")
    return Snippet(item.key, item.updated_at.isoformat(), tier, text)
