"""What a checkpoint stores of a model: every tensor of the tree, matrices as two where they are int8."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from inms_jax.models.config import ModelConfig
from inms_jax.weights.blocks import Block, Rows, quantise, tensor_blocks
from inms_jax.weights.tree import TensorSpec, tensor_specs


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """One array of a checkpoint, made of the tensor `spec`; `scales`: of its int8 numbers, one per output channel."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    spec: TensorSpec
    scales: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, rows: Rows) -> Iterator[Block]:
        """Every value in the order of `shape`. Raises `WeightsError` as `tensor_blocks` does."""
        if self.dtype != np.int8 and not self.scales:
            yield from tensor_blocks(self.spec, rows, self.dtype)
            return
        for block in tensor_blocks(self.spec, rows, np.dtype(np.float32)):
            numbers, scales = quantise(block.values[None])
            yield Block(block.layer, 0, (scales if self.scales else numbers)[0])


def stored_tensors(config: ModelConfig, dtype: np.dtype[Any], *, int8: bool) -> tuple[StoredTensor, ...]:
    """With `int8`, matrices of layers are int8 and float32 scales, everything else is of `dtype`."""
    found = []
    for spec in tensor_specs(config):
        if spec.projection and spec.layers is not None and int8:
            found.append(StoredTensor(spec.name, spec.stored_shape, np.dtype(np.int8), spec))
            shape = (spec.layers, spec.shape[0])
            found.append(StoredTensor(f"{spec.name}_scale", shape, np.dtype(np.float32), spec, scales=True))
        else:
            found.append(StoredTensor(spec.name, spec.stored_shape, dtype, spec))
    return tuple(found)
