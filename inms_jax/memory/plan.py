"""What crosses from the host to the device, as frozen int32 arrays; and `Span`, what comes in from the engine.

Axis letters: T tokens, S sequences, M pages of a row, C copies. Knows nothing of who owns a page. Entries that
pad a plan to its bucket point at the null page (0) with begin == end == 0.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from inms_jax.errors import InvalidRequestError
from inms_jax.memory.tier import Scope

NULL_PAGE = 0
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """A run of prompt tokens with one owner: `scope` is its author's, `published` closes its last page.

    root: not None makes it a fragment: all but its first `link` tokens, and the ranges of tokens in `repaired`, are
        read from where they were computed directly after these spans (memory/fragment.py).
    """

    tokens: tuple[int, ...]
    scope: Scope
    published: bool = False
    name: str | None = None
    root: "tuple[Span, ...] | None" = None
    link: int = 0
    repaired: tuple[tuple[int, int], ...] = ()
    array: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Converted once per span, not once per turn: a context of 16k tokens is 0.7 ms of boxed integers.
        wide = np.asarray(self.tokens, dtype=np.int64)
        if wide.size and not (int(wide.min()) >= 0 and int(wide.max()) <= _INT32_MAX):
            raise InvalidRequestError(f"Token ids lie in 0..{_INT32_MAX}, got {int(wide.min())}..{int(wide.max())}.")
        array = wide.astype(np.int32)
        array.flags.writeable = False
        object.__setattr__(self, "array", array)

    @property
    def in_place(self) -> "Span":
        """The same text as an ordinary span."""
        return self if self.root is None else self._with(None, 0, ())

    def after(self, root: "tuple[Span, ...]", link: int, repaired: tuple[tuple[int, int], ...] = ()) -> "Span":
        """The same text as a fragment."""
        return self._with(root, link, repaired)

    def runs(self) -> "Iterator[tuple[int, int, bool]]":
        """Ranges of tokens of a fragment in order, and whether they are computed in place: the link comes first."""
        done = self.link
        yield 0, done, True
        for start, end in self.repaired:
            if start > done:
                yield done, start, False
            yield start, end, True
            done = end
        if done < len(self.array):
            yield done, len(self.array), False

    def _with(self, root: "tuple[Span, ...] | None", link: int, repaired: tuple[tuple[int, int], ...]) -> "Span":
        other = copy(self)  # the tokens were checked and converted when the span was made
        object.__setattr__(other, "root", root)
        object.__setattr__(other, "link", link)
        object.__setattr__(other, "repaired", repaired)
        return other


@dataclass(frozen=True, slots=True)
class Copy:
    """One page to copy before the step's writes."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """The next own tokens of one sequence's context, from number `start` on, and where each stands in it."""

    tokens: Int32[np.ndarray, " T"]
    start: int
    positions: Int32[np.ndarray, " T"]
    write_page: Int32[np.ndarray, " T"]
    write_slot: Int32[np.ndarray, " T"]
    copies: tuple[Copy, ...]
    is_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeSlot:
    """Where one generated token is written."""

    token: int
    position: int
    page: int
    slot: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence's line of the page table: its used entries only."""

    page: Int32[np.ndarray, " M"]
    begin: Int32[np.ndarray, " M"]
    end: Int32[np.ndarray, " M"]
    position: Int32[np.ndarray, " M"]
    shift: Int32[np.ndarray, " M"] | None = None
    """Target minus stored position of each entry; None where every page is read where it was written."""

    def __len__(self) -> int:
        return len(self.page)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of the device. Prefill: S == 1, T = chunk bucket. Decode: S == T, one row per sequence."""

    tokens: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, " T"]
    write_page: Int32[np.ndarray, " T"]
    write_slot: Int32[np.ndarray, " T"]
    page: Int32[np.ndarray, "S M"]
    begin: Int32[np.ndarray, "S M"]
    end: Int32[np.ndarray, "S M"]
    position: Int32[np.ndarray, "S M"]
    shift: Int32[np.ndarray, "S M"]
    num_entries: Int32[np.ndarray, " S"]
    copy_src: Int32[np.ndarray, " C"]
    copy_dst: Int32[np.ndarray, " C"]


def plan_prefill(chunk: PrefillChunk, row: Row, *, num_tokens: int, num_entries: int, num_copies: int) -> StepPlan:
    """The step of one chunk, padded to `num_tokens` rows, `num_entries` page entries and `num_copies` copies."""
    columns = (chunk.tokens, chunk.positions, chunk.write_page, chunk.write_slot)
    return _plan(columns, num_tokens, [row], 1, num_entries, chunk.copies, num_copies)


def plan_decode(
    slots: Sequence[DecodeSlot], rows: Sequence[Row], *, num_rows: int, num_entries: int, num_copies: int
) -> StepPlan:
    """The step that writes one token of each sequence, padded to `num_rows` sequences."""
    table = np.array([(s.token, s.position, s.page, s.slot) for s in slots], dtype=np.int32).reshape(-1, 4)
    columns = (table[:, 0], table[:, 1], table[:, 2], table[:, 3])
    copies = tuple(copy for slot in slots for copy in slot.copies)
    return _plan(columns, num_rows, rows, num_rows, num_entries, copies, num_copies)


def _plan(
    columns: tuple[np.ndarray, ...],
    num_tokens: int,
    rows: Sequence[Row],
    num_rows: int,
    num_entries: int,
    copies: Sequence[Copy],
    num_copies: int,
) -> StepPlan:
    used = max((len(row) for row in rows), default=0)
    for what, size, bucket in (
        ("tokens", len(columns[0]), num_tokens),
        ("rows", len(rows), num_rows),
        ("page entries", used, num_entries),
        ("copies", len(copies), num_copies),
    ):
        if size > bucket:
            raise InvalidRequestError(f"A step of {size} {what} does not fit its bucket of {bucket}.")
    tables = np.zeros((5, num_rows, num_entries), np.int32)
    for s, row in enumerate(rows):
        shift = np.zeros(len(row), np.int32) if row.shift is None else row.shift
        for table, values in zip(tables, (row.page, row.begin, row.end, row.position, shift), strict=True):
            table[s, : len(row)] = values
    tokens, positions, write_page, write_slot = (_pad(column, num_tokens) for column in columns)
    return StepPlan(
        tokens=tokens,
        positions=positions,
        write_page=write_page,
        write_slot=write_slot,
        page=tables[0],
        begin=tables[1],
        end=tables[2],
        position=tables[3],
        shift=tables[4],
        num_entries=_pad(np.array([len(row) for row in rows], np.int32), num_rows),
        copy_src=_pad(np.array([copy.source for copy in copies], np.int32), num_copies),
        copy_dst=_pad(np.array([copy.destination for copy in copies], np.int32), num_copies),
    )


def _pad(values: np.ndarray, length: int) -> np.ndarray:
    padded = np.zeros(length, np.int32)
    padded[: len(values)] = values
    return padded
