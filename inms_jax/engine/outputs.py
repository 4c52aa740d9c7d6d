"""What a request returns, under vLLM's names. Plain frozen data; knows nothing of the engine."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one candidate token at one step, and its rank (1 = most likely)."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sampled answer. In a stream, `text`, `token_ids` and `logprobs` hold only what is new."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    """ "stop" (end token or stop string), "length" (max_tokens or the context is full), or None."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the answer; None for the model's own end token."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request.

    num_cached_tokens: prompt tokens whose KV was found in pages instead of being computed, exact.
    num_fragment_tokens: prompt tokens whose KV is that of a shared fragment, read at another position.
    miss_reasons: computed prompt tokens by the reason why no page could serve them.
    ttft_s: seconds from arrival to the first generated token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
    num_fragment_tokens: int = 0
    miss_reasons: dict[str, int] = field(default_factory=dict)
    ttft_s: float | None = None

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOutput:
    """How likely a given answer is.

    logprobs: natural-log probability of each of its tokens, given the context and the tokens before. logits: what the
    model said instead of each. is_greedy: greedy decoding would have said just this. prefill_s: seconds from arrival
    to the last logits. The counts of prompt tokens are as in RequestOutput.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logits: Float32[np.ndarray, "T V"]
    is_greedy: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_fragment_tokens: int
    prefill_s: float

    @property
    def logprob(self) -> float:
        """Of the whole answer."""
        return sum(self.logprobs)
