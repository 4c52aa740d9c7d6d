"""The quality gate: who may read fragments, what is said to the others, and that files are what they say."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from inms_jax import LLM, Segment, Shared
from inms_jax.engine.gate import Gate, Quality, find_gate, permission
from inms_jax.errors import ConfigError
from inms_jax.memory.fingerprint import CacheIdentity
from tests.tiny import tiny_llm

GOOD = Quality(probes=40, recall_kl=0.01, recall_top1=0.98, text_kl=0.02, text_top1=0.97, judge_consistency=0.95)
BAD = dataclasses.replace(GOOD, recall_kl=0.31, judge_consistency=0.5)
IDENTITY = CacheIdentity(
    model_id="models/tiny",
    weights_version="abc",
    dtype="float32/float32",
    layout="LP K B H",
    rope="rope",
    block_size=16,
)


def gate(**changes: Any) -> Gate:
    parts: dict[str, Any] = {
        "model_id": "models/tiny",
        "weights_version": "abc",
        "dtype": "float32/float32",
        "link_tokens": 16,
    }
    return Gate(**{**parts, "rooted": GOOD, "bos": GOOD, **changes})


def test_a_gate_is_found_for_its_own_model_only(tmp_path: Path) -> None:
    for bos in (GOOD, None):
        written = gate(bos=bos)
        path = written.write(tmp_path)
        assert find_gate("models/tiny", "abc", "float32/float32", tmp_path) == written
    assert path.parent == tmp_path / "gates"
    for other in (
        ("models/tiny", "abd", "float32/float32"),
        ("tiny", "abc", "float32/float32"),
        ("models/tiny", "abc", ""),
    ):
        assert find_gate(*other, tmp_path) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "is no gate"),
        ("{}", "is no gate"),
        ('{"format": 9}', "has format 9, this version reads 1"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = gate().write(tmp_path)
    path.write_text(content)
    with pytest.raises(ConfigError, match=said) as error:
        permission("calibrated", 16, IDENTITY, tmp_path)
    assert str(path) in str(error.value)


def test_what_is_allowed(tmp_path: Path) -> None:
    assert permission("unchecked", 0, IDENTITY, tmp_path).refusal is None
    off = permission("off", 16, IDENTITY, tmp_path)
    assert off.refusal is not None
    assert "off in this engine" in off.refusal
    missing = permission("calibrated", 16, IDENTITY, tmp_path).refusal
    assert missing is not None
    assert "never measured with 'models/tiny' in float32/float32" in missing

    gate().write(tmp_path)
    allowed = permission("calibrated", 16, IDENTITY, tmp_path)
    assert (allowed.refusal, allowed.after_bos) == (None, True)
    assert allowed.link_tokens == 16
    fewer = permission("calibrated", 8, IDENTITY, tmp_path).refusal
    assert fewer is not None
    assert "measured with 16 link tokens and this engine has 8" in fewer

    gate(bos=BAD).write(tmp_path)
    allowed = permission("calibrated", 32, IDENTITY, tmp_path)
    assert (allowed.refusal, allowed.after_bos) == (None, False)

    gate(rooted=BAD).write(tmp_path)
    failed = permission("calibrated", 16, IDENTITY, tmp_path).refusal
    assert failed is not None
    assert "judge_consistency is 0.500, at least 0.9 is asked; recall_kl is 0.3100, at most" in failed
    assert permission("unchecked", 16, IDENTITY, tmp_path).refusal is None


def test_a_measure_that_is_no_number_does_not_pass() -> None:
    nan = float("nan")
    worst = Quality(probes=1, recall_kl=nan, recall_top1=nan, text_kl=nan, text_top1=nan, judge_consistency=nan)
    assert len(worst.failures()) == 5
    assert GOOD.failures() == []


def test_an_engine_without_a_gate_refuses_fragments_and_serves_on() -> None:
    with tiny_llm() as llm, llm.tenant("acme") as tenant:
        with pytest.raises(ConfigError, match="never measured"):
            tenant.publish("record", "The port is 8443.", mode="fragment")
        tenant.publish("record", "The port is 8443.")
        with pytest.raises(ConfigError, match="never measured"):
            tenant.agent("a", [Segment("Notes."), Shared("record", mode="fragment")])
        assert tenant.agent("a", [Segment("Notes."), "record"]).chat("Hm?").num_fragment_tokens == 0
        llm.verify()


def test_an_engine_whose_gate_fails_after_bos_computes_such_fragments_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INMS_JAX_CACHE", str(tmp_path))

    def reasons(llm: LLM, *, gated: bool) -> list[str]:
        with llm.tenant("acme") as tenant:
            tenant.publish("system", "You are an agent of a web shop.")
            tenant.publish("record", "The port is 8443. " * 8, mode="fragment")
            headless = tenant.agent("a", [Segment("Notes."), "record"]).explain()[1]
            rooted = tenant.agent("b", ["system", Segment("Notes."), "record"]).explain()[2]
            with (
                pytest.raises(ConfigError, match="with 16 link tokens, fewer were asked for: 4")
                if gated
                else nullcontext()
            ):
                tenant.agent("c", ["system", Segment("Notes."), Shared("record", link_tokens=4)])
            return [headless.reason.value, rooted.reason.value]

    with tiny_llm(fragments="unchecked") as llm:
        identity = llm.cache_identity
        assert reasons(llm, gated=False) == ["no_root", "placed"]
    names = {"model_id": identity.model_id, "weights_version": identity.weights_version, "dtype": identity.dtype}
    for bos, expected in ((GOOD, "no_root"), (BAD, "no_bos")):
        path = gate(**names, bos=bos).write(tmp_path)
        assert json.loads(path.read_text())["rooted"]["probes"] == 40
        with tiny_llm() as llm:
            assert reasons(llm, gated=True) == [expected, "placed"]
