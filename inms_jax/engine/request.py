"""One request on its way through the engine: its branches, what they have said, and when they stop.

Knows nothing of pages or devices; the scheduler moves requests, the core feeds them tokens.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from inms_jax.config import SamplingParams
from inms_jax.engine.fragments import Decision
from inms_jax.engine.outputs import CompletionOutput, Logprob, RequestOutput
from inms_jax.memory.manager import SequenceHandle
from inms_jax.memory.plan import Span
from inms_jax.memory.stats import TurnUsage
from inms_jax.memory.tier import Scope
from inms_jax.text.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of one row as it came from the device. `top` holds (id, log-probability), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to choose the token of one row; `seen` ids are penalised, `banned` ids cannot be chosen."""

    key: tuple[int, int]
    token_index: int
    temperature: int | float
    top_k: int
    top_p: int | float
    min_p: int | float
    repetition_penalty: int | float
    seen: frozenset[int]
    banned: tuple[int, ...]


def sampling_key(*parts: str | int) -> tuple[int, int]:
    """Two 32-bit words from typed, length-framed parts: the key of a row depends on nothing else."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(f"{type(part).__name__}:{len(data)}:".encode() + data)
    raw = digest.digest()
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:], "little")


class Branch:
    """One sampled continuation of a request's prompt (n of them share the prompt's pages)."""

    def __init__(
        self,
        index: int,
        handle: SequenceHandle,
        params: SamplingParams,
        tokenizer: Tokenizer,
        key: tuple[int, int],
        limit: int,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.index = index
        self.handle = handle
        self.params = params
        self.key = key
        self.limit = limit
        """Most tokens to generate: max_tokens, or what the model's context leaves."""
        self.token_ids: list[int] = []
        self.seen: set[int] = set(prompt_token_ids) if params.repetition_penalty != 1 else set()
        """Ids that the repetition penalty applies to."""
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text = ""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._ends = frozenset(() if params.ignore_eos else tokenizer.eos_ids)
        self._hold_back = max((len(s) for s in params.stop), default=1) - 1
        self._sent_text = 0
        self._sent_tokens = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that may not be chosen now: the end tokens, until min_tokens are out."""
        if len(self.token_ids) >= self.params.min_tokens:
            return ()
        return (*sorted(self._ends), *self.params.stop_token_ids)

    def row_sampling(self) -> RowSampling | None:
        """How to choose the next token; None when the plain argmax is the answer."""
        params, banned = self.params, self.banned
        if params.greedy and not banned:
            return None
        return RowSampling(
            key=self.key,
            token_index=len(self.token_ids),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            seen=frozenset(self.seen),
            banned=banned,
        )

    def add(self, sampled: SampledToken) -> None:
        """Take one generated token: text, log-probabilities, and whether it ends the answer."""
        token = sampled.token
        self.token_ids.append(token)
        if self.params.repetition_penalty != 1:
            self.seen.add(token)
        self.cumulative_logprob += sampled.logprob
        if self.params.logprobs is not None:
            self.logprobs.append(self._logprobs(sampled))
        if len(self.token_ids) > self.params.min_tokens and token in self._ends:
            self._finish("stop", None)
        elif len(self.token_ids) > self.params.min_tokens and token in self.params.stop_token_ids:
            self._finish("stop", token)
        else:
            before = len(self.text)
            self.text += self._detokenizer.push(token)
            if not self._stopped_by_text(before) and len(self.token_ids) >= self.limit:
                self._finish("length", None)
                self._stopped_by_text(before)

    def _stopped_by_text(self, before: int) -> bool:
        """Cut the text at the first stop string that the new characters complete."""
        if len(self.token_ids) < self.params.min_tokens:
            return False
        start = max(0, before - self._hold_back)
        hits = [(self.text.find(s, start), s) for s in self.params.stop if s in self.text[start:]]
        if not hits:
            return False
        at, stop = min(hits)
        self.text = self.text[: at + len(stop) if self.params.include_stop_str_in_output else at]
        self.finish_reason, self.stop_reason = "stop", stop
        return True

    def _finish(self, reason: str, stop_reason: int | None) -> None:
        self.text += self._detokenizer.finish()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _logprobs(self, sampled: SampledToken) -> dict[int, Logprob]:
        def entry(token: int, value: float, rank: int | None) -> Logprob:
            return Logprob(value, rank, self._tokenizer.decode([token], skip_special=False))

        wanted = sampled.top[: self.params.logprobs or 0]
        found = {token: entry(token, value, rank) for rank, (token, value) in enumerate(wanted, start=1)}
        ranks = {token: rank for rank, (token, _) in enumerate(sampled.top, start=1)}
        found.setdefault(sampled.token, entry(sampled.token, sampled.logprob, ranks.get(sampled.token)))
        return found

    def output(self, *, delta: bool) -> CompletionOutput:
        """Everything so far, or what is new since the last delta (stop strings are held back until sure)."""
        shown = len(self.text) if self.finished else max(self._sent_text, len(self.text) - self._hold_back)
        first_text, first_token = (self._sent_text, self._sent_tokens) if delta else (0, 0)
        if delta:
            self._sent_text, self._sent_tokens = shown, len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self.text[first_text:shown],
            token_ids=tuple(self.token_ids[first_token:]),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs[first_token:]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class TurnStart:
    """What a request's owner gives when its turn begins: its sequence and the whole context.

    scope: owner of what will be generated. key_parts: what the sampling keys derive from when the request has no seed.
    decisions: which segments of the context are read as fragments, and why. scored: not 0 makes it a request for the
    logits that this many last tokens of the context were chosen from, and for no answer.
    """

    handle: SequenceHandle
    context: list[Span]
    scope: Scope
    key_parts: tuple[str | int, ...]
    decisions: tuple[Decision, ...] = ()
    scored: int = 0


@runtime_checkable
class Owner(Protocol):
    """Who a request belongs to: gives the context when the turn starts, learns how it ended."""

    def start_turn(self) -> TurnStart:
        """Called by the engine once, when the request is the first of its queue. May raise InmsError."""

    def end_turn(self, request: "Request") -> None:
        """The turn is over; `request.error` is None when it counts, `request.handle` None if it never began."""


Listener = Callable[["Request"], None]


@dataclass(eq=False, slots=True)
class Request:
    """Mutable, changed only by the engine thread."""

    request_id: str
    owner: Owner
    params: SamplingParams
    listener: Listener
    """Called by the engine thread after each token of the request and once at its end."""
    prompt: str | None = None
    queue: object = None
    """Requests of one queue run one after another, in call order (an agent's turns); None = no order."""
    arrival: float = field(default_factory=time.monotonic)
    progress: float = field(default_factory=time.monotonic)
    """When it last had a step, or came."""
    first_token: float | None = None
    start: TurnStart | None = None
    """What the owner gave; the turn begins when its pages can be reserved."""
    handle: SequenceHandle | None = None
    """The sequence, from the moment the turn began."""
    scope: Scope | None = None
    key_parts: tuple[str | int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    limit: int = 0
    """Most tokens that each branch may generate; set at admission."""
    branches: list[Branch] = field(default_factory=list)
    encoded: list[SequenceHandle] = field(default_factory=list)
    """Sequences that compute, and then hold, fragments which this request waits for."""
    num_cached_tokens: int = 0
    num_fragment_tokens: int = 0
    miss_reasons: dict[str, int] = field(default_factory=dict)
    scores: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Logits and their log-sum-exp, of the scored tokens that were prefilled so far."""
    error: BaseException | None = None
    done: bool = False

    @property
    def history_len(self) -> int:
        """Tokens of the turn: the context and the first answer."""
        return len(self.prompt_token_ids) + len(self.branches[0].token_ids)

    @property
    def scored(self) -> int:
        """How many last tokens of the context are scored instead of answered."""
        return 0 if self.start is None else self.start.scored

    def scored_rows(self, positions: np.ndarray) -> list[int]:
        """Numbers of the rows of a chunk whose logits a scored token was chosen from."""
        last = len(self.prompt_token_ids) - 1
        return np.flatnonzero((positions >= last - self.scored) & (positions < last)).tolist()

    def add_scores(self, logits: np.ndarray, lse: np.ndarray, count: int) -> None:
        """Keep the logits and log-sum-exp of the first `count` rows of a step."""
        self.scores.append((logits[:count], lse[:count]))

    def note_usage(self, usage: TurnUsage) -> None:
        """The whole prompt is in pages: remember what it took."""
        self.num_cached_tokens, self.num_fragment_tokens = usage.cached_tokens, usage.fragment_tokens
        self.miss_reasons = {reason.value: tokens for reason, tokens in usage.misses.items()}

    def scored_logits(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, V] and log-sum-exp [T] of the scored tokens."""
        logits, lse = zip(*self.scores, strict=True)
        return np.concatenate(logits), np.concatenate(lse)

    @property
    def unfinished(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.finished]

    def output(self, *, delta: bool = False) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(branch.output(delta=delta) for branch in self.branches),
            finished=self.done and self.error is None,
            num_cached_tokens=self.num_cached_tokens,
            num_fragment_tokens=self.num_fragment_tokens,
            miss_reasons=dict(self.miss_reasons),
            ttft_s=None if self.first_token is None else self.first_token - self.arrival,
        )


def flatten(spans: Sequence[Span]) -> tuple[int, ...]:
    """The token ids of a context, in order."""
    return tuple(token for span in spans for token in span.tokens)
