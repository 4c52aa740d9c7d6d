"""Published texts computed before anybody asks for them, and kept if they are to stay.

Knows nothing of agents: it is the owner of one request that reads what a home has published.
"""

from inms_jax.config import SamplingParams
from inms_jax.engine.pending import Pending
from inms_jax.engine.request import Request, TurnStart
from inms_jax.engine.services import Services
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope

_NO_ANSWER = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""The least that a request can ask for; its one token is written nowhere."""


class Preload:
    """One sequence that holds the pages of `context`, the texts of `names`, as long as it is not closed."""

    def __init__(
        self, services: Services, scope: Scope, names: tuple[str, ...], context: list[Span], *, pin: bool
    ) -> None:
        self.names = names
        self.pin = pin
        self._services = services
        self._scope = scope
        self._context = context
        services.memory.hold_scope(scope)
        self._handle = services.memory.register(scope)

    def compute(self) -> None:
        """Have the engine compute the context; raises what a turn raises."""
        services = self._services
        services.core.scheduler.check_context(self._context)
        pending = Pending(services.request_id(), services.core.abort, services)
        services.core.submit(Request(pending.request_id, self, _NO_ANSWER, pending))
        pending.result()

    def close(self) -> None:
        """Let go of the pages: what was published stays cached until room is needed."""
        self._services.core.call(self._release)

    def _release(self) -> None:
        self._services.memory.release(self._handle)
        self._services.memory.drop_scope(self._scope)

    # Owner protocol; engine thread

    def start_turn(self) -> TurnStart:
        return TurnStart(self._handle, self._context, self._scope, ("preload",))

    def end_turn(self, request: Request) -> None:
        if request.handle is None:
            return
        kept = request.error is None
        self._services.memory.end_turn(request.handle, keep=kept, history_len=request.history_len if kept else 0)
        if kept and self.pin:
            self._services.memory.pin(request.handle)
