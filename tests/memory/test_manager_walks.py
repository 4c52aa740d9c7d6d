"""Long random lives in crowded pools, on the machine of `test_manager_state_machine`."""

import random
from collections.abc import Callable

import pytest

from tests.memory.test_manager_state_machine import MemoryMachine, has


@pytest.mark.parametrize("seed", range(6))
def test_long_walks_keep_every_invariant(seed):
    """The same machine without the search for small examples: long lives in crowded pools."""
    rng = random.Random(seed)
    machine = MemoryMachine()
    machine.start(rng.randint(12, 40), rng.randint(2, 5), seed % 5 != 4, seed % 3 != 2)
    rare = {"evict_cached": 0.2, "drop": 0.1, "close_scope": 0.02, "release": 0.3}
    for _ in range(300):
        which, really = rng.randint(0, 30), True
        text = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 7)))
        begin = (
            which,
            rng.choices(range(4), k=rng.randint(0, 3)),
            text,
            rng.choice([None, None, None, 0, 3]),
            rng.choice([None, None, None, 1, 3, 8]),
            rng.randint(0, 6),
            rng.choice([1, 1, 2, 3]),
            rng.random() < 0.2,
        )
        steps: list[tuple[Callable[..., None], tuple[object, ...], bool]] = [
            (machine.register, (rng.random() < 0.4,), len(machine.live) < 6),
            (machine.begin, begin, has("idle")(machine)),
            (machine.begin, begin, has("idle")(machine)),
            (machine.prefill, (which, rng.randint(1, 9)), has("prefill")(machine)),
            (machine.prefill, (which, rng.randint(1, 9)), has("prefill")(machine)),
            (machine.finish_prompts, (), has("prefill")(machine)),
            (machine.decode_step, (list(text),), has("active")(machine)),
            (machine.decode_step, (list(text),), has("active")(machine)),
            (machine.branch, (), any(m.phase == "active" and m.branches_left for m in machine.live)),
            (machine.fork, (which,), 0 < len(machine.live) < 8 and rng.random() < 0.4),
            (machine.end_turn, (which, rng.random() < 0.7, rng.random() < 0.5), has("prefill", "active")(machine)),
            (machine.release, (which,), len(machine.live) > 3),
            (machine.drop, (which, really), has("idle")(machine)),
            (machine.evict_cached, (), machine.memory.stats().cached > 0),
            (machine.close_scope, (which, really), bool(machine.live)),
        ]
        run, arguments, possible = rng.choice(steps)
        if possible and rng.random() < rare.get(run.__name__, 1.0):
            run(*arguments)
            machine.everything_adds_up()
            machine.every_row_reads_its_own_context()
            machine.pages_are_predicted()
    machine.teardown()
