"""What a scrape says is what the engine's statistics say."""

import importlib
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inms_jax import SamplingParams
from inms_jax.errors import ConfigError
from inms_jax.metrics import render
from tests.tiny import tiny_llm


def test_a_scrape_tells_used_cached_and_free_pages_apart_and_equals_the_statistics() -> None:
    with tiny_llm(block_size=8, num_pages=60) as llm:
        tenant = llm.tenant("acme")
        tenant.publish("system", "You are an agent of a web shop. Be brief and polite.")
        with tenant.agent("a", ["system"]) as agent:
            agent.chat("hello", SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
            for _ in range(2):
                text = render(llm).decode()
                stats = llm.stats()
                memory, work = stats.memory, stats.work
                read = {
                    (sample.name, *sample.labels.values()): sample.value
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples
                }
                pages = {state: read["inms_jax_kv_pages", state] for state in ("used", "cached", "free", "fenced")}
                assert pages == {"used": memory.held, "cached": memory.cached, "free": memory.free, "fenced": 0}
                assert sum(pages.values()) == memory.total - 1
                for tier, counts in stats.pages.items():
                    told = [read["inms_jax_kv_tier_pages", s, tier.name.lower()] for s in ("used", "cached", "fenced")]
                    assert told == [counts.used, counts.cached, counts.fenced]
                for reason, number in memory.misses.items():
                    assert read["inms_jax_kv_missed_tokens_total", reason.value] == number
                assert read["inms_jax_kv_hit_tokens_total",] == memory.hit_tokens
                for name in ("quota_refusals", "fragment_tokens", "dropped_sequences", "copies", "evictions"):
                    assert read[f"inms_jax_kv_{name}_total",] == getattr(memory, name)
                assert read["inms_jax_prefill_tokens_total",] == work.prefill_tokens > 0
                assert read["inms_jax_requests_total",] == work.requests
                assert read["inms_jax_kv_page_bytes",] == llm.page_bytes
                llm.reset_prefix_cache()


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "inms_jax.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install \"inms-jax\[metrics\]\""):
        importlib.import_module("inms_jax.metrics")
