"""Ten thousand requests of every sort through one engine: is the host's memory flat, does anything compile late, is a
page or an object kept?

    PYTHONPATH=. nice -n 19 python benchmarks/long_run.py --requests 10000 --json out/long_run.json

A tiny model with random weights, so that what grows is the engine's own. Teams come and go; agents chat, fork, take
several samples, leave streams early and ask for too much; plain prompts repeat or do not. All from several threads.
"""

import argparse
import collections
import contextlib
import gc
import json
import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.timing import machine
from inms_jax import LLM, SamplingParams, Segment
from inms_jax.errors import InmsError
from tests.tiny import tiny_llm

WORKERS = 4
LOGGED = ("KVEvent", "Scope")  # the log of the latest 10,000 events keeps these
WORDS = ("port", "table", "key", "page", "team", "price", "stock", "letter", "queue", "cache", "model", "phone")


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def team(llm: LLM, number: int, seed: int) -> int:
    """One tenant from its creation to its end; the requests that it made."""
    rng = random.Random(seed * 1_000_003 + number)
    made = 0
    tenant = llm.tenant(f"tenant-{number}")
    tenant.publish("system", "You help a team. " + WORDS[number % 3])
    group = tenant.group("team")
    group.publish("decisions", words(rng, 6))
    agents = [group.agent(f"a{i}", ["system", "decisions", Segment(words(rng, 4))]) for i in range(2)]
    for _ in range(rng.randint(1, 3)):
        agent = rng.choice(agents)
        params = SamplingParams(
            max_tokens=rng.randint(1, 6),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.choice([None, 7]),
            stop=rng.choice([None, ["e"]]),
            logprobs=rng.choice([None, 2]),
        )
        agent.chat(words(rng, 5), params)
        made += 1
        if rng.random() < 0.3:
            twin = agent.fork(f"twin-{made}")
            twin.chat(words(rng, 3), SamplingParams(max_tokens=3))
            made += 1
            if rng.random() < 0.5:  # else it is dropped, which ends it as well
                twin.close()
        if rng.random() < 0.3:
            stream = agent.stream(words(rng, 3), SamplingParams(max_tokens=20, ignore_eos=True))
            next(stream)
            stream.close()  # in the middle
            made += 1
    tenant.close()
    return made


def plain(llm: LLM, number: int, seed: int) -> int:
    """Prompts without an agent, some of which were there before, and one that cannot be answered."""
    rng = random.Random(seed * 7_000_003 + number)
    llm.generate(
        [words(random.Random(number % 50), 8), words(rng, rng.randint(1, 12))],
        SamplingParams(max_tokens=4, n=rng.choice([1, 2]), repetition_penalty=rng.choice([1.0, 1.3])),
    )
    llm.chat([{"role": "user", "content": words(random.Random(number % 50), 4)}], SamplingParams(max_tokens=2))
    with contextlib.suppress(InmsError):
        llm.generate([words(rng, 400)], SamplingParams(max_tokens=4))  # longer than the model's context
    return 4


def own_objects() -> dict[str, int]:
    """Objects of the package's own classes that are alive, by class."""
    gc.collect()
    count: collections.Counter[str] = collections.Counter(
        type(value).__qualname__ for value in gc.get_objects() if str(type(value).__module__).startswith("inms_jax")
    )
    return dict(count.most_common())


def resident_bytes() -> int:
    """Of this process now; its peak so far where the kernel does not say."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sample(llm: LLM, requests: int, started: float) -> dict[str, Any]:
    """What could have grown."""
    stats = llm.stats()
    llm.verify()
    return {
        "requests": requests,
        "seconds": round(time.perf_counter() - started, 1),
        "resident_bytes": resident_bytes(),
        "compiled_programs": stats.compiled_programs,
        "pages_held": stats.memory.held,
        "pages_cached": stats.memory.cached,
        "pages_reserved": stats.memory.reserved,
        "evictions": stats.memory.evictions,
        "threads": threading.active_count(),
        "objects": sum(count for name, count in own_objects().items() if name not in LOGGED),
    }


def long_run(requests: int, every: int, seed: int = 0) -> dict[str, Any]:
    """Samples about every `every` requests, with nothing running and every tenant closed, and what they show."""
    samples = []
    with tiny_llm() as llm, ThreadPoolExecutor(WORKERS) as pool:
        llm.warmup()
        started, done, number = time.perf_counter(), 0, 0
        while done < requests:
            target = min(requests, done + every)
            while done < target:
                jobs = [pool.submit((team, plain)[i % 2], llm, number + i, seed) for i in range(2 * WORKERS)]
                number += len(jobs)
                done += sum(job.result() for job in jobs)
            samples.append(sample(llm, done, started))
            print(samples[-1], flush=True)
        kept = own_objects()
    return {"machine": machine(), "seed": seed, "samples": samples, "objects_at_end": kept, **summary(samples)}


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """From the end of the first fifth, which fills caches of Python and of the allocator, to the end."""
    first, last = samples[len(samples) // 5], samples[-1]
    thousands = (last["requests"] - first["requests"]) / 1000
    grown = {key: last[key] - first[key] for key in ("resident_bytes", "compiled_programs", "objects", "threads")}
    return {
        "from_request": first["requests"],
        "to_request": last["requests"],
        "grown": grown,
        "resident_bytes_per_thousand": round(grown["resident_bytes"] / thousands) if thousands else None,
        "compiled_after_first_sample": last["compiled_programs"] - samples[0]["compiled_programs"],
        "pages_held_at_most_between_teams": max(entry["pages_held"] for entry in samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = long_run(options.requests, options.every, options.seed)
    text = json.dumps(found, indent=1)
    print(json.dumps({key: found[key] for key in found if key not in ("samples", "machine")}, indent=1))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
