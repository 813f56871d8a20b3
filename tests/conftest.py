"""Fixtures that several test files ask for by name."""

import dataclasses
import gc
import os
import pickle
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
from labkit.lessons import notebooks
from labkit.measure import machine

interpreter.patch()  # as in a lesson
pytest.register_assert_rewrite("grouped", "operators", "products", "recurring", "taught")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this run's own: nothing is taken from an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def lesson(cache, request):
    """What the lesson NAME of a test module defines, its exercises solved."""
    return notebooks.load(request.module.NAME, solved=True)


@pytest.fixture(scope="session")
def executed(tmp_path_factory):
    """A function from a lesson's path to the result of its one execution, which xdist's workers share."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "lessons"
    shared.mkdir(exist_ok=True)

    def once(path):
        from labkit.run import execute  # not above: most test files have nothing to do with lessons

        name = notebooks.name_of(path)
        kept = shared / f"{name.replace('/', '-')}.pickle"
        with FileLock(kept.with_suffix(".lock")), mock.patch.dict(os.environ):
            if not kept.exists():
                kept.write_bytes(pickle.dumps(execute.execute(path, shared / f"{name}.ipynb")))
        return pickle.loads(kept.read_bytes())

    return once


@pytest.fixture(scope="module")
def result(executed, request):
    """The lesson NAME of a test module, executed once."""
    return executed(notebooks.resolve(request.module.NAME))


@pytest.fixture(scope="module")
def outputs(result):
    """The outputs of its code cells, in their order."""
    cells = notebooks.code_cells(notebooks.read(result.notebook_path))
    return [output for _, cell in cells for output in cell.outputs]


@pytest.fixture(scope="module")
def checks_passed(result, outputs):
    """The number of checks that each check's name passed, of a lesson that ran to its end in silence."""
    assert result.passed, result.failure
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    shown = [output.data for output in outputs if "data" in output]
    checks = [data for data in (d.get("application/vnd.labkit.check+json") for d in shown) if data]
    assert len({data["name"] for data in checks}) == len(checks), "a name is checked once"
    return {data["name"]: data["passed"] for data in checks}


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
    machine.identity.cache_clear()


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
