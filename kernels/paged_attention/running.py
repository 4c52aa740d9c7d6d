"""One running softmax per row, continued split by split: what the plain XLA forms of paged attention are made of.

Each split is first reduced by itself, from nothing, and then joined to what came before. So a row's bits are a function
of its splits in order, whoever else is computed with it. For that the joining must round alike in every program, and a
compiler may turn a * b + c * d into either of two fused forms: scores are therefore in units of log 2 and maxima are
rounded up to whole numbers, so that the factors of a join are powers of two and its products exact. Knows nothing of
tables, levels or loops.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from inms_jax.kernels.reduction import ordered_sum
from inms_jax.kernels.scaled import Pages, take_pages

# Queries are scaled by this besides, which makes scores base-2 exponents.
LOG2_E = math.log2(math.e)
# Stands for "no key yet" in the running maximum: finite, so that subtracting it never gives NaN; a whole number.
_NOTHING = -(2.0**20)
# Position of a slot that nobody may see, and (negated) of a padding row that sees nothing.
NEVER = 2**30


class Running(NamedTuple):
    """Online softmax over the splits so far: maximum (base 2, rounded up), sum of weights, weighted sum of values."""

    top: Float[Array, "G K Q"]
    total: Float[Array, "G K Q"]
    mixed: Float[Array, "G K Q H"]


def empty(G: int, K: int, Q: int, H: int) -> Running:
    """No key seen yet."""
    return Running(
        top=jnp.full((G, K, Q), _NOTHING, jnp.float32),
        total=jnp.zeros((G, K, Q), jnp.float32),
        mixed=jnp.zeros((G, K, Q, H), jnp.float32),
    )


def slot_positions(
    begin: Int32[Array, "G M"],
    end: Int32[Array, "G M"],
    position: Int32[Array, "G M"],
    num_entries: Int32[Array, ""],
    B: int,
) -> Int32[Array, "G W"]:
    """Stored position of every slot of every entry in turn.

    Slots outside begin..end, and those of entries from `num_entries` on, get one that no row reaches.
    """
    slot = jnp.arange(B, dtype=jnp.int32)[None, None]
    counted = (jnp.arange(begin.shape[1], dtype=jnp.int32) < num_entries)[None, :, None]
    used = (begin[..., None] <= slot) & (slot < end[..., None]) & counted
    return jnp.where(used, position[..., None] + slot, NEVER).reshape(begin.shape[0], -1)


def one_split(
    queries: Float[Array, "G K Q H"],
    k: Pages,
    v: Pages,
    ids: Int32[Array, "G n"],
    slots: Int32[Array, "G W"],
    limit: Int32[Array, "G Q"],
) -> Running:
    """The softmax over the n pages of one split alone; a row sees the slots whose position is at most its limit.

    `queries` carry the softmax scale times LOG2_E.
    """
    keys, values = take_pages(k, ids), take_pages(v, ids)
    # Slots that no row sees may hold NaN, and 0 * NaN would spread.
    seen = slots <= limit.max(axis=1, keepdims=True)  # G W
    values = jnp.where(seen[:, None, :, None], values, 0.0)
    visible = slots[:, None] <= limit[..., None]  # G Q W
    scores = jnp.einsum("gkqh,gkwh->gkqw", queries, keys, precision=lax.Precision.HIGHEST)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    top = jnp.maximum(jnp.ceil(scores.max(axis=-1)), _NOTHING)
    weights = jnp.exp2(scores - top[..., None])
    return Running(
        top=top,
        total=ordered_sum(weights),
        mixed=jnp.einsum("gkqw,gkwh->gkqh", weights, values, precision=lax.Precision.HIGHEST),
    )


def join(before: Running, split: Running) -> Running:
    """Both together. A split that a row sees nothing of changes nothing, exactly: its factor is 0, the other 1."""
    top = jnp.maximum(before.top, split.top)
    keep, add = _power_of_two(before.top - top), _power_of_two(split.top - top)
    return Running(
        top=top,
        total=before.total * keep + split.total * add,
        mixed=before.mixed * keep[..., None] + split.mixed * add[..., None],
    )


def _power_of_two(exponent: Float[Array, "G K Q"]) -> Float[Array, "G K Q"]:
    """2 to a whole number of at most 0, exactly; 0 below the smallest normal number."""
    biased = jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def absorb(
    running: Running,
    queries: Float[Array, "G K Q H"],
    k: Pages,
    v: Pages,
    ids: Int32[Array, "G n"],
    slots: Int32[Array, "G W"],
    limit: Int32[Array, "G Q"],
) -> Running:
    """`running`, continued by one split."""
    return join(running, one_split(queries, k, v, ids, slots, limit))


def finish(running: Running) -> tuple[Float[Array, "G K Q H"], Float[Array, "G K Q"]]:
    """Output and natural log-sum-exp; (0, -inf) where nothing was seen."""
    divisor = jnp.where(running.total == 0, 1.0, running.total)
    lse = jnp.where(running.total == 0, -jnp.inf, running.top * math.log(2) + jnp.log(divisor))
    return running.mixed / divisor[..., None], lse
