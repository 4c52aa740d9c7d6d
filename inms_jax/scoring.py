"""How likely an agent finds an answer that somebody else gives: `agent.score`.

The answer is read as a prompt, in a fork of the agent's conversation that is given up afterwards, so nothing of it
stays. Knows nothing of what the numbers are compared with.
"""

from collections.abc import Callable, Sequence

import numpy as np

from inms_jax.engine.conversation import Conversation, Item
from inms_jax.engine.outputs import RequestOutput, ScoreOutput
from inms_jax.engine.request import Request, TurnStart
from inms_jax.engine.services import Services
from inms_jax.errors import InvalidRequestError
from inms_jax.memory.manager import SequenceHandle
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope


class ScoreTurn:
    """One answer to be scored, seen by the engine as the owner of a request (engine thread)."""

    def __init__(
        self,
        services: Services,
        agent: Scope,
        items: Sequence[Item],
        answer: tuple[int, ...],
        begin: Callable[[], tuple[SequenceHandle, Conversation, tuple[Item, ...]]],
    ) -> None:
        self.answer = answer
        self._services, self._agent, self._items, self._begin = services, agent, items, begin
        self._line: Scope | None = None
        self._handle: SequenceHandle | None = None
        self._logits: tuple[np.ndarray, np.ndarray] | None = None

    def start_turn(self) -> TurnStart:
        """Fork the agent's sequence under a name that nobody else has: no block of it can be found, or found again."""
        handle, conversation, history = self._begin()
        memory = self._services.memory
        outer = self._agent
        name = self._services.unique_id(outer.tenant, outer.group or "", outer.agent or "", "score")
        line = Scope(outer.tenant, outer.group, f"{outer.agent}/{name}")
        memory.hold_scope(line, outer)
        self._line = line
        self._handle = memory.fork(handle, line)
        reader = Conversation(self._services.encoder, line)
        items = [reader.own(item) for item in self._items]
        context, decisions = reader.placed((*history, *items), tools=conversation.tools, generate=True)
        if not context or context[-1].scope != line:
            raise InvalidRequestError("the model has no chat template: score needs a message before the answer")
        return TurnStart(
            self._handle, [*context, Span(self.answer, line)], line, ("score",), tuple(decisions), len(self.answer)
        )

    def end_turn(self, request: Request) -> None:
        if request.error is None:
            self._logits = request.scored_logits()
        if request.handle is not None:
            self._services.memory.end_turn(request.handle, keep=False, history_len=0)
        if self._handle is not None:
            self._services.memory.release(self._handle)
        if self._line is not None:
            self._services.memory.drop_scope(self._line, self._agent)
            self._services.encoder.forget(self._line)

    def output(self, request: RequestOutput) -> ScoreOutput:
        """The scores, once the request has ended well."""
        assert self._logits is not None
        logits, lse = self._logits
        chosen = logits[np.arange(len(self.answer)), list(self.answer)]
        return ScoreOutput(
            token_ids=self.answer,
            logprobs=tuple((chosen - lse).tolist()),
            logits=logits,
            is_greedy=bool((logits.argmax(axis=-1) == self.answer).all()),
            num_prompt_tokens=len(request.prompt_token_ids) - len(self.answer),
            num_cached_tokens=request.num_cached_tokens,
            num_fragment_tokens=request.num_fragment_tokens,
            prefill_s=request.ttft_s or 0.0,
        )
