"""The built-in owner of plain `generate` and `chat`, and its requests, which remember nothing of each other."""

from inms_jax.engine.request import Request, TurnStart
from inms_jax.memory.manager import MemoryManager, SequenceHandle
from inms_jax.memory.plan import Span
from inms_jax.memory.tier import Scope

PLAIN = Scope("plain", None, "plain")
"""The built-in owner of `generate` and `chat`; ids of tenants end with a generation, so none is equal."""


class PlainTurn:
    """A plain request as the owner of itself: one sequence, one turn, all PRIVATE to the built-in owner."""

    def __init__(self, memory: MemoryManager, tokens: tuple[int, ...], key_parts: tuple[str | int, ...]) -> None:
        self.memory, self.tokens, self.key_parts = memory, tokens, key_parts
        self.handle: SequenceHandle | None = None

    def start_turn(self) -> TurnStart:
        if self.handle is None:
            self.handle = self.memory.register(PLAIN)
        return TurnStart(self.handle, [Span(self.tokens, PLAIN)], PLAIN, self.key_parts)

    def end_turn(self, request: Request) -> None:
        if request.handle is not None:
            kept = request.error is None
            self.memory.end_turn(request.handle, keep=kept, history_len=request.history_len if kept else 0)
        if self.handle is not None:
            self.memory.release(self.handle)
            self.handle = None
