"""Where contexts are cut into blocks."""

import pytest

from inms_jax.memory.layout import Layout, Piece, common_scope_prefix, lay_out
from inms_jax.memory.tier import Scope

T, G, A, B = Scope("t"), Scope("t", "g"), Scope("t", "g", "a"), Scope("t", "g", "b")


def blocks(layout: Layout) -> list[tuple[int, int, bool]]:
    return list(zip(layout.starts, layout.ends, layout.closed, strict=True))


def test_private_text_is_one_stream_that_fills_its_blocks():
    layout = lay_out([Piece(3, A, False), Piece(4, A, True), Piece(2, A, False)], 4)
    assert blocks(layout) == [(0, 4, True), (4, 8, True), (8, 9, False)]


def test_published_text_and_every_change_of_tier_end_a_block():
    pieces = [Piece(5, T, True), Piece(2, T, True), Piece(3, G, False), Piece(1, G, False), Piece(1, A, False)]
    layout = lay_out(pieces, 4)
    assert blocks(layout) == [(0, 4, True), (4, 5, True), (5, 7, True), (7, 11, True), (11, 12, False)]
    assert layout.scopes == (T, T, T, G, A)


def test_unpublished_group_text_before_private_text_closes_its_page():
    assert blocks(lay_out([Piece(3, G, False), Piece(2, A, False)], 4)) == [(0, 3, True), (3, 5, False)]


def test_group_text_after_private_text_is_private_and_packed():
    layout = lay_out([Piece(3, A, False), Piece(3, G, True), Piece(3, A, False)], 4)
    assert blocks(layout) == [(0, 4, True), (4, 8, True), (8, 9, False)]
    assert set(layout.scopes) == {A}


def test_a_change_of_lineage_does_not_cut_and_names_the_block_it_ends_in():
    layout = lay_out([Piece(6, A, False), Piece(3, B, False)], 4)
    assert blocks(layout) == [(0, 4, True), (4, 8, True), (8, 9, False)]
    assert layout.scopes == (A, B, B)
    assert layout.runs == ((6, A), (9, B))


def test_texts_without_a_common_reader_are_refused():
    with pytest.raises(ValueError, match="No reader"):
        lay_out([Piece(1, G, True), Piece(1, Scope("t", "h"), True)], 4)


def test_blocks_are_found_by_position():
    layout = lay_out([Piece(5, T, True), Piece(3, A, False)], 4)
    assert [layout.block_at(p) for p in (0, 3, 4, 5, 7, 8)] == [0, 0, 1, 2, 2, 3]
    assert [layout.blocks_before(p) for p in (0, 1, 4, 5, 6, 8)] == [0, 1, 1, 2, 3, 3]


def test_common_prefix_ends_where_the_effective_scope_differs():
    a = lay_out([Piece(4, T, True), Piece(4, A, False)], 4)
    assert common_scope_prefix(a, lay_out([Piece(4, T, True), Piece(9, A, False)], 4)) == 8
    assert common_scope_prefix(a, lay_out([Piece(4, T, True), Piece(2, A, False), Piece(2, B, False)], 4)) == 6
    assert common_scope_prefix(a, lay_out([Piece(3, T, True), Piece(5, A, False)], 4)) == 3
    assert common_scope_prefix(a, lay_out([Piece(8, G, False)], 4)) == 0
