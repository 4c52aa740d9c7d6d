"""`plan`: the article's case by hand, and equality with what an engine really allocates and holds."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from inms_jax import SamplingParams, Segment, cli
from inms_jax.capacity import Work, model_preset, plan_capacity, weight_bytes
from inms_jax.errors import CapacityError, ConfigError
from tests.tiny import tiny_llm, tiny_model

GIB = 2**30
ARTICLE = Work(agents=8, context=16384, public=0.6)


def test_the_articles_case() -> None:
    """512 KiB a token, 8 contexts of 16,384: 64 GiB; 9,830 tokens once and 8 x 6,554 more: 30.4 GiB."""
    found = plan_capacity(model_preset("llama-2-7b"), "80GB", ARTICLE)
    assert found.kv_bytes_per_token == 512 * 1024
    assert found.weight_bytes == 2 * 6_738_415_616  # the parameters of Llama 2 7B, as its authors count them
    assert found.independent_tokens_bytes == 64 * GIB
    assert found.shared_tokens_bytes == (9830 + 8 * 6554) * 512 * 1024
    assert round(found.shared_tokens_bytes / GIB, 1) == 30.4
    # Pages of 128: 77 for the public head, the last of them not full, and 52 for each private rest.
    assert found.chosen.independent_pages == 8 * 128
    assert found.chosen.shared_pages == 77 + 8 * 52
    # 72,000,000,000 - 13,476,831,232 bytes are 872 pages of 64 MiB.
    assert found.pool_budget == 58_523_168_768
    assert found.chosen.pool_pages == 872
    assert found.chosen.independent_agents == 871 // 128
    assert found.chosen.shared_agents == (871 - 77) // 52
    assert found.beyond_model


def test_int8_weights_by_hand() -> None:
    model = model_preset("llama-2-7b")
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    scales = 4 * 32 * (5 * 4096 + 2 * 11008)
    rest = 2 * (2 * 32000 * 4096 + 65 * 4096)
    assert weight_bytes(model, "bfloat16", "int8") == matrices + scales + rest == 7_006_265_344
    work = Work(agents=1, context=100, public=0)
    found = plan_capacity(model, "16GB", work, weight_dtype="int8", kv_cache_dtype="int8")
    assert (found.weight_bytes, found.dtype) == (7_006_265_344, "int8 and bfloat16")
    assert found.kv_bytes_per_token == 2 * 32 * 32 * (128 + 4)
    with pytest.raises(ConfigError, match="weight_dtype must be auto or int8"):
        plan_capacity(model, "16GB", work, weight_dtype="int3")


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_agents_that_fit_is_the_last_number_that_does(block_size: int, texts: int, shared: bool) -> None:
    work = Work(agents=1, context=1000, public=0.37, texts=texts)
    pages = 300
    fit = work.agents_that_fit(block_size, pages, shared=shared)
    assert fit is not None
    assert fit > 2
    # Not through the arithmetic for "one more agent": every agent counted.
    every = Work(agents=fit + 1, context=1000, public=0.37, texts=texts)
    assert work.pages(block_size, fit, shared=shared) <= pages < every.pages(block_size, shared=shared)


def test_nothing_fits_and_any_number_does() -> None:
    assert Work(agents=1, context=100, public=0.5).agents_that_fit(16, 3) == 0
    assert Work(agents=1, context=96, public=1.0).agents_that_fit(16, 6) is None


@pytest.mark.parametrize(("block_size", "kv"), [(16, "auto"), (32, "auto"), (16, "int8")])
def test_plan_equals_the_pool(block_size: int, kv: str) -> None:
    """The engine's own arrays, and the pages it holds for three agents, are what `plan` says."""
    public = "You are one of several engineers of a shop. " * 4
    memory = 4 * 2**20
    model = tiny_model()
    options: dict[str, Any] = {"block_size": block_size, "kv_cache_dtype": kv}
    with tiny_llm(**options, kv_cache_memory=_budget(memory), max_num_batched_tokens=64) as llm:
        tenant = llm.tenant("shop")
        tenant.publish("system", public)
        agents = [tenant.agent(f"agent{i}", ["system", Segment(f"secret number {i}")]) for i in range(3)]
        for agent in agents:
            agent.chat("Say something.", SamplingParams(max_tokens=9, ignore_eos=True, temperature=0))
        states = [agent.snapshot() for agent in agents]
        [context] = {state.kv_tokens for state in states}
        [head] = {len(span.tokens) for state in states for span in state.context if span.published}
        # As a part of the context, which `plan` turns back into tokens.
        work = Work(agents=3, context=context, public=(head + 0.5) / context)
        assert work.public_tokens == head
        found = plan_capacity(model.config, memory, work, **options, dtype="float32")

        stats = llm.stats()
        assert stats.memory.held == found.chosen.shared_pages
        assert stats.memory.total == found.chosen.pool_pages
        assert stats.memory.free + stats.memory.held == found.chosen.usable_pages
        assert stats.page_bytes == found.chosen.page_bytes
        assert found.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(model.params))
        runner = llm._core.runner
        assert sum(x.nbytes for x in jax.tree.leaves(runner.kv)) == found.chosen.pool_pages * found.chosen.page_bytes

        apart = [llm.tenant(f"t{i}").agent("a", [Segment(public, role="system")]) for i in range(2)]
        before = stats.memory.held
        for agent in apart:
            agent.chat("Say something.", SamplingParams(max_tokens=9, ignore_eos=True, temperature=0))
        [context] = {agent.snapshot().kv_tokens for agent in apart}
        alone = Work(agents=2, context=context, public=0.5)
        assert llm.stats().memory.held - before == alone.pages(block_size, shared=False)


