"""What the engine says of its work: a report per device step, and counters since the start. Plain data."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one device step did. `held_pages` is what sequences hold after it."""

    kind: str
    """ "prefill" or "decode"."""
    tokens: int
    """Tokens computed, padding not counted."""
    held_pages: int


@dataclass(slots=True)
class Counters:
    """Work done since the start; written by the engine thread."""

    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    pages_needed: int = 0
    """Pages that the rows of decode steps read, each for itself."""
    pages_read: int = 0
    """Pages that decode steps read: one that several rows need counts once."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fragment_tokens: int = 0
    """Prompt tokens read from fragments at another position."""
    encoded_fragments: int = 0
    """Fragments computed after their roots."""
    segments: Counter[str] = field(default_factory=Counter)
    """Segments of turns by what became of them, see `Reason` in engine/fragments.py."""
    copy_waits: int = 0
    """Steps that a row waited, since the copies of others had used up `copy_budget`."""
    peak_copies: int = 0
    """Most pages that one step copied."""
    requests: int = 0
    failed_requests: int = 0
