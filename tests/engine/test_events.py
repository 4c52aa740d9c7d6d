"""Events of the KV cache, as an operator reads them."""

from inms_jax import SamplingParams
from inms_jax.memory.events import KVEventKind
from tests.tiny import tiny_llm


def test_an_operator_sees_what_is_stored_and_that_it_was_cleared() -> None:
    with tiny_llm(block_size=8, num_pages=60) as llm:
        tenant = llm.tenant("acme")
        tenant.publish("system", "You are an agent of a web shop. Be brief and polite.")
        with tenant.agent("a", ["system"]) as agent:
            agent.chat("hello", SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
            stored = list(llm.kv_events())
            assert {event.kind for event in stored} == {KVEventKind.STORED}
            assert tenant.scope in {event.scope for event in stored}
            llm.reset_prefix_cache()
        events = list(llm.kv_events(since=stored[-1].number))
        assert events[-1].kind is KVEventKind.CLEARED
        assert {event.page for event in stored} == {e.page for e in events if e.kind is KVEventKind.REMOVED}
