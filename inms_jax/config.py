"""Frozen, validated settings of an engine and of one request. Knows nothing of models or devices."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from inms_jax.errors import ConfigError, InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_IDS = 16
DEVICE_MEMORY_FRACTION = 0.9
"""Part of a device's memory for weights and pages together; programs and their temporaries have the rest."""
KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Dtypes of pages, and bytes of one number; int8 comes with scales."""
_INT32_MAX = 2**31 - 1
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(value: int | str) -> int:
    """Bytes from an int or a text such as "1GiB", "512 MiB" or "80GB" (powers of 1000)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"a memory size is an int of bytes or a text such as '1GiB', not {value!r}")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"cannot read memory size {value!r}; write bytes or a text such as '1GiB'")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"a memory size must be positive, got {value!r}")
    return size


def _require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high and value > high):
        bounds = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
        raise ConfigError(f"{name} must be {bounds}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Names follow vLLM where it has one.

    block_size: tokens per page, a power of two in 8..512.
    weight_dtype: "auto" (as loaded) or "int8": matrices of the layers with a scale per output; half the bytes of 16
        bits, results that differ a little.
    kv_cache_memory: bytes of device memory for KV pages, on each device; "auto" is what its memory leaves beside the
        weights and a tenth for XLA, and 1 GiB on a CPU.
    kv_cache_dtype: "auto" (the weights' dtype), "float32", "bfloat16", "float16" or "int8" (with a scale per token and
        kv head; half the bytes of 16 bits, results that differ a little).
    max_num_seqs: sequences decoded in one step.
    max_num_batched_tokens: prompt tokens of one prefill step (a chunk); a power of two of at least 64.
    deterministic: bit-identical results whatever is cached and whoever runs beside; None = on for CPU.
    fragments: "calibrated" (only for a model that passed `inms-jax calibrate`), "unchecked" or "off".
    link_tokens: tokens at the start of each fragment that are computed in the reader's own context.
    copy_budget: pages that one step copies at most, so that a burst of writes to shared pages is spread over steps.
    zero_on_free: pages are overwritten with zeros when they are freed, before anybody else can use them.
    lease_ttl: seconds after which an agent that nobody used is ended; None is never. `agent(..., lease_ttl=)` wins.
    empty_idle_tenants: seconds after which the KV of a tenant that nobody used is freed; its conversations go on.
    strict_leaks: such an agent is an error, raised by `llm.sweep()` and `llm.close()`, and not only a warning.
    repair_blocks: blocks of each fragment, those that differ most in the reader's context, that are computed there too.
    seed: seed of requests that carry none.
    pool_mode: "elastic" (pools of tenants have what they reserve and borrow up to their limits) or "reserved" (a pool
        that reserves pages has exactly those).
    tensor_parallel_size: devices that share one model; see models/partition.py for what is cut.
    """

    block_size: int = 128
    weight_dtype: str = "auto"
    kv_cache_memory: int | str = "auto"
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    deterministic: bool | None = None
    fragments: str = "calibrated"
    link_tokens: int = 16
    repair_blocks: int = 0
    copy_budget: int = 8
    zero_on_free: bool = False
    lease_ttl: int | float | None = 3600
    strict_leaks: bool = False
    empty_idle_tenants: int | float | None = None
    seed: int = 0
    pool_mode: str = "elastic"
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        _require_int("block_size", self.block_size, 8, 512)
        _require_int("max_num_seqs", self.max_num_seqs, 1, 256)
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, 64, 8192)
        for name in ("block_size", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ConfigError(f"{name} must be a power of two, got {value}")
        if self.kv_cache_memory != "auto":
            parse_bytes(self.kv_cache_memory)
        if self.kv_cache_dtype not in ("auto", *KV_DTYPE_BYTES):
            names = ", ".join(KV_DTYPE_BYTES)
            raise ConfigError(f"kv_cache_dtype must be auto or one of {names}, got {self.kv_cache_dtype!r}")
        if self.weight_dtype not in ("auto", "int8"):
            raise ConfigError(f"weight_dtype must be auto or int8, got {self.weight_dtype!r}")
        if self.max_model_len is not None:
            _require_int("max_model_len", self.max_model_len, 2)
        if self.fragments not in ("calibrated", "unchecked", "off"):
            raise ConfigError(f"fragments must be calibrated, unchecked or off, got {self.fragments!r}")
        _require_int("link_tokens", self.link_tokens, 0, 4096)
        _require_int("repair_blocks", self.repair_blocks, 0, 64)
        _require_int("copy_budget", self.copy_budget, 1)
        ttl = self.lease_ttl
        if ttl is not None and (
            isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < float("inf")
        ):
            raise ConfigError(f"lease_ttl must be a number of seconds above 0, or None for no end, got {ttl!r}")
        idle = self.empty_idle_tenants
        if idle is not None and (isinstance(idle, bool) or not 0 < idle < float("inf")):
            raise ConfigError(f"empty_idle_tenants must be a number of seconds above 0, or None, got {idle!r}")
        _require_int("seed", self.seed, 0)
        if self.pool_mode not in ("elastic", "reserved"):
            raise ConfigError(f"pool_mode must be elastic or reserved, got {self.pool_mode!r}")
        _require_int("tensor_parallel_size", self.tensor_parallel_size, 1)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Row counts of prefill programs: powers of two from 64, which round alike on CPU, to the full chunk."""
        return tuple(1 << i for i in range(6, self.max_num_batched_tokens.bit_length()))

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Row counts of decode programs: powers of two from 2; more than 32 rows run as several batches.

        One row rounds differently from two or more on CPU, and so do 48 and more (DESIGN, section 10),
        so neither is a bucket.
        """
        largest = min(32, max(2, 1 << (self.max_num_seqs - 1).bit_length()))
        return tuple(1 << i for i in range(1, largest.bit_length()))


def _bad(name: str, value: Any, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {rule}, got {value!r}")


def _number(name: str, value: Any) -> float:
    """`value` as a float that float32 can hold, neither infinite nor so small that it becomes 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, value, "a number")
    if value != 0 and not 1e-30 <= abs(value) <= 1e30:
        raise _bad(name, value, "a finite number of ordinary size (0, or 1e-30 to 1e30)")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends; names and defaults are vLLM's.

    temperature 0 is greedy. top_k 0 or -1 keeps all. `logprobs=k` reports the k most likely tokens of
    each step beside the chosen one, from the raw logits. `max_tokens=None` goes on to the end of the
    model's context. `n` samples one prompt n times from one prefill. Raises InvalidRequestError.
    """

    n: int = 1
    temperature: int | float = 1.0
    top_p: int | float = 1.0
    top_k: int = 0
    min_p: int | float = 0.0
    repetition_penalty: int | float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        def integer(name: str, low: int, high: int | None = None, none: bool = False) -> None:
            value = getattr(self, name)
            if none and value is None:
                return
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise _bad(name, value, f"an integer >= {low}" + (" or None" if none else ""))
            if high is not None and value > high:
                raise _bad(name, value, f"at most {high}")

        integer("n", 1, 64)
        integer("top_k", -1, _INT32_MAX)
        integer("seed", 0, 2**63 - 1, none=True)
        integer("max_tokens", 1, none=True)
        integer("min_tokens", 0)
        integer("logprobs", 0, MAX_LOGPROBS, none=True)
        if _number("temperature", self.temperature) < 0:
            raise _bad("temperature", self.temperature, ">= 0")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise _bad("top_p", self.top_p, "in (0, 1]")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise _bad("min_p", self.min_p, "in [0, 1]")
        if _number("repetition_penalty", self.repetition_penalty) <= 0:
            raise _bad("repetition_penalty", self.repetition_penalty, "> 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("stop", "stop_token_ids"):
            value: Any = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, ())
            elif not isinstance(value, Sequence):
                raise _bad(name, value, "a list" if name == "stop_token_ids" else "a text or a list of texts")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise _bad("stop", self.stop, "one or more non-empty strings")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= _INT32_MAX for i in ids):
            raise _bad("stop_token_ids", self.stop_token_ids, "token ids")
        if len(ids) > MAX_STOP_IDS:
            raise _bad("stop_token_ids", self.stop_token_ids, f"at most {MAX_STOP_IDS} token ids")
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        """True when the plain argmax of the logits is the answer (while no id is banned), with no more to report."""
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.logprobs


def sampling_params(value: SamplingParams | dict[str, Any] | None) -> SamplingParams:
    """`value` as SamplingParams; a dict may hold its fields, an unknown one is refused by name."""
    if value is None:
        return SamplingParams()
    if isinstance(value, SamplingParams):
        return value
    if isinstance(value, dict):
        known = {field.name for field in fields(SamplingParams)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise InvalidRequestError(f"unknown sampling value(s) {unknown}; known are {sorted(known)}")
        return SamplingParams(**value)
    raise InvalidRequestError(f"sampling_params must be SamplingParams, got {type(value).__name__}")
