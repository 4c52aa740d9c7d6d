"""`inms-jax calibrate MODEL`: measure fragments against dense on built-in probes, and keep the gate of the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inms_jax.engine.gate import MAX_KL, MIN_JUDGE, MIN_TOP1, Gate, Quality
from inms_jax.eval.fragment_quality import BOS, Arm, Row, Summary, measure, summarize
from inms_jax.eval.probes import JUDGE, RECALL, TASKS, TEXT, make_probes
from inms_jax.llm import LLM
from inms_jax.weights import default_cache_dir

DENSE, ROOTED = "dense", "rooted"


def calibrate(
    llm: LLM,
    *,
    link_tokens: int = 16,
    documents: int = 40,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> tuple[Gate, list[Summary]]:
    """Measure the model of `llm`, which has fragments="unchecked", on so many documents a task."""
    arms = [Arm(DENSE, mode="dense"), Arm(ROOTED, link=link_tokens)]
    if llm.tokenizer.bos_id is not None:
        arms.append(Arm(BOS, root=BOS, link=link_tokens))
    rows: list[Row] = []
    for task in TASKS:
        rows += measure(llm, make_probes(task, documents, seed), arms, done)
    summaries = summarize(rows)
    identity = llm.cache_identity
    gate = Gate(
        model_id=identity.model_id,
        weights_version=identity.weights_version,
        dtype=identity.dtype,
        link_tokens=link_tokens,
        rooted=_quality(summaries, ROOTED),
        bos=_quality(summaries, BOS) if len(arms) == 3 else None,
    )
    return gate, summaries


def _quality(summaries: Sequence[Summary], arm: str) -> Quality:
    of: Mapping[str, Summary] = {summary.task: summary for summary in summaries if summary.arm == arm}
    judge = of[JUDGE].judge
    assert judge is not None
    return Quality(
        probes=of[RECALL].probes,
        recall_kl=of[RECALL].kl,
        recall_top1=of[RECALL].top1,
        text_kl=of[TEXT].kl,
        text_top1=of[TEXT].top1,
        judge_consistency=judge,
    )


def run_calibration(
    model: str, *, link_tokens: int, documents: int, seed: int, console: Console, cache: Path | None = None
) -> dict[str, Any]:
    """Load, measure, show, and keep the gate; what is returned is JSON."""
    with LLM(model, fragments="unchecked", kv_cache_memory="512MiB", max_num_batched_tokens=256) as llm:
        steps = len(TASKS) * documents * (3 if llm.tokenizer.bos_id is not None else 2)
        with Progress(console=console) as bar:
            task = bar.add_task("measuring", total=steps)
            gate, summaries = calibrate(
                llm, link_tokens=link_tokens, documents=documents, seed=seed, done=lambda: bar.advance(task)
            )
    path = gate.write(default_cache_dir() if cache is None else cache)
    console.print(_table(summaries))
    console.print(f"Asked: KL at most {MAX_KL}, top-1 at least {MIN_TOP1}, judge at least {MIN_JUDGE}.")
    for name, quality in (("a published root", gate.rooted), ("BOS alone", gate.bos)):
        verdict = "no such token" if quality is None else "; ".join(quality.failures()) or "passed"
        console.print(f"Fragments after {name}: {verdict}.", soft_wrap=True)
    console.print(f"Kept in {path}.", soft_wrap=True)
    return {"gate": gate.to_json(), "summaries": [asdict(summary) for summary in summaries]}


def _table(summaries: Sequence[Summary]) -> Table:
    table = Table(title="Fragments against text computed in place")
    for title in ("task", "read as", "KL", "top-1", "recall", "judge", "right", "computed"):
        table.add_column(title, justify="left" if title in ("task", "read as") else "right", no_wrap=True)
    for one in sorted(summaries, key=lambda summary: TASKS.index(summary.task)):
        table.add_row(
            one.task,
            one.arm,
            "-" if one.arm == DENSE else f"{one.kl:.4f} ± {one.kl_error:.4f}",
            "-" if one.arm == DENSE else f"{one.top1:.3f}",
            "-" if one.exact is None else f"{one.exact:.2f}",
            "-" if one.judge is None or one.arm == DENSE else f"{one.judge:.2f}",
            "-" if one.right is None else f"{one.right:.2f}",
            f"{one.computed_tokens:.0f} of {one.prompt_tokens:.0f}",
        )
    return table
