"""Timings that can be compared on a machine that others use too: interleaved rounds, medians, ratios per round.

Also what the machine itself does in the same run: float32 matrix products, copies, and what it is. Knows nothing of
what is timed.
"""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

Form = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each form in each round; entry i of every list is from round i."""

    seconds: Mapping[str, list[float]]

    def median(self, form: str) -> float:
        """Median seconds of one call."""
        return statistics.median(self.seconds[form])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times longer `slow` takes: the median over rounds, so that a busy second disturbs both or counts
        little.
        """
        return statistics.median(a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True))


def interleaved(forms: Mapping[str, Form], *, rounds: int, calls: int = 1, warmup: int = 1) -> Timings:
    """Time the forms one after the other, `rounds` times over: A B C, C B A, ... Every call is waited for.

    The order changes because a form finds the caches and the free memory as the one before left them.

    With `calls` > 1 that many are queued before the wait and the time is per call, which hides the cost of starting
    work on an accelerator.
    """
    for _ in range(warmup):
        for form in forms.values():
            _finished(form())
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    order = list(forms)
    for number in range(rounds):
        # Odd rounds run the other way, and each pair of rounds begins one form later.
        turn = number // 2 % len(order)
        for name in (order[turn:] + order[:turn])[:: -1 if number % 2 else 1]:
            form = forms[name]
            start = time.perf_counter()
            for _ in range(calls):
                result = form()
            _finished(result)
            seconds[name].append((time.perf_counter() - start) / calls)
    return Timings(seconds)


def _finished(result: Any) -> None:
    for array in jax.tree.leaves(result):
        if isinstance(array, jax.Array):
            array.block_until_ready()


def gemm_gflops(size: int = 1024, rounds: int = 7) -> float:
    """Median GFLOP/s of a float32 product of two square matrices."""
    a = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=jax.lax.Precision.HIGHEST))
    times = interleaved({"gemm": lambda: product(a)}, rounds=rounds, warmup=2)
    return 2 * size**3 / times.median("gemm") / 1e9


def copy_gb_per_s(num_bytes: int, rounds: int = 7, calls: int = 1) -> float:
    """Median GB/s, bytes read plus bytes written, of a pass over `num_bytes` that changes every word."""
    words = jnp.zeros((num_bytes // 4,), jnp.uint32)
    # Flips a bit: a plain copy may be left out by the compiler. Donated: no fresh memory in the measured time.
    change = jax.jit(lambda x: x ^ jnp.uint32(1), donate_argnums=0)

    def form() -> Any:
        nonlocal words
        words = change(words)
        return words

    times = interleaved({"copy": form}, rounds=rounds, calls=calls, warmup=2)
    return 2 * num_bytes / times.median("copy") / 1e9


def machine() -> dict[str, Any]:
    """What ran this, and how busy it was."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")) or None,
        "device_memory": (device.memory_stats() or {}).get("bytes_limit"),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
