"""How many pages a set of contexts needs: arithmetic on lengths, scopes and block size.

Imports nothing from the rest of the package, so that it can be wrong only in its own way: the manager is tested
against it. The rules, once more and independently:

- A token's effective tier is the narrowest of its own and all before it; its effective scope is that of the last
  text with this tier.
- Blocks end after `block_size` tokens, where the effective tier changes, and at the end of a published piece whose
  effective tier is not private.
- A block that ended is *complete* and is stored once for all contexts with the same scope, the same tokens in it and
  the same blocks before it. A last block that may still grow belongs to its holder alone.
- Of a fragment the first `link` tokens and the `repaired` ranges are its reader's text. The rest takes the blocks that
  hold it in a context of the root and the fragment alone; no other block of that context is held.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

PRIVATE = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens of one author: equal `identity` means equal tokens. `tier`: 0 global, 1 group, 2 private."""

    identity: Hashable
    length: int
    tier: int
    scope: Hashable
    published: bool = False
    root: "tuple[Piece, ...] | None" = None
    """Not None: a fragment after these pieces."""
    link: int = 0
    repaired: tuple[tuple[int, int], ...] = ()

    @property
    def borrowed(self) -> list[tuple[int, int]]:
        """Ranges of a fragment that are not its reader's text."""
        ends = [self.link, *(end for _, end in self.repaired)]
        starts = [*(start for start, _ in self.repaired), self.length]
        return [(a, b) for a, b in zip(ends, starts, strict=True) if a < b]


@dataclass(frozen=True, slots=True)
class Context:
    """What one sequence holds. Sequences that share an unfinished last page (a fork that wrote nothing) have one
    `holder`."""

    pieces: tuple[Piece, ...]
    holder: Hashable


def predict_pages(contexts: Iterable[Context], block_size: int) -> int:
    """Distinct blocks of all contexts together."""
    numbers: dict[Hashable, int] = {}
    held: set[int] = set()

    def number(context: Context, *ranges: tuple[int, int]) -> None:
        """Count the blocks of a context that hold one of its own tokens in one of the ranges."""
        before = start = end = 0
        for scope, content, holder in _blocks(context, block_size):
            before = numbers.setdefault((before, scope, content, holder), len(numbers) + 1)
            start, end = end, end + sum(taken for _, _, taken in content)
            if any(low < end and start < high for low, high in ranges):
                held.add(before)

    for context in contexts:
        number(context, (0, sum(piece.length for piece in context.pieces)))
        for piece in context.pieces:
            if piece.root is not None:
                alone = (*(replace(part, published=True) for part in piece.root), replace(piece, root=None))
                before = sum(part.length for part in piece.root)
                number(Context(alone, None), *((before + low, before + high) for low, high in piece.borrowed))
    return len(held)


Content = tuple[tuple[Hashable, int, int], ...]


def _blocks(context: Context, block_size: int) -> list[tuple[Hashable, Content, Hashable]]:
    """Per block of the own text: its scope, what is in it, and its holder when it is not complete."""
    done: list[tuple[Hashable, Content, Hashable]] = []
    content: list[tuple[Hashable, int, int]] = []
    bodies: list[tuple[Hashable, int, int]] = []  # that the next token stands after
    room, tier, scope = block_size, 0, None

    def close() -> None:
        nonlocal content, room
        if content:
            done.append((scope, tuple(content), None))
        content, room = [], block_size

    for piece in context.pieces:
        if piece.length == 0:
            continue
        if piece.tier > tier:
            close()
        if piece.tier >= tier:
            tier, scope = piece.tier, piece.scope
        offset = 0
        for low, high in [*(piece.borrowed if piece.root is not None else ()), (piece.length, piece.length)]:
            while offset < low:
                taken = min(room, low - offset)
                content += [*bodies, (piece.identity, offset, taken)]
                bodies = []
                offset, room = offset + taken, room - taken
                if room == 0:
                    close()
            if low < high:
                bodies.append(((piece.identity, piece.root, low, high), 0, 0))
            offset = high
        if piece.root is None and piece.published and tier < PRIVATE:
            close()
    if content:
        done.append((scope, tuple(content), ("unfinished", context.holder)))
    return done
