"""Who may read what."""

import pytest

from inms_jax.errors import ConfigError
from inms_jax.memory.tier import Scope, Tier, can_read, join

TENANT, OTHER = Scope("t"), Scope("u")
GROUP, GROUP2 = Scope("t", "g"), Scope("t", "h")
AGENT, AGENT2, LONER = Scope("t", "g", "a"), Scope("t", "g", "b"), Scope("t", None, "a")


def test_tier_follows_from_the_narrowest_id():
    assert [s.tier for s in (TENANT, GROUP, AGENT, LONER)] == [Tier.GLOBAL, Tier.GROUP, Tier.PRIVATE, Tier.PRIVATE]


@pytest.mark.parametrize("owner", [TENANT, GROUP, AGENT])
def test_agent_reads_its_tenant_its_group_and_itself(owner):
    assert can_read(AGENT, owner)


@pytest.mark.parametrize("owner", [OTHER, GROUP2, AGENT2, LONER])
def test_agent_reads_nothing_else(owner):
    assert not can_read(AGENT, owner)


def test_join_is_the_narrower_scope_in_either_order():
    assert join(TENANT, GROUP) == join(GROUP, TENANT) == GROUP
    assert join(GROUP, AGENT) == AGENT


@pytest.mark.parametrize(("a", "b"), [(GROUP, GROUP2), (AGENT, AGENT2), (TENANT, OTHER), (LONER, GROUP)])
def test_scopes_without_a_common_reader_do_not_join(a, b):
    with pytest.raises(ValueError, match="No reader may see both"):
        join(a, b)


def test_empty_ids_are_refused():
    with pytest.raises(ConfigError, match="no empty ids"):
        Scope("t", "")
