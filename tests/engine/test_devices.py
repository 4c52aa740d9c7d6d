"""How much of a device the pool may take, by the arithmetic of `inms-jax plan`, without a device of that size."""

from typing import Any

import pytest

from inms_jax.capacity import Work, model_preset, plan_capacity
from inms_jax.engine.devices import memory_limit, pool_bytes, room_for_pool
from inms_jax.errors import ConfigError
from tests.tiny import tiny_llm, tiny_model

GIB = 2**30


class Device:
    def __init__(self, limit: int | None) -> None:
        self.limit = limit

    def memory_stats(self) -> dict[str, Any] | None:
        return None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": 5}


def test_the_smallest_device_counts_and_a_cpu_says_nothing() -> None:
    assert memory_limit([Device(16 * GIB), Device(15 * GIB)]) == 15 * GIB
    assert memory_limit([Device(None)]) is None


def test_auto_leaves_room_for_weights_and_xla() -> None:
    assert room_for_pool("auto", 3 * GIB, 16 * GIB) == int(16 * GIB * 0.9) - 3 * GIB
    assert room_for_pool("auto", 3 * GIB, None) == GIB
    assert room_for_pool("2GiB", 3 * GIB, 16 * GIB) == 2 * GIB
    assert room_for_pool(5, 3 * GIB, None) == 5


def test_a_pool_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    left = int(15 * GIB * 0.9) - 13 * GIB
    with pytest.raises(ConfigError, match=rf"of 2,147,483,648 bytes does not fit.* At most {left:,} bytes are left"):
        room_for_pool("2GiB", 13 * GIB, 15 * GIB)
    assert room_for_pool(left, 13 * GIB, 15 * GIB) == left
    with pytest.raises(ConfigError, match="nothing is left for pages"):
        room_for_pool("auto", 14 * GIB, 15 * GIB)


def test_plan_says_the_same() -> None:
    work = Work(agents=8, context=4096, public=0.6)
    found = plan_capacity(
        model_preset("llama-2-7b"), "40GiB", work, block_size=128, dtype="bfloat16", kv_cache_dtype="auto"
    )
    assert room_for_pool("auto", found.weight_bytes, 40 * GIB) == found.pool_budget


def test_an_engine_asks_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = sum(array.nbytes for array in [*tiny_model().params["layers"].values()]) + sum(
        tiny_model().params[name].nbytes for name in ("embed", "final_norm", "lm_head")
    )
    monkeypatch.setattr("inms_jax.engine.devices.memory_limit", lambda devices: 10_000_000)
    assert pool_bytes("auto", tiny_model().params, 1) == 9_000_000 - weights
    with tiny_llm(kv_cache_memory="auto") as llm:
        assert llm.stats().memory.total == (9_000_000 - weights) // llm.page_bytes
    with pytest.raises(ConfigError, match="does not fit"):
        tiny_llm(kv_cache_memory="9MB")
