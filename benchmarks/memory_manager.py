"""What the memory manager costs: a long cached context looked up and registered, and eight threads at once.

    python benchmarks/memory_manager.py --json out/memory_manager.json

The first part is compared with prefilling one block of the model, measured in the same run. The second part runs eight
threads over locks per tenant and over one lock for all, with steps that release the interpreter lock: work on a core,
or a wait as for a device; outside of operations, or inside of them too, where a key is made. With one tenant both
forms are the same, so the ratio there says how far the machine lets ratios stray.
"""

import argparse
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

# The folder of a script is on the path: `timing` lies beside this one.
from timing import interleaved, machine

from inms_jax import LLM
from inms_jax.memory import CacheIdentity, MemoryManager, Scope, SequenceHandle, Span
from inms_jax.memory.plan import plan_decode

BLOCK = 128


def manager(num_pages: int, block_size: int = BLOCK, hash_function: Callable[[bytes], bytes] | None = None) -> Any:
    fields = {"model_id": "m", "weights_version": "1", "dtype": "float32", "layout": "LP K B H", "rope": "r"}
    identity = CacheIdentity(block_size=block_size, **fields)
    return MemoryManager(num_pages=num_pages, block_size=block_size, identity=identity, hash_function=hash_function)


def prefill(memory: MemoryManager, handle: SequenceHandle) -> None:
    """Compute a prompt, as far as the manager can tell."""
    while True:
        chunk = memory.prefill(handle, 512)
        memory.commit_prefill(handle, chunk)
        if chunk.is_last:
            return


