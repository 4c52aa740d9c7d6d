"""The memory manager under another engine: the example of its page of documentation, and an engine without a model."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import inms_jax.memory
from inms_jax.errors import StaleHandleError
from inms_jax.memory import Scope, Span
from tests.memory.people import EVERY, A, B, C, D, E, G, T
from tests.memory.toy_engine import Job, ToyEngine, expected

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEM = Span(tuple(range(10)), T, published=True)
PLAN = Span((50, 51, 52, 53, 54), G, published=True)


def engine(num_pages: int) -> ToyEngine:
    toy = ToyEngine(num_pages)
    for scope in EVERY:
        toy.memory.open_scope(scope)
    return toy


def team_job(toy: ToyEngine, scope: Scope, secret: int, count: int = 3) -> Job:
    return toy.submit(scope, [SYSTEM, PLAN, Span((secret, 8, 9), scope)], count)


def test_the_example_of_the_documentation_runs_without_jax_and_shares() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/memory_manager.md").read_text(), flags=re.DOTALL)
    code += "\nimport sys\nassert 'jax' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared = [SYSTEM, Span(PLAN.tokens, Scope("acme", "team"))]
    for name, found, secret in (("alice", 0, (7, 8, 9)), ("bob", 15, (1, 2, 3))):
        answer = expected([*shared, Span(secret, A)], 3)
        assert f"{name}: {answer}, {found} of 18 prompt tokens were in pages already" in done.stdout
        answer = expected([*shared, Span((*secret, *answer, 60, 61), A)], 2)
        assert f"{name}: {answer}\n" in done.stdout
    assert "31 of 31 pages are free, 15 tokens were found" in done.stdout


def test_the_documentation_names_what_exists() -> None:
    text = (ROOT / "docs/memory_manager.md").read_text()
    calls = set(re.findall(r"`([a-z_]+)(?:\(|`)", text))
    named = {
        "register", "begin_turn", "match", "prefill", "commit_prefill", "decode", "commit_decode", "row", "end_turn",
        "release", "fork", "open_scope", "close_scope", "stats", "pages", "events", "verify", "open_tenant",
        "hold_scope", "drop_scope", "pin", "empty", "evict_cached", "clear", "shared_blocks",
    }  # fmt: skip
    assert named <= calls
    assert all(hasattr(inms_jax.memory.MemoryManager, name) for name in named)
    assert all(hasattr(inms_jax.memory, name) for name in inms_jax.memory.__all__)


def test_jobs_together_answer_as_each_alone_and_the_shared_text_is_computed_once() -> None:
    toy = engine(64)
    jobs = [team_job(toy, scope, secret) for scope, secret in ((A, 1), (B, 2), (C, 3), (A, 4))]
    jobs.append(toy.submit(D, [SYSTEM, Span((5, 6), D)], 4))
    jobs.append(toy.submit(E, [Span((*SYSTEM.tokens, 7), E)], 4))
    toy.run()
    for job in jobs:
        assert job.answer == expected(job.context, job.count)
    stats = toy.memory.stats()
    assert toy.waited > 0, "nobody waited for a block that another was computing"
    # SYSTEM once for acme and once for the stranger, PLAN once, then each one's own text.
    assert stats.computed_tokens == 10 + 11 + 5 + 4 * 3 + 2
    assert stats.held == 0
    toy.memory.verify()


def test_a_pool_that_holds_two_of_eight_serves_all_of_them() -> None:
    toy = engine(2 * (3 + 2 + 2) + 1)
    jobs = [toy.submit(scope, [Span(tuple(range(n, n + 20)), scope)], 5) for n, scope in enumerate([A, B, C, D] * 2)]
    toy.run()
    assert toy.refused > 0, "nobody had to wait for a page"
    for job in jobs:
        assert job.answer == expected(job.context, job.count)
    assert toy.memory.stats().held == 0


@pytest.mark.parametrize("steps", range(9))
def test_a_job_given_up_after_any_step_leaves_nothing_and_harms_nobody(steps: int) -> None:
    toy = engine(64)
    victim, other = team_job(toy, A, 1, count=6), team_job(toy, B, 2, count=6)
    for _ in range(steps):
        toy.step()
    if victim in toy.jobs:
        toy.end(victim, keep=False)
    with pytest.raises(StaleHandleError):
        toy.memory.row(victim.handle)
    toy.run()
    assert other.answer == expected(other.context, 6)
    toy.memory.verify()
    assert toy.memory.stats().held == 0


def test_random_conversations_in_a_small_pool() -> None:
    random = np.random.default_rng(5)
    toy = engine(40)
    for number in range(50):
        scope = [A, B, C, D, E][int(random.integers(5))]
        head = [SYSTEM] * (scope.tenant == T.tenant) + [PLAN] * (scope.group == G.group and scope.tenant == T.tenant)
        own = Span(tuple(random.integers(0, 3, int(random.integers(1, 20))).tolist()), scope)
        job = toy.submit(scope, [*head, own], int(random.integers(1, 7)))
        for _ in range(int(random.integers(4))):
            toy.step()
            toy.memory.verify()
        if number % 7 == 0 and job in toy.jobs:
            toy.end(job, keep=False)
        done = [job for job in [job] if len(job.answer) == job.count]
        assert all(job.answer == expected(job.context, job.count) for job in done)
    left = list(toy.jobs)
    toy.run()
    assert all(job.answer == expected(job.context, job.count) for job in left)
    assert toy.memory.stats().held == 0
