"""Figures of one engine for Prometheus, through prometheus_client (extra `metrics`).

    registry.register(KVCollector(llm))        # served with the rest of a process
    print(render(llm).decode())                # the text format, once

Reads `llm.stats()` on each scrape and keeps nothing. The figures are the operator's and name no tenant.
"""

from collections.abc import Callable, Iterator

from inms_jax.engine.report import Counters
from inms_jax.errors import ConfigError
from inms_jax.llm import LLM
from inms_jax.memory.stats import MemoryStats

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError('metrics need prometheus_client: pip install "inms-jax[metrics]"') from error

_PAGES: tuple[tuple[str, Callable[[MemoryStats], int]], ...] = (
    ("used", lambda memory: memory.held),
    ("cached", lambda memory: memory.cached),
    ("free", lambda memory: memory.free),
    ("fenced", lambda memory: memory.fenced),
)
_WORK: tuple[tuple[str, str, Callable[[Counters], int]], ...] = (
    ("prefill_tokens", "Prompt tokens computed", lambda work: work.prefill_tokens),
    ("decode_tokens", "Tokens generated", lambda work: work.decode_tokens),
    ("prompt_tokens", "Prompt tokens of requests that were started", lambda work: work.prompt_tokens),
    ("cached_prompt_tokens", "Prompt tokens that needed no prefill", lambda work: work.cached_tokens),
    ("copy_waits", "Steps that a row waited for its copy of a page", lambda work: work.copy_waits),
    ("requests", "Requests that ended", lambda work: work.requests),
    ("failed_requests", "Requests that ended with an error", lambda work: work.failed_requests),
)


class KVCollector(Collector):
    """Collects the figures of one engine whenever a registry asks."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        memory = stats.memory
        pages = GaugeMetricFamily("inms_jax_kv_pages", "Pages by state; cached ones can be evicted", labels=["state"])
        for state, count in _PAGES:
            pages.add_metric([state], count(memory))
        yield pages
        tiers = GaugeMetricFamily(
            "inms_jax_kv_tier_pages", "Pages that are not free, by tier and state", labels=["tier", "state"]
        )
        for tier, counts in stats.pages.items():
            for state, number in (("used", counts.used), ("cached", counts.cached), ("fenced", counts.fenced)):
                tiers.add_metric([tier.name.lower(), state], number)
        yield tiers
        yield GaugeMetricFamily("inms_jax_kv_page_bytes", "Device bytes of one page", stats.page_bytes)
        yield GaugeMetricFamily("inms_jax_kv_reserved_pages", "Pages that running turns may take", memory.reserved)
        misses = CounterMetricFamily(
            "inms_jax_kv_missed_tokens", "Prompt tokens computed, by reason", labels=["reason"]
        )
        for reason, number in memory.misses.items():
            misses.add_metric([reason.value], number)
        yield misses
        yield CounterMetricFamily("inms_jax_kv_hit_tokens", "Prompt tokens found in the index", memory.hit_tokens)
        yield CounterMetricFamily(
            "inms_jax_kv_fragment_tokens", "Tokens read as fragments, at another position", memory.fragment_tokens
        )
        yield CounterMetricFamily(
            "inms_jax_kv_quota_refusals", "Turns that a limit of their own held up or refused", memory.quota_refusals
        )
        yield CounterMetricFamily(
            "inms_jax_kv_dropped_sequences", "Idle agents that gave up their KV", memory.dropped_sequences
        )
        yield CounterMetricFamily("inms_jax_kv_copies", "Pages copied on write", memory.copies)
        yield GaugeMetricFamily(
            "inms_jax_kv_peak_copies", "Most pages copied in one step since the start", stats.work.peak_copies
        )
        yield CounterMetricFamily("inms_jax_kv_evictions", "Cached pages evicted", memory.evictions)
        yield CounterMetricFamily(
            "inms_jax_kv_expired_sequences", "Agents that were ended because nobody used them", memory.expired_sequences
        )
        yield GaugeMetricFamily("inms_jax_kv_offloaded_pages", "Pages in host memory", memory.offloaded)
        agents = GaugeMetricFamily("inms_jax_sequences", "Sequences that live, by state", labels=["state"])
        for condition, number in memory.sequences.items():
            agents.add_metric([condition.value], number)
        yield agents
        for name, text, read in _WORK:
            yield CounterMetricFamily(f"inms_jax_{name}", text, read(stats.work))


def render(llm: LLM) -> bytes:
    """The figures in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(KVCollector(llm))
    return generate_latest(registry)