def lookups(tokens: int, others: int) -> dict[str, Callable[[], Any]]:
    """Forms that register a sequence, admit its turn and hold every cached block of a context of `tokens` tokens.

    cached: nobody else holds the pages. held: `others` sequences do, each in its turn.
    """
    forms: dict[str, Callable[[], Any]] = {}
    for form, holders in (("cached", 0), ("held", others)):
        memory = manager(4 * tokens // BLOCK + 16 * others)
        tenant = Scope("tenant#1")
        memory.hold_scope(tenant)
        quarter = tokens // 4
        texts = [
            Span(tuple(range(n * quarter, (n + 1) * quarter)), tenant, published=True, name=f"text {n}")
            for n in range(4)
        ]
        readers = [Scope("tenant#1", None, f"agent {n}") for n in range(holders + 1)]
        for reader in readers:
            memory.hold_scope(reader)
        contexts = [[*texts, Span((1, 2, 3), reader)] for reader in readers]
        for reader, context in zip(reader_last_first(readers), reader_last_first(contexts), strict=True):
            handle = memory.register(reader)
            assert memory.begin_turn(handle, context, max_new_tokens=16).admitted
            prefill(memory, handle)
            if reader is readers[0]:
                memory.end_turn(handle, keep=True, history_len=tokens + 3)
                memory.release(handle)

        opened: list[SequenceHandle] = []

        def look_up(
            memory: MemoryManager = memory,
            reader: Scope = readers[0],
            context: list[Span] = contexts[0],
            opened: list[SequenceHandle] = opened,
        ) -> None:
            handle = memory.register(reader)
            admission = memory.begin_turn(handle, context, max_new_tokens=16)
            match = memory.match(handle)
            assert admission.admitted
            assert match.cached_tokens == tokens
            opened.append(handle)

        def give_back(memory: MemoryManager = memory, opened: list[SequenceHandle] = opened) -> None:
            while opened:
                memory.release(opened.pop())

        forms[form] = look_up
        forms[f"{form}, given back"] = give_back
    return forms


def reader_last_first(items: list[Any]) -> list[Any]:
    """The reader that is measured comes last, so that the others hold the pages before it gives them back."""
    return [*items[1:], items[0]]


def time_lookups(tokens: int, rounds: int) -> dict[str, float]:
    """Median and best seconds of each form; giving back is timed apart."""
    forms = lookups(tokens, others=8)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def time_block(model: str, rounds: int) -> float:
    """Median seconds of prefilling one block of the model, the cheapest way: nothing before it to attend to."""
    with LLM(model, block_size=BLOCK, kv_cache_memory="128MiB", max_num_batched_tokens=512, progress=False) as llm:
        core = llm._core
        empty = plan_decode([], [], num_rows=1, num_entries=core._max_entries, num_copies=0)
        columns = {name: np.zeros(BLOCK, np.int32) for name in ("tokens", "positions", "write_page", "write_slot")}
        plan = replace(empty, **columns)

        def block() -> Any:
            return jax.block_until_ready(core.call(lambda: core.runner.prefill(plan, BLOCK - 1).logits))

        return interleaved({"block": block}, rounds=rounds, warmup=3).median("block")


def turns(memory: MemoryManager, tenant: str, thread: int, times: int, step: Callable[[], Any]) -> None:
    """Turns of an agent that reads a shared text and says something of its own; a step after each plan."""
    shared = Span(tuple(range(64)), Scope(tenant), published=True)
    scope = Scope(tenant, None, f"agent {thread}")
    memory.hold_scope(scope)
    handle = memory.register(scope)
    for turn in range(times):
        own = Span(tuple(range(100 * turn, 100 * turn + 40)), scope)
        assert memory.begin_turn(handle, [shared, own], max_new_tokens=8).admitted
        while True:
            if memory.match(handle).status == "wait":
                time.sleep(0)
                continue
            try:
                chunk = memory.prefill(handle, 64)
            except Exception:  # another thread began to compute the block
                continue
            step()
            memory.commit_prefill(handle, chunk)
            if chunk.is_last:
                break
        for token in range(8):
            memory.decode(handle, token)
            step()
            memory.commit_decode(handle)
        memory.end_turn(handle, keep=True, history_len=112)
    memory.release(handle)
    memory.drop_scope(scope)


def threads(*, tenants: int, one_lock: bool, times: int, step: Callable[[], Any], hashing: Callable | None) -> float:
    """Turns per second of eight threads."""
    memory = manager(4000, 16, hashing)
    lock = threading.RLock()
    for n in range(tenants):
        memory.hold_scope(Scope(f"tenant {n}"))
        if one_lock:
            memory._parts[f"tenant {n}"].lock = lock
    works = [threading.Thread(target=turns, args=(memory, f"tenant {n % tenants}", n, times, step)) for n in range(8)]
    start = time.perf_counter()
    for work in works:
        work.start()
    for work in works:
        work.join()
    seconds = time.perf_counter() - start
    memory.verify()
    assert memory.stats().held == 0
    return 8 * times / seconds


def compare_locks(times: int, rounds: int) -> list[dict[str, Any]]:
    """Turns per second, per tenant and with one lock, round by round."""
    page = bytes(64 * 1024)

    def nothing() -> None:
        pass

    def work() -> None:
        hashlib.sha256(page).digest()

    def wait() -> None:
        time.sleep(2e-4)

    def with_hash(step: Callable[[], None]) -> Callable[[bytes], bytes]:
        def slow(message: bytes) -> bytes:
            step()
            return hashlib.sha256(message).digest()

        return slow

    cases: list[tuple[str, Callable[[], None], Callable[[bytes], bytes] | None]] = [
        ("no step", nothing, None),
        ("work outside of operations", work, None),
        ("a wait outside of operations", wait, None),
        ("work outside and inside", work, with_hash(work)),
        ("a wait outside and inside", wait, with_hash(wait)),
    ]
    found = []
    for name, step, hashing in cases:
        for tenants in (8, 1):
            rates: dict[bool, list[float]] = {False: [], True: []}
            for n in range(rounds):
                for one_lock in (False, True) if n % 2 else (True, False):
                    rates[one_lock].append(
                        threads(tenants=tenants, one_lock=one_lock, times=times, step=step, hashing=hashing)
                    )
            found.append(
                {
                    "step": name,
                    "tenants": tenants,
                    "turns_per_s_lock_per_tenant": float(np.median(rates[False])),
                    "turns_per_s_one_lock": float(np.median(rates[True])),
                    "ratio": float(np.median(np.divide(rates[False], rates[True]))),
                    "ratios": [float(r) for r in np.divide(rates[False], rates[True])],
                }
            )
    return found


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=16384, help="of the cached context")
    parser.add_argument("--quick", action="store_true", help="few rounds, no model: for tests")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "tokens": args.tokens, "block_size": BLOCK, "quick": args.quick}
    result["lookup_s"] = lookup = time_lookups(args.tokens, rounds=5 if args.quick else 200)
    for name, seconds in lookup.items():
        print(f"{args.tokens} tokens, {name:20} {1e3 * seconds:8.3f} ms")
    if not args.quick:
        result["block_s"] = block = time_block(args.model, rounds=15)
        result["share_of_block"] = {name: lookup[name] / block for name in ("cached", "held")}
        print(f"prefilling one block of {BLOCK} tokens of {args.model}: {1e3 * block:.1f} ms")
        print("share of it:", {name: f"{share:.2%}" for name, share in result["share_of_block"].items()})
    result["locks"] = compare_locks(times=2 if args.quick else 25, rounds=1 if args.quick else 7)
    for case in result["locks"]:
        print(
            f"{case['tenants']} tenants, {case['step']:38} {case['turns_per_s_lock_per_tenant']:8.0f} turns/s with a "
            f"lock per tenant, {case['turns_per_s_one_lock']:8.0f} with one: ratio {case['ratio']:.2f}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
