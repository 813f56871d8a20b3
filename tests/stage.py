"""A toy clone for the commands, in this process or in one of its own: ``python tests/stage.py run``.

Its lessons may measure on a simulated GPU: ``import stage; gpu = stage.in_lesson()`` is their first cell.
"""

import json
import os
import time
from pathlib import Path

from click.testing import CliRunner

from labkit import paths
from labkit.run import main

# What loads torch is imported where it is used: not every command needs it.


def lesson(folder, *cells, name="01_toy"):
    """Write a lesson of code cells, each a source or (tag, source).

    Without nbformat, which takes a second and a half to import.
    """
    made = [{"cell_type": "markdown", "metadata": {}, "source": f"# {name}"}]
    for cell in cells:
        tag, source = cell if isinstance(cell, tuple) else ("", cell)
        code = {"cell_type": "code", "metadata": {"tags": [tag] if tag else []}, "source": source}
        made.append(code | {"outputs": [], "execution_count": None})
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    paths.write_text(folder / "notebooks" / f"{name}.ipynb", json.dumps(content, indent=1))
    return folder / "notebooks" / f"{name}.ipynb"


def labkit(*arguments):
    """What a command prints and ends with, in this process; never with an exception of its own."""
    result = CliRunner().invoke(main.cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def set_up(folder=None, put=setattr, environment=os.environ.__setitem__):
    """Make a folder, by default the present one, a clone without lessons."""
    folder = folder or Path.cwd()
    for name in ("notebooks", "build", "recorded"):
        put(paths, name.upper(), folder / name)
    for name, value in (("LABKIT_CACHE", folder / "cache"), ("STAGE_FOLDER", folder)):
        environment(name, str(value))
    paths.NOTEBOOKS.mkdir(exist_ok=True)


_said: set[str] = set()

# ---- recording on a simulated GPU --------------------------------------------------------------------------


def set_up_gpu(put=setattr, environment=os.environ.__setitem__):
    """A simulated GPU, here and in the lessons that are executed from now on."""
    import simulated

    from labkit.measure import copies

    environment("STAGE_GPU", "1")
    gpu = simulated.install(put)
    put(copies, "COPIES", {"Tensor.copy_": copies.COPIES["fast"]})
    return gpu


def in_lesson():
    """In a lesson's kernel: its toy clone, and the simulated GPU where there is one; else None."""
    from labkit import notebooks
    from labkit.measure import session

    set_up(Path(os.environ["STAGE_FOLDER"]))
    gpu = set_up_gpu() if os.environ.get("STAGE_GPU") else None
    session.begin(notebooks.resolve("01"))
    return gpu


def note(word):
    """Keep a word for `noted`, of a call that is measured; the first time wait ``STAGE_PAUSE`` seconds."""
    if word not in _said:
        time.sleep(float(os.environ.get("STAGE_PAUSE", "0")))
        _said.add(word)
        with Path(os.environ["STAGE_FOLDER"], "calls").open("a") as calls:
            calls.write(f"{word} ")


def noted():
    """The words that were noted since this was asked last."""
    calls = Path(os.environ["STAGE_FOLDER"], "calls")
    found = calls.read_text().split() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return found


if __name__ == "__main__":
    set_up()
    if os.environ.get("STAGE_GPU"):
        set_up_gpu()
    main.main()
