"""One engine per file of this folder, and the promise that every test of it ends with."""

from collections.abc import Iterator

import pytest

from inms_jax import LLM, SamplingParams
from tests.tiny import tiny_llm

PROMPT = "The quick brown fox jumps over the lazy dog and then it"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as engine:
        yield engine


@pytest.fixture(autouse=True)
def still_serving(llm: LLM) -> Iterator[None]:
    """Whatever a test did, the engine answers, holds no page and its books balance."""
    yield
    assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 12
    llm.verify()
    assert llm.stats().memory.held == 0
    assert llm.stats().memory.reserved == 0
