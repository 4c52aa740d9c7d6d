"""Copy whole pages of keys to where they stand at other positions: rotate and copy in one pass, in every
layer.

For a page that is copied and relocated at once, and for readers without a shift per page. Always from the
original: a destination that is shifted again adds rounding. Knows nothing of owners, of queries or of how
frequencies are chosen.
"""

from typing import Final, cast

from jaxtyping import Array, Float, Int32, Shaped

from inms_jax.kernels.choice import call
from inms_jax.kernels.scaled import Pages, ScaledPages

_IMPLEMENTATIONS: Final = ("xla", "pallas_gpu", "pallas_tpu")


def rope_shift(
    pages: Pages,
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    delta: Int32[Array, " C"],
    *,
    inv_freq: Float[Array, " h"],
    num_layers: int,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    implementation: str | None = None,
) -> Shaped[Array, "LP K B H"]:
    """Page `dst[i]` becomes what page `src[i]` was before the call, its keys `delta[i]` positions later, for
    all layers.

    Angles are `delta * inv_freq` in float32, keys are rotated in float32 and rounded once. The first
    `rotary_dim` components of a head turn (None: all of them), the others are copied; `inv_freq` has
    `rotary_dim / 2` entries, with the model's scaling in them. Planes are components (i, i + rotary_dim / 2),
    or (2i, 2i + 1) when `interleaved`. A delta of 0 copies the bits of finite keys. Lists of fewer than C
    copies are padded with 0 -> 0, delta 0. No page may be in `dst` twice, 0 aside; a page may be in both
    lists. Ids are validated on the host. In place when the caller donates `pages`.
    ValueError for int8 pages, sizes that do not fit together or an implementation that does not exist.
    """
    if isinstance(pages, ScaledPages):
        raise ValueError(
            "rope_shift of int8 pages would round rotated keys to int8 a second time: leave the pages where they are "
            "and read them with a shift in the page table, which rotates queries; or use another kv_cache_dtype."
        )
    H = pages.shape[3]
    width = H if rotary_dim is None else rotary_dim
    if width % 2 or not 0 < width <= H:
        raise ValueError(f"rotary_dim must be even and in 2..{H} (the head dim), got {width}.")
    if inv_freq.shape != (width // 2,):
        raise ValueError(
            f"rope_shift of {width} rotary components needs {width // 2} frequencies, got {inv_freq.shape[0]}."
        )
    if pages.shape[0] % num_layers:
        raise ValueError(
            f"{pages.shape[0]} pages cannot be split over {num_layers} layers; pass the pool's own number."
        )
    shifted = call(
        "rope_shift",
        _IMPLEMENTATIONS,
        implementation,
        pages,
        src,
        dst,
        delta,
        inv_freq=inv_freq,
        num_layers=num_layers,
        interleaved=interleaved,
        rotary_dim=width,
    )
    return cast(Shaped[Array, "LP K B H"], shifted)
