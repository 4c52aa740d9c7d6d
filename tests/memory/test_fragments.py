"""Fragments without a model: whose pages, at which shift, and that a reader sees what it should and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inms_jax.errors import InvalidRequestError, VisibilityError
from inms_jax.memory.fragment import own_length
from inms_jax.memory.plan import Span
from inms_jax.memory.prediction import Context, Piece, predict_pages
from inms_jax.memory.tier import Scope
from tests.memory.people import EVERY, A, B, G, T
from tests.memory.simulation import Lab, chain


def lab(**options) -> Lab:
    return Lab(scopes=EVERY, **{"num_pages": 65, **options})


def text(start: int, length: int) -> tuple[int, ...]:
    return tuple(range(start, start + length))


SYSTEM = Span(text(100, 6), T, published=True, name="system")
DOCUMENT = text(200, 10)


def fragment(tokens=DOCUMENT, scope: Scope = T, root=(SYSTEM,), link: int = 3, repaired=()) -> Span:
    return Span(tokens, scope, published=True, name="document", root=tuple(root), link=link, repaired=tuple(repaired))


def notes(scope: Scope, length: int, start: int = 500) -> Span:
    return Span(text(start, length), scope)


def body_entries(m: Lab, handle) -> list[tuple[int, int, int, int]]:
    row = m.memory.row(handle)
    shift = np.zeros(len(row), np.int32) if row.shift is None else row.shift
    return [(int(p), int(b), int(e), int(s)) for p, b, e, s in zip(row.page, row.begin, row.end, shift, strict=True)]


def test_readers_with_different_private_text_hold_the_same_pages_at_different_shifts():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(B)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)], A)
    held = m.memory.stats().held
    m.turn(b, [SYSTEM, notes(B, 12, 700), fragment(), notes(B, 2, 800)], B)
    one = [entry for entry in body_entries(m, a) if entry[3]]
    other = [entry for entry in body_entries(m, b) if entry[3]]
    assert [entry[:3] for entry in one] == [entry[:3] for entry in other]
    assert ({entry[3] for entry in one}, {entry[3] for entry in other}) == ({5}, {12})
    # Slots of the document's first page before the end of the link are not read from it.
    assert [entry[1:3] for entry in one] == [(3, 4), (0, 4), (0, 2)]
    # b added its own text only: notes, 3 link tokens and the tail, 17 tokens in pages of 4.
    assert m.memory.stats().held == held + 5
    assert m.memory.usage(b).fragment_tokens == 7


def test_own_text_around_a_fragment_fills_one_page_which_stands_in_the_row_twice():
    m = lab(block_size=16)
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)], A)
    entries = body_entries(m, a)
    assert [entry[1:] for entry in entries] == [(0, 6, 0), (0, 8, 0), (3, 10, 5), (8, 10, 0)]
    assert entries[1][0] == entries[3][0]


@pytest.mark.parametrize("link", [0, 1, 4, 9])
@pytest.mark.parametrize("block_size", [2, 4, 7, 16])
def test_a_reader_sees_the_canonical_body_for_every_link_and_block_size(link, block_size):
    m = lab(block_size=block_size)
    a = m.memory.register(A)
    spans = [SYSTEM, notes(A, 5), fragment(link=link), notes(A, 3, 600), fragment(text(300, 11), link=link)]
    spans = m.turn(a, [*spans, notes(A, 1, 650)], A, answer=(1, 2, 3), budget=5)
    m.check(a, spans)
    assert len(chain(spans)) == sum(len(span.tokens) for span in spans)
    # The next turn keeps what prefill wrote, and finds the same bodies again.
    m.turn(a, [*spans, notes(A, 4, 900)], A, answer=(4,))
    assert m.memory.usage(a).kept_tokens > 0


def test_a_fragment_directly_after_its_root_is_the_same_computation_as_a_prefix():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(B)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)], A)
    m.turn(b, [SYSTEM, fragment().in_place, notes(B, 2, 800)], B)
    assert m.memory.usage(b).hit_tokens == 16
    pages = [entry[0] for entry in body_entries(m, a) if entry[3]]
    assert [entry[0] for entry in body_entries(m, b)][2:5] == pages


def test_another_root_is_another_page():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(B)
    other = Span(text(100, 5), T, published=True)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)], A)
    m.turn(b, [other, notes(B, 5), fragment(root=[other]), notes(B, 2, 600)], B)
    assert not {e[0] for e in body_entries(m, a) if e[3]} & {e[0] for e in body_entries(m, b) if e[3]}


def test_text_after_a_fragment_is_found_again_only_after_the_same_fragment():
    m = lab()
    a = m.memory.register(A)
    tail = notes(A, 8, 600)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(), tail, notes(A, 1, 1)], A)
    m.memory.drop(a)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(), tail, notes(A, 1, 1)], A)
    assert m.memory.usage(a).hit_tokens == 6 + 16
    m.memory.drop(a)
    m.turn(a, [SYSTEM, notes(A, 5), fragment((*text(200, 9), 7)), tail, notes(A, 1, 1)], A)
    assert m.memory.usage(a).hit_tokens == 6 + 8  # 5 notes and 3 link tokens: what stands before the other body
    m.memory.drop(a)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(link=2), tail, notes(A, 1, 1)], A)
    assert m.memory.usage(a).hit_tokens == 6 + 4


def test_a_turn_that_changes_a_fragment_keeps_what_stands_before_it():
    m = lab()
    a = m.memory.register(A)
    spans = [SYSTEM, notes(A, 7), fragment(), notes(A, 6, 600)]
    m.turn(a, spans, A)
    old = {entry[0] for entry in body_entries(m, a) if entry[3]}
    m.turn(a, [SYSTEM, notes(A, 7), fragment(text(300, 10)), notes(A, 6, 600)], A)
    assert m.memory.usage(a).kept_tokens == 6 + 7
    new = {entry[0] for entry in body_entries(m, a) if entry[3]}
    assert not old & new
    assert {info.references for info in m.memory.pages() if info.page in old} == {0}


def test_group_text_narrows_what_follows_even_without_link_tokens():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, fragment(scope=G, link=0), Span(text(1, 4), T, published=True), notes(A, 2)], A)
    tiers = {info.scope for info in m.memory.pages() if info.references}
    assert tiers == {T, G, A}
    group_pages = [info for info in m.memory.pages() if info.scope == G and info.references]
    assert sum(info.tokens_used for info in group_pages) == 10 + 4


@pytest.mark.parametrize(
    ("span", "error"),
    [
        (Span(DOCUMENT, A, published=True, root=(SYSTEM,), link=1), VisibilityError),
        (Span(DOCUMENT, T, root=(SYSTEM,), link=1), VisibilityError),
        (fragment(root=[Span(text(1, 4), A)]), VisibilityError),
        (fragment(root=[Span(text(1, 4), G, published=True)]), VisibilityError),
        (fragment(root=[fragment()]), VisibilityError),
        (fragment(link=10), InvalidRequestError),
        (fragment(link=-1), InvalidRequestError),
        (fragment(repaired=[(2, 5)]), InvalidRequestError),
        (fragment(repaired=[(4, 6), (5, 8)]), InvalidRequestError),
        (fragment(repaired=[(5, 5)]), InvalidRequestError),
        (fragment(repaired=[(5, 11)]), InvalidRequestError),
        (fragment(repaired=[(3, 10)]), InvalidRequestError),
    ],
    ids=[
        *("private", "unpublished", "private root", "group root", "root of fragments", "all link", "negative link"),
        *("repaired in the link", "repaired twice", "empty repair", "repair behind the end", "all repaired"),
    ],
)
def test_a_fragment_never_stands_on_text_that_a_reader_of_it_may_not_see(span, error):
    m = lab()
    a = m.memory.register(A)
    with pytest.raises(error):
        m.memory.begin_turn(a, [SYSTEM, notes(A, 2), span, notes(A, 2)], max_new_tokens=1)
    m.memory.verify()
    assert m.memory.stats().held == 0


def test_a_context_that_ends_with_a_fragment_is_refused():
    m = lab()
    a = m.memory.register(A)
    with pytest.raises(InvalidRequestError, match="cannot end with a fragment"):
        m.memory.begin_turn(a, [SYSTEM, notes(A, 2), fragment()], max_new_tokens=1)


def test_missing_fragments_are_told_once_each_and_nothing_changes():
    m = lab()
    a = m.memory.register(A)
    spans = [SYSTEM, notes(A, 2), fragment(), notes(A, 2), fragment(), fragment(text(300, 5)), notes(A, 1)]
    admission = m.memory.begin_turn(a, spans, max_new_tokens=1)
    assert not admission.admitted
    assert [context[-1].tokens for context in admission.missing] == [DOCUMENT, text(300, 5)]
    assert m.memory.stats().held == 0
    m.turn(a, spans, A)
    m.memory.release(a)
    m.memory.verify()
    assert m.memory.stats().held == 0


def test_without_keys_a_fragment_is_computed_in_place():
    for options in ({"caching": False}, {"hash_function": lambda message: b"same"}):
        m = lab(**options)
        a = m.memory.register(A)
        spans = [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)]
        assert m.memory.begin_turn(a, spans, max_new_tokens=1).admitted
        m.prompt(a, [span.in_place for span in spans])
        assert m.memory.usage(a).fragment_tokens == 0


def test_repaired_ranges_are_own_text_between_bodies_of_one_fragment():
    m = lab()
    a, b = m.memory.register(A), m.memory.register(B)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(link=1, repaired=[(4, 8)]), notes(A, 2, 600)], A)
    held = m.memory.stats().held
    m.turn(b, [SYSTEM, notes(B, 5), fragment(link=1, repaired=[(4, 8)]), notes(B, 2, 600)], B)
    assert [entry[1:3] for entry in body_entries(m, a) if entry[3]] == [(1, 4), (0, 2)]
    assert m.memory.usage(a).fragment_tokens == 5
    assert m.memory.stats().held == held + 3  # 12 own tokens: notes, link, repaired block, notes
    m.memory.release(b)
    # Another choice is another text before what follows: nothing behind the link is found again.
    m.memory.drop(a)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(link=1, repaired=[(8, 10)]), notes(A, 2, 600)], A)
    assert m.memory.usage(a).hit_tokens == 6 + 4
    m.memory.verify()


def test_forks_and_branches_hold_the_bodies_and_give_them_back():
    m = lab()
    a = m.memory.register(A)
    spans = m.turn(a, [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)], A, answer=(1, 2))
    twin = m.memory.fork(a, B)
    m.memory.verify()
    m.check(twin, spans)
    m.memory.release(a)
    m.check(twin, spans)
    m.memory.release(twin)
    m.memory.verify()
    assert m.memory.stats().held == 0


@pytest.mark.parametrize("step", range(6))
def test_an_abort_at_any_point_leaves_the_bodies_of_the_history(step):
    m = lab()
    a = m.memory.register(A)
    history = m.turn(a, [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)], A, answer=(1, 2))
    length = sum(len(span.tokens) for span in history)
    spans = [*history, notes(A, 3, 900), fragment(text(300, 9)), notes(A, 6, 950)]
    m.begin(a, spans)
    for _ in range(step):
        chunk = m.memory.prefill(a, 3)
        m.apply_prefill(a, chunk, spans)
        m.memory.commit_prefill(a, chunk)
        if chunk.is_last:
            break
    m.memory.end_turn(a, keep=False, history_len=length)
    m.memory.verify()
    m.check(a, history)
    m.turn(a, history, A)
    m.check(a, history)


def test_own_length_counts_tokens_outside_of_bodies():
    m = lab()
    a = m.memory.register(A)
    m.turn(a, [SYSTEM, notes(A, 5), fragment(), notes(A, 2, 600)], A)
    bodies = m.memory._registry.get(a).bodies
    assert [own_length(bodies, n) for n in (0, 11, 14, 15, 21, 22, 23)] == [0, 11, 14, 14, 14, 15, 16]


def piece(span: Span) -> Piece:
    """A span as the prediction takes it."""
    root = None if span.root is None else tuple(piece(part) for part in span.root)
    tokens, scope = span.tokens, span.scope
    return Piece(tokens, len(tokens), int(scope.tier), scope, span.published, root, span.link, span.repaired)


PIECES = st.lists(
    st.tuples(
        st.sampled_from(["private", "global", "group", "fragment", "group fragment"]),
        st.integers(1, 14),
        st.lists(st.integers(0, 13), max_size=4, unique=True),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(PIECES, PIECES, st.integers(0, 4), st.sampled_from([2, 4, 8]))
def test_no_page_depends_on_text_that_one_of_its_readers_may_not_see(one, other, link, block_size):
    """Two agents of one team with any contexts: each sees its own chain, computed under scopes it may read,
    and the pages are as many as predicted."""
    m = Lab(scopes=EVERY, num_pages=129, block_size=block_size)
    handles = []
    for scope, pieces in ((A, one), (B, other)):
        spans = [SYSTEM]
        for number, (kind, length, places) in enumerate(pieces):
            start = 1000 * number + 17 * length
            if kind == "private":
                spans.append(notes(scope, length, start))
            elif "fragment" in kind and length > link:
                owner = G if "group" in kind else T
                inside = sorted(place for place in places if link <= place < length)
                repaired = tuple(zip(inside[::2], inside[1::2], strict=False))
                whole = sum(b - a for a, b in repaired) == length - link
                spans.append(fragment(text(start, length), owner, link=link, repaired=() if whole else repaired))
            else:
                spans.append(Span(text(start, length), G if "group" in kind else T, published=True))
        spans.append(notes(scope, 1, 9999))
        handle = m.memory.register(scope)
        handles.append((handle, m.turn(handle, spans, scope, answer=(7, 8), budget=6)))
    for handle, spans in handles:
        m.check(handle, spans)
    contexts = [Context(tuple(piece(span) for span in spans), handle) for handle, spans in handles]
    assert m.memory.stats().held == predict_pages(contexts, block_size)
    for handle, _ in handles:
        m.memory.release(handle)
    m.memory.verify()
    assert m.memory.stats().held == 0
