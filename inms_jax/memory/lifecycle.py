"""The state machines of a page and of a sequence, as tables. Knows states and events, nothing else.

FENCED is where a page would wait for the last step that may still read it. None has to: a plan holds the pages that
its step reads and writes until it is committed, that is dispatched, and every step takes the pool of pages that the one
before returned, so that no later write can overtake it. A fence is lifted in the call that sets it.
"""

import enum
from collections.abc import Mapping
from typing import TypeVar

from inms_jax.errors import StateError


class _Name(enum.Enum):
    """An enumeration whose members hash by identity: tables are looked up for every page of every turn."""

    __hash__ = object.__hash__


class PageState(_Name):
    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    CACHED = "cached"
    SUSPECT = "suspect"
    FENCED = "fenced"


class PageEvent(_Name):
    ALLOCATE = "allocate"
    SEAL = "seal"
    LAST_HOLDER_LEFT = "last holder left"
    HIT = "hit"
    WITHDRAW = "withdraw"
    RETIRE = "retire"
    FENCE_LIFTED = "fence lifted"


class SequenceState(_Name):
    NEW = "new"
    PREFILL = "prefill"
    ACTIVE = "active"
    IDLE = "idle"
    PAUSED = "paused"
    OFFLOADED = "offloaded"
    EXPIRED = "expired"
    CLOSED = "closed"


class SequenceEvent(_Name):
    BEGIN = "begin turn"
    PROMPT_DONE = "prompt done"
    FINISH = "finish turn"
    ABORT = "abort turn"
    PAUSE = "pause"
    OFFLOAD = "offload"
    RESUME = "resume"
    EXPIRE = "expire"
    RELEASE = "release"


PAGE_TRANSITIONS: Mapping[tuple[PageState, PageEvent], PageState] = {
    (PageState.FREE, PageEvent.ALLOCATE): PageState.FILLING,
    (PageState.FILLING, PageEvent.SEAL): PageState.SEALED,
    (PageState.SEALED, PageEvent.LAST_HOLDER_LEFT): PageState.CACHED,
    (PageState.CACHED, PageEvent.HIT): PageState.SEALED,
    (PageState.SEALED, PageEvent.WITHDRAW): PageState.SUSPECT,
    (PageState.FILLING, PageEvent.RETIRE): PageState.FENCED,
    (PageState.CACHED, PageEvent.RETIRE): PageState.FENCED,
    (PageState.SUSPECT, PageEvent.RETIRE): PageState.FENCED,
    (PageState.FENCED, PageEvent.FENCE_LIFTED): PageState.FREE,
}

SEQUENCE_TRANSITIONS: Mapping[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (SequenceState.NEW, SequenceEvent.BEGIN): SequenceState.PREFILL,
    (SequenceState.IDLE, SequenceEvent.BEGIN): SequenceState.PREFILL,
    (SequenceState.PREFILL, SequenceEvent.PROMPT_DONE): SequenceState.ACTIVE,
    (SequenceState.ACTIVE, SequenceEvent.FINISH): SequenceState.IDLE,
    (SequenceState.PREFILL, SequenceEvent.ABORT): SequenceState.IDLE,
    (SequenceState.ACTIVE, SequenceEvent.ABORT): SequenceState.IDLE,
    (SequenceState.NEW, SequenceEvent.PAUSE): SequenceState.PAUSED,
    (SequenceState.IDLE, SequenceEvent.PAUSE): SequenceState.PAUSED,
    (SequenceState.PAUSED, SequenceEvent.PAUSE): SequenceState.PAUSED,
    (SequenceState.PAUSED, SequenceEvent.OFFLOAD): SequenceState.OFFLOADED,
    (SequenceState.PAUSED, SequenceEvent.RESUME): SequenceState.IDLE,
    (SequenceState.OFFLOADED, SequenceEvent.RESUME): SequenceState.IDLE,
    (SequenceState.PAUSED, SequenceEvent.BEGIN): SequenceState.PREFILL,
    (SequenceState.OFFLOADED, SequenceEvent.BEGIN): SequenceState.PREFILL,
    (SequenceState.NEW, SequenceEvent.EXPIRE): SequenceState.EXPIRED,
    (SequenceState.IDLE, SequenceEvent.EXPIRE): SequenceState.EXPIRED,
    (SequenceState.PAUSED, SequenceEvent.EXPIRE): SequenceState.EXPIRED,
    (SequenceState.OFFLOADED, SequenceEvent.EXPIRE): SequenceState.EXPIRED,
    (SequenceState.NEW, SequenceEvent.RELEASE): SequenceState.CLOSED,
    (SequenceState.PREFILL, SequenceEvent.RELEASE): SequenceState.CLOSED,
    (SequenceState.ACTIVE, SequenceEvent.RELEASE): SequenceState.CLOSED,
    (SequenceState.IDLE, SequenceEvent.RELEASE): SequenceState.CLOSED,
    (SequenceState.PAUSED, SequenceEvent.RELEASE): SequenceState.CLOSED,
    (SequenceState.OFFLOADED, SequenceEvent.RELEASE): SequenceState.CLOSED,
}

S = TypeVar("S", PageState, SequenceState)
E = TypeVar("E", PageEvent, SequenceEvent)


def advance(table: Mapping[tuple[S, E], S], state: S, event: E, what: str) -> S:
    """The state after `event`. Raises StateError, naming `what`, when the table has no such transition."""
    after = table.get((state, event))
    if after is None:
        legal = sorted(e.value for s, e in table if s is state) or ["nothing"]
        raise StateError(f"{what} is {state.value!r}: {event.value!r} is not possible now, only {', '.join(legal)}.")
    return after
