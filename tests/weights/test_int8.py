"""Int8 matrices: how near they are, what stays as it was, and that an engine with them keeps its promises."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from inms_jax import LLM, SamplingParams
from inms_jax.capacity import weight_bytes
from inms_jax.engine.runner import compiled_programs
from inms_jax.errors import ConfigError, SnapshotError
from inms_jax.models.layers import matmul
from inms_jax.weights.blocks import quantise
from inms_jax.weights.int8 import with_int8_matrices
from tests.engine import test_determinism as determinism
from tests.engine.test_snapshot import work
from tests.tiny import tiny_llm, tiny_model

MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(weight_dtype="int8") as engine:
        yield engine


def test_numbers_are_within_half_a_scale_of_their_own_channel() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 40, 8)) * 10.0 ** np.arange(-4, 4)).astype(np.float32)
    x[1, :, 5] = 0
    numbers, scales = quantise(x)
    np.testing.assert_allclose(scales, np.abs(x).max(axis=1) / 127, rtol=1e-6)
    assert (np.abs(numbers * scales[:, None] - x) <= 0.5001 * scales[:, None]).all()
    peaks = np.abs(numbers.astype(np.int32)).max(axis=1)
    assert (np.delete(peaks.reshape(-1), 8 + 5) == 127).all()
    assert peaks[1, 5] == scales[1, 5] == 0
    assert numbers.ctypes.data % 64 == scales.ctypes.data % 64 == 0, "JAX on CPU would copy them"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_product_is_that_with_the_numbers_meant(dtype: str) -> None:
    rng = np.random.default_rng(1)
    numbers, scales = (part[0] for part in quantise(rng.standard_normal((1, 64, 32), np.float32)))
    x = jax.numpy.asarray(rng.standard_normal((5, 64), np.float32)).astype(dtype)
    found = matmul(x, jax.numpy.asarray(numbers), jax.numpy.asarray(scales))
    assert found.dtype == x.dtype
    meant = np.asarray(x).astype(np.float64) @ (numbers.astype(np.float64) * scales)
    np.testing.assert_allclose(found.astype("float32"), meant, rtol={"float32": 1e-5}.get(dtype, 1e-2), atol=1e-2)


def test_matrices_of_layers_alone_become_int8_and_the_model_another_one() -> None:
    model = tiny_model()
    small = with_int8_matrices(model)
    layers = small.params["layers"]
    assert {name for name, x in layers.items() if x.dtype == np.int8} == MATRICES
    assert set(layers) == set(model.params["layers"]) | {f"{name}_scale" for name in MATRICES}
    for name in ("attn_norm", "mlp_norm"):
        assert layers[name] is model.params["layers"][name]
    for name in ("embed", "lm_head", "final_norm"):
        assert small.params[name] is model.params[name]
    assert small.weights_version not in (
        model.weights_version,
        with_int8_matrices(small_version(model)).weights_version,
    )
    assert small.weights_version == with_int8_matrices(model).weights_version
    total = sum(x.nbytes for x in jax.tree.leaves(small.params))
    assert total == weight_bytes(model.config, "float32", "int8") < weight_bytes(model.config, "float32")


def small_version(model):
    return dataclasses.replace(model, weights_version="another")


def test_answers_are_near_those_of_the_full_weights(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5 + i % 200 for i in range(100)]}
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    with tiny_llm() as wide:
        found = [engine.generate(prompt, one)[0].outputs[0].logprobs for engine in (llm, wide)]
    narrow, exact = ({token: entry.logprob for token, entry in (steps or [{}])[0].items()} for steps in found)
    both = sorted(set(narrow) & set(exact))
    assert len(both) >= 15
    differences = np.abs([narrow[token] - exact[token] for token in both])
    assert 0 < differences.max() < 0.05


def test_bits_do_not_depend_on_what_is_cached_or_who_runs_beside(llm: LLM) -> None:
    determinism.test_cold_equals_warm(llm, determinism.SAMPLED)
    determinism.test_alone_equals_beside_others(llm, 3, "a much longer private text, " * 5)
    programs = compiled_programs()
    llm.generate(["other", "a much longer prompt " * 20], determinism.GREEDY)
    assert compiled_programs() == programs, "one per row count, whatever the lengths"


def test_nothing_is_restored_into_an_engine_with_other_weights(tmp_path: Path) -> None:
    with tiny_llm() as wide:
        work(wide)
        wide.save(tmp_path / "kv")
    with tiny_llm(weight_dtype="int8") as llm, pytest.raises(SnapshotError, match="weights_version: 'random-7' there"):
        llm.restore(tmp_path / "kv")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight_dtype must be auto or int8, got 'int4'"):
        tiny_llm(weight_dtype="int4")
