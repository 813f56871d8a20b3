"""Fixtures that several test files ask for by name."""

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this run's own: nothing is taken from an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
