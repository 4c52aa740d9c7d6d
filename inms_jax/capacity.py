"""What fits on a device: weights, pages of the pool, agents without and with sharing. Exact arithmetic on sizes.

Pages are counted by `memory/prediction.py`, the function that the pool is tested against. Knows nothing of devices, of
weights on disk or of how the numbers are shown.
"""

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from inms_jax.config import DEVICE_MEMORY_FRACTION, KV_DTYPE_BYTES, EngineConfig, parse_bytes
from inms_jax.errors import CapacityError, ConfigError
from inms_jax.memory.prediction import Context, Piece, predict_pages
from inms_jax.models.config import ModelConfig
from inms_jax.weights.shards import read_json
from inms_jax.weights.tree import tensor_specs

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_SIZES: Final = (16, 32, 64, 128, 256, 512)
PRESETS: Final = Path(__file__).parent / "configs/models"
_GLOBAL, _PRIVATE = 0, 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Agents with contexts of `context` tokens, answers included, that begin with the same published texts.

    `public` is the part of the context that is published, in `texts` texts of about equal length; the rest is private.
    """

    agents: int
    context: int
    public: int | float
    texts: int = 1

    def __post_init__(self) -> None:
        for name in ("agents", "context", "texts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.public <= 1:
            raise ConfigError(f"public is the published part of a context, in 0..1, got {self.public}")

    @property
    def public_tokens(self) -> int:
        """Tokens at the head of each context that are published."""
        # A product such as 0.07 * 100 = 7.000000000000001 means 7.
        return math.floor(round(self.context * self.public, 6))

    @property
    def unique_tokens(self) -> int:
        """Distinct tokens of all contexts."""
        return self.public_tokens + self.agents * (self.context - self.public_tokens)

    def pages(self, block_size: int, agents: int | None = None, *, shared: bool = True) -> int:
        """Pages that `agents` (None: all) hold; without sharing, each context is private from its first token."""
        count = self.agents if agents is None else agents
        if count > 2:  # what one more agent adds is the same for every one after the first
            one, two = (self.pages(block_size, n, shared=shared) for n in (1, 2))
            return one + (count - 1) * (two - one)
        return predict_pages([self._context(agent, shared) for agent in range(count)], block_size)

    def agents_that_fit(self, block_size: int, pages: int, *, shared: bool = True) -> int | None:
        """The most agents that `pages` pages hold; None: any number, since one more needs no more."""
        one, two = (self.pages(block_size, n, shared=shared) for n in (1, 2))
        if one > pages:
            return 0
        return None if two == one else 1 + (pages - one) // (two - one)

    def _context(self, agent: int, shared: bool) -> Context:
        if not shared:
            return Context((Piece(agent, self.context, _PRIVATE, agent),), agent)
        ends = [self.public_tokens * (i + 1) // self.texts for i in range(self.texts)]
        texts = [
            Piece(("text", i), end - start, _GLOBAL, "tenant", published=True)
            for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]
        return Context((*texts, Piece(agent, self.context - self.public_tokens, _PRIVATE, agent)), agent)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoice:
    """What one block size makes of the memory and of the work."""

    block_size: int
    page_bytes: int
    pool_pages: int
    """Pages that the memory holds, the null page included."""
    independent_pages: int
    shared_pages: int
    independent_agents: int | None
    shared_agents: int | None

    @property
    def usable_pages(self) -> int:
        """Pages that agents can hold: all but the null page."""
        return max(0, self.pool_pages - 1)

    @property
    def independent_bytes(self) -> int:
        return self.independent_pages * self.page_bytes

    @property
    def shared_bytes(self) -> int:
        return self.shared_pages * self.page_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """One model and one work on one device; `chosen` is the block size that was asked for, `others` all compared."""

    model: ModelConfig
    dtype: str
    kv_dtype: str
    memory_bytes: int
    memory_fraction: int | float
    weight_bytes: int
    kv_bytes_per_token: int
    work: Work
    chosen: BlockChoice
    others: tuple[BlockChoice, ...]

    @property
    def pool_budget(self) -> int:
        """Bytes left for pages; what `kv_cache_memory` is to be."""
        return math.floor(self.memory_bytes * self.memory_fraction) - self.weight_bytes

    @property
    def independent_tokens_bytes(self) -> int:
        """KV of all contexts, each by itself, as if pages had no edges."""
        return self.work.agents * self.work.context * self.kv_bytes_per_token

    @property
    def shared_tokens_bytes(self) -> int:
        """KV of the distinct tokens, as if pages had no edges."""
        return self.work.unique_tokens * self.kv_bytes_per_token

    @property
    def beyond_model(self) -> bool:
        """Whether the contexts are longer than the model's positions, so that an engine refuses them."""
        return self.work.context > self.model.max_position_embeddings

    def to_json(self) -> dict[str, Any]:
        """Everything, derived numbers included."""
        names = ("pool_budget", "independent_tokens_bytes", "shared_tokens_bytes", "beyond_model")
        return {
            **dataclasses.asdict(self),
            **{name: getattr(self, name) for name in names},
            "public_tokens": self.work.public_tokens,
            "unique_tokens": self.work.unique_tokens,
        }


