"""inms-jax: tiered KV-cache sharing for multi-agent LLM inference in JAX. Public names only.

Names load on first use, so that host-side parts (the memory manager, say) import no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inms_jax.agents import Agent
    from inms_jax.config import EngineConfig, SamplingParams
    from inms_jax.engine.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput
    from inms_jax.engine.segment import Segment, Shared
    from inms_jax.llm import LLM
    from inms_jax.memory.quota import Quota
    from inms_jax.memory.tier import Scope, Tier
    from inms_jax.memory_store import MemoryStore, Snippet
    from inms_jax.stats import AgentStats, HomeStats, Stats
    from inms_jax.tenants import Group, Tenant

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "Agent": "agents",
    "AgentStats": "stats",
    "CompletionOutput": "engine.outputs",
    "EngineConfig": "config",
    "Group": "tenants",
    "HomeStats": "stats",
    "Logprob": "engine.outputs",
    "MemoryStore": "memory_store",
    "Quota": "memory.quota",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "config",
    "Scope": "memory.tier",
    "ScoreOutput": "engine.outputs",
    "Segment": "engine.segment",
    "Shared": "engine.segment",
    "Snippet": "memory_store",
    "Stats": "stats",
    "Tenant": "tenants",
    "Tier": "memory.tier",
}

__all__ = [
    "LLM",
    "Agent",
    "AgentStats",
    "CompletionOutput",
    "EngineConfig",
    "Group",
    "HomeStats",
    "Logprob",
    "MemoryStore",
    "Quota",
    "RequestOutput",
    "SamplingParams",
    "Scope",
    "ScoreOutput",
    "Segment",
    "Shared",
    "Snippet",
    "Stats",
    "Tenant",
    "Tier",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"inms_jax.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'inms_jax' has no attribute {name!r}")
