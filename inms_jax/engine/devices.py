"""Which devices an engine runs on: one, or several that hold a part of the model each; what is compiled for them stays.

Only devices of this process are taken, so that with `jax.distributed` every process runs an engine of its own.
"""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from inms_jax.config import DEVICE_MEMORY_FRACTION, parse_bytes
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


def pool_bytes(asked: int | str, params: Any, devices: int) -> int:
    """Bytes of the pool on each of `devices`; ConfigError, with what is left, when the memory does not hold so much."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // devices
    return room_for_pool(asked, weights, memory_limit(jax.local_devices()[:devices]))


def memory_limit(devices: Sequence[Any]) -> int | None:
    """What the smallest of the devices lets this process take; None where that is not known, as on a CPU."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit), default=None)


def room_for_pool(asked: int | str, weights: int, limit: int | None) -> int:
    """The arithmetic of `pool_bytes`, the same as that of `inms-jax plan`."""
    if limit is None:
        return parse_bytes("1GiB" if asked == "auto" else asked)
    left = math.floor(limit * DEVICE_MEMORY_FRACTION) - weights
    if left <= 0:
        raise ConfigError(
            f"the weights take {weights:,} of the {limit:,} bytes that this device lets a process have, and a tenth is "
            "left for XLA: nothing is left for pages. Take a smaller model, a shorter dtype or more devices."
        )
    if asked == "auto":
        return left
    if parse_bytes(asked) > left:
        raise ConfigError(
            f"kv_cache_memory of {parse_bytes(asked):,} bytes does not fit: the device lets a process have {limit:,}, "
            f"the weights take {weights:,}, a tenth is left for XLA. At most {left:,} bytes are left: ask for them, "
            'or for "auto".'
        )
    return parse_bytes(asked)


def enable_compilation_cache(folder: Path) -> None:
    """Keep compiled programs between processes (ten times faster restart), unless the user has set a place."""
    config: Any = jax.config  # its values and methods are added at run time
    if config.jax_compilation_cache_dir is None and os.environ.get("INMS_JAX_COMPILATION_CACHE") != "0":
        config.update("jax_compilation_cache_dir", str(folder))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        config.update("jax_persistent_cache_min_entry_size_bytes", -1)
