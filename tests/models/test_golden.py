"""Every family against transformers, whole, in chunks, and with decode."""

import dataclasses

import numpy as np
import pytest

from tests.oracles import GOLDENS, PagedModel, golden

PAGES = (5, 2, 9, 1, 7)  # 80 tokens in blocks of 16


def test_every_family_has_a_golden_file():
    families = ("llama3_rope", "llama_gqa_tied", "llama_mha", "mistral", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied")
    assert tuple(GOLDENS) == families


@pytest.mark.parametrize("name", GOLDENS)
def test_logits_equal_transformers(name):
    g = golden(name)
    whole = PagedModel(g.config, g.params).prefill(g.tokens, PAGES)
    np.testing.assert_allclose(whole, g.logits, atol=1e-5, rtol=0)

    model = PagedModel(g.config, g.params)
    parts = [
        model.prefill(g.tokens[start:stop], PAGES, start, bucket=80)
        for start, stop in ((0, 7), (7, 55), (55, 64), (64, 77))
    ]
    np.testing.assert_allclose(np.concatenate(parts), g.logits[:77], atol=1e-5, rtol=0)

    for position in range(77, 80):  # the last tokens by decode, beside an unrelated row
        logits = model.decode([int(g.tokens[position]), 1], [(PAGES, position), ((11,), 3)])
        np.testing.assert_allclose(logits[0], g.logits[position], atol=1e-4, rtol=0)


def test_reference_attention_gives_the_golden_logits_too():
    g = golden("qwen3")
    whole = PagedModel(g.config, g.params).prefill(g.tokens, PAGES, implementation="reference")
    np.testing.assert_allclose(whole, g.logits, atol=1e-5, rtol=0)


def test_scaled_rope_matters_at_the_tested_positions():
    g = golden("llama3_rope")
    plain = golden("llama_gqa_tied").config.rope
    assert plain.theta == g.config.rope.theta
    unscaled = dataclasses.replace(g.config, rope=plain)
    wrong = PagedModel(unscaled, g.params).prefill(g.tokens, PAGES)
    assert np.abs(wrong - g.logits).max() > 1e-2