def _budget(memory: int) -> int:
    """What `plan` tells the user to give the engine."""
    model = tiny_model().config
    return plan_capacity(model, memory, Work(agents=1, context=1, public=0), dtype="float32").pool_budget


@pytest.mark.parametrize("preset", ["llama-2-7b", "llama-3.1-8b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-8b"])
def test_every_preset_can_be_planned(preset: str) -> None:
    found = plan_capacity(model_preset(preset), "80GB", Work(agents=4, context=4096, public=0.5, texts=3))
    assert not found.beyond_model
    assert 13e9 < found.weight_bytes < 17e9
    assert found.chosen.shared_pages < found.chosen.independent_pages


def test_weights_that_do_not_fit_are_said_with_their_bytes() -> None:
    model = model_preset("qwen3-8b")
    with pytest.raises(
        CapacityError, match=rf"weights take {weight_bytes(model, 'bfloat16')} bytes in bfloat16.*14400"
    ):
        plan_capacity(model, "16GB", ARTICLE)


def test_a_model_is_found_by_name_or_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model 'llama-9'.*llama-2-7b.*smollm2-135m"):
        model_preset("llama-9")
    (tmp_path / "bad.toml").write_text("x = ")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        model_preset(tmp_path / "bad.toml")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_preset(tmp_path) == model_preset(tmp_path / "config.json")
    assert model_preset(tmp_path).num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agents": 0}, "agents must be at least 1, got 0"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"public": 1.5}, r"in 0\.\.1, got 1\.5"),
    ],
)
def test_impossible_work_is_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Work(**{"agents": 1, "context": 1, "public": 0.5, **changes})  # type: ignore[arg-type]


def test_the_command_prints_it_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    asked = ["--memory", "80GB", "--agents", "8", "--context", "16384", "--public", "0.6", "--json", str(file)]
    assert cli.main(["plan", "llama-2-7b", *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "beyond this model: it was made for at most 4,096 positions" in said
    assert "without sharing 1,024 64.0 GiB 118% 6" in said
    assert "with sharing 493 30.8 GiB 57% 15" in said
    assert "8 agents fit with sharing; without it 9.6 GiB are missing." in said
    assert "…" not in said, "a column is cut off on a terminal of 80 columns"
    found = json.loads(file.read_text())
    assert found["chosen"]["shared_pages"] == 493
    assert [choice["block_size"] for choice in found["others"]] == [16, 32, 64, 128, 256, 512]

    assert cli.main(["plan", "llama-2-7b", "--memory", "8GB", *asked[2:8]]) == 2
    assert "llama-2-7b does not fit" in capsys.readouterr().err
