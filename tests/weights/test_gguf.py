"""GGUF files written by the library: values, q/k row order, and every refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inms_jax.errors import ConfigError, UnsupportedModelError, WeightsError
from inms_jax.models.config import Llama3Scaling
from inms_jax.weights.gguf import GgufFile, llama3_factors

Tensors = dict[str, np.ndarray]
Write = Callable[..., Path]


def read(file: GgufFile, name: str, layer: int | None = None) -> np.ndarray:
    return np.concatenate(list(file.rows(name, layer)))


def test_rows_of_q_and_k_are_in_rotate_half_order_again(tensors: Tensors, write_gguf: Write) -> None:
    file = GgufFile(write_gguf(tensors))
    for layer in range(2):
        for name in ("q", "k", "v"):
            expected = tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            np.testing.assert_array_equal(read(file, f"layers/{name}", layer), expected)


def test_other_architectures_are_not_permuted(tensors: Tensors, write_gguf: Write) -> None:
    def add_norms(_: gguf.GGUFWriter, data: Tensors) -> None:
        data |= {f"blk.{i}.attn_{p}_norm.weight": np.ones(16, np.float32) for i in range(2) for p in "qk"}

    file = GgufFile(write_gguf(tensors, architecture="qwen3", change=add_norms))
    assert file.config.qk_norm
    expected = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(read(file, "layers/q", 1), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_kind_is_what_the_library_makes_of_it(kind: str, tensors: Tensors, write_gguf: Write) -> None:
    file = GgufFile(write_gguf(tensors, kind=kind))
    qtype = gguf.GGMLQuantizationType[kind]
    for name, layer, key in (
        ("embed", None, "model.embed_tokens.weight"),
        ("layers/down", 1, "model.layers.1.mlp.down_proj.weight"),
        # Rows are quantised one by one, so their order and quantisation commute.
        ("layers/k", 0, "model.layers.0.self_attn.k_proj.weight"),
    ):
        found = read(file, name, layer)
        assert found.dtype == np.float32
        expected = gguf.dequantize(gguf.quantize(tensors[key], qtype), qtype).reshape(found.shape)
        np.testing.assert_array_equal(found, expected)
        assert np.abs(found - tensors[key]).max() < 0.5


def test_config_comes_from_the_metadata(tensors: Tensors, write_gguf: Write) -> None:
    config = GgufFile(write_gguf(tensors), name="n").config
    assert (config.name, config.vocab_size, config.hidden_size, config.intermediate_size) == ("n", 260, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings) == (1e-5, 10000.0, False)


def test_without_an_output_matrix_embeddings_are_tied(tensors: Tensors, write_gguf: Write) -> None:
    del tensors["lm_head.weight"]
    assert GgufFile(write_gguf(tensors)).config.tie_word_embeddings


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_factors(factor: float, tensors: Tensors, write_gguf: Write) -> None:
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )

    def scale(_: gguf.GGUFWriter, data: Tensors) -> None:
        data["rope_freqs.weight"] = llama3_factors(scaling, 16, 10000.0)

    assert GgufFile(write_gguf(tensors, change=scale)).config.rope.scaling == scaling


def test_llama3_factors_by_hand() -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    # Frequencies 1, 1/100, 1/10^4, 1/10^6 have wavelengths 2 pi times 1, 10^2, 10^4, 10^6. Below 8192 / 4 nothing
    # changes, above 8192 the factor is whole.
    np.testing.assert_allclose(llama3_factors(scaling, 8, 1e8), [1, 1, 8, 8])
    # Wavelength 4096: two turns, a third of the way: 1 / ((2/3) / 8 + 1/3).
    theta = (4096 / (2 * np.pi)) ** 2
    np.testing.assert_allclose(llama3_factors(scaling, 4, theta), [1, 2.4], rtol=1e-6)


def drop(key: str) -> Callable[[gguf.GGUFWriter, Tensors], None]:
    return lambda _, data: data.__delitem__(key)


def put(key: str, value: np.ndarray) -> Callable[[gguf.GGUFWriter, Tensors], None]:
    return lambda _, data: data.__setitem__(key, value)


def say(method: str, *arguments: Any) -> Callable[[gguf.GGUFWriter, Tensors], None]:
    return lambda writer, _: getattr(writer, method)(*arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (drop("blk.1.ffn_up.weight"), WeightsError, r"'blk.1.ffn_up.weight' is missing.*\(96, 64\)"),
        (drop("token_embd.weight"), WeightsError, "'token_embd.weight' is missing"),
        (put("blk.2.ffn_up.weight", np.ones((96, 64), np.float32)), WeightsError, "blk.2.ffn_up.*no place"),
        (put("blk.0.attn_q.bias", np.ones(64, np.float32)), WeightsError, "blk.0.attn_q.bias.*no place"),
        (put("output_norm.weight", np.ones(65, np.float32)), WeightsError, r"\(65,\).*\(64,\)"),
        (put("rope_freqs.weight", np.full(8, 3.0, np.float32)), UnsupportedModelError, "rope_freqs"),
        (say("add_sliding_window", 128), UnsupportedModelError, "128 of 512"),
        (say("add_expert_count", 8), UnsupportedModelError, "8 experts"),
        (say("add_rope_dimension_count", 8), UnsupportedModelError, "rope.dimension_count 8.*16"),
        (say("add_rope_scaling_type", gguf.RopeScalingType.YARN), UnsupportedModelError, "yarn"),
    ],
)
def test_refusals_name_the_thing(
    change: Any, error: type[Exception], message: str, tensors: Tensors, write_gguf: Write
) -> None:
    path = write_gguf(tensors, change=change)
    with pytest.raises(error, match=message):
        GgufFile(path)


def test_other_quantisations_are_refused(tensors: Tensors, write_gguf: Write) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'token_embd.weight'.*MXFP4.*Q4_1"):
        GgufFile(write_gguf(tensors, kind="MXFP4"))


def test_other_architectures_are_refused(tensors: Tensors, write_gguf: Write) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gemma'.*llama, qwen2, qwen3"):
        GgufFile(write_gguf(tensors, architecture="gemma"))


def test_missing_metadata_is_named(tensors: Tensors, write_gguf: Write) -> None:
    def forget(writer: gguf.GGUFWriter, _: Tensors) -> None:
        del writer.kv_data[0]["llama.feed_forward_length"]

    path = write_gguf(tensors, change=forget)
    with pytest.raises(ConfigError, match=r"llama.feed_forward_length"):
        GgufFile(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_truncated_files_are_refused(share: float, tensors: Tensors, write_gguf: Write) -> None:
    path = write_gguf(tensors)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(WeightsError, match=r"Cannot read .*tiny.gguf"):
        GgufFile(path)


def test_a_count_beyond_the_file_is_refused_at_once(tensors: Tensors, write_gguf: Write) -> None:
    path = write_gguf(tensors)
    content = bytearray(path.read_bytes())
    content[16:24] = (2**60).to_bytes(8, "little")  # number of metadata entries
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="Cannot read"):
        GgufFile(path)
