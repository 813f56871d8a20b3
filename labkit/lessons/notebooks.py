"""The lesson notebooks: find them, load their kernels as modules, read their parameters, hash their code.

Nothing here runs a measurement; `labkit.runs.execute` runs whole notebooks.
"""

import ast
import hashlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from labkit import paths
from labkit.lessons.code_hash import of_sources, without_comments

if TYPE_CHECKING:  # its validator takes a second to import, and loading a lesson does not need it
    from nbformat import NotebookNode

SETUP, KERNEL = LOADED_TAGS = ("setup", "kernel")
EXERCISE = "exercise"
COLAB = "colab"
"""The tag of the cell that installs the course on Colab and Kaggle, and elsewhere does nothing."""
KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool}
"""The kinds a lesson's parameter may be declared with."""
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

Value = int | float | bool


@dataclass(frozen=True)
class Parameter:
    """A parameter as a lesson's cell tagged ``parameters`` declares it: ``width: int = 160  # help``."""

    name: str
    kind: str
    default: Value
    help: str


def find() -> list[Path]:
    """The checkout's lessons, in order of their numbers."""
    return sorted(path for path in paths.NOTEBOOKS.glob("*.ipynb") if re.match(r"\d\d_", path.name))


def resolve(name: str) -> Path:
    """The lesson with this number ("01"), name ("01_launch_overhead") or file; else a ValueError."""
    lessons, file = find(), Path(name).resolve()
    matches = [one for one in lessons if name in (one.stem, one.stem[:2], one.name) or file == one.resolve()]
    if len(matches) == 1:
        return matches[0]
    problem = "several lessons are" if matches else "no lesson is"
    listed = ", ".join(path.stem for path in matches or lessons) or "none"
    raise ValueError(f"{problem} called {name!r}; there are: {listed}")


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


def lesson_key(lesson: str) -> str:
    """The name of a lesson in stored data: without its number, which may change."""
    return re.sub(r"^\d\d_", "", lesson)


def code_hash(path: Path) -> str:
    """12 hex digits for the source of the code cells and solutions, and for the project code that they reach.

    Of the project code that part counts which decides about a measurement (`labkit.lessons.code_hash`).
    """
    cells = [cell["source"] for _, cell in code_cells(read_json(path)) if COLAB not in tags(cell)]
    solutions = solutions_file(path)
    if solutions.exists():
        cells.append(without_comments(solutions.read_text(encoding="utf-8")))
    return of_sources(cells)


def exercise_of(cell: Mapping[str, Any]) -> str:
    """The exercise that a cell with the tag ``exercise`` hands in; ValueError if it hands in none."""
    found = re.search(r'^tasks\.check\("(\w+)"', cell["source"], re.MULTILINE)
    if found is None:
        raise ValueError(f'cell {cell["id"]}: it is tagged exercise, but has no tasks.check("...", ...)')
    return found[1]


def solutions_file(path: Path) -> Path:
    """The file of solutions of a lesson's exercises."""
    return path.parent / "solutions" / f"{path.stem}.py"


def solution_cells(path: Path) -> dict[str, str]:
    """The solutions' sources by exercise: the cells of the lesson's file marked ``# %% [name]``."""
    text = solutions_file(path).read_text(encoding="utf-8")
    parts = re.split(r"^# %%(?: \[(\w+)\])?.*$", text, flags=re.MULTILINE)
    named = zip(parts[1::2], parts[2::2], strict=True)
    return {name: source.strip() for name, source in named if name}


def load(lesson: str | Path, *, solved: bool = False) -> ModuleType:
    """The cells tagged ``setup`` and ``kernel``, in order, as a module; nothing else of the lesson runs.

    With ``solved`` the module has the solution of each exercise too, in the place of its cell. The module is
    a real file, because Triton and inspect read the source of a kernel from its file. It is imported once for
    each content. Raises ValueError for a cell that is not plain Python.
    """
    path = lesson if isinstance(lesson, Path) else resolve(lesson)
    source = _module_source(path, solved)
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


def _module_source(path: Path, solved: bool) -> str:
    parts = [f'"""The setup and kernel cells of {path.name}, written from it: edit them there."""\n']
    loaded = (*LOADED_TAGS, EXERCISE) if solved else LOADED_TAGS
    for number, cell in code_cells(read_json(path)):
        kind = next((tag for tag in tags(cell) if tag in loaded), None)
        if kind is None:
            continue
        source = solution_cells(path)[exercise_of(cell)] if kind == EXERCISE else cell["source"]
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


def parameters(path: Path) -> dict[str, Parameter]:
    """The parameters that a lesson declares; ValueError for one without a kind or with a wrong default."""
    from papermill.inspection import inspect_notebook

    notebook = read(path)
    notebook.metadata.setdefault("kernelspec", {"name": "python3", "language": "python"})
    found: dict[str, Parameter] = {}
    for name, declared in inspect_notebook(notebook).items():
        kind: str = declared["inferred_type_name"]
        default: Any = declared["default"]
        with suppress(ValueError, SyntaxError):  # left as text, which is refused below
            default = ast.literal_eval(default)
        given = type(default)
        if kind not in KINDS or given is not KINDS[kind]:
            raise ValueError(
                f"{path.stem}, parameter {name}: declared as {kind} with the default {default!r}, but has to "
                f"be one of {', '.join(KINDS)}, with a default of this kind"
            )
        found[name] = Parameter(name, kind, default, declared["help"])
    return found


def check_parameters(path: Path, given: Mapping[str, str]) -> dict[str, Value]:
    """Values for a lesson's parameters, from text; ValueError for whatever the lesson does not declare.

    papermill writes names into the code as they stand, so only declared names, which Python has parsed as
    identifiers, get there.
    """
    declared = parameters(path)
    for name in given:
        if name not in declared:
            known = ", ".join(f"{p.name} ({p.kind})" for p in declared.values()) or "none"
            raise ValueError(f"{path.stem} has no parameter {name!r}; it declares: {known}")
    return {name: _convert(path, declared[name], text) for name, text in given.items()}


def _convert(path: Path, parameter: Parameter, text: str) -> Value:
    """The value of a parameter that is given as text. An int whose default is above 0 is a size: so is it."""
    is_size = parameter.kind == "int" and int(parameter.default) > 0
    with suppress(ValueError, KeyError, OverflowError):  # the sentence below says it better than int() does
        value: Value = TRUTH[text.lower()] if parameter.kind == "bool" else KINDS[parameter.kind](text)
        if math.isfinite(value) and (value > 0 or not is_size):
            return value
    wanted = {"int": "a whole number", "float": "a finite number", "bool": "true or false"}[parameter.kind]
    said = f"{text[:40]!r} is not {wanted}{' above 0' * is_size}"
    raise ValueError(f"{path.stem}, parameter {parameter.name}: {said}")
