"""Weight-only int8: the matrices of the layers, each output channel with a scale of its own.

Embedding, head, norms and biases stay as they are. What comes of it is another model: it has a version of its own.
Knows nothing of products.
"""

import dataclasses
import hashlib
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Float32, Int8

from inms_jax.weights.load import LoadedModel
from inms_jax.weights.tree import tensor_specs

# Symmetric: -128 is not used.
_LARGEST: Final = np.float32(127)
# JAX on CPU takes host memory as it is if it begins at a multiple of this.
_ALIGNMENT: Final = 64


def with_int8_matrices(model: LoadedModel) -> LoadedModel:
    """`model` with matrix `q` of its layers as int8 `q` [L, I, O] and float32 `q_scale` [L, O], and so the others.

    Works layer by layer on the host: beside the result, it holds one layer of one matrix in float32.
    """
    layers = dict(model.params["layers"])
    for spec in tensor_specs(model.config):
        if spec.projection:
            name = spec.name.rpartition("/")[2]
            layers[name], layers[f"{name}_scale"] = quantise(np.asarray(layers[name]))
    version = hashlib.sha256(f"{model.weights_version}\nint8 matrices, a scale per output".encode()).hexdigest()
    return dataclasses.replace(model, params={**model.params, "layers": layers}, weights_version=version)


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
