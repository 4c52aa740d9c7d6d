"""The error family: every error a caller can act on derives from `InmsError`.

Messages say what was asked, the numbers, and what to do. Knows nothing of the rest of the package.
"""


class InmsError(Exception):
    """Base of every error that inms-jax raises on purpose."""


class ConfigError(InmsError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another one."""


class InvalidRequestError(InmsError, ValueError):
    """A request cannot be served as written: empty prompt, token id out of range, bad sampling value."""


class CapacityError(InmsError):
    """The page pool cannot hold what was asked, now or ever; the message has the page counts."""


class VisibilityError(InmsError, PermissionError):
    """A context names a text that does not exist or that the reader's scope may not see."""


class ClosedError(InmsError):
    """The agent, group, tenant or engine was closed and is used again."""


class StaleHandleError(ClosedError):
    """A handle of an earlier generation was used: its sequence has ended, its pages may be another's."""


class LeakError(InmsError):
    """Agents were ended because nobody used them, in an engine with `strict_leaks`."""


class StateError(InmsError):
    """A page or sequence was asked for a transition that its state machine does not have."""


class IsolationError(InmsError):
    """The self-test of isolation found a text where it must not be, or could prove nothing."""


class SnapshotError(InmsError):
    """A snapshot is missing, damaged, or of an engine that computes otherwise; the message has every difference."""


class WeightsError(InmsError):
    """A weight file is missing, truncated, corrupt or of a kind that is not supported."""


class UnsupportedModelError(WeightsError):
    """The architecture, a config attribute or a quantisation is not one this package implements."""


class TemplateError(InmsError, ValueError):
    """A chat template failed to render, or cannot be split at the boundaries of its messages."""


class AbortedError(InmsError):
    """The request was aborted before it finished; the conversation is as before it."""


class EngineError(ClosedError):
    """The engine thread failed on an internal error and has stopped; the message names it."""
