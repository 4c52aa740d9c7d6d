"""The blocks of indexes that others than their author may read, as plain data that can outlive it.

Knows nothing of files, nor of what lies in the pages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from inms_jax.memory.index import Node, PrefixIndex
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope, Tier


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A keyed GLOBAL or GROUP page: its tokens, their scope, and which block of the list stands before it."""

    page: int
    scope: Scope
    tokens: tuple[int, ...]
    parent: int | None


def shared_blocks(indexes: Iterable[PrefixIndex]) -> list[SharedBlock]:
    """Parents before children. PRIVATE blocks, and blocks that stand behind a fragment, are left out.

    A block whose parent is not there cannot be found, so it is left out too.
    """
    blocks: list[SharedBlock] = []
    places: dict[int, int | None] = {}

    def place(node: Node | None) -> int | None:
        """Where the node stands in `blocks`, once its parents do; None when it does not belong there."""
        line: list[Node] = []
        while node is not None and id(node) not in places:
            line.append(node)
            node = node.parent
        found = None if node is None else places[id(node)]
        for child in reversed(line):
            whole = child.parent is None or found is not None
            if whole and child.page is not None and child.scope.tier is not Tier.PRIVATE and not child.bodies:
                blocks.append(SharedBlock(child.page, child.scope, _tokens(child), found))
                found = len(blocks) - 1
            else:
                found = None
            places[id(child)] = found
        return found

    for index in indexes:
        for page in index.keyed_pages():
            place(index.node_of(page))
    return blocks


def chains(blocks: Sequence[SharedBlock]) -> list[list[int]]:
    """Every way from a first block to one that nothing follows, as places in `blocks`."""
    parents = {block.parent for block in blocks}
    found = []
    for last in range(len(blocks)):
        if last not in parents:
            chain: list[int] = []
            at: int | None = last
            while at is not None:
                chain.append(at)
                at = blocks[at].parent
            found.append(chain[::-1])
    return found


def as_context(blocks: Sequence[SharedBlock]) -> list[Span]:
    """A context that is cut into exactly these blocks, one after the other: a published span closes its page."""
    return [Span(block.tokens, block.scope, published=True) for block in blocks]


def _tokens(node: Node) -> tuple[int, ...]:
    return tuple(np.frombuffer(node.tokens, np.int32).tolist())
