"""Several agents with a common context arrive at once: time to first token, rates, work and memory, sharing on and off.

    python benchmarks/multi_agent.py --json out/multi_agent.json

Uses the public API only, on the real model. The machine's float32 GEMM rate is measured in the same run, so that a rate
can be read as a share of what the machine can do.
"""

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from inms_jax import LLM, RequestOutput, SamplingParams, Segment
from inms_jax.weights import LoadedModel, load


def gemm_rate(rows: int = 256, inner: int = 576, outer: int = 1536, products: int = 40) -> float:
    """Median GFLOP/s of float32 products of the model's MLP shape."""
    a, b, c = (jnp.ones(shape, jnp.float32) for shape in ((rows, inner), (inner, outer), (outer, inner)))

    @jax.jit
    def chain(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        for _ in range(products):
            a = (a @ b) @ c * 1e-6
        return a

    chain(a, b, c).block_until_ready()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        chain(a, b, c).block_until_ready()
        times.append(time.perf_counter() - start)
    return products * 4 * rows * inner * outer / statistics.median(times) / 1e9


def prefill_flops(model: LoadedModel, start: int, tokens: int) -> int:
    """Operations of computing `tokens` tokens behind `start` others: matrices, then attention."""
    c = model.config
    attention_size = c.num_heads * c.head_dim
    per_layer = c.hidden_size * (2 * attention_size + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    seen = tokens * start + tokens * (tokens + 1) // 2
    return c.num_layers * (2 * per_layer * tokens + 4 * attention_size * seen)


def token_ids(model: LoadedModel, seed: str, count: int) -> list[int]:
    """`count` tokens of plain text that no other seed shares from the start on."""
    text = f"{seed}: " + " ".join(f"item {i} of {seed} costs {i * 37 % 101} cents" for i in range(count))
    return model.tokenizer.encode(text)[:count]


def run(model: LoadedModel, args: argparse.Namespace, *, sharing: bool) -> dict[str, Any]:
    """One engine, all agents at once from their own threads."""
    tokens = args.shared + args.own + args.decoded + 64
    pages = (args.agents + 1) * (-(-tokens // args.block_size) + 2)
    page_bytes = model.config.kv_bytes_per_token(4) * args.block_size
    llm = LLM(
        model,
        block_size=args.block_size,
        kv_cache_memory=pages * page_bytes,
        max_num_seqs=args.agents,
        max_model_len=tokens,
        max_num_batched_tokens=args.chunk,
        enable_prefix_caching=sharing,
    )
    with llm:
        llm.warmup()
        steps: list[tuple[str, int, float, int]] = []
        llm.observe(lambda report: steps.append((report.kind, report.tokens, time.perf_counter(), report.held_pages)))
        tenant = llm.tenant("benchmark")
        tenant.publish("shared", model.tokenizer.decode(token_ids(model, "shared", args.shared)))
        agents = [
            tenant.agent(f"agent-{i}", ["shared", Segment(token_ids(model, f"agent {i}", args.own))])
            for i in range(args.agents)
        ]
        params = SamplingParams(max_tokens=args.decoded, temperature=0.0, ignore_eos=True)
        outputs: dict[str, RequestOutput] = {}
        barrier = threading.Barrier(args.agents + 1)

        def talk(number: int) -> None:
            barrier.wait()
            outputs[agents[number].name] = agents[number].chat("Summarise the list.", params)

        threads = [threading.Thread(target=talk, args=(i,)) for i in range(args.agents)]
        for thread in threads:
            thread.start()
        barrier.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - begin
        stats = llm.stats()
        times = [begin, *(at for _, _, at, _ in steps)]
        spent = {"prefill": 0.0, "decode": 0.0}
        for (kind, _, at, _), before in zip(steps, times, strict=False):
            spent[kind] += at - before
        flops = 0
        for output in outputs.values():
            computed = len(output.prompt_token_ids) - output.num_cached_tokens
            flops += prefill_flops(model, output.num_cached_tokens, computed)
        return {
            "wall_s": wall,
            "prefill_s": spent["prefill"],
            "decode_s": spent["decode"],
            "ttft_s": {name: output.ttft_s for name, output in sorted(outputs.items())},
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs.values()),
            "tokens_computed": stats.work.prefill_tokens,
            "tokens_decoded": stats.work.decode_tokens,
            "prefill_tokens_per_s": stats.work.prefill_tokens / spent["prefill"],
            "prefill_gflops": flops / spent["prefill"] / 1e9,
            "decode_tokens_per_s": stats.work.decode_tokens / spent["decode"],
            "peak_kv_bytes": max(held for *_, held in steps) * page_bytes,
            "decode_pages_needed": stats.work.pages_needed,
            "decode_pages_read": stats.work.pages_read,
            "token_ids": {name: list(output.outputs[0].token_ids) for name, output in sorted(outputs.items())},
        }


def main() -> None:
    """Parse, run both modes, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--shared", type=int, default=1228, help="tokens that all agents read")
    parser.add_argument("--own", type=int, default=820, help="private tokens of each agent")
    parser.add_argument("--decoded", type=int, default=32, help="tokens generated by each agent")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load(args.model, dtype="float32")
    rates = [gemm_rate()]
    modes = {}
    for name, sharing in (("shared", True), ("independent", False)):
        modes[name] = run(model, args, sharing=sharing)
        rates.append(gemm_rate())
    shared, independent = modes["shared"], modes["independent"]
    result = {
        "work": {k: v for k, v in vars(args).items() if k != "json"},
        "gemm_gflops": rates,
        "modes": modes,
        "same_tokens": shared["token_ids"] == independent["token_ids"],
        "wall_ratio": shared["wall_s"] / independent["wall_s"],
        "kv_ratio": shared["peak_kv_bytes"] / independent["peak_kv_bytes"],
        "prefill_share_of_gemm": {n: m["prefill_gflops"] / statistics.median(rates) for n, m in modes.items()},
    }
    for key in ("wall_s", "prefill_s", "decode_s", "tokens_computed", "prefill_tokens_per_s", "decode_tokens_per_s"):
        print(f"{key:22} shared {shared[key]:10.2f}   independent {independent[key]:10.2f}")
    for name, mode in modes.items():
        ttft = sorted(mode["ttft_s"].values())
        print(f"TTFT {name:12} first {ttft[0]:.2f} s, median {statistics.median(ttft):.2f} s, last {ttft[-1]:.2f} s")
        print(f"peak KV {name:12} {mode['peak_kv_bytes'] / 2**20:.1f} MiB")
        print(f"decode read {mode['decode_pages_read']} of {mode['decode_pages_needed']} pages needed ({name})")
    print(f"float32 GEMM {', '.join(f'{r:.0f}' for r in rates)} GFLOP/s; prefill share of it", end=" ")
    print({name: round(share, 2) for name, share in result["prefill_share_of_gemm"].items()})  # type: ignore[attr-defined]
    print(
        f"wall ratio {result['wall_ratio']:.2f}, KV ratio {result['kv_ratio']:.2f}, same tokens {result['same_tokens']}"
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
