"""The same work on several processes: each has a model and a pool of its own, and does its share of the groups.

All agents of a group run on one replica, since they share its pages. The processes are those of `jax.distributed`,
which the caller starts (docs/many_devices.md); with one process everything is done here. Knows nothing of what the
work is.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from inms_jax.errors import EngineError

G = TypeVar("G")


def placement(loads: Sequence[int], replicas: int) -> list[int]:
    """The replica of each group: the heaviest first, each to the one that has the least; the same on every process.

    loads: of each group, in tokens say. Where loads are equal, the earlier group and the lower replica go first.
    """
    given = [0] * replicas
    where = [0] * len(loads)
    for group in sorted(range(len(loads)), key=lambda g: (-loads[g], g)):
        replica = min(range(replicas), key=lambda r: (given[r], r))
        where[group] = replica
        given[replica] += loads[group]
    return where


def evaluate(groups: Sequence[G], work: Callable[[G], Any], load: Callable[[G], int] = lambda group: 1) -> list[Any]:
    """`work` of every group, on the process that it is placed on; all results in order, on every process.

    Results are what JSON can say. Every process must call it with the same groups. When a group fails, the others are
    done all the same, and then every process raises EngineError with the process, the group and the reason.
    """
    mine, replicas = jax.process_index(), jax.process_count()
    where = placement([load(group) for group in groups], replicas)
    done: dict[int, Any] = {}
    failed: dict[int, str] = {}
    for number, group in enumerate(groups):
        if where[number] == mine:
            try:
                result = work(group)
                json.dumps(result)  # what cannot be sent is this group's failure
                done[number] = result
            except Exception as error:
                failed[number] = f"{type(error).__name__}: {error}"
    everyone = _exchange({"done": done, "failed": failed})
    problems = [
        f"group {number} on process {process}: {reason}"
        for process, said in enumerate(everyone)
        for number, reason in said["failed"].items()
    ]
    if problems:
        raise EngineError(f"{len(problems)} of {len(groups)} groups failed: {'; '.join(problems)}")
    results = {int(number): result for said in everyone for number, result in said["done"].items()}
    return [results[number] for number in range(len(groups))]


def _exchange(said: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process says, on every process."""
    text = np.frombuffer(json.dumps(said).encode(), np.uint8)
    if jax.process_count() == 1:
        return [json.loads(text.tobytes())]
    lengths = np.asarray(multihost_utils.process_allgather(np.array(len(text), np.int32)))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(text)] = text
    found = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(line[:length].tobytes()) for line, length in zip(found, lengths, strict=True)]
