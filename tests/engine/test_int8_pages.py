"""An engine with int8 pages keeps every promise of one without, forks, snapshots and fragments included."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from inms_jax import LLM, SamplingParams, Segment
from inms_jax.engine.runner import compiled_programs
from inms_jax.errors import ConfigError, SnapshotError
from inms_jax.kernels import choice
from inms_jax.kernels.scaled import ScaledPages
from tests.engine import test_determinism as determinism
from tests.engine import test_leases
from tests.engine.fragments.test_placing import DOCUMENT, PARAMS, RECORD, check_against_oracle
from tests.engine.test_snapshot import answers, same, work
from tests.tiny import tiny_llm


def engine(**options: object) -> LLM:
    return tiny_llm(kv_cache_dtype="int8", **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as found:
        yield found


def test_pages_are_int8_and_there_are_more_of_them(llm: LLM) -> None:
    with tiny_llm() as wide:
        # 16 numbers of 4 bytes, against 16 of one byte and a scale of 4.
        assert llm.page_bytes == wide.page_bytes * 20 // 64
        assert llm.stats().memory.total == wide.stats().memory.total * 64 // 20
        assert llm.cache_identity.dtype == "float32/int8" != wide.cache_identity.dtype
    pages = llm._core.runner.kv
    assert isinstance(pages.k, ScaledPages)
    assert pages.k.scale.shape == pages.k.numbers.shape[:3]
    assert sum(x.nbytes for x in jax.tree.leaves(pages)) == llm.stats().memory.total * llm.page_bytes


def test_answers_are_near_those_of_float32_and_not_the_same(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5 + i % 200 for i in range(200)]}
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    with tiny_llm() as wide:
        found = [engine.generate(prompt, one)[0].outputs[0].logprobs for engine in (llm, wide)]
    narrow, exact = ({token: entry.logprob for token, entry in (steps or [{}])[0].items()} for steps in found)
    both = sorted(set(narrow) & set(exact))
    assert len(both) >= 18
    differences = np.abs([narrow[token] - exact[token] for token in both])
    assert 0 < differences.max() < 0.02


@pytest.mark.parametrize("params", [determinism.GREEDY, determinism.SAMPLED], ids=["greedy", "sampled"])
def test_cold_equals_warm(llm: LLM, params: SamplingParams) -> None:
    determinism.test_cold_equals_warm(llm, params)


def test_alone_equals_beside_others(llm: LLM) -> None:
    determinism.test_alone_equals_beside_others(llm, 3, "a much longer private text, " * 5)


def test_another_agents_secret_moves_nothing(llm: LLM) -> None:
    determinism.test_another_agents_secret_moves_nothing(llm)


@pytest.mark.parametrize("between", ["evict", "rebuild"])
def test_three_turns_by_another_route(llm: LLM, between: str) -> None:
    determinism.test_three_turns_by_another_route(llm, between)


def test_forks_that_both_go_on(llm: LLM) -> None:
    """Their last page is copied before it is written, scales and all."""
    determinism.test_forks_that_both_go_on(llm)


def test_a_snapshot_brings_numbers_and_scales_back(tmp_path: Path) -> None:
    with engine() as llm:
        first = work(llm)
        llm.save(tmp_path / "kv")
    with engine() as llm:
        restored = llm.restore(tmp_path / "kv")
        assert restored.pages.restored > 0
        assert restored.pages.left_out == 0
        again = answers(llm)
        same(first, again)
        assert again[0].num_cached_tokens > 100
        llm.verify()
    with tiny_llm() as wide, pytest.raises(SnapshotError, match=r"dtype: 'float32/int8' there, 'float32/float32' here"):
        wide.restore(tmp_path / "kv")


@pytest.mark.parametrize("evict", [False, True])
def test_pages_in_host_memory_come_back_with_their_scales(llm: LLM, evict: bool) -> None:
    test_leases.test_an_offloaded_agent_goes_on_with_the_same_bits(llm, evict)


def test_freed_pages_lose_numbers_and_scales() -> None:
    with engine(zero_on_free=True) as llm, llm.tenant("acme") as tenant:
        with tenant.agent("a", [Segment("My word is ultraviolet. " * 4)]) as agent:
            agent.chat("Hm?", PARAMS)
            pages = [info.page for info in llm.memory_map()]
            before = llm._core.call(lambda: llm._core.runner.read_pages(pages))
        llm._core.call(llm._core.runner.wipe)
        after = llm._core.call(lambda: llm._core.runner.read_pages(pages))
    for full, empty in zip(before, after, strict=True):
        assert full[..., :16].any(axis=(1, 2, 3, 4)).all()
        assert full[..., 16:].any(axis=(1, 2, 3, 4)).all()
        assert not empty.any()


def test_fragments_are_read_where_they_lie_by_turning_queries() -> None:
    """Against the dense float32 computation: what is left is the rounding of keys and values."""
    with engine(fragments="unchecked", link_tokens=5) as llm, llm.tenant("acme") as tenant:
        tenant.publish("document", DOCUMENT, mode="fragment")
        tenant.publish("record", RECORD, mode="fragment")
        agent = tenant.agent("a", [Segment("I like tea."), "document", "record", Segment("More notes.")])
        output = agent.chat("When is the release?", PARAMS)
        check_against_oracle(agent, output, tolerance=0.02)
        twin = tenant.agent("b", [Segment("I like tea."), "document", "record", Segment("More notes.")])
        again = twin.chat("When is the release?", PARAMS)
        assert again.num_fragment_tokens == output.num_fragment_tokens > 300
        assert determinism.said(again) == determinism.said(output)


def test_platforms_with_kernels_of_their_own_take_plain_xla_and_say_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a TPU, whose kernels are asked first: on this machine they could not run at all."""
    prompts = ["one", "a longer prompt " * 4]
    expected = llm.generate(prompts, determinism.GREEDY)
    assert not caplog.records
    monkeypatch.setattr(choice, "_ELSEWHERE", ("pallas_tpu", "xla"))
    programs = compiled_programs()
    with engine(num_pages=60) as other:
        found = other.generate(prompts, determinism.GREEDY)
    assert compiled_programs() > programs, "nothing was traced with the other choice"
    assert [determinism.said(o) for o in found] == [determinism.said(o) for o in expected]
    assert caplog.messages == ["there is no Pallas kernel for int8 pages: attention runs in plain XLA on this cpu"]


def test_no_program_is_compiled_twice(llm: LLM) -> None:
    """One per row count, as with other pages, whatever the lengths."""
    llm.generate(["short", "a longer prompt " * 8], determinism.GREEDY)
    programs = compiled_programs()
    llm.generate(["other", "a much longer prompt " * 20], determinism.GREEDY)
    assert compiled_programs() == programs


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="auto or one of float32, bfloat16, float16, int8, got 'int4'"):
        tiny_llm(kv_cache_dtype="int4")
