"""The caller's side of a request: wait for it, or iterate over what it says, from a thread or from asyncio.

Leaving a wait early, or dropping a stream (even one that was never started), aborts the request.
"""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future

from inms_jax.engine.outputs import RequestOutput
from inms_jax.engine.request import Request


class Pending:
    """A request that was handed to the engine; itself the request's listener.

    `engine` is kept alive as long as someone waits.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None], engine: object, *, stream: bool = False) -> None:
        self.request_id = request_id
        self._abort = abort
        self._engine = engine
        self._future: Future[RequestOutput] = Future()
        self._future.set_running_or_notify_cancel()  # a cancelled waiter aborts the request, never the future
        self._deltas: queue.SimpleQueue[RequestOutput | None] | None = queue.SimpleQueue() if stream else None
        self.wake: Callable[[], None] = lambda: None

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
        self.wake()

    def result(self) -> RequestOutput:
        """Wait for the end. Raises what ended the request, if it failed."""
        try:
            return self._future.result()
        finally:
            self.leave()

    async def aresult(self) -> RequestOutput:
        """`result` for asyncio; cancelling it aborts the request."""
        try:
            return await asyncio.wrap_future(self._future)
        finally:
            self.leave()

    def next_delta(self, *, block: bool) -> RequestOutput | None:
        """The next delta, None at the end, which raises what ended the request. queue.Empty if `block` is False."""
        assert self._deltas is not None, "made without stream=True"
        delta = self._deltas.get(block)
        if delta is None:
            self._deltas.put(None)  # the end stays the end
            self._future.result()
        return delta

    def leave(self) -> None:
        """Nobody waits any more: abort the request if it has not ended."""
        if not self._future.done():
            self._abort(self.request_id)


class Stream:
    """Deltas of one request as an iterator."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> RequestOutput:
        try:
            delta = self._pending.next_delta(block=True)
        except BaseException:
            self.close()
            raise
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Abort the request if it has not ended."""
        self._pending.leave()

    def __del__(self) -> None:
        self.close()


class AsyncStream:
    """`Stream` for asyncio."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._ready: asyncio.Event | None = None

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ready is None:
            self._ready = ready = asyncio.Event()
            loop = asyncio.get_running_loop()

            def wake() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(ready.set)

            self._pending.wake = wake
        try:
            while True:
                self._ready.clear()
                try:
                    delta = self._pending.next_delta(block=False)
                    break
                except queue.Empty:
                    await self._ready.wait()
        except BaseException:
            self._pending.leave()
            raise
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        self._pending.leave()

    def __del__(self) -> None:
        self._pending.leave()
