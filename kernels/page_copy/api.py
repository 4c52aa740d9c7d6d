"""Copy whole pages inside the pool, in every layer: the copy-on-write primitive. Knows nothing of who owns a
page.
"""

from typing import Final, cast

from jaxtyping import Array, Int32, Shaped

from inms_jax.kernels.choice import call

_IMPLEMENTATIONS: Final = ("xla", "pallas_gpu", "pallas_tpu")


def page_copy(
    pages: Shaped[Array, "LP K B *H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    *,
    num_layers: int,
    implementation: str | None = None,
) -> Shaped[Array, "LP K B *H"]:
    """Page `dst[i]` becomes what page `src[i]` was before the call, for all layers.

    Lists of fewer than C copies are padded with 0 -> 0, the null page. No page may be in `dst` twice, 0
    aside; a page may be in both lists. Ids are validated on the host. In place when the caller donates
    `pages`. ValueError for an implementation that does not exist.
    """
    copied = call("page_copy", _IMPLEMENTATIONS, implementation, pages, src, dst, num_layers=num_layers)
    return cast(Shaped[Array, "LP K B *H"], copied)
