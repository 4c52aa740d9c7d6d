"""Fingerprints: keyed, length-framed digests of a block, its scope and everything before it.

Knows what must be in a key, and how to write it down so that different fields never give the same bytes.
Knows nothing of pages, and does not decide what may be shared.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field

from inms_jax.memory.tier import Scope

FORMAT_VERSION = 1
_FRAME = struct.Struct("<cQ")

Field = str | int | bytes | None
HashFunction = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """Everything besides tokens and scopes that changes the bytes of a KV page."""

    model_id: str
    weights_version: str
    dtype: str
    layout: str
    rope: str
    block_size: int


def encode(fields: Iterable[Field]) -> bytes:
    """A typed, length-framed encoding: two different tuples of fields give different bytes."""
    parts: list[bytes] = []
    for value in fields:
        if value is None:
            tag, payload = b"n", b""
        elif isinstance(value, str):
            tag, payload = b"s", value.encode("utf-8", "surrogatepass")
        elif isinstance(value, int):
            tag, payload = b"i", str(value).encode()
        else:
            tag, payload = b"b", value
        parts.append(_FRAME.pack(tag, len(payload)))
        parts.append(payload)
    return b"".join(parts)


def keyed_blake2b(key: bytes) -> HashFunction:
    """BLAKE2b under a secret key: who does not have it cannot look for collisions."""
    return lambda message: hashlib.blake2b(message, digest_size=32, key=key).digest()


@dataclass(slots=True)
class Fingerprints:
    """Digests of blocks under one cache identity."""

    identity: CacheIdentity
    hash_function: HashFunction
    _heads: dict[Scope, bytes] = field(default_factory=dict)

    def block(self, scope: Scope, parent: bytes | None, tokens: bytes, bodies: bytes = b"") -> bytes:
        """Digest of a block: `parent` is the digest of the block before, `tokens` int32 bytes.

        `bodies`: which fragments stand before tokens of the block, and before which.
        """
        head = self._heads.get(scope)
        if head is None:
            head = self._heads[scope] = encode(
                [
                    FORMAT_VERSION,
                    *astuple(self.identity),
                    scope.tenant,
                    int(scope.tier),
                    scope.group,
                    scope.agent,
                    "prefix",
                ]
            )
        return self.hash_function(head + encode((parent, tokens, bodies) if bodies else (parent, tokens)))

    def forget(self, scope: Scope) -> None:
        """Drop what is cached for a scope that was closed."""
        self._heads.pop(scope, None)
