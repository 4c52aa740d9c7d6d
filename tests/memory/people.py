"""Scopes that the tests of this folder share."""

from inms_jax.memory.tier import Scope

T, T2 = Scope("acme#1"), Scope("other#1")
G, G2 = Scope("acme#1", "team#1"), Scope("acme#1", "rest#1")
A, B, C = (Scope("acme#1", "team#1", name) for name in ("a#1", "b#1", "c#1"))
D = Scope("acme#1", "rest#1", "d#1")
E = Scope("other#1", "team#1", "a#1")
EVERY = [T, T2, G, G2, A, B, C, D, E]
