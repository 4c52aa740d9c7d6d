"""Q4_K, Q5_K and Q6_K against a decoder written from the format's description, one value at a time.

The layouts are those of `block_q4_K`, `block_q5_K` and `block_q6_K` in ggml-common.h: 256 values a block, in sub-blocks
with small scales of their own; `d` and `dmin` are float16.
"""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from inms_jax.weights.gguf import GgufFile
from tests.weights.conftest import HF_NAMES, WIDE, make_tensors

BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
WHERE_D = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # offsets of the float16 numbers in a block


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def scale_and_minimum(packed: bytes, index: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of sub-block `index`: eight pairs in 12 bytes."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    low, high_scale, high_minimum = packed[index + 4], packed[index - 4] >> 6, packed[index] >> 6
    return (low & 15) | (high_scale << 4), (low >> 4) | (high_minimum << 4)


def decode_4_or_5(block: bytes, bits: int) -> list[float]:
    """y = d * scale * q - dmin * minimum; sub-blocks of 32, two of which share 32 bytes (low, then high nibbles)."""
    d, dmin, packed = half(block, 0), half(block, 2), block[4:16]
    fifth, nibbles = (block[16:48], block[48:176]) if bits == 5 else (bytes(32), block[16:144])
    values = []
    for sub in range(8):
        scale, minimum = scale_and_minimum(packed, sub)
        for i in range(32):
            q = (nibbles[32 * (sub // 2) + i] >> (4 * (sub % 2))) & 15
            q += 16 * ((fifth[i] >> sub) & 1)
            values.append(d * scale * q - dmin * minimum)
    return values


def decode_6(block: bytes) -> list[float]:
    """y = d * scale * (q - 32); sub-blocks of 16; each half of the block keeps 4 runs of 32 in 64 + 32 bytes."""
    d = half(block, 208)
    scales = np.frombuffer(block, np.int8, 16, 192).tolist()
    values = []
    for y in range(256):
        part, run, i = y // 128, y // 32 % 4, y % 32
        low = (block[64 * part + 32 * (run % 2) + i] >> (4 * (run // 2))) & 15
        high = (block[128 + 32 * part + i] >> (2 * run)) & 3
        values.append(d * scales[y // 16] * ((low | high << 4) - 32))
    return values


def decode(row: bytes, kind: str) -> np.ndarray:
    blocks = [row[at : at + BYTES[kind]] for at in range(0, len(row), BYTES[kind])]
    values = [decode_6(b) if kind == "Q6_K" else decode_4_or_5(b, int(kind[1])) for b in blocks]
    # Every product is exact in Python's floats and in float32, so there is one rounding at most and bits are equal.
    return np.concatenate(values).astype(np.float32)


def random_blocks(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """[rows, bytes]: any bits at all, except that `d` and `dmin` are numbers of the size that files have."""
    rows, blocks = shape[0], shape[1] // 256
    raw = rng.integers(0, 256, (rows, blocks, BYTES[kind]), np.uint8)
    for at in WHERE_D[kind]:
        numbers = rng.uniform(-1e-3, 1e-3, (rows, blocks, 1)).astype(np.float16)
        raw[..., at : at + 2] = numbers.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(BYTES))
def test_k_quants_are_what_the_format_says(kind: str, write_gguf: Callable[..., Path]) -> None:
    rng = np.random.default_rng(5)
    stored = {
        name: random_blocks(rng, kind, value.shape) if value.ndim == 2 else value
        for name, value in make_tensors(sizes=WIDE).items()
    }
    file = GgufFile(write_gguf(stored, kind=kind, sizes=WIDE))
    assert (file.config.hidden_size, file.config.intermediate_size, file.config.head_dim) == (256, 512, 64)
    for name, layer, key in (
        ("embed", None, "model.embed_tokens.weight"),
        ("layers/down", 1, f"model.layers.1.{HF_NAMES['ffn_down']}"),  # two blocks a row
        ("layers/q", 1, f"model.layers.1.{HF_NAMES['attn_q']}"),  # rows in another order in the file
        ("layers/k", 0, f"model.layers.0.{HF_NAMES['attn_k']}"),
    ):
        found = np.concatenate(list(file.rows(name, layer)))
        some = range(0, len(found), 17)  # one value at a time is slow
        expected = np.stack([decode(stored[key][row].tobytes(), kind) for row in some])
        np.testing.assert_array_equal(found[list(some)], expected, err_msg=name)


def test_minima_and_signed_scales_occur() -> None:
    """The comparison would prove little on blocks whose upper bits and minima are never used."""
    rng = np.random.default_rng(5)
    block = random_blocks(rng, "Q5_K", (1, 256))[0].tobytes()
    pairs = [scale_and_minimum(block[4:16], i) for i in range(8)]
    assert max(scale for scale, _ in pairs[4:]) > 15
    assert max(minimum for _, minimum in pairs[4:]) > 15
    signed = np.frombuffer(random_blocks(rng, "Q6_K", (1, 256))[0].tobytes(), np.int8, 16, 192)
    assert signed.min() < 0 < signed.max()


def test_block_sizes_are_the_librarys() -> None:
    for kind, size in BYTES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (256, size)
