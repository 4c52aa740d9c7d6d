"""What fragments cost in quality and save in work: every probe answered with each arm, and compared with dense.

All arms read the very same tokens; they differ in what is read from where it was computed once. Knows nothing of
gates or files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import fmean, median, stdev

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32

from inms_jax.engine.outputs import ScoreOutput
from inms_jax.engine.segment import Segment, Shared
from inms_jax.eval.probes import JUDGE, OTHER_SYSTEM, SYSTEM, Probe
from inms_jax.llm import LLM
from inms_jax.tenants import Tenant

PUBLIC, DECLARED, BOS = "public", "declared", "bos"
ROWS = 64
"""Scored tokens are compared so many at a time, so that one program is compiled."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to read a context of a system text, a private note, `documents` documents and a question.

    root: what the fragments stand after. "public": the published system text at the head. "declared": one that is
    not in the context; "bos": nothing. In these two the system text of the context is the reader's own.
    """

    name: str
    mode: str = "fragment"
    root: str = PUBLIC
    link: int = 0
    repair: int = 0
    documents: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One probe with one arm. kl: mean over the scored tokens, to dense, in nats. exact: greedy decoding says just the
    right answer. chose_right: of a judge, whether the right answer is the more likely one. cold: a fragment had to be
    computed first.
    """

    arm: str
    task: str
    kl: float
    top1: float
    exact: bool
    chose_right: bool | None
    prompt_tokens: int
    computed_tokens: int
    fragment_tokens: int
    prefill_s: float
    cold: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """All probes of one task with one arm. exact: of recall, greedy answers that are right. judge: how often a choice
    is that of dense; right: how often it is the right one. kl_error: standard error.
    """

    arm: str
    task: str
    probes: int
    kl: float
    kl_error: float
    top1: float
    exact: float | None
    judge: float | None
    right: float | None
    computed_tokens: float
    prompt_tokens: float
    prefill_s: float


def measure(
    llm: LLM, probes: Sequence[Probe], arms: Sequence[Arm], done: Callable[[], None] = lambda: None
) -> list[Row]:
    """Every probe with every arm; `done` is called after each. Dense references are computed besides."""
    rows: list[Row] = []
    with ExitStack() as stack:
        tenants = {root: stack.enter_context(llm.tenant(f"quality {root}")) for root in (PUBLIC, DECLARED, BOS)}
        tenants[PUBLIC].publish("system", SYSTEM)
        tenants[PUBLIC].preload(["system"])
        tenants[DECLARED].publish("other", OTHER_SYSTEM)
        tenants[DECLARED].root(["other"])
        for tenant in tenants.values():
            for number, probe in enumerate(probes):
                tenant.publish(f"document {number}", probe.document)
        for number in range(len(probes)):
            for count in sorted({arm.documents for arm in arms}):
                dense = Arm("dense", mode="dense", documents=count)
                reference = _answers(llm, tenants, probes, number, dense)
                for arm in [arm for arm in arms if arm.documents == count]:
                    rows.append(_row(llm, tenants, probes, number, arm, reference))
                    done()
    return rows


def _row(
    llm: LLM, tenants: dict[str, Tenant], probes: Sequence[Probe], number: int, arm: Arm, dense: list[ScoreOutput]
) -> Row:
    before = llm.stats().work.encoded_fragments
    found = dense if arm.mode == "dense" else _answers(llm, tenants, probes, number, arm)
    cold = llm.stats().work.encoded_fragments > before
    probe = probes[number]
    compared = [compare(ours.logits, theirs.logits) for ours, theirs in zip(found, dense, strict=True)]
    first = found[0]
    return Row(
        arm=arm.name,
        task=probe.task,
        kl=float(np.mean(np.concatenate([kl for kl, _ in compared]))),
        top1=float(np.mean(np.concatenate([same for _, same in compared]))),
        exact=first.is_greedy,
        chose_right=found[0].logprob > found[1].logprob if probe.task == JUDGE else None,
        prompt_tokens=first.num_prompt_tokens,
        computed_tokens=first.num_prompt_tokens - first.num_cached_tokens - first.num_fragment_tokens,
        fragment_tokens=first.num_fragment_tokens,
        prefill_s=first.prefill_s,
        cold=cold,
    )


