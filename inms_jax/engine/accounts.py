"""What the turns of each agent took, found and made, and the sums for its group and tenant.

Kept by scope, since names are used again. Knows nothing of pages.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from inms_jax.engine.request import Request
from inms_jax.memory.policy import MissReason
from inms_jax.memory.stats import TurnUsage
from inms_jax.memory.tier import Scope, Tier


@dataclass(frozen=True, slots=True)
class Work:
    """Turns and tokens. Of turns that ended well: prompt_tokens == saved_prefill_tokens + computed_tokens.

    A failed turn adds to `failed_turns`, and to the tokens as far as it came.
    """

    turns: int = 0
    failed_turns: int = 0
    prompt_tokens: int = 0
    saved_prefill_tokens: int = 0
    """Prompt tokens that were in pages: kept from the turn before, found in the index, or those of fragments."""
    hit_tokens: int = 0
    """Prompt tokens found in the index: computed by somebody else, or given up by oneself."""
    fragment_tokens: int = 0
    """Prompt tokens read from fragments at another position."""
    computed_tokens: int = 0
    generated_tokens: int = 0
    misses: Mapping[MissReason, int] = field(default_factory=dict)
    """Computed prompt tokens by the reason that the reader is told."""

    def __add__(self, other: "Work") -> "Work":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "misses"}
        return Work(**sums, misses=dict(Counter(self.misses) + Counter(other.misses)))


def turn_work(request: Request, usage: TurnUsage) -> Work:
    """What one turn of an agent added."""
    prefilled = bool(request.branches)
    return Work(
        turns=int(request.error is None),
        failed_turns=int(request.error is not None),
        prompt_tokens=len(request.prompt_token_ids) if prefilled else 0,
        saved_prefill_tokens=request.num_cached_tokens + request.num_fragment_tokens,
        fragment_tokens=request.num_fragment_tokens,
        hit_tokens=usage.hit_tokens,
        computed_tokens=usage.computed_tokens,
        generated_tokens=sum(len(branch.token_ids) for branch in request.branches),
        misses=usage.misses,
    )


class Accounts:
    """One `Work` for each agent that lives; those that left count for their home."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: dict[Scope, Work] = {}

    def add(self, agent: Scope, work: Work) -> None:
        with self._lock:
            self._work[agent] = self._work.get(agent, Work()) + work

    def of(self, scope: Scope) -> Work:
        """The work of `scope` and of all that is inside it."""
        with self._lock:
            inside = [work for owner, work in self._work.items() if _inside(owner, scope)]
        return sum(inside, Work())

    def close(self, scope: Scope) -> None:
        """`scope` is gone: from now on its work counts for its home; a tenant's is forgotten."""
        with self._lock:
            work = self._work.pop(scope, None)
            if work is not None and scope.tier is not Tier.GLOBAL:
                home = Scope(scope.tenant, None if scope.tier is Tier.GROUP else scope.group)
                self._work[home] = self._work.get(home, Work()) + work


def _inside(owner: Scope, scope: Scope) -> bool:
    if scope.tier is Tier.GLOBAL:
        return owner.tenant == scope.tenant
    if scope.tier is Tier.GROUP:
        return (owner.tenant, owner.group) == (scope.tenant, scope.group)
    return owner == scope
