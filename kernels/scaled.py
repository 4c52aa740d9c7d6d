"""Pages of int8 numbers, each slot of each kv head with a scale of its own.

A slot is quantised once, when its token is written, and from its own numbers only: what a token becomes does not
depend on what stands beside it. Such pages are taken, copied and cut like arrays, of which they are two. Knows nothing
of attention.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Shaped

from inms_jax.kernels.state import register_state
from inms_jax.kernels.storage import decode, encode

# Symmetric: -128 is not used.
_LARGEST = 127.0


@register_state
@dataclass(frozen=True, slots=True)
class ScaledPages:
    """A number of slot j of kv head h is `numbers[p, h, j] * scale[p, h, j]`."""

    numbers: Int8[Array, "LP K B H"]
    scale: Float32[Array, "LP K B"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[L*P, K, B, H], as of pages without scales."""
        return self.numbers.shape

    @property
    def dtype(self) -> Any:
        """int8."""
        return self.numbers.dtype


Pages: TypeAlias = Shaped[Array, "LP K B H"] | ScaledPages
"""Keys or values of all pages."""


def empty_pages(shape: tuple[int, ...], stored: DTypeLike) -> Pages:
    """Zeros, with scales where `stored` is int8."""
    if jnp.dtype(stored) == jnp.int8:
        return ScaledPages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, stored)


def quantise(values: Float[Array, "... H"]) -> tuple[Int8[Array, "... H"], Float32[Array, "..."]]:
    """The nearest int8 numbers, and the scale that makes the largest of each H of them 127.

    An error of at most half a scale. Something that is no number makes its scale, and so all of its H, no number.
    """
    wide = values.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1) / _LARGEST
    return jnp.round(wide / jnp.where(scale == 0, 1.0, scale)[..., None]).astype(jnp.int8), scale


def put_slots(pages: Pages, page: Shaped[Array, " T"], slot: Shaped[Array, " T"], new: Float[Array, "T K H"]) -> Pages:
    """`pages` with each row of `new` in its slot, rounded to what they hold; pages past the end are dropped."""
    # Heads are indexed too, so that what is scattered are single rows of H: else a TPU program gives the pool another
    # layout for the scatter, which copies it.
    heads = jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    at = (page[:, None], heads, slot[:, None])
    if isinstance(pages, ScaledPages):
        numbers, scale = quantise(new)
        return ScaledPages(pages.numbers.at[at].set(numbers, mode="drop"), pages.scale.at[at].set(scale, mode="drop"))
    return pages.at[at].set(encode(new, pages.dtype), mode="drop")


def take_pages(pages: Pages, ids: Shaped[Array, "G n"]) -> Float[Array, "G K W H"]:
    """The n pages of each group side by side, W = n * B slots, in float32. Host code has validated the ids."""
    G, n = ids.shape

    def side_by_side(x: Shaped[Array, "LP K B *H"]) -> Shaped[Array, "G K W *H"]:
        taken = jnp.moveaxis(x.at[ids].get(mode="promise_in_bounds"), 1, 2)  # G K n B *H
        return taken.reshape(G, x.shape[1], n * x.shape[2], *x.shape[3:])

    if isinstance(pages, ScaledPages):
        return decode(side_by_side(pages.numbers)) * side_by_side(pages.scale)[..., None]
    return decode(side_by_side(pages))


def without_scales(pages: Pages, operation: str) -> Shaped[Array, "LP K B H"]:
    """The array of pages that have no scales. NotImplementedError for those that have."""
    if isinstance(pages, ScaledPages):
        raise NotImplementedError(f"{operation} does not take int8 pages with scales")
    return pages
