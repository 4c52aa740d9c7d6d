"""Agents as objects: what they read and what they say.

Knows nothing of pages: it names scopes and hands contexts to the engine.
"""

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inms_jax.config import SamplingParams, sampling_params
from inms_jax.engine.conversation import Conversation, Item, ReplyItem, TextItem
from inms_jax.engine.fragments import Decision, Explanation, Mode
from inms_jax.engine.outputs import ScoreOutput
from inms_jax.engine.pending import Pending
from inms_jax.engine.request import Request, TurnStart
from inms_jax.engine.segment import Published, Segment, Shared, message_parts
from inms_jax.errors import ClosedError, InvalidRequestError, StaleHandleError
from inms_jax.homes import Handle, Home
from inms_jax.membership import Membership
from inms_jax.memory.lease import check_ttl
from inms_jax.memory.manager import SequenceHandle
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope
from inms_jax.memory_store import MemoryStore, Snippet, as_text, found_in
from inms_jax.scoring import ScoreTurn
from inms_jax.speaker import ChatInput, Speaker
from inms_jax.stats import AgentStats, View


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """Where an agent stands: spans of the turn that runs, else of the history; `kv_tokens` of them are in pages."""

    context: tuple[Span, ...]
    kv_tokens: int
    kv_pages: int
    sequence: SequenceHandle
    """As `memory_map` names the holders of pages."""


ContextItem = str | Segment | Shared


