"""Weight-only int8: the matrices of the layers, each output channel with a scale of its own.

Embedding, head, norms and biases stay as they are. What comes of it is another model: it has a version of its own.
Knows nothing of products.
"""

import dataclasses
import hashlib

import numpy as np

from inms_jax.weights.blocks import quantise
from inms_jax.weights.load import LoadedModel
from inms_jax.weights.tree import tensor_specs


def with_int8_matrices(model: LoadedModel) -> LoadedModel:
    """`model` with matrix `q` of its layers as int8 `q` [L, I, O] and float32 `q_scale` [L, O], and so the others.

    One that is so already is returned. Works layer by layer on the host: beside the result, it holds one layer of one
    matrix in float32.
    """
    layers = dict(model.params["layers"])
    if any(x.dtype == np.int8 for x in layers.values()):
        return model
    for spec in tensor_specs(model.config):
        if spec.projection:
            name = spec.name.rpartition("/")[2]
            layers[name], layers[f"{name}_scale"] = quantise(np.asarray(layers[name]))
    version = hashlib.sha256(f"{model.weights_version}\nint8 matrices, a scale per output".encode()).hexdigest()
    return dataclasses.replace(model, params={**model.params, "layers": layers}, weights_version=version)
