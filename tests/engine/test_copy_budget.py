"""Copies on write are spread over steps, at most so many in each; who waits loses no bit, and all of it is counted."""

import itertools

import pytest

from inms_jax import CompletionOutput, SamplingParams, Segment
from inms_jax.engine.report import StepReport
from inms_jax.errors import ConfigError
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
    assert peak == 8  # the last of the eight writes in place
    for budget in (1, 3, 7):
        answers, copies, waits, peak, spread = burst(budget)
        assert answers == free
        assert copies == 7
        assert peak == budget
        assert waits > 0
        jumps = [after - before for before, after in itertools.pairwise(spread)]
        assert max(jumps) <= budget
        assert max(spread) <= max(held)


def test_forks_that_all_write_wait_for_their_copies_in_order() -> None:
    def talk(copy_budget: int) -> tuple[list[tuple[int, ...]], int]:
        with tiny_llm(copy_budget=copy_budget, num_pages=200) as llm, llm.tenant("acme") as tenant:
            agent = tenant.agent("a", [Segment("I like tea.")])
            agent.chat("Hm?", SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
            twins = [agent.fork(f"f{i}") for i in range(5)]
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            pending = [twin._submit(f"{i}?", params, None) for i, twin in enumerate(twins)]
            said = [one.result().outputs[0].token_ids for one in pending]
            llm.verify()
            return said, llm.stats().work.peak_copies

    expected, _ = talk(64)
    said, peak = talk(1)
    assert said == expected
    assert peak <= 1


@pytest.mark.parametrize("budget", [0, -1, True])
def test_a_budget_that_lets_nobody_write_is_refused(budget: int) -> None:
    with pytest.raises(ConfigError, match="copy_budget"):
        tiny_llm(copy_budget=budget)
