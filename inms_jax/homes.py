"""Handles, and the homes that agents live in: what a tenant and a group have in common.

Knows nothing of what an agent is, beyond its name.
"""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from inms_jax.engine.fragments import Mode
from inms_jax.engine.segment import segment_mode
from inms_jax.engine.services import Services
from inms_jax.errors import ClosedError, ConfigError
from inms_jax.membership import Membership
from inms_jax.memory.tier import Scope
from inms_jax.shelf import Shelf

Closable = TypeVar("Closable", bound="Handle")
Member = TypeVar("Member", bound="Handle")


def check_name(kind: str, name: Any) -> None:
    """ConfigError unless `name` can name something."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the name of a {kind} must be a non-empty string, got {name!r}")


class Handle:
    """Something with a name that can be closed, once or several times, and used as a context manager."""

    kind = "handle"

    def __init__(self, name: str) -> None:
        check_name(self.kind, name)
        self.name = name
        self.closed = False

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.kind} {self.name!r} was closed: create a new one to go on")

    def close(self) -> None:
        """End it; later calls raise ClosedError."""
        self.closed = True

    def __enter__(self: Closable) -> Closable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name!r}{' closed' if self.closed else ''}>"


class Home(Handle, Generic[Member]):
    """Where agents live and texts are published: a tenant, or a group inside one (its `outer`).

    A home keeps no agent alive: one that its user has dropped is released like one that was closed.
    """

    def __init__(
        self, services: Services, name: str, scope: Scope, outer: "Home[Any] | None", kv_limit: int | None = None
    ) -> None:
        super().__init__(name)
        self._services = services
        self.scope = scope
        self.outer = outer
        self.shelf: Shelf = Shelf(f"{self.kind} {name!r}", scope, outer.shelf if outer else None)
        self._members: dict[Membership, weakref.ref[Member]] = {}
        self.kv_limit = kv_limit
        services.memory.hold_scope(scope, limit=kv_limit)

    @property
    def names(self) -> Scope:
        """The names of the tenant, and of the group if this is one; they are the same after a restart."""
        return Scope(self.name) if self.outer is None else Scope(self.outer.name, self.name)

    @property
    def agents(self) -> dict[str, Member]:
        """The agents that live here, by name."""
        living = [member() for member in list(self._members.values())]
        return {agent.name: agent for agent in living if agent is not None}

    def _publish(self, name: str, text: str, *, mode: Mode | str | None, **options: Any) -> None:
        if mode is not None and segment_mode(mode) is Mode.FRAGMENT:
            self._services.require_fragments()
        self.shelf.publish(name, text, mode=mode, **options)

    def root(self, names: Sequence[str]) -> None:
        """Declare the published texts that fragments of this home stand after, where a context has no public head.

        They are computed for that even where no reader's context holds them. Applies to contexts made from now on.
        """
        with self._services.lock:
            self._require_open()
            self.shelf.declare_root(names)

    def _require_free(self, name: str) -> None:
        check_name("agent", name)
        if name in self.agents:
            raise ConfigError(f"agent {name!r} is live in {self.name!r}: close it first or choose another name")

    def _leave(self, member: Membership) -> None:
        """An agent of this home was dropped without being closed, and released. Takes no lock."""
        self._members.pop(member, None)
        self._member_left()

    def _member_left(self) -> None:
        """Called after an agent of this home has ended. Takes no lock: the engine thread may call it."""
