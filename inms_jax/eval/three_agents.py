"""Runs the work of a scenario on one loaded model, without sharing and with it, and measures both.

Knows nothing of screens: it tells a watcher what happens.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, runtime_checkable

import jax

from inms_jax.agents import Agent
from inms_jax.engine.segment import Segment
from inms_jax.errors import StateError
from inms_jax.eval.probe import Probe
from inms_jax.eval.results import MODES, AgentResult, DemoResult, ModeResult, StepSample, TurnResult
from inms_jax.eval.scenario import AgentScript, Scenario
from inms_jax.llm import LLM
from inms_jax.weights import LoadedModel, load


@runtime_checkable
class Watcher(Protocol):
    """Who wants to see a run while it goes on. Called from several threads."""

    def note(self, text: str) -> None:
        """Something that takes a while begins."""

    def mode(self, mode: str, total_pages: int, page_bytes: int) -> None:
        """A run begins."""

    def asked(self, agent: str, turn: int) -> None:
        """A turn (from 1) was handed to the engine."""

    def said(self, agent: str, text: str, tokens: int, ttft_s: float) -> None:
        """More of an answer is there: all its text and tokens so far."""

    def answered(self, agent: str, turn: TurnResult) -> None:
        """A turn is over."""

    def step(self, sample: StepSample) -> None:
        """A device step was taken. Called by the engine thread."""


def run_demo(scenario: Scenario, model: LoadedModel, watcher: Watcher) -> DemoResult:
    """Both runs, each in an engine of its own.

    Raises StateError when the pages held differ from the prediction after any step or when pages stay held after
    everything was closed, and what an engine raises.
    """
    independent, shared = (_run_mode(mode, scenario, model, watcher) for mode in MODES)
    return DemoResult(model.model_id, independent, shared)


def load_model(scenario: Scenario) -> LoadedModel:
    """The model of a scenario, for both runs: float32 on CPU, bfloat16 elsewhere."""
    return load(scenario.model, dtype="float32" if jax.default_backend() == "cpu" else "bfloat16")


def _run_mode(mode: str, scenario: Scenario, model: LoadedModel, watcher: Watcher) -> ModeResult:
    sharing = mode == "shared"
    with LLM(model, enable_prefix_caching=sharing, progress=False, **scenario.engine) as llm:
        watcher.note(f"{mode}: compiling the engine's programs, so that no TTFT contains it")
        llm.warmup()
        total_pages = llm.stats().memory.total - 1  # without the null page
        watcher.mode(mode, total_pages, llm.page_bytes)
        probe = Probe(llm, shared=sharing, on_step=watcher.step)
        work = Work(scenario, llm, probe, watcher)
        try:
            turns = work.run()
        except BaseException:
            llm.close()  # ends the turns of agents that run in other threads
            raise
        wall_s = probe.seconds
        probe.check()
        counters = llm.stats().work
        work.close()
        return ModeResult(
            mode=mode,
            deterministic=llm.deterministic,
            wall_s=wall_s,
            page_bytes=llm.page_bytes,
            block_size=llm.config.block_size,
            total_pages=total_pages,
            tokens_prompt=counters.prompt_tokens,
            tokens_computed=counters.prefill_tokens,
            tokens_generated=sum(len(turn.token_ids) for answers in turns.values() for turn in answers),
            decode_steps=counters.decode_steps,
            samples=probe.samples,
            page_map=probe.page_map,
            agents=tuple(
                AgentResult(name, tuple(answers), probe.published_tokens(name)) for name, answers in turns.items()
            ),
        )


class Work:
    """The work itself, once, on one engine."""

    def __init__(self, scenario: Scenario, llm: LLM, probe: Probe, watcher: Watcher) -> None:
        self._scenario = scenario
        self._llm = llm
        self._probe = probe
        self._watcher = watcher
        self._params = replace(scenario.sampling, logprobs=0)  # of the chosen tokens only
        self._tenant = llm.tenant(scenario.tenant)
        self._group = self._tenant.group(scenario.group)
        self._turns: dict[str, list[TurnResult]] = {agent.name: [] for agent in scenario.agents}

    def run(self) -> dict[str, list[TurnResult]]:
        """The turns of each agent."""
        scenario, everyone = self._scenario, [text.name for text in self._scenario.published]
        for text in scenario.published:
            self._tenant.publish(text.name, text.text)
        author = self._agent(scenario.author, everyone)
        self._probe.start()
        for question in scenario.author.turns:
            self._ask(author, question)
        statement = self._turns[author.name][-1].text.strip()
        self._group.publish(scenario.decisions.name, f"{scenario.decisions.text}\n{statement}")
        readers = [self._agent(script, [*everyone, scenario.decisions.name]) for script in scenario.readers]
        scripts = [(author, scenario.author.later_turns)]
        scripts += [(agent, script.turns) for agent, script in zip(readers, scenario.readers, strict=True)]
        with ThreadPoolExecutor(len(scripts)) as threads:
            running = [threads.submit(self._ask_all, agent, questions) for agent, questions in scripts]
            try:
                for future in running:
                    future.result()
            except BaseException:
                self._llm.close()  # the other threads must not be waited for
                raise
        return self._turns

    def dismiss(self) -> None:
        """End every agent; what was published stays."""
        for agent in list(self._group.agents.values()):
            agent.close()

    def close(self) -> None:
        """End every agent. Raises StateError if a page is held after that."""
        self._tenant.close()
        memory = self._llm.stats().memory
        if memory.held:
            raise StateError(f"{memory.held} of {memory.total - 1} pages are held after every agent was closed")

    def _agent(self, script: AgentScript, names: Sequence[str]) -> Agent:
        agent = self._group.agent(script.name, [*names, Segment(script.notes)])
        self._probe.add(agent)
        return agent

    def _ask_all(self, agent: Agent, questions: Sequence[str]) -> None:
        for question in questions:
            self._ask(agent, question)

    def _ask(self, agent: Agent, question: str) -> None:
        answers = self._turns[agent.name]
        self._watcher.asked(agent.name, len(answers) + 1)
        text, token_ids, logprobs = "", list[int](), list[float]()
        for delta in agent.stream(question, self._params):
            [part] = delta.outputs
            assert part.logprobs is not None, "asked for above"
            text += part.text
            token_ids += part.token_ids
            logprobs += [found[token].logprob for token, found in zip(part.token_ids, part.logprobs, strict=True)]
            self._watcher.said(agent.name, text, len(token_ids), delta.ttft_s or 0.0)
        answer = TurnResult(
            question=question,
            text=text,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            ttft_s=delta.ttft_s or 0.0,
            prompt_tokens=len(delta.prompt_token_ids),
            cached_tokens=delta.num_cached_tokens,
        )
        answers.append(answer)
        self._probe.check()
        self._watcher.answered(agent.name, answer)
