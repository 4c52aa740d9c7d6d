"""Reads an engine between two steps: what each agent holds, what the prediction says, what an ideal memory would hold.

The number of tokens an agent has in pages comes from its row of the page table, what they are from its conversation,
and the prediction from the lengths alone. Runs on the engine thread, as an observer of steps.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from time import monotonic

from inms_jax.agents import Agent, AgentSnapshot
from inms_jax.engine.report import StepReport
from inms_jax.errors import StateError
from inms_jax.eval.results import AgentPages, MapCell, StepSample
from inms_jax.llm import LLM
from inms_jax.memory.prediction import Context, Piece, predict_pages


def context_of(name: str, state: AgentSnapshot, *, shared: bool) -> Context:
    """The held part of a context as the prediction takes it; without sharing, equal texts are different pages."""
    pieces: list[Piece] = []
    left = state.kv_tokens
    for span in state.context:
        length = min(left, len(span.tokens))
        identity: Hashable = span.tokens if shared else (name, span.tokens)
        whole = length == len(span.tokens)
        pieces.append(Piece(identity, length, int(span.scope.tier), span.scope, span.published and whole))
        left -= length
    if left:  # what the turn has generated so far
        own = state.context[-1].scope
        pieces.append(Piece((name, "generated"), left, int(own.tier), own))
    return Context(tuple(piece for piece in pieces if piece.length), name)


def unique_tokens(contexts: Iterable[Context]) -> int:
    """Tokens that differ in themselves, in what stands before them, or in whose they are. Pure arithmetic."""
    longest: dict[Hashable, int] = {}
    for context in contexts:
        before: tuple[Hashable, ...] = ()
        for piece in context.pieces:
            before = (*before, (piece.identity, piece.scope))
            longest[before] = max(longest.get(before, 0), piece.length)
    return sum(longest.values())


class Probe:
    """Collects one sample a step, and the page map when the most pages are held.

    Held pages that differ from the prediction, or a broken invariant of the page pool, are an error, which `check`
    raises in the caller's thread.
    """

    def __init__(self, llm: LLM, *, shared: bool, on_step: Callable[[StepSample], None]) -> None:
        self._llm = llm
        self._on_step = on_step
        self._shared = shared
        self._agents: dict[str, Agent] = {}
        self._published: dict[str, int] = {}
        self._start = monotonic()
        self._samples: list[StepSample] = []
        self._map: tuple[MapCell, ...] = ()
        self._failure: Exception | None = None

    def add(self, agent: Agent) -> None:
        """Watch an agent that has not spoken yet."""
        self._agents = {**self._agents, agent.name: agent}

    def start(self) -> None:
        """Take a sample after every step from now on; now is their time zero."""
        self._start = monotonic()
        self._llm.observe(self._observe)

    @property
    def seconds(self) -> float:
        return monotonic() - self._start

    @property
    def samples(self) -> tuple[StepSample, ...]:
        return tuple(self._samples)

    @property
    def page_map(self) -> tuple[MapCell, ...]:
        """At the peak."""
        return self._map

    def check(self) -> None:
        """Raise what went wrong on the engine thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def published_tokens(self, name: str) -> int:
        """Tokens of the published texts in an agent's context."""
        return self._published[name]

    def _observe(self, report: StepReport) -> None:
        if self._failure is None:
            try:
                self._take(report)
            except Exception as error:  # the engine must go on; the caller hears of it from `check`
                self._failure = error

    def _take(self, report: StepReport) -> None:
        states = {name: agent.snapshot() for name, agent in self._agents.items()}
        contexts = [context_of(name, state, shared=self._shared) for name, state in states.items()]
        predicted = predict_pages(contexts, self._llm.config.block_size)
        sample = StepSample(
            time_s=self.seconds,
            kind=report.kind,
            tokens=report.tokens,
            held_pages=report.held_pages,
            predicted_pages=predicted,
            unique_tokens=unique_tokens(context_of(name, state, shared=True) for name, state in states.items()),
            agents={name: AgentPages(state.kv_tokens, state.kv_pages) for name, state in states.items()},
        )
        if report.held_pages != predicted:
            tokens = {name: state.kv_tokens for name, state in states.items()}
            raise StateError(
                f"after step {len(self._samples) + 1} ({report.kind}) {report.held_pages} pages are held and "
                f"{predicted} were predicted, for agents with {tokens} tokens in pages of "
                f"{self._llm.config.block_size}: one of the two is wrong"
            )
        if not self._samples or report.held_pages > max(s.held_pages for s in self._samples):
            self._map = self._cells(states)
        for name, state in states.items():
            self._published[name] = sum(len(span.tokens) for span in state.context if span.published)
        self._samples.append(sample)
        self._llm.verify()
        self._on_step(sample)

    def _cells(self, states: Mapping[str, AgentSnapshot]) -> tuple[MapCell, ...]:
        names = {state.sequence: name for name, state in states.items()}
        return tuple(
            MapCell(
                page=info.page,
                tier=info.tier.name.lower(),
                state=info.state.value,
                tokens=info.tokens_used,
                holders=tuple(name for handle, name in names.items() if handle in info.holders),
            )
            for info in self._llm.memory_map()
        )
