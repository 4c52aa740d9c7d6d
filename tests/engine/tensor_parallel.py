"""An engine over several virtual CPU devices, compared with one device; prints a line of JSON per case.

A program of its own, because the number of devices is fixed when jax starts:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.engine.tensor_parallel 8/2:1,2,4` runs a tiny model
of 8 query and 2 kv heads on 1, 2 and 4 devices; `--demo` adds the three agents, without and with sharing, on the last
number of devices. `kv_cache_dtype=int8`, or any other option of an
engine, goes to the tiny ones. `smollm2:3` is the real model on 3.
"""

import dataclasses
import json
import logging
import re
import sys
import unittest.mock
from typing import Any

import jax
import numpy as np

from inms_jax import LLM, SamplingParams, Segment
from inms_jax.cache import page_ops
from inms_jax.engine import runner
from inms_jax.eval.scenario import load_scenario
from inms_jax.eval.three_agents import run_demo
from inms_jax.models.llama import random_params
from inms_jax.weights import LoadedModel, load
from tests.engine.test_smollm2 import GOLDEN
from tests.eval.work import ROOT, Recorder, small_scenario
from tests.tiny import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


class Programs:
    """Remembers what a program was called with, so that it can be compiled once more and read."""

    def __init__(self, name: str, program: Any) -> None:
        self.name, self.program = name, program
        self.calls: dict[str, tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        def shape(x: Any) -> Any:  # what comes from the host has no place yet
            placed = x.sharding if len(x.sharding.device_set) > 1 else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

        shapes = jax.tree.map(shape, args)
        self.calls.setdefault(str([x.shape for x in jax.tree.leaves(shapes)]), (shapes, options))
        return self.program(*args, **options)

    def _cache_size(self) -> int:
        return int(self.program._cache_size())

    def read(self) -> list[dict[str, Any]]:
        """Per program: what crosses between devices, by number of elements, and temporaries."""
        found = []
        for shapes, options in self.calls.values():
            compiled = self.program.lower(*shapes, **options).compile()
            crossing = [
                (
                    kind,
                    sum(
                        int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\[(.*?)\]", what)
                    ),
                )
                for what, kind in COLLECTIVE.findall(compiled.as_text())
            ]
            found.append(
                {
                    "program": self.name,
                    "crossing": crossing,
                    "temporaries": compiled.memory_analysis().temp_size_in_bytes,
                }
            )
        return found


def tiny(heads: int, kv_heads: int) -> LoadedModel:
    base = tiny_model()
    config = dataclasses.replace(base.config, num_heads=heads, num_kv_heads=kv_heads)
    return dataclasses.replace(
        base, config=config, params=jax.tree.map(np.asarray, random_params(config, jax.random.key(7)))
    )


def converse(llm: LLM) -> list[list[tuple[int, float]]]:
    """Agents that share, one that does not, and a fork whose last page is copied: what each says."""
    with llm.tenant("shop") as tenant:
        tenant.publish("system", "You help the team of a web shop. Answer in one sentence, name the service.")
        agents = [tenant.agent("a", ["system", Segment("a private note")])]
        agents += [tenant.agent("b", ["system"]), tenant.agent("c", [Segment("alone")])]
        streams = [agent.stream(f"Question {i}?", GREEDY) for i, agent in enumerate(agents)]
        deltas = [[part for delta in stream for part in delta.outputs] for stream in streams]
        said = [
            [(t, s[t].logprob) for p in d for t, s in zip(p.token_ids, p.logprobs or (), strict=True)] for d in deltas
        ]
        twin = agents[0].fork("d")
        for agent in (twin, agents[0]):
            [answer] = agent.chat("And then?", GREEDY).outputs
            said.append([(t, s[t].logprob) for t, s in zip(answer.token_ids, answer.logprobs or (), strict=True)])
    llm.verify()
    return said


def run_tiny(heads: int, kv_heads: int, sizes: list[int], demo: bool, chosen: dict[str, str]) -> None:
    model = tiny(heads, kv_heads)
    for size in sizes:
        warnings: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, to=warnings: to.append(record.getMessage())  # type: ignore[method-assign,misc]
        logging.getLogger("inms_jax").addHandler(handler)
        step, copy = Programs("step", runner.step), Programs("copy_pages", page_ops.copy_pages)
        options: dict[str, Any] = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, **chosen}
        with (
            unittest.mock.patch.object(runner, "step", step),
            unittest.mock.patch.object(runner, "copy_pages", copy),
            LLM(model, kv_cache_memory="1MiB", tensor_parallel_size=size, **options) as llm,
        ):
            said = converse(llm)
            pages = llm._core.runner.kv
            parts = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(pages)]
            found = {
                "model": f"{heads}/{kv_heads}",
                "size": size,
                "said": said,
                "log": warnings,
                "devices": len(jax.tree.leaves(pages)[0].sharding.device_set),
                "part_bytes": sum(parts),
                "expected_bytes": llm.stats().memory.total * llm.page_bytes,
                "programs": [*step.read(), *copy.read()] if size > 1 else [],
            }
        logging.getLogger("inms_jax").removeHandler(handler)
        print(json.dumps(found), flush=True)
    if demo:
        scenario = small_scenario()
        engine = {**scenario.engine, "tensor_parallel_size": sizes[-1]}
        show(dataclasses.replace(scenario, engine=engine), model)


def show(scenario: Any, model: LoadedModel) -> None:
    result = run_demo(scenario, model, Recorder())
    print(json.dumps({"demo": result.texts_identical, "pages": [m.peak.held_pages for m in result.modes]}), flush=True)


def run_smollm2(size: int) -> None:
    model = load("smollm2-135m-instruct", progress=False)
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in GOLDEN.values()]
    longest = max(len(case["greedy_token_ids"]) for case in GOLDEN.values())
    with LLM(model, kv_cache_memory="128MiB", max_model_len=1024, tensor_parallel_size=size) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=longest))
    said = {name: list(output.outputs[0].token_ids) for name, output in zip(GOLDEN, outputs, strict=True)}
    print(json.dumps({"golden": said}), flush=True)
    scenario = load_scenario(ROOT / "tests/data/short_demo.toml")
    show(dataclasses.replace(scenario, engine={**scenario.engine, "tensor_parallel_size": size}), model)


def main(arguments: list[str]) -> None:
    chosen = dict(argument.split("=") for argument in arguments if "=" in argument)
    for argument in arguments:
        if argument.startswith("-") or "=" in argument:
            continue
        name, sizes = argument.split(":")
        numbers = [int(n) for n in sizes.split(",")]
        if name == "smollm2":
            run_smollm2(numbers[0])
        else:
            heads, kv_heads = name.split("/")
            run_tiny(int(heads), int(kv_heads), numbers, "--demo" in arguments, chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
