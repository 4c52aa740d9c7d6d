"""A self-test of the running engine: a team shares, nobody else does. Run by `llm.verify_isolation()`.

The same text is given to two members of a group, to another group, to another tenant, and as private text to three
agents, two of them in one group. Only the second member of the first group may find it. Both halves count: with
sharing off, "nobody else found it" would prove nothing.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from inms_jax.agents import Agent
from inms_jax.config import SamplingParams
from inms_jax.engine.segment import Segment
from inms_jax.errors import IsolationError
from inms_jax.tenants import Tenant

_TEXT = "This record tests that a team shares what was published to it, and that nobody else can find it. " * 2
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """Tokens found in the prefix index by a reader of the same text: the second member of the group, and the others."""

    same_group: int
    other_group: int
    other_tenant: int
    private: int


def verify_isolation(tenant: Callable[[str], Tenant]) -> IsolationReport:
    """Run the test in tenants of its own, which are gone after it. Raises IsolationError with the numbers."""
    with ExitStack() as stack:
        one, two = (stack.enter_context(tenant(f"isolation test {n}")) for n in (1, 2))
        readers: list[Agent] = []
        for owner, name, members in ((one, "team", 2), (one, "others", 1), (two, "team", 1)):
            group = owner.group(name)
            group.publish("record", _TEXT)
            readers += [group.agent(f"reader {n}", ["record"]) for n in range(members)]
        # Without a group, and twice in the same one: private text is not even shared among the members of a team.
        own = [Segment(_TEXT, role="system")]
        readers.append(one.agent("loner", own))
        pair = two.group("private")
        readers += [pair.agent(f"loner {n}", own) for n in range(2)]
        first, *found = [reader.chat("Hello", _ONE_TOKEN).num_cached_tokens for reader in readers]
    same_group, other_group, other_tenant, *private = found
    report = IsolationReport(same_group, other_group, other_tenant, sum(private))
    if first or report.other_group or report.other_tenant or report.private:
        raise IsolationError(
            f"A text was found by who must not see it: {report}, and {first} tokens by its very first reader. Stop "
            "serving tenants that do not trust each other, and report this."
        )
    if not report.same_group:
        raise IsolationError(
            f"Nothing crossed, but nothing was shared either: {report}. Turn enable_prefix_caching on, or the test "
            "proves nothing."
        )
    return report
