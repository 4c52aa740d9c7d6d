"""Pages read at another position than they were written at, through the engine's own runner and step loop.

No feature makes such rows yet, so a memory manager that says "written 48 positions further on" stands in: the text is
computed at 0, 1, ... and read at 48, 49, ... with its query at the true place. RoPE is relative, so the answers are the
same; with the wrong sign or no rotation they are not.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from inms_jax import SamplingParams
from inms_jax.cache.page_ops import shift_pages
from inms_jax.memory.manager import MemoryManager
from inms_jax.memory.plan import Row
from inms_jax.models.rope import inverse_frequencies
from tests.tiny import tiny_llm

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
PROMPT = "The same words, read from another place than the one they were written for."
DELTA = 48


@pytest.mark.parametrize("right_sign", [True, False])
def test_shifts_reach_the_device_with_the_right_sign(monkeypatch: pytest.MonkeyPatch, right_sign: bool) -> None:
    real = MemoryManager.row

    with tiny_llm() as llm:
        (expected,) = llm.generate(PROMPT, PARAMS)
        llm.reset_prefix_cache()
        # Write the pages rotated to DELTA positions further on, then read them with that shift.
        (_,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
        pages = [info.page for info in llm.memory_map()]  # the full pages of the prompt, which stay cached
        assert len(pages) == 4

        def rotate() -> None:
            ids = np.zeros(8, np.int32)
            ids[:4] = pages
            by = np.where(ids > 0, DELTA if right_sign else -DELTA, 0).astype(np.int32)
            runner = llm._core.runner
            inv_freq = jnp.asarray(inverse_frequencies(runner.model))
            runner.kv = shift_pages(runner.kv, jnp.asarray(ids), jnp.asarray(ids), jnp.asarray(by), inv_freq)

        llm._core.call(rotate)

        def row(self: MemoryManager, handle: Any) -> Row:
            found = real(self, handle)
            shift = np.where(np.isin(found.page, pages), -DELTA, 0).astype(np.int32)
            return Row(found.page, found.begin, found.end, found.position - shift, shift)

        monkeypatch.setattr(MemoryManager, "row", row)
        (output,) = llm.generate(PROMPT, PARAMS)
        assert output.num_cached_tokens == 64
    same = output.outputs[0].token_ids == expected.outputs[0].token_ids
    close = abs(output.outputs[0].cumulative_logprob - expected.outputs[0].cumulative_logprob) < 1e-3
    assert (same and close) == right_sign


def test_rows_with_and_without_shifts_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour with shifts changes no bit of a row without."""
    with tiny_llm() as llm:
        expected = llm.generate([PROMPT, "another"], PARAMS)
        real = MemoryManager.row

        def row(self: MemoryManager, handle: Any) -> Row:
            found = real(self, handle)
            if len(found) == 1:  # "another": shifts of zero take the shifted program
                return Row(found.page, found.begin, found.end, found.position, np.zeros(1, np.int32) + 0)
            return found

        monkeypatch.setattr(MemoryManager, "row", row)
        outputs = llm.generate([PROMPT, "another"], PARAMS)
    assert outputs[0].outputs == expected[0].outputs
    assert outputs[1].outputs[0].token_ids == expected[1].outputs[0].token_ids
