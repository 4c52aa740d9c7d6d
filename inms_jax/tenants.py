"""Tenants and groups as objects: who publishes to whom, and who may join.

Membership is a handle given out here, never a string in a request. Knows nothing of pages or conversations.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from inms_jax.agents import Agent, ContextItem
from inms_jax.engine.conversation import Conversation
from inms_jax.engine.fragments import Mode
from inms_jax.engine.segment import OnUpdate
from inms_jax.engine.services import Services
from inms_jax.errors import ClosedError, ConfigError, InvalidRequestError
from inms_jax.homes import Home
from inms_jax.memory.quota import Quota
from inms_jax.memory.tier import Scope, Tier
from inms_jax.preload import Preload
from inms_jax.stats import AgentStats, HomeStats, View


class _AgentHome(Home[Agent]):
    """A home that makes its agents, and may have its texts computed before they come."""

    def __init__(
        self, services: Services, name: str, scope: Scope, outer: Home[Agent] | None, kv_limit: int | None = None
    ) -> None:
        super().__init__(services, name, scope, outer, kv_limit)
        self._preloads: dict[Preload, None] = {}

    def _agent(
        self,
        name: str,
        context: Sequence[ContextItem],
        tools: Sequence[dict[str, Any]] | None,
        kv_limit: int | None,
        lease_ttl: int | float | None,
    ) -> Agent:
        ttl = self._services.config.lease_ttl if lease_ttl is None else lease_ttl
        with self._services.lock:
            self._require_open()
            self._require_free(name)
            return Agent(self, name, context, tools, kv_limit=kv_limit, lease_ttl=ttl)

    def preload(self, names: Sequence[str], *, pin: bool = True) -> None:
        """Compute published texts now, for contexts that begin with them in this order.

        pin: their pages stay until this home is closed. Otherwise they are cached like those of any other text.
        Raises CapacityError when there is no room, VisibilityError for a name that is not published here.
        """
        services = self._services
        with services.lock:
            self._require_open()
            scope = Scope(self.scope.tenant, self.scope.group, services.unique_id(self.scope.tenant, "preload"))
            conversation = Conversation(services.encoder, scope)
            conversation.extend([conversation.item(self.shelf.resolve(name, "preload")) for name in names])
            texts = Preload(services, scope, tuple(names), conversation.spans(generate=False), pin=pin)
            self._preloads[texts] = None
        try:
            texts.compute()
        except BaseException:
            self._forget(texts)
            raise
        if not pin:
            self._forget(texts)

    @property
    def pinned(self) -> tuple[tuple[str, ...], ...]:
        """The runs of texts that were preloaded to stay, by name."""
        return tuple(texts.names for texts in self._preloads if texts.pin)

    def _close_scope(self) -> None:
        """Everybody has left: the pages of what was published here go."""
        for texts in list(self._preloads):
            self._forget(texts)
        self._services.memory.drop_scope(self.scope)
        self._services.close_scope(self.scope)

    def _forget(self, texts: Preload) -> None:
        with contextlib.suppress(KeyError):  # somebody else does it
            del self._preloads[texts]
            with contextlib.suppress(ClosedError):  # a closed engine holds nothing any more
                texts.close()


class Tenant(_AgentHome):
    """A customer of this engine: owns GLOBAL texts, groups and agents. Made by `llm.tenant(name)`."""

    kind = "tenant"

    def __init__(
        self, services: Services, name: str, tenants: dict[str, "Tenant"], quotas: Mapping[Tier, Quota]
    ) -> None:
        scope = Scope(services.unique_id(name))
        self.quotas = quotas
        services.memory.open_tenant(scope.tenant, quotas)
        super().__init__(services, name, scope, outer=None)
        self.groups: dict[str, Group] = {}
        self._tenants = tenants

    def publish(
        self, name: str, text: str, role: str = "system", *, mode: Mode | str = Mode.PREFIX, readers: int = 2
    ) -> None:
        """Make `text` readable for every agent of this tenant, under `name`, for the tenant's life (GLOBAL).

        mode: how contexts take it that list its name, see `Shared`. readers: how many are expected of it; a text that
        too few read is not worth a canonical form.
        """
        with self._services.lock:
            self._require_open()
            inner = [group.name for group in self.groups.values() if name in group.shelf]
            if inner:
                raise InvalidRequestError(f"{name!r} is already published in group {inner[0]!r}: choose another name")
            self._publish(name, text, role=role, mode=mode, readers=readers)

    def group(self, name: str, *, kv_limit: int | None = None) -> "Group":
        """A new group (team) of this tenant; a live name again raises.

        kv_limit: the most pages that texts published to it may take, inside the tenant's group pool.
        """
        with self._services.lock:
            self._require_open()
            if name in self.groups:
                raise ConfigError(f"group {name!r} is live in {self.name!r}: close it first or choose another name")
            self.groups[name] = group = Group(self, name, kv_limit)
            return group

    def agent(
        self,
        name: str,
        context: Sequence[ContextItem] = (),
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        kv_limit: int | None = None,
        lease_ttl: int | float | None = None,
    ) -> Agent:
        """A new agent of no group. `context` lists published names and private Segments, in order.

        kv_limit: the most pages that its own text may take, inside the tenant's private pool. lease_ttl: seconds after
        which it is ended when nobody has used it; by default that of the engine.
        """
        return self._agent(name, context, tools, kv_limit, lease_ttl)

    def empty(self) -> int:
        """Free every page that no running turn needs and that is not pinned; the number of pages freed.

        Conversations go on: their next turn computes again what it needs.
        """
        self._require_open()
        return self._services.core.call(lambda: self._services.memory.empty(self.scope.tenant))

    def stats(self) -> HomeStats:
        """Its own turns and pages, with its groups and agents; says nothing of other tenants."""
        self._require_open()
        return self._stats(View(self._services))

    def _stats(self, view: View) -> HomeStats:
        # Copies of dicts, not the lock of the names: the engine thread may ask too.
        groups = {name: group._stats(view) for name, group in dict(self.groups).items()}
        return view.home(self.name, self.scope, _agents(view, self), groups)

    def close(self) -> None:
        """End the tenant with all its groups and agents; its pages go."""
        with self._services.lock:
            if self.closed:
                return
            self.closed = True
            groups, agents = list(self.groups.values()), list(self.agents.values())
        for group in groups:
            group.close(force=True)
        for agent in agents:
            agent.close()
        self._close_scope()
        self._services.memory.close_tenant(self.scope.tenant)
        self._services.forget_tenant(self.scope.tenant)
        with self._services.lock:
            self._tenants.pop(self.name, None)


class Group(_AgentHome):
    """A team: its members read what is published to it. Made by `tenant.group(name)`."""

    kind = "group"

    def __init__(self, tenant: Tenant, name: str, kv_limit: int | None) -> None:
        outer = tenant.scope.tenant
        services = tenant._services
        super().__init__(services, name, Scope(outer, services.unique_id(outer, name)), tenant, kv_limit)
        self.tenant = tenant
        self._end = threading.Lock()  # whoever gets it ends the group

    def publish(
        self,
        name: str,
        text: str,
        role: str | None = None,
        *,
        mode: Mode | str | None = None,
        readers: int | None = None,
        on_update: OnUpdate | str = OnUpdate.APPEND,
    ) -> None:
        """Make `text` readable for the members of this group, under `name` (GROUP); see `Tenant.publish`.

        A name that is published already gets a new version, with the role, mode and readers of the one before unless
        given. Turns that start after this returned read it, running ones finish with the old one. on_update: "append"
        adds it to contexts that hold the old one, which stays; "replace" puts it in the place of the old one, and
        these contexts compute again what follows.
        """
        with self._services.lock:
            self._require_open()
            if name in self.tenant.shelf:
                raise InvalidRequestError(
                    f"{name!r} is already published by tenant {self.tenant.name!r}: choose another name"
                )
            self._publish(name, text, role=role, mode=mode, readers=readers, on_update=on_update)

    def agent(
        self,
        name: str,
        context: Sequence[ContextItem] = (),
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        kv_limit: int | None = None,
        lease_ttl: int | float | None = None,
    ) -> Agent:
        """A new member; see `Tenant.agent`."""
        return self._agent(name, context, tools, kv_limit, lease_ttl)

    def stats(self) -> HomeStats:
        """The turns and pages of this group, with its members; says nothing of other groups."""
        self._require_open()
        return self._stats(View(self._services))

    def _stats(self, view: View) -> HomeStats:
        return view.home(self.name, self.scope, _agents(view, self), {})

    def close(self, force: bool = False) -> None:
        """Refuse new members and publishes; members go on and the pages go with the last. `force` ends them."""
        with self._services.lock:
            self.closed = True
            members = list(self.agents.values()) if force else []
        for agent in members:
            agent.close()
        self._member_left()

    def _member_left(self) -> None:
        if self.closed and not self._members and self._end.acquire(blocking=False):
            del self.tenant.groups[self.name]
            self._close_scope()


def _agents(view: View, home: Home) -> dict[str, AgentStats]:
    return {name: view.agent(agent.full_name, agent.scope, agent._handle) for name, agent in home.agents.items()}
