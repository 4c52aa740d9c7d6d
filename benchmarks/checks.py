"""Kernels against their float32 references on fresh random inputs, on whatever machine this is.

Every slot that nobody may read holds NaN, every page that nobody names too. Part of `accelerator.py`; knows nothing of
time.
"""

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inms_jax.kernels.choice import first_choice
from inms_jax.kernels.page_copy import reference as copy_reference
from inms_jax.kernels.paged_attention import reference as attention_reference
from inms_jax.kernels.rope_shift import reference as shift_reference
from inms_jax.kernels.storage import encode, storage_dtype

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (128, 64)
BLOCK_SIZES = (128, 256, 512)
# Groups, rows of a group: agents one by one, agents on the pages they share, a chunk of a prompt.
SHAPES = {"decode": (8, 1), "decode shared": (1, 8), "prefill": (1, 64)}
# Query heads, kv heads.
_HEADS = {64: (9, 3), 128: (8, 2), 16: (3, 1)}
_LAYERS, _ENTRIES, _PAGES, _COPIES = 2, 3, 12, 6
# Largest |found - expected| / (1 + |expected|): float32 sums in another order, and rounding of 16-bit weights.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One implementation of one kernel at one size."""

    kernel: str
    implementation: str
    shape: str
    dtype: str
    head_dim: int
    block_size: int
    interpret: bool = False


def cases(tiny: bool) -> Iterator[Case]:
    """Everything, what matters most first: the platform's own kernels at every size, then plain XLA."""
    own = first_choice(None)
    names = [own] if own == "xla" else [own, "xla"]
    shapes = [("paged_attention", shape) for shape in SHAPES] + [("rope_shift", ""), ("page_copy", "")]
    shapes += [("paged_attention", shape + ", shifted") for shape in SHAPES]
    grid: Any = (names, shapes, HEAD_DIMS, BLOCK_SIZES, DTYPES)
    if tiny:
        # Kernels of another chip, where interpreting them is cheap.
        names = [*names, "pallas_gpu"] if own == "xla" else names
        few = [shapes[0], *shapes[3:5], shapes[-1]]
        grid = (names, few, (16,), (16,), ("bfloat16",))
    for name, (kernel, shape), H, B, dtype in itertools.product(*grid):
        yield Case(
            kernel=kernel,
            implementation=name,
            shape=shape,
            dtype=dtype,
            head_dim=H,
            block_size=B,
            interpret=tiny and name == "pallas_gpu" and own == "xla",
        )


def check(case: Case) -> dict[str, Any]:
    """Run one case twice: largest error, whether it is small enough, whether both runs gave the same bits.

    An implementation that says "not this shape, or not on this chip" is `refused`; plain XLA takes its place then.
    """
    line = dataclasses.asdict(case)
    form = _FORMS[case.kernel]
    try:
        error, same = form(case, np.random.default_rng(sum(map(ord, repr(case)))))
    except NotImplementedError as refusal:
        return line | {"status": "refused", "why": str(refusal)}
    tolerance = 0.0 if case.kernel == "page_copy" else TOLERANCE[case.dtype]
    passed = bool(error <= tolerance)  # NaN is not
    found = float(error) if np.isfinite(error) else str(error)
    return line | {"status": "passed" if passed else "WRONG", "error": found, "tolerance": tolerance, "same_bits": same}


def _function(case: Case) -> Callable[..., Any]:
    module = importlib.import_module(f"inms_jax.kernels.{case.kernel}.{case.implementation}")
    function: Callable[..., Any] = getattr(module, case.kernel)
    return functools.partial(function, interpret=True) if case.interpret else function


def _stored(case: Case, numbers: np.ndarray) -> jax.Array:
    """`numbers` as the pool of this platform holds them; interpreted kernels get the dtype itself."""
    dtype = jnp.dtype(case.dtype)
    stored = storage_dtype(dtype, jax.default_backend()) if case.implementation == "xla" else dtype
    return encode(jnp.asarray(numbers), stored)


