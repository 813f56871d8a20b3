"""Fixtures that several test files ask for by name."""

import dataclasses
import gc
import os
import tempfile
from pathlib import Path
from unittest import mock

# Before torch counts its threads: those of two workers on two cores would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import setuptools  # noqa: F401 - puts its distutils in place, which it would not after anything looked for pip
import torch
from filelock import FileLock

from labkit import interpreter, paths
from labkit.measure import tape

interpreter.patch()  # as in a lesson
pytest.register_assert_rewrite("grouped", "operators", "products", "recurring")


LONGEST = ("test_judge.py", "test_lesson_notebooks.py")
"""Files that take minutes come first: at the end one worker would go on with them while the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes a file at a time, in this order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this run's own: nothing is taken from an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """A cache, a learner's folder and a place for recorded devices of the test's own."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    """A machine in virtual time whose faster copy moves 10 bytes a microsecond."""
    from simulated import install

    return install(monkeypatch.setattr)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    monkeypatch.setattr("labkit.gpu.device", lambda: "cpu")


@pytest.fixture
def fresh_compiler():
    """torch.compile knows nothing of earlier calls, and later ones nothing of these."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def overflow_is_an_error(monkeypatch):
    """A number that runs over 32 bits in an interpreted kernel is an error before it could be an address."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(builder, "options", options)


@pytest.fixture(autouse=True)
def the_machine_itself():
    """What a test has found out about another machine, or told its processes, ends with that test."""
    with mock.patch.dict(os.environ):
        yield
    tape.here.cache_clear()


@pytest.fixture(autouse=True)
def room_for_large_tests(request):
    """A test marked ``large`` needs most of a GPU's memory: one such test at a time, whatever the workers."""
    if request.node.get_closest_marker("large") is None:
        yield
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("tensors of more than 2**31 elements need a GPU with 60 GiB")
    with FileLock(Path(tempfile.gettempdir()) / "labkit-large-tests.lock"):
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A toy clone without lessons, for this process and for those that it starts; kernels are interpreted."""
    import stage

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([paths.python_path(), str(Path(__file__).parent)]))
    stage.set_up(tmp_path, monkeypatch.setattr, monkeypatch.setenv)
    return tmp_path
