"""Fixtures that several test files ask for by name."""

import os

# Before torch counts its threads: those of two workers on two cores would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import setuptools  # noqa: F401 - puts its distutils in place, which it would not after anything looked for pip
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported; no test file does it

pytest.register_assert_rewrite("judging", "grouped")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this run's own: nothing is taken from an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def judged(request, tmp_path, cache):
    """The finding for a cell of one of the exercises that the test file has in ANSWERS."""
    return lambda name, source: request.module.ANSWERS.finding(name, source, tmp_path)


@pytest.fixture
def fresh_compiler():
    """torch.compile knows nothing of earlier calls, and later ones nothing of these."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
