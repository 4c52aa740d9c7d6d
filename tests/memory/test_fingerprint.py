"""Keys: different fields give different bytes, and everything that changes KV is in them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inms_jax.memory.fingerprint import CacheIdentity, Fingerprints, encode, keyed_blake2b
from inms_jax.memory.tier import Scope
from tests.memory.simulation import identity

fields = st.lists(st.none() | st.text(max_size=3) | st.integers(-300, 300) | st.binary(max_size=3), max_size=5)
TOKENS = bytes(16)


def digest(scope: Scope, parent: bytes | None = None, tokens: bytes = TOKENS, of: CacheIdentity | None = None) -> bytes:
    return Fingerprints(of or identity(4), keyed_blake2b(b"key")).block(scope, parent, tokens)


@given(fields, fields)
def test_encoding_is_injective_over_field_tuples(a, b):
    same = len(a) == len(b) and all(type(x) is type(y) and x == y for x, y in zip(a, b, strict=True))
    assert (encode(a) == encode(b)) == same


def test_none_and_empty_and_shifted_strings_differ():
    values = [encode(f) for f in ([None], [""], [b""], [], ["ab", "c"], ["a", "bc"], ["abc"], [1], ["1"])]
    assert len(set(values)) == len(values)


def test_one_string_in_different_key_fields_gives_different_keys():
    scopes = [Scope("x"), Scope("x", "x"), Scope("x", None, "x"), Scope("x", "x", "x")]
    assert len({digest(scope) for scope in scopes}) == 4


@pytest.mark.parametrize("name", ["model_id", "weights_version", "dtype", "layout", "rope"])
def test_everything_that_changes_kv_is_in_the_key(name):
    assert digest(Scope("t")) != digest(Scope("t"), of=identity(4, **{name: "other"}))


def test_block_size_parent_tokens_and_secret_are_in_the_key():
    scope = Scope("t")
    wide = Fingerprints(identity(8), keyed_blake2b(b"key")).block(scope, None, TOKENS)
    other_secret = Fingerprints(identity(4), keyed_blake2b(b"KEY")).block(scope, None, TOKENS)
    keys = [digest(scope), digest(scope, b"p"), digest(scope, None, b"1" * 16), wide, other_secret]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
