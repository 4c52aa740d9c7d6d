"""The state machines as a page of documentation: `python -m inms_jax.memory.diagram > docs/state_machines.md`.

Knows the tables of lifecycle.py and how to draw them; a test holds the committed page to what is drawn here.
"""

from collections.abc import Mapping

from inms_jax.memory.lifecycle import PAGE_TRANSITIONS, SEQUENCE_TRANSITIONS, E, PageState, S, SequenceState

_OPENING = """\
# State machines

Made from the tables in `inms_jax/memory/lifecycle.py` by `python -m inms_jax.memory.diagram`. A transition that is not
in a table raises `StateError` and changes nothing.
"""


def page() -> str:
    """The whole of docs/state_machines.md."""
    parts = [_OPENING]
    for title, text in (
        ("A page", _draw(PAGE_TRANSITIONS, PageState.FREE)),
        ("A sequence", _draw(SEQUENCE_TRANSITIONS, SequenceState.NEW)),
    ):
        parts.append(f"## {title}\n\n```mermaid\n{text}```\n")
    return "\n".join(parts)


def _draw(table: Mapping[tuple[S, E], S], start: S) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {start.name}"]
    lines += [f"    {before.name} --> {after.name}: {event.value}" for (before, event), after in table.items()]
    ends = set(table.values()) - {before for before, _ in table}
    lines += sorted(f"    {state.name} --> [*]" for state in ends)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
