"""Counts that vary, padded to sizes that programs were compiled for. Pure arithmetic."""

from collections.abc import Sequence

COPY_BUCKET = 8
"""Pages of the largest copy program; a plan has a power of two up to it, or whole multiples of it."""


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that holds `count`."""
    return next(size for size in sizes if count <= size)


def copies_bucket(count: int) -> int:
    """Length of the padded copy list: a power of two, or whole runs of the largest copy program."""
    if count <= COPY_BUCKET:
        return 1 << (count - 1).bit_length() if count else 0
    return -(-count // COPY_BUCKET) * COPY_BUCKET
