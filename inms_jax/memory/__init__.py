"""Who owns which page: scopes, fingerprints, the page pool, the prefix index and the manager over them.

The names below are what another engine needs; `docs/memory_manager.md` shows their use.
"""

from inms_jax.memory.fingerprint import CacheIdentity
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import Copy, DecodeSlot, PrefillChunk, Row, Span
from inms_jax.memory.quota import Quota
from inms_jax.memory.shared_blocks import SharedBlock
from inms_jax.memory.stats import Admission, MatchResult, MemoryStats, PageInfo, SequenceHandle, TurnUsage
from inms_jax.memory.tier import Scope, Tier

__all__ = [
    "Admission",
    "CacheIdentity",
    "Copy",
    "DecodeSlot",
    "MatchResult",
    "MemoryManager",
    "MemoryStats",
    "PageInfo",
    "PrefillChunk",
    "Quota",
    "Row",
    "Scope",
    "SequenceHandle",
    "SharedBlock",
    "Span",
    "Tier",
    "TurnUsage",
]
