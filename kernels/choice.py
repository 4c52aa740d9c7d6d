"""Which implementation of an operation runs: by platform, or by the name that a caller asked for.

An operation is a folder; each implementation is a module in it with a function of the operation's name.
`NotImplementedError` from an implementation means "not this shape, or not on this chip": without a name the
next one of the platform is asked, so plain XLA always remains. Pallas is imported when it is chosen, not
before. Knows nothing of what the operations compute.
"""

import importlib
from collections.abc import Callable
from typing import Any, Final

import jax

# Best first. Plain XLA runs everywhere and takes every shape.
_BY_PLATFORM: Final = {"gpu": ("pallas_gpu", "xla"), "tpu": ("pallas_tpu", "xla")}
_ELSEWHERE: Final = ("xla",)


def call(operation: str, names: tuple[str, ...], requested: str | None, *args: Any, **kwargs: Any) -> Any:
    """Run `requested`, or the first of this platform that supports these arguments.

    ValueError when `requested` is not among `names`, NotImplementedError when it does not support the
    arguments.
    """
    if requested is not None:
        if requested not in names:
            raise ValueError(f"No {operation} implementation {requested!r}; there are {sorted(names)}.")
        return _load(operation, requested)(*args, **kwargs)
    *preferred, last = _BY_PLATFORM.get(jax.default_backend(), _ELSEWHERE)
    for name in preferred:
        try:
            return _load(operation, name)(*args, **kwargs)
        except NotImplementedError:
            continue
    return _load(operation, last)(*args, **kwargs)


def first_choice(requested: str | None) -> str:
    """The implementation that is asked first."""
    return requested or _BY_PLATFORM.get(jax.default_backend(), _ELSEWHERE)[0]


def _load(operation: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"inms_jax.kernels.{operation}.{name}")
    implementation: Callable[..., Any] = getattr(module, operation)
    return implementation
