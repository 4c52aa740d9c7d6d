"""An agent attaches to what another one has finished while that one still speaks."""

from inms_jax import SamplingParams
from tests.tiny import tiny_llm


def test_a_prefix_is_shared_while_its_first_reader_still_decodes() -> None:
    long = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    short = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with tiny_llm() as llm:
        team = llm.tenant("shop").group("team")
        team.publish("plan", "The plan of the whole team is to ship on Monday, whatever the weather is like.")
        expected = team.agent("first", ["plan"]).chat("go on", long).outputs[0].token_ids
    with tiny_llm() as llm:
        team = llm.tenant("shop").group("team")
        team.publish("plan", "The plan of the whole team is to ship on Monday, whatever the weather is like.")
        stream = team.agent("first", ["plan"]).stream("go on", long)
        said = list(next(iter(stream)).outputs[0].token_ids)
        found = team.agent("second", ["plan"]).chat("hello", short)
        assert found.num_cached_tokens > 64
        running = llm.stats().memory.reserved
        said += [token for delta in stream for token in delta.outputs[0].token_ids]
        assert running > 0, "the first one had already ended"
        assert said == list(expected)
