"""What a tenant or a group has published, by name, and what its readers may put into their contexts.

Knows nothing of agents or conversations.
"""

from collections.abc import Iterable
from dataclasses import replace

from inms_jax.engine.fragments import Mode
from inms_jax.engine.segment import Published, Shared, segment_mode
from inms_jax.errors import InvalidRequestError, VisibilityError
from inms_jax.memory.tier import Scope


class Shelf:
    """Texts of one scope; `outer` holds what its readers see besides. `home` names it in errors."""

    def __init__(self, home: str, scope: Scope, outer: "Shelf | None") -> None:
        self.home = home
        self.scope = scope
        self.outer = outer
        self._texts: dict[str, Published] = {}
        self._root: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def publish(self, name: str, text: str, role: str, mode: Mode | str, readers: int) -> Published:
        """Put a text up for every reader of the scope."""
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"a published text needs a non-empty name, got {name!r}")
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"nothing to publish as {name!r}: the text is empty")
        if isinstance(readers, bool) or not isinstance(readers, int) or readers < 1:
            raise InvalidRequestError(f"the readers expected of {name!r} must be an integer >= 1, got {readers!r}")
        if name in self._texts:
            raise InvalidRequestError(
                f"{name!r} is already published in {self.home} and cannot change: use another name"
            )
        published = Published(name, text, role, self.scope, segment_mode(mode), readers)
        self._texts[name] = published
        return published

    def declare_root(self, names: Iterable[str]) -> None:
        """What fragments of this scope stand after where a context has no head that their readers may see."""
        if isinstance(names, str):
            raise InvalidRequestError(f"a root is a list of published names, got the text {names!r}")
        names = tuple(names)
        seen = self.visible()
        if unknown := [name for name in names if name not in seen]:
            raise VisibilityError(f"{unknown} are not published where {self.home} can read them, only {sorted(seen)}")
        self._root = names

    def visible(self) -> dict[str, Published]:
        """Every text that a reader of the scope can read, by name."""
        outer = {} if self.outer is None else self.outer.visible()
        root = tuple(replace(self._find(name), root=()) for name in self._root)
        return {**outer, **{name: replace(text, root=root) for name, text in self._texts.items()}}

    def resolve(self, part: str | Shared, reader: str) -> Published:
        """The text that `part` names, in the mode it is asked for; VisibilityError unless the reader may see it."""
        if not isinstance(part, str | Shared):
            raise InvalidRequestError(f"a context holds published names, Shared and Segments, got {part!r}")
        name, mode = (part.name, segment_mode(part.mode)) if isinstance(part, Shared) else (part, None)
        seen = self.visible()
        if name not in seen:
            raise VisibilityError(
                f"{name!r} is not published where agent {reader!r} can read it; it can read {sorted(seen)}. "
                f"Private text is given as Segment(text)."
            )
        return seen[name] if mode is None else replace(seen[name], mode=mode)

    def _find(self, name: str) -> Published:
        found = self._texts.get(name)
        if found is None:
            assert self.outer is not None, "a root names visible texts"
            found = self.outer._find(name)
        return found
