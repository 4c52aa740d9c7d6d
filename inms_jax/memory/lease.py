"""Leases: how long a sequence lives that nobody uses, and for how long a pause keeps its KV. Owns no clock.

Times are seconds of any clock that only goes forward, given by the caller. Knows nothing of pages.
"""

from dataclasses import dataclass

from inms_jax.errors import InvalidRequestError
from inms_jax.memory.stats import SequenceHandle
from inms_jax.memory.tier import Scope


@dataclass(slots=True)
class Lease:
    """Of one sequence. ttl None: it lives until it is released. paused_until None: a pause without an end."""

    ttl: int | float | None = None
    renewed: int | float = 0
    paused_until: int | float | None = None

    def expired(self, now: int | float) -> bool:
        return self.ttl is not None and now - self.renewed >= self.ttl

    def pause_over(self, now: int | float) -> bool:
        return self.paused_until is not None and now >= self.paused_until


@dataclass(frozen=True, slots=True)
class Expired:
    """A sequence that nobody used for its `ttl`: whose it was, for how long, and the pages that it held."""

    handle: SequenceHandle
    scope: Scope
    age: int | float
    ttl: int | float
    pages: int

    def __str__(self) -> str:
        return f"{self.scope} was not used for {self.age:.0f} s, its ttl is {self.ttl:.0f} s: {self.pages} pages"


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one look at all leases found. `resumed`: their pause is over, their KV is that of any idle sequence.

    emptied: tenants that nobody used for a while, and the pages that were freed of each.
    """

    expired: tuple[Expired, ...] = ()
    resumed: tuple[SequenceHandle, ...] = ()
    emptied: tuple[tuple[str, int], ...] = ()


def check_ttl(what: str, ttl: int | float | None) -> None:
    """InvalidRequestError unless `ttl` is a time to live in seconds, or None."""
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < float("inf")):
        raise InvalidRequestError(f"the ttl of {what} is a number of seconds above 0, or None for no end, got {ttl!r}")
