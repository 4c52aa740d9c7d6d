"""What tenants, groups and agents need of one engine: its parts, unique names, counts of work.

Knows nothing of what tenants and agents are.
"""

import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from inms_jax.config import EngineConfig
from inms_jax.engine.accounts import Accounts, turn_work
from inms_jax.engine.conversation import SpanEncoder
from inms_jax.engine.core import EngineCore
from inms_jax.engine.gate import Permission
from inms_jax.engine.request import Request
from inms_jax.engine.sweep import STALLED_S, SweepReport, stalled_requests
from inms_jax.errors import ConfigError, LeakError
from inms_jax.memory.lease import Expired
from inms_jax.memory.manager import MemoryManager, SequenceHandle
from inms_jax.memory.tier import Scope

log = logging.getLogger("inms_jax")


@runtime_checkable
class Member(Protocol):
    """Who is told that its sequence was ended."""

    name: str

    def expire(self, expired: Expired) -> None:
        """Called by the engine thread."""


class _Sweeper:
    """What the engine thread calls now and then; keeps the engine alive for nobody."""

    def __init__(self, services: "Services") -> None:
        self._services = weakref.ref(services)

    def __call__(self) -> None:
        services = self._services()
        if services is not None:
            services.sweep(services.now())


@dataclass(eq=False)
class Services:
    """Shared by every handle of one LLM. `lock` guards the names; the engine thread never takes it.

    The engine runs as long as these are alive: the LLM, any handle, or a pending request keeps them so.
    """

    core: EngineCore
    memory: MemoryManager
    encoder: SpanEncoder
    config: EngineConfig
    fragments: Permission
    accounts: Accounts = field(default_factory=Accounts)
    lock: threading.RLock = field(default_factory=threading.RLock)
    members: "weakref.WeakValueDictionary[SequenceHandle, Member]" = field(default_factory=weakref.WeakValueDictionary)
    """Who holds a sequence with a lease."""
    now: Callable[[], float] = time.monotonic
    leaks: list[Expired] = field(default_factory=list)
    """Agents that ended because nobody used them, where that is an error."""
    _generations: dict[str, Counter[tuple[str, ...]]] = field(default_factory=dict)
    """Of the names inside each tenant, by its id; of tenants themselves under ""."""
    _name_lock: threading.Lock = field(default_factory=threading.Lock)
    _requests: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.stop_when_dropped = weakref.finalize(self, self.core.stop)
        self.stop_when_dropped.atexit = False  # the engine sees to that itself
        self.core.sweep = _Sweeper(self)

    def require_fragments(self, link_tokens: int | None = None) -> None:
        """ConfigError unless this engine may read shared text away from where it was computed, behind this link."""
        if self.fragments.refusal is not None:
            raise ConfigError(self.fragments.refusal)
        if link_tokens is not None and link_tokens < self.fragments.link_tokens:
            raise ConfigError(
                f"fragments were measured with {self.fragments.link_tokens} link tokens, fewer were asked for: "
                f'{link_tokens}. LLM(..., fragments="unchecked") allows that'
            )

    def sweep(self, now: int | float, stalled_after: int | float = STALLED_S) -> SweepReport:
        """End agents that nobody used for their ttl, and report requests that stand still. Engine thread only."""
        found = self.memory.sweep(now, empty_after=self.config.empty_idle_tenants)
        for expired in found.expired:
            member = self.members.pop(expired.handle, None)
            log.warning("agent %s was ended: %s", "?" if member is None else member.name, expired)
            if member is not None:
                member.expire(expired)
        if self.config.strict_leaks:
            self.leaks += found.expired
        stalled = stalled_requests(self.core.scheduler.requests(), now, stalled_after)
        for one in stalled:
            log.warning("%s", one)
        return SweepReport(found.expired, stalled, found.emptied)

    def require_no_leaks(self) -> None:
        """LeakError, once, if agents were ended that nobody closed and `strict_leaks` is set."""
        leaks, self.leaks[:] = list(self.leaks), []
        if leaks:
            raise LeakError(
                f"{len(leaks)} agents were not closed: {'; '.join(map(str, leaks))}. Close agents after use."
            )

    def unique_id(self, *path: str) -> str:
        """The last name of `path` with its generation: a name used again after close is a new thing."""
        with self._name_lock:
            names = self._generations.setdefault(path[0] if len(path) > 1 else "", Counter())
            names[path] += 1
            return f"{path[-1]}#{names[path]}"

    def forget_tenant(self, tenant: str) -> None:
        """The tenant of this id is closed, and an id is never given again: nobody asks for names inside it."""
        with self._name_lock:
            self._generations.pop(tenant, None)

    def close_scope(self, scope: Scope) -> None:
        """An agent, group or tenant is gone: its work counts for its home, its texts are kept no longer."""
        self.accounts.close(scope)
        self.encoder.forget(scope)

    def request_id(self) -> str:
        """An id for logs and abort; results never depend on it."""
        return f"request-{next(self._requests)}"

    def count_turn(self, agent: Scope, request: Request) -> None:
        """Add a turn that has ended to the work of its agent."""
        if request.handle is not None:
            self.accounts.add(agent, turn_work(request, self.memory.usage(request.handle)))
