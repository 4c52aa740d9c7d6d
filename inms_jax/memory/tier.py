"""Tier and Scope: who owns a run of text, and who may read it.

The strings in a scope are unique ids that the server gives out; they carry their own generation. Knows
nothing of tokens, pages or keys.
"""

import enum
from dataclasses import dataclass, field

from inms_jax.errors import ConfigError


class Tier(enum.IntEnum):
    """How far a text is shared; a larger value is narrower."""

    GLOBAL = 0
    GROUP = 1
    PRIVATE = 2


@dataclass(frozen=True, slots=True)
class Scope:
    """An owner: a tenant (GLOBAL), a group of it (GROUP), or one agent or fork lineage (PRIVATE)."""

    tenant: str
    group: str | None = None
    agent: str | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Counted once: every block of every context is looked up by its scope.
        object.__setattr__(self, "_hash", hash((self.tenant, self.group, self.agent)))
        if "" in (self.tenant, self.group, self.agent):
            raise ConfigError(f"A scope has no empty ids, got {self}; leave a level out with None.")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Scope"], tuple[str, str | None, str | None]]:
        return Scope, (self.tenant, self.group, self.agent)

    @property
    def tier(self) -> Tier:
        if self.agent is not None:
            return Tier.PRIVATE
        return Tier.GLOBAL if self.group is None else Tier.GROUP


def can_read(reader: Scope, owner: Scope) -> bool:
    """Whether text of `owner` may stand in the context of `reader`."""
    if reader.tenant != owner.tenant:
        return False
    if owner.tier is Tier.GLOBAL:
        return True
    if owner.tier is Tier.GROUP:
        return reader.group == owner.group
    return reader == owner


def join(a: Scope, b: Scope) -> Scope:
    """The narrower of two scopes on one chain.

    Raises ValueError when neither can read the other: KV computed from both would have no reader.
    """
    if can_read(b, a):
        return b
    if can_read(a, b):
        return a
    raise ValueError(f"No reader may see both {a} and {b}.")
