"""Whether a block may be shared, and the reasons given for a miss. Knows nothing of pages."""

import enum


class MissReason(enum.StrEnum):
    """Why tokens of a context had to be computed.

    NO_PREFIX: nobody has computed these tokens behind these. SCOPE: somebody has, whose text the reader may not see.
    EVICTED: they were there. SUB_BLOCK: less than a block, or only a part of one that is there. POSITION: published,
    but behind text of a narrower tier, which it depends on there, so that it is nobody's but the reader's.
    """

    NO_PREFIX = "no_prefix"
    SCOPE = "scope"
    EVICTED = "evicted"
    SUB_BLOCK = "sub_block"
    POSITION = "position"
    DISABLED = "disabled"

    def for_reader(self) -> "MissReason":
        """What the reader is told: that others have the same text is the operator's to know."""
        return MissReason.NO_PREFIX if self is MissReason.SCOPE else self


class Sharing(enum.Enum):
    """What is done with a block's page."""

    SHARE = "share"
    CACHING_OFF = "prefix caching is off"
    SCOPE_CLOSED = "the scope of the block is not open"
    NOT_COMPLETE = "the block is not complete, or its key collides"


def decide(*, caching: bool, scope_open: bool, has_key: bool) -> Sharing:
    """Default deny: a block is shared only when it has a key under a scope that is open."""
    if not caching:
        return Sharing.CACHING_OFF
    if not has_key:
        return Sharing.NOT_COMPLETE
    return Sharing.SHARE if scope_open else Sharing.SCOPE_CLOSED
