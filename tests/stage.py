"""Commands in a process of their own, on a simulated GPU, in a toy clone in the present folder.

    python tests/stage.py sweep | run | record | bench [OPTION]...

A sweep of 12 widths waits ``STAGE_PAUSE`` seconds for each; ``calls`` lists the widths that were measured.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from taped import recorded

from labkit import cli, places, rows

# What loads torch is imported where it is used: not every command needs it.

POINTS = [{"batch": 2, "width": 8 * n} for n in range(1, 13)]
CELL = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport stage\nprint(stage.sweep())"


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
    from labkit import sweeps

    return len(sweeps.run("stage/sweep", contenders(), POINTS, **options))


def panel():
    """A sweep panel over the same points."""
    from labkit import panels

    widths = [point["width"] for point in POINTS]
    sizes = dict(others={"batch": (2,)}, dtypes=("float32",), of="labkit", over="labkit", title="Doubling")
    return panels.sweep("stage/panel", contenders(), widths, **sizes)


def measured():
    """The widths that were measured since this was asked last."""
    found = notes().read_text().split() if notes().exists() else []
    notes().unlink(missing_ok=True)
    return list(dict.fromkeys(map(int, found)))


def lesson(folder, *cells, name="01_toy", parameters=""):
    """Write a lesson without nbformat, which takes a second and a half to import."""
    made = [{"cell_type": "markdown", "metadata": {}, "source": "# Toy"}]
    for tags, source in [(["parameters"], parameters)] * bool(parameters) + [([], cell) for cell in cells]:
        code = {"cell_type": "code", "metadata": {"tags": tags}, "source": source}
        made.append(code | {"outputs": [], "execution_count": None})
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    content = {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    places.write_text(folder / "notebooks" / "solutions" / f"{name}.py", "")
    places.write_text(folder / "notebooks" / f"{name}.ipynb", json.dumps(content, indent=1))
    return folder / "notebooks" / f"{name}.ipynb"


def labkit(*arguments):
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def whole(folder, pattern):
    """The rows of the one file like this; every line of it has to be one."""
    (path,) = folder.rglob(pattern)
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [rows.Row.from_json(line) for line in text.splitlines()]


def mounted(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)


@contextlib.contextmanager
def fails_to_write():
    """Gives what was raised, as a learner sees it."""
    told: list[str] = []
    try:
        yield told
    except OSError as error:
        told += [str(error), *error.__notes__]
    else:
        raise AssertionError("it could be written")


def fill(folder):
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(512))


def set_up(folder=None, put=setattr, environment=os.environ.__setitem__):
    """Make a folder, by default the present one, a clone with one lesson, which is this sweep."""
    folder = folder or Path.cwd()
    for name in ("notebooks", "build", "recorded"):
        put(places, name.upper(), folder / name)
    for name, value in (("LABKIT_CACHE", folder / "cache"), ("STAGE_FOLDER", folder)):
        environment(name, str(value))
    if not (folder / "notebooks").exists():
        lesson(folder, CELL)


def set_up_gpu(put=setattr):
    """A simulated GPU with roofs that are known, and one suite, which is this sweep."""
    import simulated

    from labkit import machine, suites
    from labkit.bench_plan import Part

    simulated.install(put)
    put(machine, "roofs", lambda **_: rows.write(machine.cache_path(), [recorded(suite="roofs/copy")]))
    (ours,) = contenders()
    put(suites, "NAMES", ("affine",))
    put(suites, "parts", lambda name, *, peers: [Part((ours,), POINTS, "bench/affine", ("float32",))])


if __name__ == "__main__":
    set_up()
    set_up_gpu()
    if sys.argv[1] == "sweep":
        print(sweep())
    else:
        cli.main()
