"""`inms-jax convert`: any model that can be loaded, once and for all, to a checkpoint that restores to many devices."""

import hashlib
from pathlib import Path

from inms_jax.config import EngineConfig
from inms_jax.errors import WeightsError
from inms_jax.weights.blocks import named_dtype
from inms_jax.weights.checkpoint import write_checkpoint
from inms_jax.weights.origin import Origin
from inms_jax.weights.record import CheckpointRecord, is_checkpoint
from inms_jax.weights.source import resolve
from inms_jax.weights.store import default_cache_dir


def convert(
    spec: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    weight_dtype: str = "auto",
    cache_dir: Path | None = None,
    progress: bool = True,
) -> CheckpointRecord:
    """Write `spec`, whatever `load` takes, to the new directory `out` with weights of `dtype`; then `load(out)`.
    With a `weight_dtype` of "int8", matrices of layers are int8 with a scale per output channel.

    Raises `WeightsError` or `ConfigError` and leaves nothing behind; killed in the middle, it leaves a hidden directory
    that nothing takes for a model.
    """
    named_dtype(dtype)
    EngineConfig(weight_dtype=weight_dtype)
    out = Path(out).expanduser()
    if out.exists():
        raise WeightsError(f"{out} exists: choose another place or remove it.")
    cache = cache_dir or default_cache_dir()
    model_id, path = resolve(spec, cache, progress=progress)
    if is_checkpoint(path):
        raise WeightsError(
            f"{path} was converted before: convert the model's own files again, to another dtype or place."
        )
    origin = Origin.of(model_id, path, cache)
    opened = origin.open()
    # Rounded to 16 bits, a model is another one, whatever dtype it is computed in.
    stored = dtype if weight_dtype == "auto" else f"{dtype} and {weight_dtype}"
    version = hashlib.sha256(f"{origin.weights_version}\n{stored}".encode()).hexdigest()
    record = CheckpointRecord(opened.config, opened.metadata, dtype, model_id, version, weight_dtype)
    write_checkpoint(out, record, opened.rows, progress=progress)
    return record
