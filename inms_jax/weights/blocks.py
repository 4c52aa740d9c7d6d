"""The tensors of a file as the blocks that are stored: cast or quantised once, matrices turned to the tree's order.

Between the readers of weight files and the two forms that are written. Knows neither.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Int8

from inms_jax.errors import ConfigError, WeightsError
from inms_jax.weights.tree import TensorSpec

DTYPES: Final = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Largest int8 number; symmetric: -128 is not used.
_LARGEST: Final = np.float32(127)
# JAX on CPU takes host memory as it is if it begins at a multiple of this.
_ALIGNMENT: Final = 64

# (name in the tree, layer) to the tensor in float32, a run of rows at a time, as files have them.
Rows = Callable[[str, int | None], Iterator[np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A run of the first axis of one layer of a tensor (of the tensor itself if it is no layer's), contiguous."""

    layer: int | None
    start: int
    values: np.ndarray


def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype that weights may be kept in; raises `ConfigError` for any other."""
    if name not in DTYPES:
        raise ConfigError(f"Weights cannot be of dtype {name!r}; choose one of {', '.join(DTYPES)}.")
    dtype: np.dtype[Any] = DTYPES[name]
    return dtype


def tensor_blocks(spec: TensorSpec, rows: Rows, dtype: np.dtype[Any]) -> Iterator[Block]:
    """Every value of a tensor in the order of its `stored_shape`; a matrix that is turned comes in one block a layer.

    Raises `WeightsError` naming the tensor if a value is too large for `dtype`.
    """
    for layer in [None] if spec.layers is None else range(spec.layers):
        if spec.transposed:
            turned = np.empty(spec.shape[::-1], dtype)
            start = 0
            for part in rows(spec.name, layer):
                turned[:, start : start + len(part)] = _cast(part, dtype, spec, layer).T
                start += len(part)
            yield Block(layer, 0, turned)
            continue
        start = 0
        for part in rows(spec.name, layer):
            yield Block(layer, start, np.ascontiguousarray(_cast(part, dtype, spec, layer)))
            start += len(part)


def _cast(part: np.ndarray, dtype: np.dtype[Any], spec: TensorSpec, layer: int | None) -> np.ndarray:
    with np.errstate(over="ignore"):  # looked at below
        cast = part.astype(dtype, copy=False)
    if dtype == np.float16 and not np.isfinite(cast).all():
        where = spec.name if layer is None else f"{spec.name} of layer {layer}"
        raise WeightsError(
            f"{where} has values up to {np.abs(part).max():.4g}, beyond float16's {np.finfo(np.float16).max:.0f}:"
            " choose bfloat16."
        )
    return cast


def quantise(stacked: Float[np.ndarray, "L I O"]) -> tuple[Int8[np.ndarray, "L I O"], Float32[np.ndarray, "L O"]]:
    """The nearest int8 numbers, and the scales that make the largest of each output channel 127."""
    num_layers, _, outputs = stacked.shape
    numbers, scales = _aligned(stacked.shape, np.int8), _aligned((num_layers, outputs), np.float32)
    for layer in range(num_layers):
        wide = stacked[layer].astype(np.float32)
        scales[layer] = np.abs(wide).max(axis=0) / _LARGEST
        wide /= np.where(scales[layer] == 0, np.float32(1), scales[layer])
        numbers[layer] = np.rint(wide, out=wide)
    return numbers, scales


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    return array
