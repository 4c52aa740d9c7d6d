"""Hash functions that collide all the time: fewer pages are shared, never a wrong one."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inms_jax.memory import Scope, Span
from inms_jax.memory.fingerprint import CacheIdentity, Fingerprints, HashFunction
from tests.memory.people import EVERY, A, B, C, D, E, G, T
from tests.memory.simulation import Lab
from tests.memory.toy_engine import ToyEngine, expected


def few(values: int) -> HashFunction:
    """A hash function with so many values."""
    return lambda message: bytes([hashlib.blake2b(message, digest_size=1).digest()[0] % values])


HASHES: dict[str, Callable[[bytes], bytes]] = {
    "constant": lambda message: b"same",
    "two": few(2),
    "five": few(5),
    "tokens alone": lambda message: message[-16:],
    "length alone": lambda message: bytes([len(message) % 256]),
}
SYSTEM = Span(tuple(range(10)), T, published=True)
PLAN = Span((50, 51, 52, 53, 54), G, published=True)


@pytest.mark.parametrize("name", HASHES)
def test_an_engine_gives_the_right_answers_whatever_collides(name: str) -> None:
    random = np.random.default_rng(7)
    toy = ToyEngine(40, hash_function=HASHES[name])
    for scope in EVERY:
        toy.memory.open_scope(scope)
    jobs = []
    for _ in range(40):
        scope = [A, B, C, D, E][int(random.integers(5))]
        head = [SYSTEM] * (scope.tenant == T.tenant) + [PLAN] * ((scope.tenant, scope.group) == (T.tenant, G.group))
        own = Span(tuple(random.integers(0, 2, int(random.integers(1, 14))).tolist()), scope)
        jobs.append(toy.submit(scope, [*head, own], int(random.integers(1, 5))))
        for _ in range(int(random.integers(4))):
            toy.step()
            toy.memory.verify()
    toy.run()
    assert all(job.answer == expected(job.context, job.count) for job in jobs)
    assert toy.memory.stats().held == 0


@pytest.mark.parametrize("name", HASHES)
def test_conversations_forks_and_fragments_see_their_own_tokens_whatever_collides(name: str) -> None:
    random = np.random.default_rng(11)
    m = Lab(num_pages=60, scopes=EVERY, hash_function=HASHES[name])
    documents = [tuple(range(start, start + 9)) for start in (200, 300, 400)]
    for _ in range(30):
        scope = [A, B][int(random.integers(2))]
        document = documents[int(random.integers(3))]
        spans = [
            SYSTEM,
            Span(tuple(random.integers(0, 2, int(random.integers(1, 6))).tolist()), scope),
            Span(document, T, published=True, root=[(SYSTEM,), ()][int(random.integers(2))], link=2),
            Span(tuple(random.integers(0, 2, 9).tolist()), scope),
        ]
        handle = m.memory.register(scope)
        m.turn(handle, spans, scope, answer=tuple(random.integers(0, 2, 3).tolist()))
        if random.integers(3):
            m.memory.release(handle)
        else:
            twin = m.memory.fork(handle, scope)
            m.turn(twin, [*spans, Span((1, 2, 3), scope)], scope, answer=(0,))
            m.memory.release(handle)
            m.memory.release(twin)
        if random.integers(4) == 0:
            m.memory.evict_cached()
        m.memory.verify()


def test_a_key_after_a_fragment_is_not_that_after_another_one_with_the_same_digest() -> None:
    """The digest of a fragment is free for another one as soon as nobody has the first; keys made of it are not."""
    digests: dict[bytes, bytes] = {}

    def chosen(message: bytes) -> bytes:
        """The two fragments have one digest, everything else its own."""
        fragment = b"".join(token.to_bytes(4, "little") for token in (201, 202, 203))
        other = b"".join(token.to_bytes(4, "little") for token in (301, 302, 303))
        if message.endswith((fragment, other)):
            return b"same"
        return digests.setdefault(message, hashlib.blake2b(message).digest())

    m = Lab(num_pages=60, scopes=EVERY, hash_function=chosen)
    tail = Span((1, 2, 3, 4, 5, 6, 7, 8), A)
    for first in (200, 300):
        handle = m.memory.register(A)
        document = Span(tuple(range(first, first + 4)), T, published=True, root=(), link=0)
        m.turn(handle, [Span((9, 9, 9), A), document, tail, Span((1,), A)], A)
        m.memory.release(handle)
        for info in m.memory.pages():  # nobody has the fragment any more, but what stands after it is cached
            if info.scope == T:
                m.memory._parts[T.tenant].store.evict(info.page)
        m.memory.verify()


texts = st.text(alphabet="ab#\0:s", max_size=3)
identities = st.builds(
    CacheIdentity,
    model_id=texts,
    weights_version=texts,
    dtype=texts,
    layout=texts,
    rope=texts,
    block_size=st.sampled_from([1, 11, 16]),
)
ids = st.text(alphabet="ab#\0:s", min_size=1, max_size=3)
scopes = st.builds(Scope, ids, st.none() | ids, st.none() | ids)
pieces = st.binary(max_size=4)
keys = st.tuples(identities, scopes, st.none() | pieces, pieces, pieces)
Key = tuple[CacheIdentity, Scope, bytes | None, bytes, bytes]


@settings(max_examples=300)
@given(keys, keys)
def test_different_fields_of_a_key_give_different_messages_to_the_hash_function(
    a: tuple[CacheIdentity, Scope, bytes | None, bytes, bytes],
    b: tuple[CacheIdentity, Scope, bytes | None, bytes, bytes],
) -> None:
    one, other = (
        Fingerprints(identity, lambda message: message).block(scope, parent, tokens, bodies)
        for identity, scope, parent, tokens, bodies in (a, b)
    )
    assert (one == other) == (a == b)


@settings(max_examples=300)
@given(keys, st.integers(0, 12), texts)
def test_a_change_of_one_field_of_a_key_changes_the_message(key: Key, which: int, text: str) -> None:
    """Two independent keys are seldom near each other; these differ in one field, or in none."""
    identity, scope, parent, tokens, bodies = key
    fields: dict[str, Any] = {name: getattr(identity, name) for name in CacheIdentity.__dataclass_fields__}
    names = [*fields, "tenant", "group", "agent", "parent", "tokens", "bodies"]
    name = names[which % len(names)]
    owner: dict[str, Any] = {"tenant": scope.tenant, "group": scope.group, "agent": scope.agent}
    rest: dict[str, bytes | None] = {"parent": parent, "tokens": tokens, "bodies": bodies}
    if name == "block_size":
        fields[name] = len(text) + 1
    elif name in fields:
        fields[name] = text
    elif name in owner:
        owner[name] = text or ("x" if name == "tenant" else None)
    else:
        rest[name] = text.encode()
    changed = (CacheIdentity(**fields), Scope(**owner), rest["parent"], rest["tokens"] or b"", rest["bodies"] or b"")
    one, other = (Fingerprints(i, lambda message: message).block(s, p, t, f) for i, s, p, t, f in (key, changed))
    assert (one == other) == (key == changed)
