"""What a look at all leases and requests finds, for the log and for operators. Plain data."""

from collections.abc import Iterable
from dataclasses import dataclass

from inms_jax.engine.request import Request
from inms_jax.memory.lease import Expired

INTERVAL_S = 30.0
"""Between two looks of the engine thread."""
STALLED_S = 120.0
"""A request that has not moved for so long is reported."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """A request that waits, or has had no step, for `seconds`."""

    request_id: str
    seconds: int | float
    waiting: bool

    def __str__(self) -> str:
        what = "has waited for its start" if self.waiting else "has had no step"
        return f"request {self.request_id!r} {what} for {self.seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Agents that were ended because nobody used them, requests that stand still, and idle tenants whose KV was freed:
    id, and number of pages.
    """

    expired: tuple[Expired, ...] = ()
    stalled: tuple[Stalled, ...] = ()
    emptied: tuple[tuple[str, int], ...] = ()


def stalled_requests(requests: Iterable[Request], now: int | float, after: int | float) -> tuple[Stalled, ...]:
    """Those that have not moved for `after` seconds."""
    found = [Stalled(one.request_id, now - one.progress, one.handle is None) for one in requests]
    return tuple(one for one in found if one.seconds >= after)
