"""What tenants, groups and agents need of one engine: its parts, unique names, counts of work.

Knows nothing of what tenants and agents are.
"""

import itertools
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field

from inms_jax.config import EngineConfig
from inms_jax.engine.accounts import Accounts, turn_work
from inms_jax.engine.conversation import SpanEncoder
from inms_jax.engine.core import EngineCore
from inms_jax.engine.gate import Permission
from inms_jax.engine.request import Request
from inms_jax.errors import ConfigError
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.tier import Scope


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
    _generations: dict[str, Counter[tuple[str, ...]]] = field(default_factory=dict)
    """Of the names inside each tenant, by its id; of tenants themselves under ""."""
    _name_lock: threading.Lock = field(default_factory=threading.Lock)
    _requests: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.stop_when_dropped = weakref.finalize(self, self.core.stop)
        self.stop_when_dropped.atexit = False  # the engine sees to that itself

    def require_fragments(self, link_tokens: int | None = None) -> None:
        """ConfigError unless this engine may read shared text away from where it was computed, behind this link."""
        if self.fragments.refusal is not None:
            raise ConfigError(self.fragments.refusal)
        if link_tokens is not None and link_tokens < self.fragments.link_tokens:
            raise ConfigError(
                f"fragments were measured with {self.fragments.link_tokens} link tokens, fewer were asked for: "
                f'{link_tokens}. LLM(..., fragments="unchecked") allows that'
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