def _rounded(case: Case, numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(jnp.dtype(case.dtype)).astype(np.float32)


def _attention(case: Case, rng: np.random.Generator) -> tuple[float, bool]:
    shape, _, shifted = case.shape.partition(", ")
    (G, R), H, B, M = SHAPES[shape], case.head_dim, case.block_size, _ENTRIES
    N, K = _HEADS[H]
    table, shift, q_position = _table(rng, G, R, B, shifted=bool(shifted))
    q = _rounded(case, rng.standard_normal((G, R, N, H), np.float32))
    pools = [_rounded(case, rng.standard_normal((_LAYERS * _PAGES, K, B, H), np.float32)) for _ in range(2)]
    hidden = ~_seen(table, shift, q_position, B)  # pages of the second layer, slots
    for pool in pools:
        pool[:_PAGES] = np.nan
        pool[_PAGES:][np.broadcast_to(hidden[:, None, :], (_PAGES, K, B))] = np.nan
    inv_freq = (1e4 ** -(np.arange(H // 2) / (H // 2))).astype(np.float32)
    columns = [table[name] for name in ("page", "begin", "end", "position")]
    rest = [*columns, shift if shifted else None, np.int32(M), q_position, np.int32(_PAGES)]
    options = {"scale": H**-0.5, "inv_freq": inv_freq}
    with jax.default_device(_reference_device()):
        expected = jax.jit(functools.partial(attention_reference.paged_attention, **options))(q, *pools, *rest)
    run = jax.jit(functools.partial(_function(case), **options))
    arrays = [jnp.asarray(q, case.dtype), *(_stored(case, pool) for pool in pools)]
    found, again = ([np.asarray(x) for x in run(*arrays, *rest)] for _ in range(2))
    error = max(_error(a, np.asarray(b)) for a, b in zip(found, expected, strict=True))
    return error, all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, again, strict=True))


def _table(
    rng: np.random.Generator, G: int, R: int, B: int, *, shifted: bool
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Groups of 0 to M entries: partly used pages, begin > 0, page ids that repeat; rows that see all or nothing."""
    M = _ENTRIES
    used = np.arange(M) < rng.integers(0, M + 1, (G, 1))
    used[0] = True
    begin = rng.integers(0, B, (G, M)) * rng.integers(0, 2, (G, M))
    end = np.minimum(B, begin + rng.integers(1, B + 1, (G, M)))
    table = {"page": rng.integers(1, _PAGES, (G, M)), "begin": begin, "end": end}
    table["position"] = np.tile(np.arange(M) * B, (G, 1))
    table = {name: np.where(used, x, 0).astype(np.int32) for name, x in table.items()}
    # Also positions far out, where angles are large.
    shift = rng.choice([0, 0, 37, -B, 4096], (G, R, M)) if shifted else np.zeros((G, R, M))
    first = rng.integers(0, M * B, (G, 1))
    q_position = first + (np.arange(R) if R > 8 else rng.integers(0, M * B, (G, R)))
    q_position[0, 0] = -1
    return table, shift.astype(np.int32), q_position.astype(np.int32)


def _seen(table: dict[str, np.ndarray], shift: np.ndarray, q_position: np.ndarray, B: int) -> np.ndarray:
    """Slots of each page that some row may see."""
    slot = np.arange(B)
    used = (table["begin"][..., None] <= slot) & (slot < table["end"][..., None])  # G M B
    limit = q_position[..., None] - shift  # G R M
    visible = (table["position"][:, None, :, None] + slot <= limit[..., None]).any(axis=1) & used
    seen = np.zeros((_PAGES, B), bool)
    np.logical_or.at(seen, table["page"].reshape(-1), visible.reshape(-1, B))
    return seen


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest |difference| / (1 + |expected|); NaN if a number is missing where there should be one."""
    equal = found == expected  # covers -inf, the log-sum-exp of a row that sees nothing
    with np.errstate(invalid="ignore"):
        error = np.where(equal, 0.0, np.abs(found - expected) / (1 + np.abs(expected)))
    return float(error.max())


def _lists(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, ...]:
    """Copies padded with 0 -> 0; one page is source and destination."""
    ids = rng.permutation(np.arange(1, _PAGES))
    src, dst, delta = np.zeros((3, _COPIES + 2), np.int32)
    src[:_COPIES], dst[:_COPIES] = ids[:_COPIES], ids[1 : _COPIES + 1]
    delta[:_COPIES] = [0, 1, -1, 300, -4000, 100_000]
    return (src, dst, delta)[:rows]


def _moved(case: Case, rng: np.random.Generator, rows: int, reference: Callable[..., Any], **options: Any) -> Any:
    """Pages before, pages expected, pages found twice; page 0 left out, which may hold anything."""
    K = _HEADS[case.head_dim][1]
    lists = _lists(rng, rows)
    pages = _rounded(case, rng.standard_normal((_LAYERS * _PAGES, K, case.block_size, case.head_dim), np.float32))
    by_page = pages.reshape(_LAYERS, _PAGES, -1)
    by_page[:, [p for p in range(_PAGES) if p not in lists[0][:_COPIES]]] = np.nan
    expected = reference(pages.astype(jnp.dtype(case.dtype)), *lists, num_layers=_LAYERS, **options)
    run = jax.jit(functools.partial(_function(case), num_layers=_LAYERS, **options), donate_argnums=0)
    found, again = (np.asarray(run(_stored(case, pages), *lists)) for _ in range(2))
    found, again = found.view(jnp.dtype(case.dtype)), again.view(jnp.dtype(case.dtype))
    keep = np.arange(_LAYERS * _PAGES) % _PAGES != 0
    return lists, expected[keep], found[keep], again[keep]


def _page_copy(case: Case, rng: np.random.Generator) -> tuple[float, bool]:
    _, expected, found, again = _moved(case, rng, 2, copy_reference.page_copy)
    return float(not _same_bits(found, expected)), _same_bits(found, again)


def _rope_shift(case: Case, rng: np.random.Generator) -> tuple[float, bool]:
    inv_freq = (1e4 ** -(np.arange(case.head_dim // 2) / (case.head_dim // 2))).astype(np.float32)
    (_, dst, _), expected, found, again = _moved(case, rng, 3, shift_reference.rope_shift, inv_freq=inv_freq)
    kept = np.arange(1, _PAGES)
    touched = np.tile(np.isin(kept, dst), _LAYERS)
    wide = found[touched].astype(np.float32), expected[touched].astype(np.float32)
    error = _error(*wide)
    return error if _same_bits(found[~touched], expected[~touched]) else float("nan"), _same_bits(found, again)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """NaN is like any other bits here: what nobody touched must not change."""
    return a.tobytes() == b.tobytes()


def _reference_device() -> jax.Device | None:
    """The host, so that the reference owes nothing to the chip under test; None (the chip) where jax has no host."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


_FORMS: dict[str, Callable[[Case, np.random.Generator], tuple[float, bool]]] = {
    "paged_attention": _attention,
    "page_copy": _page_copy,
    "rope_shift": _rope_shift,
}