class Agent(Handle, Speaker):
    """One speaker with a context and a conversation. Made by `tenant.agent` or `group.agent`.

    Calls from several threads run in call order. A failed or aborted turn leaves the conversation as before it.
    """

    kind = "agent"

    def __init__(
        self,
        home: "Home[Agent]",
        name: str,
        context: Sequence[ContextItem],
        tools: Sequence[dict[str, Any]] | None,
        parent: "Agent | None" = None,
        kv_limit: int | None = None,
        lease_ttl: int | float | None = None,
    ) -> None:
        super().__init__(name)
        check_ttl(f"agent {name!r}", lease_ttl)
        if isinstance(context, str):
            raise InvalidRequestError(f"context must be a list of published names and Segments, got {context!r}")
        self._home = home
        self.turn = 0
        """Turns that ended well."""
        self._history_len = 0
        """Tokens of the last turn that ended well: its context and its answer."""
        self._running: Sequence[Span] | None = None
        """The context of the turn that runs."""
        self._services = services = home._services
        outer = home.scope
        unique = services.unique_id(outer.tenant, outer.group or "", name)
        self.scope = Scope(outer.tenant, outer.group, unique)
        self._forks = itertools.count(1)
        self._conversation = Conversation(services.encoder, self.scope)
        self._conversation.tools = tools
        if parent is None:
            items = [self._conversation.item(self._resolve(part)) for part in context]
            # A context that cannot be rendered or is too long fails here, not later.
            services.core.scheduler.check_context(self._conversation.check(items))
            self._conversation.extend(items)
        self._membership = member = Membership(services, self.full_name, self.scope, home._leave)
        member.hold(self.scope, limit=kv_limit)
        self._kv_limit = kv_limit
        self._lease_ttl = lease_ttl
        if parent is None:
            member.take(services.memory.register(self.scope), lease_ttl)
        home._members[member] = weakref.ref(self)
        self._dropped = member.watch(self)

    # ---- what it reads -----------------------------------------------------------------------------------------

    def append(self, *parts: ContextItem, role: str | None = None) -> None:
        """Add published names and Segments to the conversation without generating; `role` overrides theirs."""
        self._require_open()
        items = []
        for part in parts:
            resolved = self._resolve(part)
            item = self._conversation.item(resolved)
            if role is not None and isinstance(item, TextItem):
                item = replace(item, role=role)
            items.append(item)
        self._extend(items)

    def _extend(self, items: Sequence[Item], *, once: bool = False) -> None:
        """Add items behind the turns that were asked before. `once`: those that are not there yet."""

        def extend() -> None:
            self._require_open()
            owned = [self._conversation.own(item) for item in items]
            if once:
                owned = [item for item in dict.fromkeys(owned) if item not in self._conversation.items]
            self._services.core.scheduler.check_context(self._conversation.check(owned))  # before anything changes
            self._conversation.extend(owned)
            self._membership.renew()

        self._services.core.call(extend, queue=self)

    def recall(self, store: MemoryStore, query: str, k: int = 4, *, role: str = "system") -> tuple[Snippet, ...]:
        """Add the at most `k` snippets of long-term memory that fit `query` best to the conversation; returns them all.

        What the conversation holds already is not added again. Shared snippets are stored once for all who recall them.
        """
        self._require_open()
        found = found_in(store, query, self.names, k)
        fragments = self._services.fragments.refusal is None
        texts = [as_text(snippet, role, self._home.shelf, fragments=fragments) for snippet in found]
        items = [self._conversation.item(text) for text in texts]
        self._extend(items, once=True)
        return found

    def score(self, message: ChatInput | None, answer: str | Sequence[int]) -> ScoreOutput:
        """How likely `answer` is as the answer to `message`: a log-probability and logits for each of its tokens.

        The conversation stays as it is. `answer` is a text or token ids; without a `message` it answers the
        conversation so far. Raises what a turn raises.
        """
        self._require_open()
        ids = self._services.core.tokenizer.encode(answer) if isinstance(answer, str) else answer
        if not ids:
            raise InvalidRequestError("the answer to score is empty: it must hold at least one token")
        items = [] if message is None else self._items(message)
        turn = ScoreTurn(self._services, self.scope, items, tuple(ids), self._to_fork)
        pending = Pending(self._services.request_id(), self._services.core.abort, self._services)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self._services.core.submit(Request(pending.request_id, turn, params, pending, queue=self))
        return turn.output(pending.result())

    def _to_fork(self) -> tuple[SequenceHandle, Conversation, tuple[Item, ...]]:
        """What a reader of this agent's mind starts from. Engine thread, between turns."""
        self._require_open()
        assert self._handle is not None, "an open agent has a sequence"
        self._membership.renew()
        return self._handle, self._conversation, self._conversation.updated(self._home.shelf.newer)

    # ---- what it is --------------------------------------------------------------------------------------------

    @property
    def _handle(self) -> SequenceHandle | None:
        """Its sequence; a fork gets it when the turns before the fork have ended."""
        return self._membership.handle

    @property
    def names(self) -> Scope:
        """The names of its tenant, its group and itself; they are the same after a restart."""
        home = self._home.names
        return Scope(home.tenant, home.group, self.name)

    @property
    def full_name(self) -> str:
        """tenant/group/agent, or tenant/agent."""
        return "/".join(self._names)

    @property
    def _names(self) -> tuple[str, ...]:
        outer = (self._home.outer.name, self._home.name) if self._home.outer else (self._home.name,)
        return (*outer, self.name)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The history as token ids, as the next turn will find it."""
        return self._services.core.call(lambda: self._conversation.token_ids)

    def stats(self) -> AgentStats:
        """Its own turns and pages; says nothing of other agents."""
        self._require_open()
        return View(self._services).agent(self.full_name, self.scope, self._handle)

    def explain(self) -> Explanation:
        """For each segment of the next turn's context: whether it is read as a fragment, and why. Prints as a table."""

        def decisions() -> list[Decision]:
            return self._conversation.placed(self._conversation.updated(self._home.shelf.newer), generate=True)[1]

        return Explanation(self._services.core.call(decisions))

    def snapshot(self) -> AgentSnapshot:
        """Context and KV as they are between two steps; observers of the engine may call it too."""
        return self._services.core.call(self._snapshot)

    def _snapshot(self) -> AgentSnapshot:
        self._require_open()
        assert self._handle is not None, "an open agent has a sequence"
        context = self._conversation.spans(generate=False) if self._running is None else self._running
        row = self._services.memory.row(self._handle)
        return AgentSnapshot(tuple(context), int((row.end - row.begin).sum()), len(row.page), self._handle)

    def fork(self, name: str) -> "Agent":
        """A new agent of the same home that has this one's whole conversation, at no copy of any page.

        What the two say from then on is private to each, under the same `kv_limit` for each; this one pays for what
        they have in common. Waits for the turns before it.
        """
        self._require_open()
        services = self._services
        with services.lock:
            self._home._require_open()
            self._home._require_free(name)
            twin = Agent(self._home, name, (), None, self, self._kv_limit, self._lease_ttl)
        try:
            services.core.call(lambda: self._fork_into(twin), queue=self)
        except BaseException:
            twin.close()
            raise
        return twin

    def _fork_into(self, twin: "Agent") -> None:
        self._require_open()
        twin._require_open()
        assert self._handle is not None, "an open agent has a sequence"
        services = self._services
        member = self._membership
        member.renew()
        twin._membership.take(services.memory.fork(self._handle, twin.scope), self._lease_ttl)
        twin._conversation.items, twin._conversation.tools = self._conversation.items, self._conversation.tools
        twin.turn, twin._history_len = self.turn, self._history_len
        for lineage in list(member.lineages):
            twin._membership.hold(lineage)
        # What this agent says from now on is no business of the twin's.
        line = Scope(self.scope.tenant, self.scope.group, f"{self.scope.agent}/{next(self._forks)}")
        member.hold(line)
        self._conversation.scope = line

    def pause(self, ttl: int | float | None = None, *, offload: bool = False) -> None:
        """Keep its KV while it waits for something, a tool say, whatever others need, for `ttl` seconds or for good.

        offload: copy its private pages to host memory and let others have them; the next turn brings them back, bit by
        bit. A turn or `resume` ends the pause. Waits for the turns before it.
        """
        check_ttl(f"a pause of agent {self.name!r}", ttl)
        services = self._services

        def pause() -> None:
            self._require_open()
            assert self._handle is not None, "an open agent has a sequence"
            services.memory.pause(self._handle, None if ttl is None else services.now() + ttl)
            self._membership.renew()
            if offload:
                services.core.host.offload(self._handle)

        services.core.call(pause, queue=self)

    def resume(self) -> None:
        """End a pause; StateError without one. What was offloaded comes back with the next turn."""

        def resume() -> None:
            self._require_open()
            assert self._handle is not None, "an open agent has a sequence"
            self._services.memory.resume(self._handle)
            self._membership.renew()

        self._services.core.call(resume, queue=self)

    def _require_open(self) -> None:
        if self._membership.expired is not None:
            raise StaleHandleError(f"agent {self.name!r} was ended: {self._membership.expired}. Create a new one.")
        super()._require_open()

    def close(self) -> None:
        """End the agent: turns in progress fail, its private pages go, pages that others hold stay."""
        with self._services.lock:
            if self.closed:
                return
            self.closed = True
            self._dropped.detach()
            self._home._members.pop(self._membership, None)
        with contextlib.suppress(ClosedError):  # a closed engine holds nothing any more
            self._services.core.call(self._release)
        self._home._member_left()

    def _release(self) -> None:
        self._services.core.end_queue(self, ClosedError(f"agent {self.name!r} was closed during the turn"))
        self._membership.end()

    # ---- turns (Owner protocol; engine thread) -----------------------------------------------------------------

    def _submit(
        self, message: ChatInput, params: Any, tools: Sequence[dict[str, Any]] | None, *, stream: bool = False
    ) -> Pending:
        self._require_open()
        chosen = sampling_params(params)
        if chosen.n != 1:
            raise InvalidRequestError(f"an agent's turn has one answer, got n={chosen.n}: use agent.fork for branches")
        items = self._items(message)
        pending = Pending(self._services.request_id(), self._services.core.abort, self._services, stream=stream)
        self._services.core.submit(
            Request(
                pending.request_id,
                _Turn(self, items, tools),
                chosen,
                pending,
                prompt=message if isinstance(message, str) else None,
                queue=self,
            )
        )
        return pending

    def _items(self, message: ChatInput) -> list[Item]:
        parts: Sequence[Any] = [message] if isinstance(message, str | Segment) else message
        items: list[Item] = []
        for part in parts:
            if isinstance(part, Segment):
                items.append(self._conversation.item(part))
                continue
            if isinstance(part, str):
                part = {"role": "user", "content": part}
            items.append(TextItem(*message_parts(part), self._conversation.scope))
        if not items:
            raise InvalidRequestError("the prompt is empty: say at least one message")
        return items

    def _resolve(self, part: ContextItem) -> Segment | Published:
        if isinstance(part, Segment):
            return part
        found = self._home.shelf.resolve(part, self.full_name)
        if found.mode is Mode.FRAGMENT:
            self._services.require_fragments(found.link_tokens)
        return found


