"""Page copy, one page at a time: the oracle."""

import numpy as np
from jaxtyping import Int32, Shaped


def page_copy(
    pages: Shaped[np.ndarray, "LP K B *H"],
    src: Int32[np.ndarray, " C"],
    dst: Int32[np.ndarray, " C"],
    *,
    num_layers: int,
) -> Shaped[np.ndarray, "LP K B *H"]:
    """See `api.page_copy`; plain numpy, a new array."""
    result = pages.copy()
    per_layer = pages.shape[0] // num_layers
    for layer in range(num_layers):
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            result[target + layer * per_layer] = pages[source + layer * per_layer]
    return result
