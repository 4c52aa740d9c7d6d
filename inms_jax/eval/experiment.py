"""An experiment: settings from a strict TOML file, cells that are measured one by one, results that can be resumed.

What is measured is told apart: `facts` are the same in every run on every machine, `times` are not. Knows nothing of
what an experiment measures.
"""

import hashlib
import importlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

from inms_jax.errors import ConfigError

BUILT_IN = Path(__file__).parent.parent / "configs/experiments"
EXPERIMENTS = (
    "eight_agents",
    "block_size",
    "cow_burst",
    "decode_sharing",
    "leak_soak",
    "memory_store",
    "pools",
)
"""The modules of inms_jax.eval.experiments."""

Cell = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell: facts, and times in seconds or per second."""

    facts: Mapping[str, Any]
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a report; `note` stands under it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """All cells in order, each with what was measured."""

    experiment: str
    settings: Mapping[str, Any]
    cells: tuple[Cell, ...]
    measured: tuple[Measured, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One flat row for each cell: what it was, its facts and its times."""
        return [{**cell, **one.facts, **one.times} for cell, one in zip(self.cells, self.measured, strict=True)]

    def to_json(self) -> dict[str, Any]:
        cells = [
            {"cell": dict(cell), "facts": dict(one.facts), "times": dict(one.times)}
            for cell, one in zip(self.cells, self.measured, strict=True)
        ]
        return {"experiment": self.experiment, "settings": dict(self.settings), "cells": cells}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Results":
        cells = value["cells"]
        return cls(
            value["experiment"],
            value["settings"],
            tuple(one["cell"] for one in cells),
            tuple(Measured(one["facts"], one["times"]) for one in cells),
        )


@runtime_checkable
class Experiment(Protocol):
    """What a module of inms_jax.eval.experiments offers."""

    TITLE: str
    Settings: type

    def cells(self, settings: Any) -> list[dict[str, Any]]:
        """What is to be measured, in order: plain values."""

    def bench(self, settings: Any) -> Callable[[Cell], Measured]:
        """Load what all cells need, once; what is returned measures one of them."""

    def tables(self, results: Results) -> Sequence[Table]:
        """What the report shows."""

    def plot(self, results: Results, path: Path) -> None:
        """The picture."""


@dataclass(frozen=True, slots=True)
class Config:
    """One file: which experiment, with which settings."""

    name: str
    experiment: str
    settings: Any

    @property
    def module(self) -> Any:
        return experiment_module(self.experiment)

    @property
    def digest(self) -> str:
        """Tells one set of settings from another."""
        text = json.dumps([self.experiment, asdict(self.settings)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def experiment_module(name: str) -> Any:
    """The module of an experiment; ConfigError unless there is one."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"there is no experiment {name!r}; there are {list(EXPERIMENTS)}")
    return importlib.import_module(f"inms_jax.eval.experiments.{name}")


def find_config(name: str) -> Path:
    """A file, or the name of a built-in one."""
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return path
    built_in = BUILT_IN / f"{name}.toml"
    if not built_in.is_file():
        known = sorted(file.stem for file in BUILT_IN.glob("*.toml") if file.stem in EXPERIMENTS)
        raise ConfigError(f"{name!r} is neither a TOML file nor one of {known}")
    return built_in


def load_config(path: Path, *, tiny: bool = False) -> Config:
    """Read a file; `tiny` puts the values of its [tiny] table over those of [settings]. ConfigError names the key."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    if unknown := sorted(set(values) - {"experiment", "settings", "tiny"}):
        raise ConfigError(f"{path}: unknown key(s) {unknown}; known are ['experiment', 'settings', 'tiny']")
    name = values.get("experiment")
    if not isinstance(name, str):
        raise ConfigError(f"{path}: experiment is missing; it must be one of {list(EXPERIMENTS)}")
    try:
        module = experiment_module(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: experiment: {error}") from error
    merged: dict[str, Any] = {}
    for table in ("settings", "tiny") if tiny else ("settings",):
        given = values.get(table, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: {table}: must be a table, got {given!r}")
        merged |= _checked(given, module.Settings, f"{path}: {table}.")
    _checked(values.get("tiny", {}), module.Settings, f"{path}: tiny.")
    try:
        return Config(path.stem, name, module.Settings(**merged))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _checked(values: Mapping[str, Any], settings: type, place: str) -> dict[str, Any]:
    hints = get_type_hints(settings)
    known = [one.name for one in fields(settings)]
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(f"{place}{unknown[0]}: is unknown; known are {known}")
    return {key: _value(value, hints[key], f"{place}{key}") for key, value in values.items()}


def _value(value: Any, kind: Any, place: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{place}: must be a list with at least one value, got {value!r}")
        return tuple(_value(one, get_args(kind)[0], f"{place}[{i}]") for i, one in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{place}: must be {kind.__name__}, got {value!r}")
    if isinstance(value, int | float) and not value >= 0:
        raise ConfigError(f"{place}: must not be negative, got {value!r}")
    return value
