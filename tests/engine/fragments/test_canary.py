"""Whose words move whose logits, with the real model: keys of content alone leak a private note, ours do not.

A reader scores an answer while another agent, which read the same document behind a secret of its own, lives beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from inms_jax import LLM, SamplingParams, Segment
from inms_jax.eval.naive import keys_of_content_alone

pytestmark = pytest.mark.model

DOCUMENT = (
    "Decision record. 1. Billing listens on port 8443 and nowhere else. 2. Orders go through the queue named "
    "orders-v2. 3. Money is an integer of cents. 4. Retries stop after three attempts. 5. Logs carry the order id. "
    "6. The release is on Thursday. 7. The database is called amber, and nobody writes to it on Fridays."
)
SECRETS = ("The port is 1111, and nobody else must know it.", "The port is 9999, and nobody else must know it.")
OWN_NOTE = "My own note is that the coffee has been cold all day."


@contextmanager
def engine(spec: str) -> Iterator[LLM]:
    with LLM(spec, kv_cache_memory="128MiB", block_size=32, progress=False, fragments="unchecked") as llm:
        yield llm


def note(llm: LLM, text: str) -> Segment:
    """A private note of 12 tokens, so that the document stands at the same place after each."""
    ids = llm.tokenizer.encode(text)[:12]
    assert len(ids) == 12
    return Segment(ids)


def reader_logits(llm: LLM, secret: str | None, mode: str) -> tuple[np.ndarray, int]:
    """What the reader's answer looks like, and how many tokens it did not compute itself."""
    with llm.tenant("acme") as tenant:
        tenant.publish("document", DOCUMENT, mode=mode)
        others = [] if secret is None else [tenant.agent("other", [note(llm, secret), "document"])]
        for other in others:
            other.chat("Which port?", SamplingParams(max_tokens=2, temperature=0.0))
        with tenant.agent("reader", [note(llm, OWN_NOTE), "document"]) as reader:
            scores = reader.score("On which port does billing listen?", "Billing listens on port 8443.")
        return scores.logits, scores.num_cached_tokens + scores.num_fragment_tokens


@pytest.mark.parametrize("mode", ["prefix", "fragment"])
def test_another_agents_private_note_moves_no_bit(smollm2_spec: str, mode: str) -> None:
    with engine(smollm2_spec) as llm:
        alone, _ = reader_logits(llm, None, mode)
        for secret in SECRETS:
            beside, found = reader_logits(llm, secret, mode)
            assert (found > 0) == (mode == "fragment")
            assert np.array_equal(alone, beside)


def test_with_keys_of_content_alone_it_moves_them(smollm2_spec: str) -> None:
    """The measure above can fail: a cache that finds a document by its tokens, whatever stood before it, leaks."""
    with engine(smollm2_spec) as llm:
        alone, _ = reader_logits(llm, None, "prefix")
        with keys_of_content_alone():
            leaked = []
            for secret in SECRETS:
                llm.reset_prefix_cache()
                logits, found = reader_logits(llm, secret, "prefix")
                assert found > 0
                leaked.append(logits)
        moved = [np.abs(logits - alone).max() for logits in leaked]
        assert min(moved) > 0.01
        assert np.abs(leaked[0] - leaked[1]).max() > 0.01
        llm.reset_prefix_cache()
        again, _ = reader_logits(llm, SECRETS[0], "prefix")
        assert np.array_equal(again, alone)
