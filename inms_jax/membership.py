"""What an agent holds of an engine: its place in its home, its sequence, its lineages. Given back once.

Outlives the agent's object, so that an agent which was dropped without `close()` is released too. Knows nothing of
conversations.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable

from inms_jax.engine.services import Services
from inms_jax.errors import StaleHandleError
from inms_jax.memory.lease import Expired
from inms_jax.memory.manager import SequenceHandle
from inms_jax.memory.tier import Scope

log = logging.getLogger("inms_jax")


class Membership:
    """Changed by the engine thread, once the agent is made. `left`: tells the home, without taking a lock.

    Keeps neither home nor engine alive: whoever drops agent and engine together is rid of both at once.
    """

    def __init__(self, services: Services, name: str, scope: Scope, left: "Callable[[Membership], None]") -> None:
        self._services = weakref.ref(services)
        self.name = name
        self.scope = scope
        self.handle: SequenceHandle | None = None
        self.expired: Expired | None = None
        """Why it ended by itself, if it did."""
        self.lineages: list[Scope] = []
        self._left = weakref.WeakMethod(left)
        self._ended = False

    def hold(self, lineage: Scope, *, limit: int | None = None) -> None:
        """Keep the pages of `lineage` in the index for as long as this lasts. `limit`: of the agent's pages, once."""
        self._engine.memory.hold_scope(lineage, self.scope, limit=limit)
        self.lineages.append(lineage)

    def take(self, handle: SequenceHandle, ttl: int | float | None) -> None:
        """Hold a sequence, which ends when nobody has used it for `ttl` seconds."""
        services = self._engine
        self.handle = handle
        services.members[handle] = self
        services.memory.lease(handle, ttl, services.now())

    def renew(self) -> None:
        """The agent is in use."""
        if self.handle is not None:
            self._engine.memory.renew(self.handle, self._engine.now())

    def expire(self, expired: Expired) -> None:
        """Its sequence was ended, because nobody used it. Engine thread only."""
        self.expired, handle, self.handle = expired, self.handle, None
        if handle is not None:
            self._engine.core.host.forget(handle)
        self.end()
        left = self._left()
        if left is not None:
            left(self)

    def watch(self, agent: object) -> "weakref.finalize[..., object]":
        """End this when `agent` is collected. That may happen on any thread and under any lock, so it only leaves word
        for the engine thread.
        """
        finalizer = weakref.finalize(agent, self._engine.core.leave_word, self._abandoned)
        finalizer.atexit = False  # the engine ends with the process
        return finalizer

    def end(self) -> None:
        """Give everything back. Engine thread only."""
        if self._ended:
            return
        self._ended = True
        services = self._engine
        if self.handle is not None:
            with contextlib.suppress(StaleHandleError):  # its lease was over, and nobody was told
                services.memory.release(self.handle)
            services.core.host.forget(self.handle)
            services.members.pop(self.handle, None)
        for lineage in self.lineages:
            services.memory.drop_scope(lineage, self.scope)
            services.encoder.forget(lineage)
        services.close_scope(self.scope)

    @property
    def _engine(self) -> Services:
        services = self._services()
        assert services is not None, "the agent, or the home that is told, keeps it alive"
        return services

    def _abandoned(self) -> None:
        left = self._left()
        if left is None:  # the engine was dropped with it
            return
        log.warning("agent %r was dropped without close(): its pages are released", self.name)
        try:
            self.end()
        finally:
            left(self)
