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
    options: dict[str, Any] = {"fragments": "unchecked", "block_size": BLOCK, "max_num_batched_tokens": 256}
    rows: list[Row] = []
    with LLM(args.model, kv_cache_memory="768MiB", **options) as llm:
        llm.warmup()
        for task in args.tasks:
            rows += measure(llm, make_probes(task, args.documents, args.seed), arms(args.link))
            print(f"{task}: {time.perf_counter() - began:.0f} s", flush=True)
        for task in [task for task in (RECALL, TEXT) if task in args.tasks]:
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
    }


COLUMNS = ("task", "read as", "KL", "top-1", "exact", "as dense", "right", "computed", "own KV", "prefill")


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each arm and task, as texts."""
    found: list[tuple[str, ...]] = []
    for one in result["summaries"]:
        exact, judge, right = ("-" if one[name] is None else f"{one[name]:.2f}" for name in ("exact", "judge", "right"))
        kl = f"{one['kl']:.4f} ± {one['kl_error']:.4f}"
        computed = f"{one['computed_tokens']:.0f} of {one['prompt_tokens']:.0f}"
        own = f"{one['computed_tokens'] * result['kv_bytes_per_token'] / 2**20:.1f} MiB"
        top1, prefill = f"{one['top1']:.3f}", f"{one['prefill_s']:.2f} s"
        found.append((one["task"], one["arm"], kl, top1, exact, judge, right, computed, own, prefill))
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/fragments.md."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *lines(result)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def table(result: dict[str, Any]) -> None:
    """The same on a terminal."""
    rows = [COLUMNS, *lines(result)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


LOOKS = {
    PUBLIC: ("#0072B2", "published root", 7),
    DECLARED: ("#009E73", "declared root", -13),
    BOS: ("#D55E00", "BOS alone", 7),
}


def plot(result: dict[str, Any], path: Path) -> None:
    """Quality against computed tokens, one panel a task."""
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if any(one["task"] == task for one in result["summaries"])]
    figure = Figure(figsize=(4.2 * len(tasks), 4.6), layout="constrained")
    for place, task in enumerate(tasks, start=1):
        axes = figure.add_subplot(1, len(tasks), place)
        found = [one for one in result["summaries"] if one["task"] == task and " root, " in one["arm"]]
        for root, (colour, label, offset) in LOOKS.items():
            line = [one for one in found if one["arm"].startswith(root) and "repaired" not in one["arm"]]
            line.sort(key=lambda one: one["computed_tokens"])
            x, y = [one["computed_tokens"] for one in line], [one["kl"] for one in line]
            error = [one["kl_error"] for one in line]
            axes.errorbar(x, y, yerr=error, marker="o", ms=5, color=colour, capsize=3, label=label)
            for one, at_x, at_y in zip(line, x, y, strict=True):
                link = one["arm"].split(", ")[1].removesuffix(" link")
                if link != "4":  # stands beside the 0
                    axes.annotate(
                        link, (at_x, at_y), xytext=(0, offset), textcoords="offset points", fontsize=8, color=colour
                    )
        for one in (one for one in found if "repaired" in one["arm"]):
            label = "16 link, 1 block repaired"
            axes.errorbar(
                one["computed_tokens"],
                one["kl"],
                yerr=one["kl_error"],
                marker="*",
                ms=10,
                color="black",
                capsize=3,
                label=label,
            )
        dense = next(one for one in result["summaries"] if one["task"] == task and one["arm"] == "dense")
        axes.axvline(dense["computed_tokens"], color="black", ls=":", lw=1, label="computed in place")
        axes.set_title(task)
        axes.set_xlabel("tokens that a reader computes")
        axes.set_yscale("log")
        axes.set_ylim(1e-3, 1e-1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            axes.set_ylabel("KL to text computed in place (nats per token)")
            axes.legend(fontsize=8, loc="upper right")
    figure.suptitle(f"Fragments on {result['model']}, {result['documents']} documents a task; numbers are link tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--documents", type=int, default=40, help="of each task (%(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="all of them unless given")
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
