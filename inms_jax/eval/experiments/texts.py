"""Texts of a given length, for experiments that measure memory and time and not what is said."""

from inms_jax.text.tokenizer import Tokenizer


def text_of(tokenizer: Tokenizer, tokens: int) -> str:
    """A text of about so many tokens with what a chat template puts around it."""
    each = len(tokenizer.encode(" port" * 64)) / 64
    return "port" + " port" * max(1, int((tokens - 8) / each) - 1)
