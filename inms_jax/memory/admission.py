"""What a turn would keep, hit and need, worked out before anything is changed.

Pure reading of a sequence, the pool and the index. Knows nothing of other sequences or how room is made.
"""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np

from inms_jax.errors import InvalidRequestError, VisibilityError
from inms_jax.memory.fragment import Body, chain, check_fragment, same_until, take_apart
from inms_jax.memory.index import Node
from inms_jax.memory.layout import Layout, Piece, common_scope_prefix, displaced, lay_out
from inms_jax.memory.lifecycle import PageState
from inms_jax.memory.plan import Span
from inms_jax.memory.sequence import Sequence
from inms_jax.memory.store import PageStore
from inms_jax.memory.tier import Scope, can_read


@dataclass(frozen=True, slots=True, eq=False)
class TurnPlan:
    """Keep the first `kept_pages` pages with `kept` tokens in them, retain `hits` after them, take `needed` more.

    All of the own text; `body_pages` are those of its `bodies`, None for a body that nobody has computed.
    """

    scope: Scope
    layout: Layout
    tokens: np.ndarray
    context_length: int
    nodes: list[Node | None]
    kept: int
    kept_pages: int
    hits: tuple[int, ...]
    copy: int
    branches: int
    branch_pages: int
    bodies: tuple[Body, ...]
    body_pages: tuple[tuple[int, ...] | None, ...]
    displaced: tuple[tuple[int, int], ...]

    @property
    def own_total(self) -> int:
        """Pages of its own text, if nothing of it is shared with anyone."""
        return len(self.layout.starts) + self.branch_pages

    @property
    def total(self) -> int:
        """Pages that the turn holds at its end if nothing of it is shared with anyone."""
        return self.own_total + len({id(node) for body in self.bodies for node in body.nodes})

    @property
    def needed(self) -> int:
        return self.own_total - self.kept_pages - len(self.hits) + self.copy

    @property
    def retained(self) -> set[int]:
        """Pages that the turn will hold from its start on and that it may not hold yet."""
        return {*self.hits, *(page for pages in self.body_pages if pages is not None for page in pages)}

    @property
    def missing(self) -> tuple[tuple[Span, ...], ...]:
        """Canonical contexts that must be computed first, each once."""
        bodies = zip(self.bodies, self.body_pages, strict=True)
        return tuple(dict.fromkeys(body.canonical for body, pages in bodies if pages is None))

    @property
    def to_take(self) -> Counter[Scope]:
        """The owners of the pages that are needed."""
        owners = Counter(self.layout.scopes[self.kept_pages + len(self.hits) :])
        if self.copy:
            owners[self.layout.scopes[self.layout.block_at(self.kept)]] += self.copy
        owners[self.layout.scopes[-1]] += self.branch_pages
        return owners

    @property
    def written(self) -> int:
        return self.layout.ends[self.kept_pages + len(self.hits) - 1] if self.hits else self.kept


def check_readable(seq: Sequence, context: Items[Span], scope: Scope) -> None:
    """Raise unless the reader may see every span: default deny."""
    for number, span in enumerate(context):
        if not (can_read(scope, span.scope) or span.scope in seq.readable):
            label = f"span {number}" if span.name is None else f"span {number} ({span.name!r})"
            raise VisibilityError(f"{label} of {len(context)} belongs to {span.scope}, which {scope} may not read.")
        if span.root is not None:
            check_fragment(span)


