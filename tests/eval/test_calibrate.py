"""Measuring fragments: the probes, the comparison, and a calibration of a tiny model from end to end."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from inms_jax import LLM
from inms_jax.eval.calibrate import run_calibration
from inms_jax.eval.fragment_quality import Arm, compare, measure, summarize
from inms_jax.eval.probes import JUDGE, RECALL, TASKS, TEXT, make_probes
from tests.tiny import tiny_model


def roomy_llm() -> LLM:
    """The tiny model takes a byte for a token, so that probes are long for it."""
    model = tiny_model()
    model = replace(model, config=replace(model.config, max_position_embeddings=8192))
    return LLM(model, block_size=64, kv_cache_memory="16MiB", max_num_batched_tokens=512, fragments="unchecked")


@pytest.mark.parametrize("task", TASKS)
def test_probes_follow_from_the_seed_and_differ(task: str) -> None:
    probes = make_probes(task, 40)
    assert probes == make_probes(task, 40)
    assert probes != make_probes(task, 40, seed=1)
    assert probes[:10] == make_probes(task, 10) or task == TEXT
    assert len({probe.document for probe in probes}) == 40
    for probe in probes:
        assert 600 < len(probe.document) < 1100
        if task == RECALL:
            assert probe.answer in probe.document
        if task == JUDGE:
            assert probe.wrong is not None
            assert probe.answer in probe.document
            assert probe.wrong not in probe.document


def test_the_comparison_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    ours, dense = (rng.normal(size=(70, 11)).astype(np.float32) for _ in range(2))
    kl, same = compare(ours, dense)

    def log_p(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))

    expected = (np.exp(log_p(dense)) * (log_p(dense) - log_p(ours))).sum(axis=1)
    np.testing.assert_allclose(kl, expected, atol=1e-5)
    np.testing.assert_array_equal(same, ours.argmax(axis=1) == dense.argmax(axis=1))
    assert compare(dense, dense)[0].max() < 1e-6


def test_what_is_computed_in_place_entirely_is_dense() -> None:
    """A link as long as the document leaves no fragment; a shorter one changes something, and saves work."""
    arms = [Arm("dense", mode="dense"), Arm("placed", link=4), Arm("all link", link=4000)]
    with roomy_llm() as llm:
        rows = measure(llm, make_probes(RECALL, 3), arms)
        assert llm.stats().memory.held == 0
        llm.verify()
    of = {summary.arm: summary for summary in summarize(rows)}
    assert of["dense"].kl == 0 == of["all link"].kl
    assert of["placed"].kl > 0
    assert of["placed"].computed_tokens < of["dense"].computed_tokens == of["all link"].computed_tokens
    assert {row.prompt_tokens for row in rows if row.arm == "placed"} == {
        row.prompt_tokens for row in rows if row.arm == "dense"
    }


def test_roots_and_fragments_in_a_row_read_the_same_tokens() -> None:
    arms = [Arm("dense", mode="dense"), *(Arm(root, root=root, link=2) for root in ("public", "declared", "bos"))]
    arms += [Arm("two", documents=2, link=2)]
    with roomy_llm() as llm:
        rows = measure(llm, make_probes(TEXT, 2), arms)
    single = [row for row in rows if row.arm != "two"]
    assert len({row.kl for row in single}) == len(single) - 1  # each root gives other numbers; dense is 0 twice
    for arm in ("dense", "public", "declared", "bos"):
        assert [r.prompt_tokens for r in rows if r.arm == arm] == [r.prompt_tokens for r in rows if r.arm == "dense"]
    assert all(
        two.fragment_tokens > one.fragment_tokens
        for two, one in zip(
            (row for row in rows if row.arm == "two"), (row for row in rows if row.arm == "public"), strict=True
        )
    )


def test_the_command_shows_and_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inms_jax.eval.calibrate.LLM", lambda model, **options: roomy_llm())
    screen = io.StringIO()
    console = Console(file=screen, width=110)
    found = run_calibration("tiny", link_tokens=8, documents=2, seed=0, console=console, cache=tmp_path)
    (path,) = (tmp_path / "gates").iterdir()
    assert len(found["summaries"]) == 3 * 3
    assert found["gate"]["weights_version"] == tiny_model().weights_version
    assert found["gate"]["rooted"]["probes"] == 2
    assert found["gate"]["rooted"] != found["gate"]["bos"]
    assert json.loads(path.read_text()) == found["gate"]
    text = screen.getvalue()
    assert str(path) in text.replace("\n", "")
    assert "Fragments after a published root: " in text
    assert text.count("rooted") == 3
