"""Text to tokens and back: tokenizers and chat templates, split at the boundaries of messages."""
