"""What int8 weights cost in quality: SmolLM2 reads Python's own help pages with weights of each dtype.

    PYTHONPATH=. python benchmarks/int8_weights.py --json out/int8_weights.json

As `int8_kv.py`; bfloat16 weights are the same ones rounded, computed in float32 like the others.
"""

import dataclasses

import jax
import ml_dtypes
import numpy as np
from int8_kv import BASE, Form, load_model, main

from inms_jax.weights import LoadedModel


def rounded(model: LoadedModel) -> LoadedModel:
    """Every parameter rounded to bfloat16 and widened again."""
    params = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), model.params)
    return dataclasses.replace(model, params=params, weights_version=f"{model.weights_version} in bfloat16")


if __name__ == "__main__":
    model = load_model()
    forms = {
        BASE: Form(model),
        "bfloat16": Form(rounded(model), dtype="bfloat16"),
        "int8": Form(model, {"weight_dtype": "int8"}),
        "int8, int8 pages": Form(model, {"weight_dtype": "int8", "kv_cache_dtype": "int8"}),
    }
    main(forms, (__doc__ or "").splitlines()[0])
