"""The ways to say something and hear the answer: at once or as a stream, from a thread or from asyncio.

Knows nothing of contexts: whoever speaks makes a request of what is said.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from inms_jax.config import SamplingParams
from inms_jax.engine.outputs import RequestOutput
from inms_jax.engine.pending import AsyncStream, Pending, Stream
from inms_jax.engine.segment import Segment

ChatInput = str | Segment | Sequence[dict[str, str] | Segment]


class Speaker(ABC):
    """Calls from several threads run in call order."""

    @abstractmethod
    def _submit(
        self, message: ChatInput, params: Any, tools: Sequence[dict[str, Any]] | None, *, stream: bool = False
    ) -> Pending:
        """Hand the engine a request."""

    def chat(
        self,
        message: ChatInput,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RequestOutput:
        """Say `message` (role `user` if a string) and wait for the answer.

        `message` may also be a list of {"role", "content"} and Segments. Raises what ended the turn, if it failed;
        the conversation is then as before it.
        """
        return self._submit(message, params, tools).result()

    def stream(
        self,
        message: ChatInput,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Stream:
        """`chat` as an iterator of deltas; leaving it early aborts the turn."""
        return Stream(self._submit(message, params, tools, stream=True))

    async def achat(
        self,
        message: ChatInput,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RequestOutput:
        """`chat` for asyncio; cancelling it aborts the turn."""
        return await self._submit(message, params, tools).aresult()

    def astream(
        self,
        message: ChatInput,
        params: SamplingParams | dict[str, Any] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> AsyncStream:
        """`stream` for asyncio."""
        return AsyncStream(self._submit(message, params, tools, stream=True))
