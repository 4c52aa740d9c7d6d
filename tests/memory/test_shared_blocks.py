"""What others may read can be taken out of one memory and put into another, and nothing private goes with it."""

from inms_jax.memory.plan import Span
from inms_jax.memory.shared_blocks import SharedBlock, as_context, chains
from inms_jax.memory.tier import Tier
from tests.memory.people import EVERY, A, B, C, D, E, G, T
from tests.memory.simulation import Lab

SYSTEM = Span(tuple(range(100, 110)), T, published=True)
TOOLS = Span(tuple(range(110, 113)), T, published=True)
PLAN = Span(tuple(range(200, 206)), G, published=True)


def blocks_of(lab: Lab) -> list[SharedBlock]:
    return lab.memory.shared_blocks()


def filled() -> Lab:
    lab = Lab(num_pages=65, scopes=EVERY)
    for scope, head in ((A, [SYSTEM, PLAN]), (B, [SYSTEM, TOOLS]), (C, [SYSTEM, PLAN]), (D, []), (E, [])):
        own = Span(tuple(range(900, 909)), scope)
        lab.turn(lab.memory.register(scope), [*head, own], scope)
    return lab


def test_global_and_group_blocks_come_out_in_order_and_private_ones_do_not() -> None:
    lab = filled()
    blocks = blocks_of(lab)
    assert len(blocks) == 3 + 2 + 1
    assert all(block.parent is None or block.parent < number for number, block in enumerate(blocks))
    assert {block.scope for block in blocks} == {T, G}
    assert not any(token >= 900 for block in blocks for token in block.tokens)
    texts = {tuple(t for at in chain for t in blocks[at].tokens) for chain in chains(blocks)}
    assert texts == {SYSTEM.tokens + PLAN.tokens, SYSTEM.tokens + TOOLS.tokens}
    owners = {info.page: info.scope for info in lab.memory.pages() if info.tier is not Tier.PRIVATE}
    assert owners == {block.page: block.scope for block in blocks}


def test_a_block_whose_head_was_evicted_is_left_out() -> None:
    lab = filled()
    head = next(block.page for block in blocks_of(lab) if block.parent is None)
    lab.memory._parts[T.tenant].store.index.withdraw(head)
    assert blocks_of(lab) == []


def test_the_same_blocks_are_made_by_a_memory_that_is_given_them_as_a_context() -> None:
    blocks = blocks_of(filled())
    other = Lab(num_pages=65, scopes=EVERY)
    for chain in chains(blocks):
        handle = other.memory.register(A)
        other.turn(handle, as_context([blocks[at] for at in chain]), A)
        other.memory.release(handle)
    again = blocks_of(other)
    assert {(b.scope, b.tokens) for b in again} == {(b.scope, b.tokens) for b in blocks}
    assert other.memory.stats().cached == len(again) == len(blocks)
    handle = other.memory.register(B)
    spans = [SYSTEM, PLAN, Span((1,), B)]
    other.begin(handle, spans)
    other.prompt(handle, spans)
    assert other.memory.usage(handle).hit_tokens == 16
