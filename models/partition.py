"""How one model is cut over several devices: one table of logical axes, and what follows from it for weights and pages.

Each device holds some of the heads, of the MLP's width and of the vocabulary, and runs the ordinary program on its
part; only sums of partial products and logits cross between devices (Shoeybi et al. 2019, arXiv:1909.08053). An axis
whose size the number of devices does not divide is kept whole on every device. Knows nothing of steps, requests or page
ownership.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from inms_jax.cache.page_cut import PageCut
from inms_jax.cache.page_table import KVPages
from inms_jax.errors import ConfigError
from inms_jax.models.config import ModelConfig
from inms_jax.models.layers import Cut

MESH_AXIS: Final = "model"

# The logical axis of each dimension; None is never cut. Stacked layers lead with one more. `heads` are query heads,
# `kv` key and value heads, which are also those of the pages `[L*P, K, B, H]`; both are cut or neither.
_AXES: Final[Mapping[str, tuple[str | None, ...]]] = {
    "embed": ("vocab", None),
    "lm_head": ("vocab", None),
    "final_norm": (None,),
    "attn_norm": (None,),
    "mlp_norm": (None,),
    "q": (None, "heads"),
    "k": (None, "kv"),
    "v": (None, "kv"),
    "o": ("heads", None),
    "q_bias": ("heads",),
    "k_bias": ("kv",),
    "v_bias": ("kv",),
    "q_norm": (None,),
    "k_norm": (None,),
    "gate": (None, "mlp"),
    "up": (None, "mlp"),
    "down": ("mlp", None),
    # Scales of int8 matrices, one per output.
    "q_scale": ("heads",),
    "k_scale": ("kv",),
    "v_scale": ("kv",),
    "o_scale": (None,),
    "gate_scale": ("mlp",),
    "up_scale": ("mlp",),
    "down_scale": (None,),
}
_KV_WEIGHTS: Final = ("k", "v", "k_bias", "v_bias", "k_scale", "v_scale")


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """One model on the devices of `mesh`; `cut` says which axes are cut. Hashable: part of a program's identity."""

    mesh: Mesh
    model: ModelConfig
    cut: Cut

    @classmethod
    def over(cls, model: ModelConfig, devices: Sequence[Any]) -> "Partition":
        """Cut `model` over `devices` as far as its sizes allow; see `kept_whole`."""
        n = len(devices)
        whole_groups = model.num_kv_heads % n == 0 or n % model.num_kv_heads == 0
        cut = Cut(
            heads=MESH_AXIS if model.num_heads % n == 0 and whole_groups else None,
            mlp=MESH_AXIS if model.intermediate_size % n == 0 else None,
            vocab=MESH_AXIS if model.vocab_size % n == 0 else None,
        )
        mesh = Mesh(np.array(devices), (MESH_AXIS,), axis_types=(AxisType.Auto,))
        return cls(mesh, model, cut)

    @property
    def size(self) -> int:
        """Devices."""
        return int(self.mesh.devices.size)

    @property
    def kv_copies(self) -> int:
        """Devices that hold the same kv head, when there are more devices than kv heads."""
        return max(1, self.size // self.model.num_kv_heads) if self.cut.heads else 1

    @property
    def stored(self) -> ModelConfig:
        """The model as its weights and pages are laid out over all devices: kv heads count once per copy."""
        return dataclasses.replace(self.model, num_kv_heads=self.model.num_kv_heads * self.kv_copies)

    @property
    def local(self) -> ModelConfig:
        """The model that one device sees. The vocabulary is that of the results, which are whole everywhere."""
        n, whole = self.size, self.stored
        heads = n if self.cut.heads else 1
        return dataclasses.replace(
            whole,
            num_heads=whole.num_heads // heads,
            num_kv_heads=whole.num_kv_heads // heads,
            intermediate_size=whole.intermediate_size // (n if self.cut.mlp else 1),
        )

    @property
    def kept_whole(self) -> tuple[str, ...]:
        """What is not cut and why, for the log."""
        m, n = self.model, self.size
        said = []
        if not self.cut.heads:
            said.append(f"attention ({m.num_heads} query heads and {m.num_kv_heads} kv heads)")
        if not self.cut.mlp:
            said.append(f"the MLP (width {m.intermediate_size})")
        if not self.cut.vocab:
            said.append(f"the vocabulary ({m.vocab_size} tokens)")
        return tuple(f"{what} is whole on each of {n} devices: {n} does not divide it" for what in said)

    @property
    def pages(self) -> PageCut:
        """How the pool is cut."""
        return PageCut(self.mesh, self._mesh_axis("kv"))

    def param_specs(self, params: Any) -> Any:
        """The tree of specs for a tree of parameters, stacked or layer by layer."""
        return jax.tree_util.tree_map_with_path(lambda path, x: self._spec(path[-1].key, x.ndim), params)

    def on_each_device(self, run: Callable[..., Any], params: Any, kv: KVPages, *others: Any) -> Any:
        """`run(params, kv, *others)`, which gives pages and results, with each device's part of the first two.

        `others` and the results are the same on every device.
        """
        whole, pages = PartitionSpec(), self.pages.spec  # type: ignore[no-untyped-call]
        specs = (self.param_specs(params), pages, *[whole] * len(others))
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=(pages, whole), check_vma=False)(
            params, kv, *others
        )

    def place(self, params: Any) -> Any:
        """Parameters from the host, each device with its part."""

        def put(path: Any, x: Any) -> Any:
            ready = self._with_copies(path[-1].key, x)
            return jax.device_put(ready, NamedSharding(self.mesh, self._spec(path[-1].key, x.ndim)))

        return jax.tree_util.tree_map_with_path(put, params)

    def empty_pages(self, num_pages: int, block_size: int, dtype: Any, platform: str) -> KVPages:
        """An empty pool, made where it stays."""

        def create() -> KVPages:
            return KVPages.create(self.stored, num_pages, block_size, dtype, platform)

        pages: KVPages = jax.jit(create, out_shardings=NamedSharding(self.mesh, self.pages.spec))()
        return pages

    def _spec(self, name: str, ndim: int) -> PartitionSpec:
        if name not in _AXES:
            raise ConfigError(f"no axes are known for the array {name!r}; known are {', '.join(_AXES)}")
        found = [self._mesh_axis(axis) for axis in _AXES[name]]
        return PartitionSpec(*[None] * (ndim - len(found)), *found)  # type: ignore[no-untyped-call]

    def _mesh_axis(self, axis: str | None) -> str | None:
        return {
            "heads": self.cut.heads,
            "kv": self.cut.heads,
            "mlp": self.cut.mlp,
            "vocab": self.cut.vocab,
            None: None,
        }[axis]

    def _with_copies(self, name: str, x: Any) -> Any:
        """Columns of kv heads repeated, so that devices that share a kv head each find it in their part."""
        if name not in _KV_WEIGHTS or self.kv_copies == 1:
            return x
        heads = np.asarray(x).reshape(*x.shape[:-1], self.model.num_kv_heads, self.model.head_dim)
        return np.repeat(heads, self.kv_copies, axis=-2).reshape(*x.shape[:-1], -1)
