"""Which blocks of a fragment differ most between the reader's context and the one they were computed in.

What enters layer 1 in either context follows from its tokens (models/first_layer.py). The blocks whose values of layer
1 differ most are chosen. So a choice depends on nothing that is cached, nor on anybody else. Fragments before this one
count as if they were computed in place.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from inms_jax.memory.plan import Span

Values = Callable[[np.ndarray], np.ndarray]
"""From the tokens of a context to its values of layer 1, `[T, K, H]`."""


class RepairChoice:
    """Chooses blocks; remembers what it has chosen, since every turn of a conversation asks again."""

    REMEMBERED = 1024

    def __init__(self, values: Values, block_size: int) -> None:
        self._values = values
        self._block_size = block_size
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __call__(
        self, before: Sequence[Span], fragment: Span, root: Sequence[Span], count: int
    ) -> tuple[tuple[int, int], ...]:
        """The token ranges of the `count` blocks of `fragment` that differ most behind `before` and behind `root`.

        Blocks are those of the fragment's own form: `block_size` tokens each from its first token on.
        """
        length = len(fragment.array)
        order = self._order(
            np.concatenate([span.array for span in (*before, fragment)]),
            np.concatenate([span.array for span in (*root, fragment)]),
            length,
        )
        starts = sorted(block * self._block_size for block in order[:count])
        return tuple((start, min(start + self._block_size, length)) for start in starts)

    def _order(self, here: np.ndarray, alone: np.ndarray, length: int) -> tuple[int, ...]:
        """The blocks of the last `length` tokens of two contexts, those that differ most first."""
        digest = hashlib.blake2b(digest_size=32)
        for part in (np.array([len(here), len(alone), length]), here, alone):
            digest.update(part.astype("<i8").tobytes())
        key = digest.digest()
        found = self._known.get(key)
        if found is None:
            moved = np.square(self._values(here)[-length:] - self._values(alone)[-length:]).sum(axis=(1, 2))
            means = np.array(
                [np.sqrt(moved[i : i + self._block_size]).mean() for i in range(0, length, self._block_size)]
            )
            found = self._known[key] = tuple(np.argsort(-means, kind="stable").tolist())
            if len(self._known) > self.REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found
