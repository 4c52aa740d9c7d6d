"""Who holds a scope, and who pays for its pages: the oldest holder that is still there.

An *account* is the scope by which a group or an agent is known; a fork makes it hold further scopes, its lineages.
Knows nothing of pages.
"""

from collections import Counter

from inms_jax.errors import StateError
from inms_jax.memory.tier import Scope


class Lineages:
    """Scopes with their holders, in the order in which these came."""

    def __init__(self) -> None:
        self._holders: dict[Scope, Counter[Scope]] = {}

    def hold(self, scope: Scope, account: Scope) -> None:
        """`account` holds `scope`, once more if it did already."""
        self._holders.setdefault(scope, Counter())[account] += 1

    def drop(self, scope: Scope, account: Scope) -> None:
        """Undo one `hold`."""
        holders = self._holders.get(scope, Counter())
        if not holders[account]:
            raise StateError(f"{account} does not hold {scope}: it is held by {len(holders)} others.")
        holders[account] -= 1
        if not holders[account]:
            del holders[account]
        if not holders:
            del self._holders[scope]

    def payer(self, scope: Scope) -> Scope | None:
        """The account that pays for `scope`."""
        return next(iter(self._holders.get(scope, ())), None)

    def held(self, scope: Scope) -> bool:
        return scope in self._holders

    def holds_any(self, account: Scope) -> bool:
        """Whether the account still holds something."""
        return any(account in holders for holders in self._holders.values())

    def forget(self, scope: Scope) -> None:
        """Drop every holder of a scope that is closed."""
        self._holders.pop(scope, None)
