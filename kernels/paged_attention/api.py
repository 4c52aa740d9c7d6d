"""Attention of groups of query rows over pages of keys and values: the one signature, and who implements it.

A group is a set of rows that read the same pages: a prefill chunk is one group of R rows, decode is S groups
of one row. Knows nothing of models, of sequences or of who may read a page.
"""

from dataclasses import dataclass
from typing import Final, cast

from jaxtyping import Array, Float, Int32

from inms_jax.kernels.choice import call
from inms_jax.kernels.scaled import Pages
from inms_jax.kernels.state import register_state

_IMPLEMENTATIONS: Final = ("reference", "xla", "pallas_gpu", "pallas_tpu")


@register_state
@dataclass(frozen=True, slots=True)
class Level:
    """The pages that groups of rows read.

    `rows` says which of a step's T query rows are in each group: R = T // G rows each, in order, when None; else R is
    T and `rows[g, t]` is t where row t is in group g and at least T where it is not, so a row may be in several
    groups. Entry m of group g uses slots begin <= j < end of a page whose slot 0 holds the token of stored
    `position`. `shift` is target minus stored position; None is no shift at all, at no cost. Entries at and after
    `num_entries`, the largest number that any group uses, are never read, unused ones before it have begin == end.
    """

    rows: Int32[Array, "G R"] | None
    page: Int32[Array, "G M"]
    begin: Int32[Array, "G M"]
    end: Int32[Array, "G M"]
    position: Int32[Array, "G M"]
    shift: Int32[Array, "G R M"] | None
    num_entries: Int32[Array, ""]
    num_groups: Int32[Array, ""] | None = None
    """Groups in use; those at and after it read nothing. None: all."""


def paged_attention(
    q: Float[Array, "G R N H"],
    k: Pages,
    v: Pages,
    level: Level,
    q_position: Int32[Array, "G R"],
    page_offset: Int32[Array, ""],
    *,
    scale: float,
    inv_freq: Float[Array, " h"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "G R N H"], Float[Array, "G R N"]]:
    """Softmax attention of each row over the slots visible to it, in float32; natural-log lse.

    Slot j of an entry is visible iff begin <= j < end and position + j <= q_position - shift. Rows that see
    nothing give (0, -inf). `q` is rotated to `q_position`; `page_offset` is added to each page id (layer
    times pages per layer). `inv_freq` (H/2 rotary frequencies) is needed when the level has shifts. Slots
    that no row may see may hold anything, NaN included. In plain XLA a row's bits depend on its own query and
    entries only. ValueError for an implementation that does not exist.
    """
    if level.shift is not None and inv_freq is None:
        raise ValueError("paged_attention of a level with shifts needs inv_freq, got None; pass rope frequencies.")
    found = call(
        "paged_attention",
        _IMPLEMENTATIONS,
        implementation,
        q,
        k,
        v,
        level.page,
        level.begin,
        level.end,
        level.position,
        level.shift,
        level.num_entries,
        q_position,
        page_offset,
        scale=scale,
        inv_freq=inv_freq,
    )
    return cast(tuple[Float[Array, "G R N H"], Float[Array, "G R N"]], found)
