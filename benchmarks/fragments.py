"""What fragments cost in quality and save in work, on the real model: roots, link tokens, repair, several in a row.

    python benchmarks/fragments.py --json out/fragments.json --png out/fragments.png

Every arm reads the same contexts of a system text, a private note, documents and a question, and is compared with the
same context computed in place. Uses the public API.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inms_jax import LLM
from inms_jax.eval.fragment_quality import BOS, DECLARED, PUBLIC, Arm, Row, measure, summarize
from inms_jax.eval.probes import RECALL, TASKS, TEXT, make_probes

BLOCK = 64
LINKS = (0, 4, 16, 32, BLOCK)
IN_A_ROW = (2, 3, 5)


def arms(link: int) -> list[Arm]:
    """Dense first: the others are compared with it."""
    roots = [Arm(f"{root} root, {k} link", root=root, link=k) for root in (PUBLIC, DECLARED, BOS) for k in (0, link)]
    links = [Arm(f"{PUBLIC} root, {k} link", link=k) for k in LINKS if k not in (0, link)]
    repair = Arm(f"{PUBLIC} root, {link} link, 1 block repaired", link=link, repair=1)
    return [Arm("dense", mode="dense"), *roots, *links, repair]


def in_a_row(link: int) -> list[Arm]:
    """Several fragments one behind the other, blind to each other."""
    dense = [Arm(f"{n} documents, dense", mode="dense", documents=n) for n in IN_A_ROW]
    placed = [Arm(f"{n} documents, {link} link", link=link, documents=n) for n in IN_A_ROW]
    return [*dense, *placed]


def run(args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    options = {"fragments": "unchecked", "block_size": BLOCK, "max_num_batched_tokens": 256}
    rows: list[Row] = []
    with LLM(args.model, kv_cache_memory="768MiB", **options) as llm:
        llm.warmup()
        for task in TASKS:
            rows += measure(llm, make_probes(task, args.documents, args.seed), arms(args.link))
            print(f"{task}: {time.perf_counter() - began:.0f} s", flush=True)
        for task in (RECALL, TEXT):
            rows += measure(llm, make_probes(task, args.documents, args.seed + 1), in_a_row(args.link))
            print(f"{task} in a row: {time.perf_counter() - began:.0f} s", flush=True)
        kv_bytes = llm.page_bytes // llm.config.block_size
    return {
        "model": args.model,
        "documents": args.documents,
        "seed": args.seed,
        "seconds": time.perf_counter() - began,
        "kv_bytes_per_token": kv_bytes,
        "summaries": [asdict(summary) for summary in summarize(rows)],
        "rows": [asdict(row) for row in rows],
    }


def table(result: dict[str, Any]) -> None:
    print(
        f"{'task':8} {'read as':38} {'KL':>8} {'±':>7} {'top-1':>6} {'exact':>6} {'judge':>6} {'computed':>9} "
        f"{'own KV':>9} {'prefill':>8}"
    )
    for one in result["summaries"]:
        exact, judge = ("-" if one[name] is None else f"{one[name]:.2f}" for name in ("exact", "judge"))
        own = one["computed_tokens"] * result["kv_bytes_per_token"] / 2**20
        print(
            f"{one['task']:8} {one['arm']:38} {one['kl']:8.4f} {one['kl_error']:7.4f} {one['top1']:6.3f} {exact:>6} "
            f"{judge:>6} {one['computed_tokens']:5.0f}/{one['prompt_tokens']:<4.0f}{own:7.1f}M {one['prefill_s']:7.2f}s"
        )


def plot(result: dict[str, Any], path: Path) -> None:
    """Quality against computed tokens, one panel a task."""
    from matplotlib.figure import Figure

    colours = {PUBLIC: "#0072B2", DECLARED: "#009E73", BOS: "#D55E00"}
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    for place, task in enumerate(TASKS, start=1):
        axes = figure.add_subplot(1, len(TASKS), place)
        placed = [one for one in result["summaries"] if one["task"] == task and " root, " in one["arm"]]
        found = [one for one in placed if "repaired" not in one["arm"]]
        for root, colour in colours.items():
            line = sorted((one for one in found if one["arm"].startswith(root)), key=lambda one: one["computed_tokens"])
            x, y = [one["computed_tokens"] for one in line], [one["kl"] for one in line]
            axes.errorbar(
                x,
                y,
                yerr=[one["kl_error"] for one in line],
                marker="o",
                ms=5,
                color=colour,
                capsize=3,
                label={PUBLIC: "published root", DECLARED: "declared root", BOS: "BOS alone"}[root],
            )
            for one, at_x, at_y in zip(line, x, y, strict=True):
                link = one["arm"].split(", ")[1].removesuffix(" link")
                axes.annotate(link, (at_x, at_y), xytext=(5, 5), textcoords="offset points", fontsize=8, color=colour)
        dense = next(one for one in result["summaries"] if one["task"] == task and one["arm"] == "dense")
        axes.axvline(dense["computed_tokens"], color="black", ls=":", lw=1, label="computed in place")
        axes.set_title(task)
        axes.set_xlabel("tokens that a reader computes")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            axes.set_ylabel("KL to text computed in place (nats per token)")
            axes.legend(fontsize=8.5)
    figure.suptitle(f"Fragments on {result['model']}, {result['documents']} documents a task; numbers are link tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--documents", type=int, default=40, help="of each task (%(default)s)")
    parser.add_argument("--link", type=int, default=16, help="link tokens of the arms that compare roots (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    result = run(args)
    table(result)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.png is not None:
        plot(result, args.png)


if __name__ == "__main__":
    main()
