"""Several processes with a model each: what they find together is what one finds alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inms_jax.errors import EngineError
from inms_jax.eval.replicas import evaluate, placement

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("loads", "replicas", "where"),
    [
        ([1, 1, 1, 1], 2, [0, 1, 0, 1]),
        ([1, 2, 9, 3, 3], 2, [1, 1, 0, 1, 1]),
        ([5, 5, 4, 4, 3, 3], 3, [0, 1, 2, 2, 0, 1]),
        ([7], 4, [0]),
        ([], 3, []),
    ],
)
def test_the_heaviest_groups_are_placed_first(loads: list[int], replicas: int, where: list[int]) -> None:
    assert placement(loads, replicas) == where


def test_one_process_does_everything_and_names_what_fails() -> None:
    assert evaluate([3, 1, 2], lambda group: {"twice": 2 * group}) == [{"twice": 6}, {"twice": 2}, {"twice": 4}]
    done: list[int] = []

    def work(group: int) -> Any:
        done.append(group)
        return {1: object(), 2: 1 // group}.get(group, group) if group else 1 // group

    with pytest.raises(
        EngineError, match=r"2 of 4 groups failed: group 0 on process 0: ZeroDivisionError.*group 1 .*JSON"
    ):
        evaluate([0, 1, 2, 3], work)
    assert done == [0, 1, 2, 3]


def together(mode: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.eval.replica_work", mode]
    count = 1 if mode == "alone" else 2
    running = [
        subprocess.Popen(
            [*command, str(i), str(port)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for i in range(count)
    ]
    found = []
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err.decode()[-3000:]
        found.append(json.loads(out.decode().strip().splitlines()[-1]))
    return found


def test_two_processes_say_what_one_says_and_both_name_a_group_that_fails() -> None:
    (alone,) = together("alone")
    one, other = together("two")
    assert one["found"] == other["found"] == alone["found"]
    assert one["requests"] + other["requests"] == alone["requests"] == 10
    assert min(one["requests"], other["requests"]) >= 4
    for process in (alone, one, other):
        assert process["refused"].startswith("1 of 5 groups failed: group 3 on process ")
        assert "ValueError: team-3 is on strike" in process["refused"]
