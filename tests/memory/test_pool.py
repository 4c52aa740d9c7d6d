"""The page pool."""

import pytest

from inms_jax.errors import CapacityError, ConfigError, StateError
from inms_jax.memory.lifecycle import PageEvent, PageState
from inms_jax.memory.pool import PagePool


def test_null_page_is_never_given_out_and_each_page_once():
    pool = PagePool(5)
    assert sorted(pool.allocate() for _ in range(4)) == [1, 2, 3, 4]
    with pytest.raises(CapacityError, match="0 of 4 are free"):
        pool.allocate()


def test_double_release_names_the_page_and_changes_nothing():
    pool = PagePool(3)
    page = pool.allocate()
    assert pool.release(page) == 0
    pool.retire(page)
    with pytest.raises(StateError, match=rf"Page {page} \(generation 1\).*'free'.*0 holders"):
        pool.release(page)
    assert pool.references(page) == 0
    assert pool.num_free == 2


def test_a_held_page_cannot_be_freed():
    pool = PagePool(3)
    page = pool.allocate()
    with pytest.raises(StateError, match="it has 1 holders"):
        pool.retire(page)
    assert pool.state(page) is PageState.FILLING


def test_generation_tells_two_uses_of_a_page_apart():
    pool = PagePool(2)
    page = pool.allocate()
    pool.release(page)
    pool.retire(page)
    assert pool.allocate() == page
    assert pool.generation(page) == 1


def test_a_cached_page_comes_back_by_a_hit():
    pool = PagePool(2)
    page = pool.allocate()
    pool.move(page, PageEvent.SEAL)
    pool.release(page)
    pool.move(page, PageEvent.LAST_HOLDER_LEFT)
    pool.retain(page)
    assert (pool.state(page), pool.references(page)) == (PageState.SEALED, 1)


def test_null_page_has_no_life():
    with pytest.raises(StateError, match=r"not one of pages 1\.\.2"):
        PagePool(3).move(0, PageEvent.ALLOCATE)


def test_a_pool_without_a_page_is_refused():
    with pytest.raises(ConfigError, match="at least 2 pages"):
        PagePool(1)
