"""Tier and Scope: who owns a run of text, and who may read it.

The strings in a scope are unique ids that the server gives out; they carry their own generation. Knows
nothing of tokens, pages or keys.
"""

import enum
from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        if "" in (self.tenant, self.group, self.agent):
            raise ConfigError(f"A scope has no empty ids, got {self}; leave a level out with None.")

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
