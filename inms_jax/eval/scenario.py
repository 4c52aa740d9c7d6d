"""The work of a group of agents as data: what is published, who knows what, who is asked what, on which engine.

Read from a TOML file that is checked strictly: an unknown key, a wrong type or a bad number is named with its file
and place. Knows nothing of engines; the settings of one are handed on as they are.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from inms_jax.config import EngineConfig, SamplingParams
from inms_jax.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedText:
    """A GLOBAL text, under the name by which contexts list it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The GROUP text: `text` with the last answer of `author` appended."""

    name: str
    author: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentScript:
    """What one agent knows alone (`notes`) and is asked; `later_turns` are the author's, after publication."""

    name: str
    notes: str
    turns: tuple[str, ...]
    later_turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """See the module. `engine` holds fields of EngineConfig without `enable_prefix_caching`, which is what varies."""

    model: str
    engine: Mapping[str, Any]
    sampling: SamplingParams
    tenant: str
    group: str
    published: tuple[PublishedText, ...]
    decisions: Decisions
    agents: tuple[AgentScript, ...]

    @property
    def author(self) -> AgentScript:
        return next(agent for agent in self.agents if agent.name == self.decisions.author)

    @property
    def readers(self) -> tuple[AgentScript, ...]:
        """The agents that start when the decisions are out."""
        return tuple(agent for agent in self.agents if agent.name != self.decisions.author)

    @property
    def num_turns(self) -> int:
        return sum(len(agent.turns) + len(agent.later_turns) for agent in self.agents)


class _Table:
    """One table of the file: hands out values by type, and at the end refuses what nobody asked for."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self._values = values
        self._place = place
        self._asked: set[str] = set()

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._place}{key}: {problem}")

    def get(self, key: str, kind: type[T], described: str, default: T | None = None) -> T:
        self._asked.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, f"is missing; it must be {described}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"must be {described}, got {value!r}")
        return value

    def text(self, key: str) -> str:
        value = self.get(key, str, "a text").strip()
        if not value:
            raise self.error(key, "must be a text, got an empty one")
        return value

    def texts(self, key: str, *, optional: bool = False) -> tuple[str, ...]:
        values = self.get(key, list, "a list of texts", [] if optional else None)
        if not optional and not values:
            raise self.error(key, "must hold at least one text, got none")
        for number, value in enumerate(values):
            if not isinstance(value, str) or not value.strip():
                raise self.error(f"{key}[{number}]", f"must be a non-empty text, got {value!r}")
        return tuple(value.strip() for value in values)

    def table(self, key: str) -> "_Table":
        return _Table(self.get(key, dict, "a table"), f"{self._place}{key}.")

    def tables(self, key: str) -> list["_Table"]:
        values = self.get(key, list, f"a list of tables ([[{key}]])")
        if not values or any(not isinstance(value, dict) for value in values):
            raise self.error(key, f"must be one or more tables ([[{key}]]), got {values!r}")
        return [_Table(value, f"{self._place}{key}[{number}].") for number, value in enumerate(values)]

    def fields_of(self, settings: type, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """Every other value of the table, each a field of the dataclass `settings`, which checks what it means."""
        hints = get_type_hints(settings)
        rest = {key: value for key, value in self._values.items() if key not in self._asked}
        self._asked |= {field.name for field in fields(settings)} - set(without)
        self.finish()
        for key, value in rest.items():
            kinds = tuple(get_origin(hint) or hint for hint in get_args(hints[key]) or (hints[key],))
            allowed = (*kinds, int) if float in kinds else kinds
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
                raise self.error(key, f"must be {names}, got {value!r}")
        try:
            settings(**rest)
        except ValueError as error:
            raise ConfigError(f"{self._place.removesuffix('.')}: {error}") from error
        return rest

    def finish(self) -> None:
        """Raise for keys that are not part of the format."""
        for key in self._values:
            if key not in self._asked:
                raise self.error(key, f"is not a known key; known here are {', '.join(sorted(self._asked))}")


def load_scenario(path: str | Path) -> Scenario:
    """Read and check a scenario file. Raises ConfigError naming the file, the key and what is wrong."""
    file = Path(path)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from error
    return _scenario(_Table(data, f"{file}: "))


def _scenario(root: _Table) -> Scenario:
    engine = root.table("engine")
    model = engine.text("model")
    settings = engine.fields_of(EngineConfig, without=("enable_prefix_caching",))
    sampling = SamplingParams(**root.table("sampling").fields_of(SamplingParams, without=("n", "logprobs")))
    project = root.table("project")
    tenant, group = project.text("tenant"), project.text("group")
    project.finish()
    scenario = Scenario(
        model=model,
        engine=settings,
        sampling=sampling,
        tenant=tenant,
        group=group,
        published=tuple(_published(table) for table in root.tables("published")),
        decisions=_decisions(root.table("decisions")),
        agents=tuple(_agent(table) for table in root.tables("agent")),
    )
    root.finish()
    _check_names(root, scenario)
    return scenario


def _published(table: _Table) -> PublishedText:
    text = PublishedText(name=table.text("name"), text=table.text("text"))
    table.finish()
    return text


def _decisions(table: _Table) -> Decisions:
    decisions = Decisions(name=table.text("name"), author=table.text("author"), text=table.text("text"))
    table.finish()
    return decisions


def _agent(table: _Table) -> AgentScript:
    agent = AgentScript(
        name=table.text("name"),
        notes=table.text("notes"),
        turns=table.texts("turns"),
        later_turns=table.texts("later_turns", optional=True),
    )
    table.finish()
    return agent


def _check_names(root: _Table, scenario: Scenario) -> None:
    published = [text.name for text in scenario.published] + [scenario.decisions.name]
    agents = [agent.name for agent in scenario.agents]
    for key, names in (("published", published), ("agent", agents)):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise root.error(key, f"the name {twice[0]!r} is used more than once")
    if scenario.decisions.author not in agents:
        raise root.error("decisions.author", f"{scenario.decisions.author!r} is not an agent; there are {agents}")
    if len(agents) < 2:
        raise root.error("agent", f"there must be an author and at least one reader, got {len(agents)} agent")
    for number, agent in enumerate(scenario.agents):
        if agent.later_turns and agent is not scenario.author:
            raise root.error(
                f"agent[{number}].later_turns", f"only the author ({scenario.decisions.author!r}) has later turns"
            )
