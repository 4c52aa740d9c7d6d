"""What a run of a scenario measured: typed, frozen, and convertible to JSON. Knows nothing of engines or screens."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MODES = ("independent", "shared")


@dataclass(frozen=True, slots=True)
class AgentPages:
    """What one agent holds after a step: tokens and pages; pages that others hold too count for each."""

    tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class StepSample:
    """The state of memory after one device step.

    time_s: seconds since the run began. unique_tokens: distinct tokens held (equal tokens behind equal tokens, in one
    scope, count once), which is what an ideal memory would store.
    """

    time_s: float
    kind: str
    tokens: int
    held_pages: int
    predicted_pages: int
    unique_tokens: int
    agents: Mapping[str, AgentPages]


@dataclass(frozen=True, slots=True)
class MapCell:
    """One page of the page map: tier and state as lower-case words, and which agents hold it."""

    page: int
    tier: str
    state: str
    tokens: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One answer. `logprobs` are natural logs, one for each token id."""

    question: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class AgentResult:
    """All turns of one agent. Its TTFT and its cached tokens are those of its first turn, where sharing shows."""

    name: str
    turns: tuple[TurnResult, ...]
    published_tokens: int
    """Tokens of its context that stand in published texts."""

    @property
    def ttft_s(self) -> float:
        return self.turns[0].ttft_s

    @property
    def num_cached_tokens(self) -> int:
        return self.turns[0].cached_tokens

    @property
    def text(self) -> str:
        """Every answer, one paragraph each."""
        return "\n\n".join(turn.text.strip() for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Prompt and answer of the last turn, which hold the whole conversation."""
        return self.turns[-1].prompt_tokens + len(self.turns[-1].token_ids)

    @property
    def shared_fraction(self) -> float:
        """The part of the final context that stands in published texts."""
        return self.published_tokens / self.context_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "ttft_s": self.ttft_s,
            "num_cached_tokens": self.num_cached_tokens,
            "text": self.text,
            "context_tokens": self.context_tokens,
            "shared_fraction": self.shared_fraction,
            "turns": [asdict(turn) for turn in self.turns],
        }


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One run of the work, with or without sharing.

    tokens_prompt: prompt tokens of all turns; tokens_computed: those of them whose KV was not found in pages.
    page_map: the pages in use (and cached) when the most were held.
    """

    mode: str
    deterministic: bool
    wall_s: float
    page_bytes: int
    block_size: int
    total_pages: int
    tokens_prompt: int
    tokens_computed: int
    tokens_generated: int
    decode_steps: int
    samples: tuple[StepSample, ...]
    page_map: tuple[MapCell, ...]
    agents: tuple[AgentResult, ...]

    @property
    def peak(self) -> StepSample:
        """The first step after which the most pages were held."""
        return max(self.samples, key=lambda sample: sample.held_pages)

    @property
    def peak_kv_bytes(self) -> int:
        return self.peak.held_pages * self.page_bytes

    @property
    def predicted_kv_bytes(self) -> int:
        return max(sample.predicted_pages for sample in self.samples) * self.page_bytes

    @property
    def ideal_kv_bytes(self) -> int:
        """Bytes of the most distinct tokens held at once, as if pages had no edges."""
        return max(sample.unique_tokens for sample in self.samples) * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        return self.page_bytes // self.block_size

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_kv_bytes": self.peak_kv_bytes,
            "predicted_kv_bytes": self.predicted_kv_bytes,
            "ideal_kv_bytes": self.ideal_kv_bytes,
            "peak_pages": self.peak.held_pages,
            "predicted_pages": max(sample.predicted_pages for sample in self.samples),
            "total_pages": self.total_pages,
            "page_bytes": self.page_bytes,
            "tokens_prompt": self.tokens_prompt,
            "tokens_computed": self.tokens_computed,
            "tokens_generated": self.tokens_generated,
            "decode_steps": self.decode_steps,
            "wall_s": self.wall_s,
            "agents": {agent.name: agent.to_json() for agent in self.agents},
            "steps": [
                {
                    "time_s": sample.time_s,
                    "kind": sample.kind,
                    "tokens": sample.tokens,
                    "held_pages": sample.held_pages,
                    "predicted_pages": sample.predicted_pages,
                    "unique_tokens": sample.unique_tokens,
                }
                for sample in self.samples
            ],
        }


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both runs of one scenario on one model."""

    model: str
    independent: ModeResult
    shared: ModeResult

    @property
    def modes(self) -> tuple[ModeResult, ModeResult]:
        return self.independent, self.shared

    @property
    def texts_identical(self) -> bool:
        """Every answer of both runs has the same token ids and bit-identical log-probabilities."""
        answers = [
            [(agent.name, turn.token_ids, turn.logprobs) for agent in mode.agents for turn in agent.turns]
            for mode in self.modes
        ]
        return answers[0] == answers[1]

    @property
    def saved_fraction(self) -> float:
        """Peak KV bytes that sharing saved, as a part of what the independent run held."""
        return 1 - self.shared.peak_kv_bytes / self.independent.peak_kv_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "deterministic": self.shared.deterministic,
            "block_size": self.shared.block_size,
            "texts_identical": self.texts_identical,
            "saved_fraction": self.saved_fraction,
            "modes": {mode.mode: mode.to_json() for mode in self.modes},
        }