class _Turn:
    """One turn of one agent, seen by the engine as the owner of a request."""

    def __init__(self, agent: Agent, items: list[Item], tools: Sequence[dict[str, Any]] | None) -> None:
        self.agent, self.items, self.tools = agent, items, tools
        self.history: tuple[Item, ...] = ()

    def start_turn(self) -> TurnStart:
        agent = self.agent
        agent._require_open()
        assert agent._handle is not None, "an open agent has a sequence"
        agent._membership.renew()
        conversation = agent._conversation
        # Given before a fork and said after it, the text belongs to the line that says it.
        self.items = [conversation.own(item) for item in self.items]
        # What was published anew until now; a turn that fails leaves the conversation without it.
        self.history = conversation.updated(agent._home.shelf.newer)
        context, decisions = conversation.placed((*self.history, *self.items), tools=self.tools, generate=True)
        agent._running = context
        key: tuple[str | int, ...] = ("agent", agent._services.config.seed, *agent._names, agent.turn)
        return TurnStart(agent._handle, context, conversation.scope, key, tuple(decisions))

    def end_turn(self, request: Request) -> None:
        agent, conversation = self.agent, self.agent._conversation
        kept = request.error is None
        agent._running = None
        if request.handle is not None:
            length = request.history_len if kept else agent._history_len
            agent._services.memory.end_turn(request.handle, keep=kept, history_len=length)
            agent._services.count_turn(agent.scope, request)
            agent._membership.renew()
            if kept:
                agent._services.core.host.forget(request.handle)
        if kept:
            reply = ReplyItem(tuple(request.branches[0].token_ids), conversation.scope)
            conversation.items = (*self.history, *self.items, reply)
            if self.tools is not None:
                conversation.tools = self.tools
            agent.turn += 1
            agent._history_len = request.history_len
