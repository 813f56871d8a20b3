"""Fixtures of a clone with toy lessons, toy GPUs and workers that need neither kernels nor a GPU."""

import os
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import cli, gpus, places, worker
from labkit.gpus import Gpu

TOY_WORKER = str(Path(__file__).with_name("toy_worker.py"))
FAILS_FIRST = (
    "import os\nif not os.path.exists('mark'):\n    open('mark', 'w')\n    raise RuntimeError('once')"
)
DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
FOR_EVER = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.1)"


def set_up(folder, put, environment):
    """Make ``folder`` a clone without lessons; gives a function that adds one."""
    put(places, "NOTEBOOKS", folder / "notebooks")
    put(places, "BUILD", folder / "build")
    put(places, "RECORDED", folder / "recorded")
    put(worker, "COMMAND", (TOY_WORKER,))
    put(gpus, "found", lambda: [Gpu(0, "Toy", "A"), Gpu(1, "Toy", "B")])
    environment("LABKIT_CACHE", str(folder / "cache"))
    environment("TRITON_INTERPRET", "1")
    environment("PYTHONPATH", os.pathsep.join([places.python_path(), str(Path(__file__).parent)]))
    places.NOTEBOOKS.mkdir(exist_ok=True)

    def add(name, *cells):
        notebook = new_notebook(cells=[new_markdown_cell(f"# {name}"), *map(new_code_cell, cells)])
        nbformat.write(notebook, places.NOTEBOOKS / f"{name}.ipynb")
        return places.NOTEBOOKS / f"{name}.ipynb"

    return add


@pytest.fixture
def two_models(monkeypatch):
    """The toy GPUs as cards of two models."""
    monkeypatch.setattr(gpus, "found", lambda: [Gpu(0, "Toy A", "A"), Gpu(1, "Toy B", "B")])


@pytest.fixture
def clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return set_up(tmp_path, monkeypatch.setattr, monkeypatch.setenv)


def labkit(*arguments):
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
