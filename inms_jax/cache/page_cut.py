"""Where the pool lies when it is cut over several devices: each has every page, of some of the kv heads.

So page ids, page tables and plans mean the same on each device, and no operation on pages has to talk to another
device. Knows nothing of models or of why heads are cut.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from inms_jax.cache.page_table import KVPages


@dataclasses.dataclass(frozen=True, slots=True)
class PageCut:
    """Kv heads over `axis` of `mesh`; None: whole on each device. Hashable: part of a program's identity."""

    mesh: Mesh
    axis: str | None

    @property
    def spec(self) -> PartitionSpec:
        """How an array `[L*P, K, ...]` of the pool is cut."""
        return PartitionSpec(None, self.axis)  # type: ignore[no-untyped-call]

    def on_each_device(self, change: Callable[..., KVPages], kv: KVPages, *others: Any) -> KVPages:
        """Run `change(kv, *others)` on each device with its part of the pool; `others` are the same everywhere."""
        whole = PartitionSpec()  # type: ignore[no-untyped-call]
        specs = (self.spec, *[whole] * len(others))
        changed: KVPages = jax.shard_map(change, mesh=self.mesh, in_specs=specs, out_specs=self.spec, check_vma=False)(
            kv, *others
        )
        return changed