def model_preset(spec: str | Path) -> ModelConfig:
    """Sizes of a model: the name of a preset, or a path to a preset, a `config.json` or a directory with one."""
    known = {path.stem: path for path in sorted(PRESETS.glob("*.toml"))}
    if str(spec) in known:
        return ModelConfig.from_toml(known[str(spec)])
    path = Path(spec)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"no model {str(spec)!r}: neither a file nor one of {', '.join(known)}")
    try:
        return ModelConfig.from_toml(path) if path.suffix == ".toml" else ModelConfig.from_hf(read_json(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def weight_bytes(model: ModelConfig, dtype: str, weight_dtype: str = "auto") -> int:
    """Bytes of the parameters in `dtype`; with a `weight_dtype` of int8, matrices of layers take a byte a number and
    a float32 scale per output.
    """
    total = 0
    for spec in tensor_specs(model):
        size = math.prod(spec.stored_shape)
        if spec.projection and weight_dtype == "int8":
            total += size + 4 * spec.shape[0] * (spec.layers or 1)
        else:
            total += size * DTYPE_BYTES[dtype]
    return total


def plan_capacity(
    model: ModelConfig,
    memory: int | str,
    work: Work,
    *,
    block_size: int = 128,
    dtype: str = "bfloat16",
    weight_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    memory_fraction: int | float = DEVICE_MEMORY_FRACTION,
    compared: Sequence[int] = BLOCK_SIZES,
) -> Capacity:
    """What `memory` bytes of a device hold of `model` and `work`.

    Raises ConfigError for a value that an engine would refuse, and CapacityError when the weights alone do not fit.
    """
    EngineConfig(block_size=block_size, weight_dtype=weight_dtype, kv_cache_dtype=kv_cache_dtype)
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    total, weights = parse_bytes(memory), weight_bytes(model, dtype, weight_dtype)
    weights_in = dtype if weight_dtype == "auto" else f"{weight_dtype} and {dtype}"
    kv_dtype = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    per_token = model.kv_bytes_per_token(KV_DTYPE_BYTES[kv_dtype])
    budget = math.floor(total * memory_fraction) - weights
    if budget <= 0:
        raise CapacityError(
            f"{model.name} does not fit: its weights take {weights} bytes in {weights_in}, and {memory_fraction:.0%} "
            f"of {total} bytes of memory are {math.floor(total * memory_fraction)}; the rest is for programs"
        )

    def choice(size: int) -> BlockChoice:
        pool_pages = budget // (size * per_token)
        usable = max(0, pool_pages - 1)
        return BlockChoice(
            block_size=size,
            page_bytes=size * per_token,
            pool_pages=pool_pages,
            independent_pages=work.pages(size, shared=False),
            shared_pages=work.pages(size),
            independent_agents=work.agents_that_fit(size, usable, shared=False),
            shared_agents=work.agents_that_fit(size, usable),
        )

    return Capacity(
        model=model,
        dtype=weights_in,
        kv_dtype=kv_dtype,
        memory_bytes=total,
        memory_fraction=memory_fraction,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        work=work,
        chosen=choice(block_size),
        others=tuple(choice(size) for size in sorted({*compared, block_size})),
    )
