"""Every test of a kernel compiles into a cache of its own."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(cache):
    """Nothing is taken from an earlier run's cache."""
