"""Which devices an engine runs on: one, or several that hold a part of the model each; what is compiled for them stays.

Only devices of this process are taken, so that with `jax.distributed` every process runs an engine of its own.
"""

import logging
import os
from pathlib import Path
from typing import Any

import jax

from inms_jax.errors import ConfigError
from inms_jax.models.config import ModelConfig
from inms_jax.models.partition import Partition

log = logging.getLogger("inms_jax")


def partition_over(model: ModelConfig, count: int) -> Partition | None:
    """`model` over `count` devices, None for one; says in the log what is not cut. ConfigError: there are fewer."""
    if count == 1:
        return None
    devices = jax.local_devices()
    if count > len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {count}, and this process has {len(devices)} device(s) of platform "
            f"{devices[0].platform!r}: lower it"
        )
    partition = Partition.over(model, devices[:count])
    for said in partition.kept_whole:
        log.warning("%s", said)
    return partition


def enable_compilation_cache(folder: Path) -> None:
    """Keep compiled programs between processes (ten times faster restart), unless the user has set a place."""
    config: Any = jax.config  # its values and methods are added at run time
    if config.jax_compilation_cache_dir is None and os.environ.get("INMS_JAX_COMPILATION_CACHE") != "0":
        config.update("jax_compilation_cache_dir", str(folder))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        config.update("jax_persistent_cache_min_entry_size_bytes", -1)
