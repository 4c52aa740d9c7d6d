"""Copies on write are spread over steps, at most so many in each; who waits loses no bit, and all of it is counted."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from inms_jax import LLM, CompletionOutput, SamplingParams, Segment
from inms_jax.engine.pending import Pending
from inms_jax.engine.report import Counters, StepReport
from inms_jax.errors import ConfigError
from inms_jax.memory.plan import StepPlan
from tests.tiny import tiny_llm

BURST = SamplingParams(n=8, max_tokens=6, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)


def burst(copy_budget: int) -> tuple[tuple[CompletionOutput, ...], int, int, int, list[int]]:
    """Eight samples of one prompt: their answers, copies, waits, the most copies of one step, and pages held."""
    held: list[int] = []
    with tiny_llm(copy_budget=copy_budget, num_pages=200) as llm:

        def note(report: StepReport) -> None:
            held.append(report.held_pages)

        llm.observe(note)
        (output,) = llm.generate("A prompt that ends in the middle of a page.", BURST)
        stats = llm.stats()
        llm.verify()
        assert stats.memory.held == 0
        return output.outputs, stats.memory.copies, stats.work.copy_waits, stats.work.peak_copies, held


def test_a_burst_is_spread_over_steps_and_says_the_same() -> None:
    free, copies, waits, peak, held = burst(64)
    assert (copies, waits) == (7, 0)
    assert peak == 7  # the last of the eight writes in place
    for budget in (1, 3, 7):
        answers, copies, waits, peak, spread = burst(budget)
        assert answers == free
        assert copies == 7
        assert peak == budget
        assert waits > 0
        jumps = [after - before for before, after in itertools.pairwise(spread)]
        assert max(jumps) <= budget
        assert max(spread) <= max(held)


def copies_of_steps(llm: LLM) -> list[int]:
    """Filled, from now on, with the pages that each step copies, counted where they reach the device."""
    core, runner = llm._core, llm._core.runner
    step, prefill, decode, copies = core._step, runner.prefill, runner.decode, [0]

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(plan: StepPlan, *args: Any) -> Any:
            copies[-1] += int((plan.copy_dst > 0).sum())
            return run(plan, *args)

        return call

    def begin() -> None:
        copies.append(0)
        step()

    core._step, runner.prefill, runner.decode = begin, counted(prefill), counted(decode)  # type: ignore[method-assign]
    return copies


def talk(copy_budget: int) -> tuple[list[object], list[int], Counters]:
    """Eight forks of one agent all speak while eight samples of one prompt begin: prompts and answers copy at once."""
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, ignore_eos=True)
    with tiny_llm(copy_budget=copy_budget, num_pages=400, max_num_seqs=16) as llm, llm.tenant("acme") as tenant:
        copies = copies_of_steps(llm)
        agent = tenant.agent("a", [Segment("I like tea.")])
        agent.chat("Hm?", SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        twins = [agent.fork(f"f{i}") for i in range(8)]

        def submit() -> list[Pending]:
            samples = llm._submit("A prompt that ends in the middle of a page.", BURST, 0)
            return [samples, *(twin._submit(f"{i}?", params, None) for i, twin in enumerate(twins))]

        pending = llm._core.call(submit)
        said: list[object] = [[(one.token_ids, one.logprobs) for one in each.result().outputs] for each in pending]
        llm.verify()
        return said, copies, llm.stats().work


def test_prompts_and_answers_share_one_budget() -> None:
    expected, copies, _ = talk(64)
    assert max(copies) >= 7
    for budget in (1, 2, 3):
        said, spread, work = talk(budget)
        assert said == expected
        assert sum(spread) == sum(copies)
        assert max(spread) == work.peak_copies == budget
        assert work.copy_waits > 0


@pytest.mark.parametrize("budget", [0, -1, True])
def test_a_budget_that_lets_nobody_write_is_refused(budget: int) -> None:
    with pytest.raises(ConfigError, match="copy_budget"):
        tiny_llm(copy_budget=budget)
