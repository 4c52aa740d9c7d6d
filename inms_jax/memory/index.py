"""The prefix index: fingerprint -> page, with the tokens compared on each lookup.

A `Node` is one block after one exact chain of blocks. Nodes are interned: the digest only finds the candidate, then
tokens, scope and the parent node are compared, so a collision of the hash function is a miss and never a wrong page.
A node outlives its page while a sequence or a later block refers to it. Knows nothing of reference counts or states.
"""

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

from inms_jax.memory.contents import Contents, Head
from inms_jax.memory.events import EventLog, KVEvent, KVEventKind
from inms_jax.memory.eviction import EvictionOrder
from inms_jax.memory.fingerprint import Fingerprints
from inms_jax.memory.policy import MissReason
from inms_jax.memory.tier import Scope, Tier

# A miss after at least this many shared tokens is reported as `sub_block`: the smallest block size, as int32 bytes.
_HEAD_BYTES = 16 * 4


@dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """One block after one chain. `page` when it is indexed, `claimant` (a sequence id) while it is computed."""

    digest: bytes
    parent: "Node | None"
    scope: Scope
    tokens: bytes
    content: int
    bodies: bytes = b""
    # Kept alive, so that no other fragment takes their digests while keys are made of these.
    fragments: "tuple[Node, ...]" = ()
    page: int | None = None
    claimant: int | None = None

    @property
    def head(self) -> Head:
        parent = 0 if self.parent is None else self.parent.content
        return parent, self.scope, self.tokens[:_HEAD_BYTES]


Made = tuple[Node | None, Scope, bytes, bytes, tuple[Node, ...]]
"""What makes a node: parent, scope, tokens, and the fragments inside."""


class PrefixIndex:
    """Keyed pages of one tenant, and in `orders`, by tier, those of them that nobody holds."""

    def __init__(self, fingerprints: Fingerprints, contents: Contents, events: EventLog, *, num_pages: int) -> None:
        self._fingerprints = fingerprints
        self._all_contents = contents
        self._events = events
        self.orders = {tier: EvictionOrder(num_pages) for tier in Tier}
        self._nodes: WeakValueDictionary[bytes, Node] = WeakValueDictionary()
        # The same nodes by all that makes them: what is known already is found without a digest of it.
        self._known: WeakValueDictionary[Made, Node] = WeakValueDictionary()
        self._by_page: dict[int, Node] = {}
        self._by_scope: dict[Scope, set[int]] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._evicted_memory = 4 * num_pages

    def intern(
        self,
        parent: Node | None,
        scope: Scope,
        tokens: bytes,
        bodies: bytes = b"",
        fragments: "tuple[Node, ...]" = (),
    ) -> Node | None:
        """The node of a block after `parent`.

        `bodies` says which `fragments`, given by their last blocks, stand inside the block, and where.
        None when another block has its digest: it cannot be shared.
        """
        key = (parent, scope, tokens, bodies, fragments)
        known = self._known.get(key)
        if known is not None:
            return known
        digest = self._fingerprints.block(scope, None if parent is None else parent.digest, tokens, bodies)
        node = self._nodes.get(digest)
        if node is None:
            content = hash((0 if parent is None else parent.content, tokens, bodies))
            node = self._nodes[digest] = Node(digest, parent, scope, tokens, content, bodies, fragments)
        # Nodes are equal when they are the same.
        elif (node.parent, node.scope, node.tokens, node.bodies, node.fragments) != key:
            return None
        self._known[key] = node
        return node

    def publish(self, node: Node, page: int) -> None:
        node.page = page
        self._by_page[page] = node
        self._by_scope.setdefault(node.scope, set()).add(page)
        self._all_contents.add(node.content, node.head)
        self._evicted.pop(node.digest, None)
        self._log(KVEventKind.STORED, node, page)

    def withdraw(self, page: int) -> None:
        """Forget the key of a page."""
        node = self._by_page.pop(page)
        node.page = None
        pages = self._by_scope[node.scope]
        pages.discard(page)
        if not pages:
            del self._by_scope[node.scope]
        self._all_contents.remove(node.content, node.head)
        self.orders[node.scope.tier].forget(page)
        self._log(KVEventKind.REMOVED, node, page)

    def forget(self, scope: Scope) -> None:
        """Drop what was cached for making keys under a scope that is closed."""
        self._fingerprints.forget(scope)

    def note_eviction(self, page: int) -> None:
        """Remember, for the miss reason, that this page's block was evicted; a bounded number is remembered."""
        self._evicted[self._by_page[page].digest] = None
        if len(self._evicted) > self._evicted_memory:
            self._evicted.popitem(last=False)

    def pages_of(self, scope: Scope) -> tuple[int, ...]:
        return tuple(self._by_scope.get(scope, ()))

    def node_of(self, page: int) -> Node | None:
        return self._by_page.get(page)

    def keyed_pages(self) -> tuple[int, ...]:
        return tuple(self._by_page)

    def miss_reason(self, node: Node) -> MissReason:
        """Why a complete block is not in the index."""
        if node.digest in self._evicted:
            return MissReason.EVICTED
        if self._all_contents.has(node.content):
            return MissReason.SCOPE
        if len(node.tokens) >= _HEAD_BYTES and self._all_contents.has_head(node.head):
            return MissReason.SUB_BLOCK
        return MissReason.NO_PREFIX

    def _log(self, kind: KVEventKind, node: Node, page: int) -> None:
        parent = None if node.parent is None else node.parent.digest
        self._events.add(KVEvent(kind, page, node.digest, parent, node.scope, len(node.tokens) // 4))
