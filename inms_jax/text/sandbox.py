"""Chat templates from strangers: jinja2's immutable sandbox, with what Hugging Face templates expect to find.

Work is bounded where a template can make it large in one step: ranges, products, widths, the length of the text.
Knows nothing of where messages begin and end.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from inms_jax.errors import TemplateError

_MAX_TEXT: Final = 16 * 2**20
_MAX_ITERATIONS: Final = 100_000


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses the one-step ways to fill memory: large products, powers, widths and counts.

    A hostile template can still double a text many times or nest loops: its output and its ranges are bounded, the
    memory and time between are not. Load templates of strangers with the process's own limits set.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for some, other in ((left, right), (right, left)):
                if isinstance(some, int) and isinstance(other, (str, bytes, list, tuple)):
                    _limit(some * len(other), "repeats a sequence to a length of")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _limit(abs(left).bit_length() * abs(right), "takes a power with a size in bits of")
        if operator == "%" and isinstance(left, str):
            raise TemplateError("The chat template formats with %, which is not allowed; it can use ~.")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, _Ranges):
            _check_numbers(args, kwargs)
        if getattr(obj, "__name__", "") in ("format", "format_map"):
            raise TemplateError("The chat template calls format, which is not allowed; it can use ~.")
        return super().call(context, obj, *args, **kwargs)


class CompiledTemplate:
    """One template, compiled; `render` is a function of its arguments, and of the date if the template asks."""

    def __init__(self, source: str) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        del environment.filters["format"], environment.globals["lipsum"]
        environment.filters |= {name: _bounded(f) for name, f in environment.filters.items()}
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"The chat template does not parse: {error}.") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables; whatever goes wrong inside the template is a `TemplateError`."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**variables, range=_Ranges()):
                size += len(part)
                _limit(size, "writes a number of characters of")
                parts.append(part)
        except TemplateError:
            raise
        except Exception as error:  # a template can raise anything that its expressions can
            raise TemplateError(f"The chat template failed: {error or type(error).__name__}.") from error
        return "".join(parts)


class _Ranges:
    """`range`, with one budget for a whole rendering: nested ranges multiply, and a limit on each does not."""

    def __init__(self) -> None:
        self._left = _MAX_ITERATIONS

    def __call__(self, *arguments: int) -> range:
        result = range(*arguments)
        self._left -= max(0, (result.stop - result.start) // result.step) + 1
        if self._left < 0:
            raise TemplateError(f"The chat template counts to more than {_MAX_ITERATIONS:,} in its ranges.")
        return result


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args[1:], kwargs)
        return function(*args, **kwargs)

    return checked


def _check_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _limit(abs(value), "asks for a width or count of", _MAX_ITERATIONS)


def _limit(size: int, what: str, most: int = _MAX_TEXT) -> None:
    if size > most:
        raise TemplateError(f"The chat template {what} {size:,}; the limit is {most:,}.")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"The chat template refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes HTML and sorts; templates are written for this one.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
