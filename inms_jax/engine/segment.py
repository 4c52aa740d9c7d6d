"""A piece of an agent's context with one owner and one tier, as a user writes it.

Knows nothing of pages: `conversation.py` turns segments into token spans.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inms_jax.engine.fragments import Mode
from inms_jax.errors import InvalidRequestError
from inms_jax.memory.tier import Scope, Tier


@dataclass(frozen=True, slots=True)
class Segment:
    """Private text (or raw token ids) of a context.

    content: a text, which becomes one message of `role` in the model's chat template; or token ids, which
        enter the context as they are.
    tier: PRIVATE. Shared text is published under a name, and a context then lists the name.
    """

    content: str | Sequence[int]
    tier: Tier = Tier.PRIVATE
    role: str = "system"

    def __post_init__(self) -> None:
        if self.tier is not Tier.PRIVATE:
            raise InvalidRequestError(
                f"a Segment holds PRIVATE text, not {Tier(self.tier).name}: publish shared text with "
                f"tenant.publish(name, text) or group.publish(name, text) and list the name in the context"
            )
        if not self.content:
            raise InvalidRequestError("a Segment needs text or token ids, got nothing")
        if not isinstance(self.content, str):
            ids = tuple(self.content)
            if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
                raise InvalidRequestError("the token ids of a Segment must be non-negative integers")
            object.__setattr__(self, "content", ids)


class OnUpdate(enum.StrEnum):
    """What a new version of a published text does in contexts that hold an older one, from their next turn on.

    APPEND: it is added, and the older one stays: nothing is computed again. REPLACE: it takes the place of the older
    one, and what follows is computed again.
    """

    APPEND = "append"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Published:
    """A text that its author made readable for a whole scope, under a name.

    on_update: what this version did to the one before it.
    """

    name: str
    text: str
    role: str
    scope: Scope
    mode: Mode = Mode.PREFIX
    readers: int = 2
    root: "tuple[Published, ...]" = ()
    """Declared for the scope: what the text stands after, as a fragment, in a context without a public head."""
    version: int = 1
    on_update: OnUpdate = OnUpdate.APPEND
    link_tokens: int | None = None
    repair_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A published text, by name, with the mode in which this one context takes it.

    mode: "prefix" (in place, exact), "fragment" (may be read where it was computed once) or "dense" (always computed
        in place, for judges and comparisons).
    link_tokens: of a fragment, computed in place at its start. repair_blocks: those blocks of it that this context
        changes most are computed in place, so many. None is what the engine was made with.
    """

    name: str
    mode: Mode | str = Mode.FRAGMENT
    link_tokens: int | None = None
    repair_blocks: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", segment_mode(self.mode))
        for what, count in (("link_tokens", self.link_tokens), ("repair_blocks", self.repair_blocks)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise InvalidRequestError(f"the {what} of {self.name!r} must be an integer >= 0 or None, got {count!r}")


def update_rule(rule: OnUpdate | str) -> OnUpdate:
    """InvalidRequestError unless `rule` is one."""
    try:
        return OnUpdate(rule)
    except ValueError:
        raise InvalidRequestError(f"on_update is one of {[str(m) for m in OnUpdate]}, got {rule!r}") from None


def segment_mode(mode: Mode | str) -> Mode:
    """InvalidRequestError unless `mode` is one."""
    try:
        return Mode(mode)
    except ValueError:
        raise InvalidRequestError(f"a mode is one of {[str(m) for m in Mode]}, got {mode!r}") from None


def message_parts(message: Any) -> tuple[str, str]:
    """Role and content of a {"role", "content"} message; InvalidRequestError unless both are non-empty texts."""
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        raise InvalidRequestError(f'a message is a text or {{"role": ..., "content": ...}}, got {message!r}')
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"the role of a message must be a non-empty text, got {role!r}")
    if not isinstance(content, str) or not content:
        raise InvalidRequestError(f"the content of a message must be a non-empty text, got {content!r}")
    return role, content
