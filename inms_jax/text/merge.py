"""Messages, and what becomes of system messages that a chat template refuses: one rule a template.

Merged texts are joined by an empty line and keep their order. Knows nothing of rendering.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

SEPARATOR: Final = "\n\n"


class SystemRule(enum.Enum):
    """KEEP: any number, anywhere. HEAD: those at the head become one system message, later ones go to a user
    message. USER: all go to a user message. They go to the user message that follows; where none does, to the one
    before; else they become a user message."""

    KEEP = "keep"
    HEAD = "head"
    USER = "user"


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message as templates know it: `role` is system, user, assistant or tool."""

    role: str
    content: str
    name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """One message as the template gets it; `parts` are the contents of the messages merged into it."""

    role: str
    parts: tuple[str, ...]
    name: str | None = None

    def join(self, parts: Sequence[str]) -> str:
        """The content with these parts in place of its own."""
        return SEPARATOR.join(parts)

    @property
    def content(self) -> str:
        """The content the template gets."""
        return self.join(self.parts)


def merge(messages: Sequence[Message], rule: SystemRule) -> tuple[Rendered, ...]:
    """Apply `rule`; the parts of the result, in order, are the contents of `messages`."""
    if rule is SystemRule.KEEP:
        return tuple(Rendered(m.role, (m.content,), m.name) for m in messages)
    result: list[Rendered] = []
    waiting: tuple[str, ...] = ()
    for message in [*messages, None]:
        if message is not None and message.role == "system":
            waiting += (message.content,)
            continue
        follows = message is not None and message.role == "user"
        if waiting and rule is SystemRule.HEAD and not result:
            result.append(Rendered("system", waiting))
        elif waiting and not follows:
            if result and result[-1].role == "user":
                result[-1] = dataclasses.replace(result[-1], parts=result[-1].parts + waiting)
            else:
                result.append(Rendered("user", waiting))
        elif waiting and message is not None:
            result.append(Rendered("user", (*waiting, message.content), message.name))
            waiting = ()
            continue
        waiting = ()
        if message is not None:
            result.append(Rendered(message.role, (message.content,), message.name))
    return tuple(result)
