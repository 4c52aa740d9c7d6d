"""Typed results that the manager gives out: admissions, matches, usage, statistics and the page map."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from inms_jax.memory.lifecycle import PageState, SequenceState
from inms_jax.memory.plan import Span
from inms_jax.memory.policy import MissReason
from inms_jax.memory.tier import Scope, Tier


@dataclass(frozen=True, slots=True)
class SequenceHandle:
    """Names one sequence for its life; `generation` tells it from a later sequence with the same id."""

    id: int
    generation: int


class Shortage(enum.StrEnum):
    """What a turn has too few pages of: its agent's or group's account, its tenant's pool, or the whole memory."""

    ACCOUNT = "account"
    POOL = "pool"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a turn may start now. Not admitted: nothing was changed, ask again when pages were given back.

    missing: canonical contexts of fragments that nobody has computed yet; a turn of each, with no new token, does.
    """

    admitted: bool
    needed: int
    available: int
    reason: str | None = None
    missing: tuple[tuple[Span, ...], ...] = ()
    short: Shortage | None = None


@dataclass(frozen=True, slots=True)
class MatchResult:
    """ "wait": another sequence is computing the next block."""

    status: Literal["ready", "wait"]
    cached_tokens: int
    remaining: int
    """Tokens of the context that are still to be computed, as things stand."""


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Tokens of one turn: kept = held since the turn before, hit = found in the index, fragment = bodies of fragments
    read from where they stand, the rest computed."""

    cached_tokens: int
    kept_tokens: int
    hit_tokens: int
    computed_tokens: int
    fragment_tokens: int
    misses: Mapping[MissReason, int]


@dataclass(frozen=True, slots=True)
class PageInfo:
    """One page that is not free."""

    page: int
    generation: int
    state: PageState
    tier: Tier
    scope: Scope
    references: int
    tokens_used: int
    holders: tuple[SequenceHandle, ...]


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Page counts now, token and event counts since the start. free + cached + held + fenced == total - 1."""

    total: int
    free: int
    cached: int
    held: int
    fenced: int
    reserved: int
    by_tier: Mapping[Tier, int]
    by_scope: Mapping[Scope, int]
    kept_tokens: int
    hit_tokens: int
    computed_tokens: int
    fragment_tokens: int
    misses: Mapping[MissReason, int]
    copies: int
    evictions: int
    dropped_sequences: int
    quota_refusals: int
    """Turns that had to wait for pages, or could never have them, because of a limit of their own."""
    sequences: Mapping[SequenceState, int]
    """Sequences that live, by state."""
    offloaded: int
    """Pages of paused sequences that are in host memory."""
    expired_sequences: int
