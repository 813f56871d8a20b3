"""Commands in a process of their own, on a simulated GPU, in a toy clone in the present folder.

    python tests/stage.py sweep | run | record | bench [OPTION]...

A sweep of 12 widths waits ``STAGE_PAUSE`` seconds for each; ``calls`` lists the widths that were measured.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from taped import recorded

from labkit import paths
from labkit.cli import main
from labkit.measure import roofline, rows

# What loads torch is imported where it is used: not every command needs it.

POINTS = [{"batch": 2, "width": 8 * n} for n in range(1, 13)]
IMPORT = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport stage\n"


def notes():
    """Where each measured width is noted; a lesson's kernel works in another folder."""
    return Path(os.environ["STAGE_FOLDER"]) / "calls"


def inputs(shape):
    with notes().open("a") as calls:
        calls.write(f"{shape['width']} ")
    time.sleep(float(os.environ.get("STAGE_PAUSE", "0")))
    import simulated

    return simulated.DOUBLING.inputs(shape)


def contenders():
    import simulated

    return [simulated.doubling(simulated.install(setattr), work=replace(simulated.DOUBLING, inputs=inputs))]


def sweep(**options):
    """How many points there are in the end."""
    from labkit.measure import sweeps

    return len(sweeps.run("stage/sweep", contenders(), POINTS, **options))


def tape():
    """Stands in for a sweep of a lesson that is recorded."""
    for point in POINTS:
        rows.append(Path(os.environ["LABKIT_TAPE"]), recorded(width=point["width"]))
        time.sleep(float(os.environ.get("STAGE_PAUSE", "0")))


def measured():
    """The widths that were measured since this was asked last."""
    found = notes().read_text().split() if notes().exists() else []
    notes().unlink(missing_ok=True)
    return list(dict.fromkeys(map(int, found)))


def lesson(folder, *cells, name="01_toy", parameters=""):
    """Write a lesson without nbformat, which takes a second and a half to import."""
    made = [{"cell_type": "markdown", "metadata": {}, "source": f"# {name}"}]
    for tags, source in [(["parameters"], parameters)] * bool(parameters) + [([], cell) for cell in cells]:
        code = {"cell_type": "code", "metadata": {"tags": tags}, "source": source}
        made.append(code | {"outputs": [], "execution_count": None})
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    content = {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    paths.write_text(folder / "notebooks" / "solutions" / f"{name}.py", "")
    paths.write_text(folder / "notebooks" / f"{name}.ipynb", json.dumps(content, indent=1))
    return folder / "notebooks" / f"{name}.ipynb"


def labkit(*arguments):
    """What a command prints and ends with, in this process; never with an exception of its own."""
    result = CliRunner().invoke(main.cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def whole(folder, pattern):
    """The rows of the one file like this; every line of it but a torn last one has to be one."""
    (path,) = folder.rglob(pattern)
    return rows.read(path)


def set_up(folder=None, put=setattr, environment=os.environ.__setitem__):
    """Make a folder, by default the present one, a clone without lessons."""
    folder = folder or Path.cwd()
    for name in ("notebooks", "build", "recorded"):
        put(paths, name.upper(), folder / name)
    for name, value in (("LABKIT_CACHE", folder / "cache"), ("STAGE_FOLDER", folder)):
        environment(name, str(value))
    paths.NOTEBOOKS.mkdir(exist_ok=True)


def set_up_gpu(put=setattr):
    """A simulated GPU with roofs that are known, and one suite, which is this sweep."""
    import simulated

    from labkit.bench import suites
    from labkit.bench.suite_part import SuitePart

    simulated.install(put)
    put(roofline, "roofs", lambda **_: rows.write(roofline.cache_path(), [recorded(suite="roofs/copy")]))
    (ours,) = contenders()
    put(suites, "SUITES", {"affine": lambda: [SuitePart((ours,), tuple(POINTS), dtypes=("float32",))]})


if __name__ == "__main__":
    set_up()
    if sys.argv[1] != "run":
        set_up_gpu()
    if sys.argv[1] == "sweep":
        print(sweep())
    else:
        main.main()
