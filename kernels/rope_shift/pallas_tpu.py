"""Rope shift as a Pallas kernel for TPU: a page copy that turns the keys while they are in VMEM.

Every convention is one formula: `x * cos + quarter(x) * sin`, where a quarter turn takes component b of a plane
(a, b) to -a's place and a to b's. It is a product with a matrix of one 1 or -1 per turning row, which costs
nothing beside the copies and does not ask the chip to cut lanes in odd places. Each product has one term, so
nothing is rounded before the sum.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from inms_jax.kernels.page_copy.pallas_tpu import edit_pages
from inms_jax.kernels.tpu_layout import slots_are_lanes


def rope_shift(
    pages: Shaped[Array, "LP K B H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    delta: Int32[Array, " C"],
    *,
    inv_freq: Float[Array, " h"],
    num_layers: int,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    interpret: Any = False,
) -> Shaped[Array, "LP K B H"]:
    """See `api.rope_shift`. NotImplementedError as for `page_copy`. `interpret` is for tests."""
    H = pages.shape[3]
    half = (H if rotary_dim is None else rotary_dim) // 2
    first = 2 * np.arange(half) if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    quarter = np.zeros((H, H), np.float32)  # row: component it gives, column: component it takes
    quarter[first, second], quarter[second, first] = -1.0, 1.0

    angle = delta.astype(jnp.float32)[:, None] * inv_freq.astype(jnp.float32)[None]  # C h
    cosine, sine = jnp.ones((delta.shape[0], H), jnp.float32), jnp.zeros((delta.shape[0], H), jnp.float32)
    for component in (first, second):
        cosine, sine = cosine.at[:, component].set(jnp.cos(angle)), sine.at[:, component].set(jnp.sin(angle))
    turned = slots_are_lanes(pages)
    if turned:
        tables = [jnp.asarray(quarter), cosine[:, :, None], sine[:, :, None]]
    else:
        tables = [jnp.asarray(quarter.T), cosine[:, None], sine[:, None]]
    edit = functools.partial(_turn, turned)
    return edit_pages("rope_shift", pages, src, dst, *tables, num_layers=num_layers, interpret=interpret, edit=edit)


def _turn(turned: bool, i: Any, page: Any, quarter: Any, cosine: Any, sine: Any) -> None:
    """Turn the keys of one page in place; H leads where `turned`."""
    precision = lax.Precision.HIGHEST
    for head in range(page.shape[0]):
        x = page[head].astype(jnp.float32)
        pair = (quarter[...], x) if turned else (x, quarter[...])
        ahead = lax.dot(*pair, precision=precision, preferred_element_type=jnp.float32)
        moved = x * cosine[i] + ahead * sine[i]
        # What does not turn keeps its bits, the sign of zero included.
        page[head] = jnp.where(sine[i] == 0.0, x, moved).astype(page.dtype)
