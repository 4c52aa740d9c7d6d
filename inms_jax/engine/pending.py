"""The caller's side of a request: wait for it, or iterate over what it says, from a thread or from asyncio.

Leaving a wait or an iteration early aborts the request.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

from inms_jax.engine.outputs import RequestOutput
from inms_jax.engine.request import Request


class Pending:
    """A request that was handed to the engine; itself the request's listener."""

    def __init__(self, request_id: str, abort: Callable[[str], None], *, stream: bool = False) -> None:
        self.request_id = request_id
        self._abort = abort
        self._future: Future[RequestOutput] = Future()
        self._future.set_running_or_notify_cancel()  # a cancelled waiter aborts the request, never the future
        self._deltas: queue.SimpleQueue[RequestOutput | None] | None = queue.SimpleQueue() if stream else None
        self._wake: Callable[[], None] = lambda: None

    def __call__(self, request: Request) -> None:
        """Called by the engine thread after each token and at the end."""
        if self._deltas is not None and request.error is None:
            self._deltas.put(request.output(delta=True))
        if request.done:
            if request.error is not None:
                self._future.set_exception(request.error)
            else:
                self._future.set_result(request.output())
            if self._deltas is not None:
                self._deltas.put(None)
        self._wake()

    def result(self) -> RequestOutput:
        """Wait for the end. Raises what ended the request, if it failed."""
        try:
            return self._future.result()
        finally:
            self._leave()

    async def aresult(self) -> RequestOutput:
        """`result` for asyncio; cancelling it aborts the request."""
        try:
            return await asyncio.wrap_future(self._future)
        finally:
            self._leave()

    def __iter__(self) -> Iterator[RequestOutput]:
        """Deltas until the end; then raises what ended the request, if it failed."""
        assert self._deltas is not None, "made without stream=True"
        try:
            while (delta := self._deltas.get()) is not None:
                yield delta
            self._future.result()
        finally:
            self._leave()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """`__iter__` for asyncio."""
        assert self._deltas is not None, "made without stream=True"
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ready.set)

        self._wake = wake
        try:
            while True:
                try:
                    delta = self._deltas.get_nowait()
                except queue.Empty:
                    ready.clear()
                    if self._deltas.empty():
                        await ready.wait()
                    continue
                if delta is None:
                    break
                yield delta
            self._future.result()
        finally:
            self._leave()

    def _leave(self) -> None:
        if not self._future.done():
            self._abort(self.request_id)
