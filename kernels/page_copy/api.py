"""Copy whole pages inside the pool, in every layer: the copy-on-write primitive. Knows nothing of who owns a
page.
"""

from jaxtyping import Array, Int32, Shaped

from inms_jax.kernels.page_copy import xla


def page_copy(
    pages: Shaped[Array, "LP K B H"],
    src: Int32[Array, " C"],
    dst: Int32[Array, " C"],
    *,
    num_layers: int,
) -> Shaped[Array, "LP K B H"]:
    """Page `dst[i]` becomes what page `src[i]` was before the call, for all layers.

    Lists of fewer than C copies are padded with 0 -> 0, the null page. No page may be in `dst` twice, 0
    aside. Ids are validated on the host.
    """
    return xla.page_copy(pages, src, dst, num_layers=num_layers)
