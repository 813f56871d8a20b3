"""Every test of a kernel compiles into a cache of its own; helpers' assertions say what they compared."""

import pytest

pytest.register_assert_rewrite("operators")


@pytest.fixture(autouse=True)
def own_cache(cache):
    """Nothing is taken from an earlier run's cache."""
