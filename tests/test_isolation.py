"""The self-test of isolation passes on this engine, and fails on one whose keys say nothing of whose text it is."""

from typing import Any
from weakref import WeakValueDictionary

import pytest

from inms_jax.errors import IsolationError
from inms_jax.memory.index import Node, PrefixIndex
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope
from tests.tiny import tiny_llm


def test_a_team_shares_and_nobody_else_finds_it() -> None:
    with tiny_llm(block_size=16, num_pages=200) as llm:
        before = llm.stats().memory
        report = llm.verify_isolation()
        assert report.same_group > 16
        assert (report.other_group, report.other_tenant, report.private) == (0, 0, 0)
        after = llm.stats().memory
        assert (after.free, after.held, after.cached) == (before.free, before.held, before.cached)
        assert llm.verify_isolation() == report


@pytest.mark.parametrize("seen", [(), ("tenant",), ("tenant", "group"), ("group", "agent")])
def test_keys_that_ignore_a_part_of_the_scope_fail_it(seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    intern = PrefixIndex.intern
    first: dict[tuple[str | None, ...], Scope] = {}

    def blind(self: PrefixIndex, parent: Any, scope: Scope, *rest: Any) -> Any:
        same = first.setdefault(tuple(getattr(scope, part) for part in seen), scope)
        return intern(self, parent, same, *rest)

    def joint(self: PrefixIndex, *args: Any, **options: Any) -> None:
        """All tenants look into one index; that each has its own, and its own open scopes, keeps them apart too."""
        create(self, *args, **options)
        self._nodes = nodes

    create, nodes = PrefixIndex.__init__, WeakValueDictionary[bytes, Node]()
    monkeypatch.setattr(PrefixIndex, "__init__", joint)
    monkeypatch.setattr(PrefixIndex, "intern", blind)
    monkeypatch.setattr(PageStore, "shares", lambda _, node: node is not None)
    with tiny_llm(block_size=16, num_pages=200) as llm, pytest.raises(IsolationError, match="must not see it"):
        llm.verify_isolation()


def test_an_engine_that_shares_nothing_proves_nothing() -> None:
    with (
        tiny_llm(block_size=16, num_pages=200, enable_prefix_caching=False) as llm,
        pytest.raises(IsolationError, match="nothing was shared either"),
    ):
        llm.verify_isolation()
