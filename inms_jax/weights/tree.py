"""The parameter tree that weight files are converted to: names, shapes and the order of matrix axes.

Shared contract with the model's modules. Knows nothing of files, and imports no jax.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from inms_jax.errors import WeightsError
from inms_jax.models.config import ModelConfig

# Layer matrices are kept [in, out]: measured on CPU, 1.0-1.9 times faster than files' [out, in] at 2-64 rows.
INPUT_FIRST: Final = True


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the tree; `shape` is what files hold for one layer, [out, in] for a matrix."""

    name: str
    shape: tuple[int, ...]
    layers: int | None = None  # None: not a layer's
    projection: bool = False

    @property
    def transposed(self) -> bool:
        """Whether the tree holds the matrix the other way round than files do."""
        return self.projection and INPUT_FIRST

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the tree: layers lead."""
        own = self.shape[::-1] if self.transposed else self.shape
        return own if self.layers is None else (self.layers, *own)


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the tree; a name with a slash is nested under its first part."""
    V, D, F, L = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    matrices = {
        "q": (N * H, D),
        "k": (K * H, D),
        "v": (K * H, D),
        "o": (D, N * H),
        "gate": (F, D),
        "up": (F, D),
        "down": (D, F),
    }
    vectors = {"attn_norm": D, "mlp_norm": D}
    if config.attention_bias:
        vectors |= {"q_bias": N * H, "k_bias": K * H, "v_bias": K * H}
    if config.qk_norm:
        vectors |= {"q_norm": H, "k_norm": H}
    return (
        TensorSpec("embed", (V, D)),
        TensorSpec("final_norm", (D,)),
        *(() if config.tie_word_embeddings else (TensorSpec("lm_head", (V, D)),)),
        *(TensorSpec(f"layers/{name}", shape, L, projection=True) for name, shape in matrices.items()),
        *(TensorSpec(f"layers/{name}", (size,), L) for name, size in vectors.items()),
    )


def check_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    file_name: Callable[[str, int | None], str],
    ignored: Iterable[str] = (),
) -> None:
    """Compare the tensors of a file, `shapes` by name, with what `config` needs; `file_name(name, layer)`
    translates. Raises `WeightsError` naming the first missing, misshapen or unexpected tensor."""
    used = set(ignored)
    for spec in tensor_specs(config):
        for layer in [None] if spec.layers is None else range(spec.layers):
            name = file_name(spec.name, layer)
            if name not in shapes:
                raise WeightsError(f"Tensor {name!r} is missing: {config.name!r} needs it with shape {spec.shape}.")
            if shapes[name] != spec.shape:
                raise WeightsError(f"Tensor {name!r} has shape {shapes[name]}; {config.name!r} needs {spec.shape}.")
            used.add(name)
    unexpected = sorted(shapes.keys() - used)
    if unexpected:
        raise WeightsError(
            f"Tensor {unexpected[0]!r} has no place in {config.name!r} ({len(unexpected)} such tensors):"
            " the file is of another kind of model than its config says."
        )


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of named leaves: `layers/q` becomes `["layers"]["q"]`."""
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        group, _, leaf = name.rpartition("/")
        (tree.setdefault(group, {}) if group else tree)[leaf] = array
    return tree
