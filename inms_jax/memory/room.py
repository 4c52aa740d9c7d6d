"""Whether a turn can have the pages that it needs, and which idle sequences would have to give up theirs for that.

The one edge rule: a pool that is short drops idle sequences of its own tenant, the longest idle first; where the memory
as a whole is short, then those of tenants that have borrowed pages; cached pages count as room all the time. What is
within another pool's reserve is never touched. Changes
nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inms_jax.errors import CapacityError
from inms_jax.memory.admission import TurnPlan
from inms_jax.memory.partition import Partition
from inms_jax.memory.quota import Book, Forecast, Ledger, Quota
from inms_jax.memory.reservation import Leaving, charged, needs
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.stats import Shortage


@dataclass(frozen=True, slots=True)
class Room:
    """Pages that the turn could have and, unless something is `short`, who must be dropped for it and what its tenant
    claims then."""

    available: int
    claim: int
    dropped: tuple[tuple[Partition, Sequence], ...]
    short: Shortage | None
    reason: str | None


def make_room(part: Partition, seq: Sequence, plan: TurnPlan) -> Room:
    """Look for room for the turn."""
    forecast, leaving = Forecast(part.ledger), Leaving(plan.retained)
    for book, pages in needs(part.store, plan).items():
        forecast.add(book, pages)
    own = seq.held[plan.kept_pages :]
    for book, pages in leaving.books(part.store, own).items():
        forecast.add(book, -pages)
    leaving.let_go(part.store, own)
    dropped: list[tuple[Partition, Sequence]] = []
    for owner, other in _idle(part, seq, forecast):
        over, missing = forecast.over(), forecast.missing
        if not (over or missing):
            break
        freed = leaving.books(owner.store, other.held)
        if any(book in over or (missing and forecast.lends(book)) for book in freed):
            for book, pages in freed.items():
                forecast.add(book, -pages)
            leaving.let_go(owner.store, other.held)
            dropped.append((owner, other))
    over, claim = forecast.over(), forecast.claim(part.store.pools.values())
    if over:
        worst = max(over, key=lambda book: over[book])
        available = plan.needed - over[worst]
        limit = f"{worst.quota.limit} of {worst.name}"
        reason = f"{plan.needed} pages are needed, {available} of the {limit} can be had now"
        return Room(available, claim, (), Shortage.POOL if worst.is_pool else Shortage.ACCOUNT, reason)
    available = plan.needed - forecast.missing
    if forecast.missing:
        reason = f"{plan.needed} pages are needed, {available} of {part.ledger.total} can be had now"
        return Room(available, claim, (), Shortage.MEMORY, reason)
    return Room(available, claim, tuple(dropped), None, None)


def require_possible(part: Partition, seq: Sequence, plan: TurnPlan) -> None:
    """CapacityError when the turn could not be had even if nobody else had a page."""
    what = f"{plan.context_length} tokens of context, {len(plan.tokens) - plan.context_length} new ones"
    owners = Counter(plan.layout.scopes)
    owners[plan.layout.scopes[-1]] += plan.branch_pages
    owners.update(node.scope for node in {id(node): node for body in plan.bodies for node in body.nodes}.values())
    wanted = charged(part.store, owners)
    for book, pages in wanted.items():
        # Charges that were passed on may exceed a limit; then the turn may not add a page.
        if book.quota.limit is not None and pages > book.quota.limit and needs(part.store, plan)[book]:
            part.totals.quota_refusals += 1
            raise CapacityError(
                f"{seq.name} needs {pages} pages of {book.name} for {what} and {plan.branches} branches: its limit is "
                f"{book.quota.limit} pages of {part.block_size} tokens. Shorten the context, lower max_tokens or raise "
                "the limit."
            )
    pools = part.store.pools.values()
    own = sum(max(wanted[book], book.quota.reserve) - book.quota.reserve for book in pools)
    excess = own + part.ledger.reserves - part.ledger.total
    if excess > 0:
        raise CapacityError(
            f"{seq.name} needs {plan.total} pages of {part.block_size} tokens for {what} and {plan.branches} branches: "
            f"the pool has {plan.total - excess}. Shorten the context, lower max_tokens or enlarge the pool."
        )


def room_for_reserves(
    tenant: str, quotas: Iterable[Quota], ledger: Ledger, parts: Iterable[Partition]
) -> list[tuple[Partition, Sequence]]:
    """The idle sequences to drop so that a new tenant has what it reserves; CapacityError when that cannot be."""
    wanted = sum(quota.reserve for quota in quotas)
    if ledger.reserves + wanted > ledger.total:
        raise CapacityError(
            f"Tenant {tenant!r} cannot reserve {wanted} pages: {ledger.reserves} of {ledger.total} are reserved by "
            "others. Lower its reserves or enlarge the pool."
        )
    forecast, leaving = Forecast(ledger), Leaving(())
    forecast.add(Book(tenant, Quota(), is_pool=True), wanted)
    dropped: list[tuple[Partition, Sequence]] = []
    for owner, seq in _by_age(parts):
        if not forecast.missing:
            break
        freed = leaving.books(owner.store, seq.held)
        if any(forecast.lends(book) for book in freed):
            for book, pages in freed.items():
                forecast.add(book, -pages)
            leaving.let_go(owner.store, seq.held)
            dropped.append((owner, seq))
    if forecast.missing:
        raise CapacityError(
            f"Tenant {tenant!r} cannot reserve {wanted} pages now: running turns and pinned or paused sequences of "
            f"others hold {forecast.missing} of them. Try again when those have ended."
        )
    return dropped


def _idle(part: Partition, seq: Sequence, forecast: Forecast) -> Iterator[tuple[Partition, Sequence]]:
    """Sequences that can be dropped: those of the tenant, then those of all others, each the longest idle first."""
    yield from (pair for pair in _by_age([part]) if pair[1] is not seq)
    if forecast.missing and not forecast.over():
        part.commons.require_all()
        yield from _by_age(peer for peer in part.peers.values() if peer is not part)


def _by_age(parts: Iterable[Partition]) -> list[tuple[Partition, Sequence]]:
    found = [(part, seq) for part in parts for seq in part.sequences if seq.droppable]
    return sorted(found, key=lambda pair: pair[1].last_used)