def plan_turn(
    seq: Sequence,
    context: Items[Span],
    *,
    scope: Scope,
    max_new_tokens: int,
    branches: int,
    store: PageStore,
    block_size: int,
) -> TurnPlan:
    """Lay out the context and the room for its answer, and compare it with what the sequence holds."""
    own = take_apart(context, store.index, block_size, caching=store.caching)
    length = len(own.tokens)
    if length == 0:
        raise InvalidRequestError("A turn needs at least 1 token of context, got 0.")
    if own.bodies and own.bodies[-1].at == length:
        raise InvalidRequestError("A context cannot end with a fragment: its last token must be computed in place.")
    try:
        layout = lay_out([*own.pieces, Piece(max_new_tokens, scope, False)], block_size)
    except ValueError as error:
        raise VisibilityError(str(error)) from error
    tokens = np.zeros(length + max_new_tokens, np.int32)
    tokens[:length] = own.tokens
    nodes = chain(layout, tokens, length, store.index, own.bodies) if store.caching else []
    kept, kept_pages = _kept(seq, layout, tokens, length, nodes, own.bodies, store)
    plan = TurnPlan(
        scope=scope,
        layout=layout,
        tokens=tokens,
        context_length=length,
        nodes=nodes,
        kept=kept,
        kept_pages=kept_pages,
        hits=(),
        copy=0,
        branches=branches,
        branch_pages=(branches - 1) * (len(layout.starts) - layout.block_at(length)),
        bodies=own.bodies,
        body_pages=tuple(_body_pages(seq, body, store) for body in own.bodies),
        displaced=displaced(own.pieces, layout),
    )
    return _with_hits(seq, plan, store)


def without_partial_page(seq: Sequence, plan: TurnPlan, store: PageStore) -> TurnPlan:
    """The same turn, computing the tokens of its last kept page again instead of copying them."""
    start = plan.layout.starts[plan.kept_pages - 1]
    return _with_hits(seq, replace(plan, kept=start, kept_pages=plan.kept_pages - 1, hits=(), copy=0), store)


def _body_pages(seq: Sequence, body: Body, store: PageStore) -> tuple[int, ...] | None:
    """The pages of a body: those that the sequence holds, else those that the index knows."""
    for held, pages in zip(seq.bodies, seq.body_pages, strict=False):
        if held.key == body.key:
            return pages
    found = [store.indexed(node) for node in body.nodes]
    return None if None in found else tuple(page for page in found if page is not None)


def _kept(
    seq: Sequence,
    layout: Layout,
    tokens: np.ndarray,
    length: int,
    nodes: list[Node | None],
    bodies: tuple[Body, ...],
    store: PageStore,
) -> tuple[int, int]:
    """Tokens and pages that still stand: written by prefill, under the same tokens, scopes and fragments."""
    limit = min(seq.prefilled, length, common_scope_prefix(seq.layout, layout))
    other_body = same_until(seq.bodies, bodies)
    if other_body is not None:
        limit = min(limit, other_body)
    differs = np.flatnonzero(seq.tokens[:limit] != tokens[:limit])
    common = int(differs[0]) if differs.size else limit
    kept = kept_pages = 0
    for block, page in enumerate(seq.pages):
        if block >= len(layout.starts) or layout.starts[block] != seq.layout.starts[block]:
            break
        start, end = layout.starts[block], layout.ends[block]
        usable = min(common, seq.layout.ends[block])
        if usable <= start or end < usable:
            break
        complete = block < len(nodes) and usable == end
        sealed = store.pool.state(page) is not PageState.FILLING
        if complete and sealed and seq.node(block) is not nodes[block]:
            # The page has the key of another block, of which this one is a part.
            break
        kept, kept_pages = usable, block + 1
        if usable < end:
            break
    return kept, kept_pages


def _with_hits(seq: Sequence, plan: TurnPlan, store: PageStore) -> TurnPlan:
    """Add what the index holds after the kept tokens; a hit takes the place of a partly kept page."""
    first = plan.layout.block_at(plan.kept)
    hits: list[int] = []
    for node in plan.nodes[first:]:
        page = store.indexed(node)
        if page is None:
            break
        hits.append(page)
    if hits:
        return replace(plan, kept_pages=first, hits=tuple(hits), copy=0)
    partial = first < plan.kept_pages
    copy = int(partial and not store.writable(seq.pages[first]))
    return replace(plan, kept_pages=plan.kept_pages, hits=(), copy=copy)
