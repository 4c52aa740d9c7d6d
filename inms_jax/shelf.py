"""What a tenant or a group has published, by name, and what its readers may put into their contexts.

Knows nothing of agents or conversations.
"""

from collections.abc import Iterable
from dataclasses import replace

from inms_jax.engine.fragments import Mode
from inms_jax.engine.segment import OnUpdate, Published, Shared, segment_mode, update_rule
from inms_jax.errors import InvalidRequestError, VisibilityError
from inms_jax.memory.tier import Scope


class Shelf:
    """Texts of one scope; `outer` holds what its readers see besides. `home` names it in errors."""

    def __init__(self, home: str, scope: Scope, outer: "Shelf | None") -> None:
        self.home = home
        self.scope = scope
        self.outer = outer
        # All versions of each name, the newest last. The engine thread reads without a lock: nothing changes in place.
        self._texts: dict[str, tuple[Published, ...]] = {}
        self._root: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def publish(
        self,
        name: str,
        text: str,
        *,
        role: str | None = None,
        mode: Mode | str | None = None,
        readers: int | None = None,
        on_update: OnUpdate | str | None = None,
    ) -> None:
        """Put a text up for every reader of the scope. With `on_update`, a name that is there gets a new version.

        What is None is as in the version before, or the default of a first one.
        """
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"a published text needs a non-empty name, got {name!r}")
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"nothing to publish as {name!r}: the text is empty")
        if readers is not None and (isinstance(readers, bool) or not isinstance(readers, int) or readers < 1):
            raise InvalidRequestError(f"the readers expected of {name!r} must be an integer >= 1, got {readers!r}")
        versions = self._texts.get(name, ())
        if versions and on_update is None:
            raise InvalidRequestError(
                f"{name!r} is already published in {self.home} and cannot change: use another name"
            )
        before = versions[-1] if versions else Published(name, text, "system", self.scope, version=0)
        published = replace(
            before,
            text=text,
            role=before.role if role is None else role,
            mode=before.mode if mode is None else segment_mode(mode),
            readers=before.readers if readers is None else readers,
            version=before.version + 1,
            on_update=OnUpdate.APPEND if on_update is None else update_rule(on_update),
        )
        self._texts[name] = (*versions, published)

    def unlisted(self, name: str, text: str, role: str, *, fragment: bool) -> Published:
        """A text for every reader of the scope that no context can ask for by name. `name` is for people."""
        mode = Mode.FRAGMENT if fragment else Mode.PREFIX
        return Published(name, text, role, self.scope, mode, root=self._root_texts())

    def newer(self, name: str, version: int) -> tuple[Published, ...]:
        """The versions of a text after `version`, the newest last. Any thread."""
        found = self._texts.get(name)
        if found is not None:
            return found[version:]
        return () if self.outer is None else self.outer.newer(name, version)

    def everything(self) -> tuple[Published, ...]:
        """Every version of every text of this scope, a newer one after those before it."""
        return tuple(published for versions in self._texts.values() for published in versions)

    @property
    def root(self) -> tuple[str, ...]:
        """The names of the declared root."""
        return self._root

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
        root = self._root_texts()
        return {**outer, **{name: replace(versions[-1], root=root) for name, versions in self._texts.items()}}

    def _root_texts(self) -> tuple[Published, ...]:
        return tuple(replace(self._find(name), root=()) for name in self._root)

    def resolve(self, part: str | Shared, reader: str) -> Published:
        """The text that `part` names, in the mode it is asked for; VisibilityError unless the reader may see it."""
        if not isinstance(part, str | Shared):
            raise InvalidRequestError(f"a context holds published names, Shared and Segments, got {part!r}")
        name = part.name if isinstance(part, Shared) else part
        seen = self.visible()
        if name not in seen:
            raise VisibilityError(
                f"{name!r} is not published where agent {reader!r} can read it; it can read {sorted(seen)}. "
                f"Private text is given as Segment(text)."
            )
        if isinstance(part, Shared):
            mode = segment_mode(part.mode)
            return replace(seen[name], mode=mode, link_tokens=part.link_tokens, repair_blocks=part.repair_blocks)
        return seen[name]

    def _find(self, name: str) -> Published:
        versions = self._texts.get(name)
        if versions is not None:
            return versions[-1]
        assert self.outer is not None, "a root names visible texts"
        return self.outer._find(name)
