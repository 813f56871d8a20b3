"""The lesson notebooks: find them, load their kernels as modules.

A lesson's name is its file below ``notebooks``, without the suffix: "01_launch_overhead". What lessons link
to stands in ``notebooks/asides``: "asides/wrong_measurements".

Nothing here runs a measurement; `labkit.run.execute` runs whole notebooks.
"""

import ast
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from labkit import paths

if TYPE_CHECKING:  # its validator takes a second to import, and loading a lesson does not need it
    from nbformat import NotebookNode

SETUP, KERNEL, WAY = LOADED_TAGS = ("setup", "kernel", "way")
EXERCISE = "exercise"
ASIDES = "asides"
"""The folder of the notebooks without exercises that lessons link to."""


def find() -> list[Path]:
    """The checkout's lessons, in order of their numbers; then the asides."""
    places = ("[0-9][0-9]_*", f"{ASIDES}/*")
    return [path for place in places for path in sorted(paths.NOTEBOOKS.glob(f"{place}.ipynb"))]


def name_of(path: Path) -> str:
    """The name of a lesson: "01_launch_overhead", "asides/wrong_measurements"."""
    return (f"{path.parent.name}/" if path.parent.name == ASIDES else "") + path.stem


def key_of(path: Path) -> str:
    """The name of a lesson in stored data: without its number, which may change."""
    return re.sub(r"(^|/)\d\d_", r"\1", name_of(path))


def resolve(name: str) -> Path:
    """The lesson with this number ("01" or "1"), name (with or without its number) or file.

    ValueError for a name that no lesson has.
    """
    lessons, file = find(), Path(name).resolve()
    for path in lessons:
        whole = name_of(path)
        number = "" if "/" in whole else whole[:2]
        names = whole, number, number.lstrip("0"), key_of(path), f"{whole}.ipynb"
        if (name and name in names) or file == path.resolve():
            return path
    listed = ", ".join(map(name_of, lessons)) or "none"
    raise ValueError(f"no lesson is called {name!r}; there are: {listed}")


def read(path: Path) -> "NotebookNode":
    """A notebook as version 4 of the format."""
    import nbformat

    return cast("NotebookNode", nbformat.read(path, as_version=4))


def read_json(path: Path) -> dict[str, Any]:
    """A notebook as plain JSON, without the validation of `read`, which takes a second to import."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])  # in a file it may be a list of lines
    return notebook


def code_cells(notebook: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """The code cells, numbered from 1. Messages name this number; after Run All it is a cell's [n]."""
    return enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), start=1)


def tags(cell: Mapping[str, Any]) -> list[str]:
    """The tags of a cell."""
    return list(cell["metadata"].get("tags", []))


def title(notebook: Mapping[str, Any]) -> str | None:
    """The text of the first top-level heading, or None."""
    text = "\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
    return heading[1].strip() if heading else None


def exercise_of(cell: Mapping[str, Any]) -> str:
    """The exercise that a cell with the tag ``exercise`` hands in; ValueError if it hands in none."""
    found = re.search(r'^(?:\w+ = )?tasks\.check\("(\w+)"', cell["source"], re.MULTILINE)
    if found is None:
        raise ValueError(f'cell {cell["id"]}: it is tagged exercise, but has no tasks.check("...", ...)')
    return found[1]


def solutions_file(path: Path) -> Path:
    """The file of solutions of a lesson's exercises."""
    return path.parent / "solutions" / f"{path.stem}.py"


def solution_cells(path: Path) -> dict[str, str]:
    """The solutions' sources by exercise: the cells of the lesson's file marked ``# %% [name]``.

    An aside has no exercises, and no such file.
    """
    if not solutions_file(path).exists():
        return {}
    text = solutions_file(path).read_text(encoding="utf-8")
    parts = re.split(r"^# %%(?: \[(\w+)\])?.*$", text, flags=re.MULTILINE)
    named = zip(parts[1::2], parts[2::2], strict=True)
    return {name: source.strip() for name, source in named if name}


def load(lesson: str | Path) -> ModuleType:
    """The cells tagged ``setup``, ``kernel`` and ``way``, in order, as a module; nothing else runs.

    The module is a real file, because Triton and inspect read the source of a kernel from its file. It is
    imported once for each content. Raises ValueError for a cell that is not plain Python.
    """
    path = lesson if isinstance(lesson, Path) else resolve(lesson)
    source = _module_source(path)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    name = f"labkit_lesson_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    file = paths.cache() / "lessons" / f"{path.stem}_{digest}.py"
    paths.write_text(file, source)
    return import_file(name, file)


def import_file(name: str, file: Path) -> ModuleType:
    """Import a Python file as the module ``name``."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and torch look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_source(path: Path) -> str:
    parts = [f'"""The setup, kernel and way cells of {path.name}, written from it: edit them there."""\n']
    for number, cell in code_cells(read_json(path)):
        kind = next((tag for tag in tags(cell) if tag in LOADED_TAGS), None)
        if kind is None:
            continue
        source = cell["source"]
        where = f"{path.stem}, cell {number}"
        try:
            ast.parse(source)
        except SyntaxError as error:
            raise ValueError(
                f"{where}: a cell tagged {kind} has to be plain Python, without % or ! magics "
                f"(line {error.lineno}: {error.msg}: {(error.text or '').strip()})"
            ) from error
        parts.append(f"# {where} ({kind})\n{source.rstrip()}\n")
    return "\n\n".join(parts)
