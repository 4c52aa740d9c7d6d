"""What was done since the start, as counts. Knows nothing of how."""

from collections import Counter
from dataclasses import dataclass, field, fields

from inms_jax.memory.policy import MissReason
from inms_jax.memory.sequence import Pending


@dataclass(slots=True)
class Totals:
    """Counts of one tenant, or of all that were."""

    kept_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    fragment_tokens: int = 0
    copies: int = 0
    evictions: int = 0
    dropped_sequences: int = 0
    quota_refusals: int = 0
    expired_sequences: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)

    def add(self, step: Pending) -> None:
        """Count a committed step."""
        self.computed_tokens += step.computed
        self.copies += len(step.plan.copies)
        self.misses.update(step.misses)

    def include(self, other: "Totals") -> None:
        """Add the counts of another tenant."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))