def _answers(llm: LLM, tenants: dict[str, Tenant], probes: Sequence[Probe], number: int, arm: Arm) -> list[ScoreOutput]:
    """The right answer as this arm sees it; of a judge, then the wrong one."""
    probe = probes[number]
    tenant = tenants[arm.root]
    # The probe's own document stands in the middle of the others.
    others = islice(cycle(n for n in range(len(probes)) if n != number), arm.documents - 1)
    documents = list(others) if arm.documents > 1 else []
    documents.insert(len(documents) // 2, number)
    shared = [_shared(f"document {n}", arm) for n in documents]
    system = "system" if arm.root == PUBLIC else Segment(SYSTEM)
    with tenant.agent("reader", [system, Segment(probe.note), *shared]) as agent:
        answers = [probe.answer] if probe.wrong is None else [probe.answer, probe.wrong]
        return [agent.score(probe.question, answer) for answer in answers]


def _shared(name: str, arm: Arm) -> Shared:
    if arm.mode == "dense":
        return Shared(name, mode="dense")
    return Shared(name, mode=arm.mode, link_tokens=arm.link, repair_blocks=arm.repair)


def compare(logits: Float32[np.ndarray, "T V"], dense: Float32[np.ndarray, "T V"]) -> tuple[np.ndarray, np.ndarray]:
    """For each token: KL(dense || ours) in nats, and whether both have the same most likely token."""
    kl, same = zip(*(_compare(*pair) for pair in zip(_blocks(logits), _blocks(dense), strict=True)), strict=True)
    count = len(logits)
    return np.concatenate(kl)[:count], np.concatenate(same)[:count]


@jax.jit
def _compare(logits: Float[Array, "T V"], dense: Float[Array, "T V"]) -> tuple[Array, Array]:
    ours, theirs = jax.nn.log_softmax(logits), jax.nn.log_softmax(dense)
    kl = optax.losses.kl_divergence_with_log_targets(ours, theirs)  # type: ignore[attr-defined]
    return kl, logits.argmax(-1) == dense.argmax(-1)


def _blocks(logits: np.ndarray) -> Iterator[Array]:
    for start in range(0, len(logits), ROWS):
        block = logits[start : start + ROWS]
        yield jnp.asarray(np.pad(block, ((0, ROWS - len(block)), (0, 0))))


def summarize(rows: Sequence[Row]) -> list[Summary]:
    """One line for each arm and task, in the order in which they came."""
    dense = [row.chose_right for row in rows if (row.arm, row.task) == ("dense", JUDGE)]
    return [_summary([row for row in rows if (row.arm, row.task) == key], dense) for key in _keys(rows)]


def _keys(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.arm, row.task) for row in rows))


def _summary(rows: Sequence[Row], dense: Sequence[bool | None]) -> Summary:
    kl = [row.kl for row in rows]
    task = rows[0].task
    mean = partial(fmean)
    warm = [row.prefill_s for row in rows if not row.cold] or [row.prefill_s for row in rows]
    judged = task == JUDGE
    return Summary(
        arm=rows[0].arm,
        task=task,
        probes=len(rows),
        kl=mean(kl),
        kl_error=stdev(kl) / len(kl) ** 0.5 if len(kl) > 1 else 0.0,
        top1=mean(row.top1 for row in rows),
        exact=mean(row.exact for row in rows) if task == "recall" else None,
        judge=mean(row.chose_right == other for row, other in zip(rows, dense, strict=True)) if judged else None,
        right=mean(bool(row.chose_right) for row in rows) if judged else None,
        computed_tokens=mean(row.computed_tokens for row in rows),
        prompt_tokens=mean(row.prompt_tokens for row in rows),
        prefill_s=median(warm),
    )
