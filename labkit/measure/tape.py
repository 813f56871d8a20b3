"""A tape: what a lesson measured on one device, a row a line.

It stands in ``labkit/data/recorded/<device>/<lesson>.jsonl``. Everything else is made from tapes: the outputs
of the notebooks, and the pages.

The stamp of a row is a hash of what was measured. An edit of that makes the row stale, and no other one. What
is measured stands in a lesson's cells tagged ``kernel`` or ``way``, in its solutions, in ``labkit.kernels``
and in ``labkit.work``. Syntax trees are hashed, without docstrings, so neither a comment nor the formatting
counts. Of the cells, and of ``labkit.work``, those definitions count that the measured function, or the work,
reaches by name; of ``labkit.kernels`` whole files, those that are reached by import statements. The clock,
and the copy beside which everything is timed, count for every row.
"""

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from labkit import gpu, notebooks, paths

SHOWN = "nvidia-h200"
"""The device whose tapes figures show where several have the lesson."""
FIELDS = ("dtype", "direction", "clock", "cache")
"""The columns of a row that say, beside its sizes, how it was measured."""
Key = tuple[Any, ...]
MEASURED = {"kernel", "way"}
"""Tags of the cells that define what may be measured."""
REACHED = {"setup", *MEASURED}
"""Tags of the cells whose definitions count where they are reached from there."""
KERNELS, WORK = paths.PACKAGE / "kernels", paths.PACKAGE / "work"
CLOCK = [paths.PACKAGE / "measure" / f"{name}.py" for name in ("clocks", "copies")]
Definitions = dict[str, list[ast.stmt]]
"""By name the statements that define it, each import and each redefinition too."""


@dataclass(frozen=True)
class Row:
    """A measurement, and what is needed to trust it. Times are microseconds a call."""

    title: str
    """Of the race or sweep, or the name of a number of the lesson's own."""
    way: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    dtype: str = ""
    direction: str = ""
    clock: str = ""
    cache: str = ""
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    copy_us: float | None = None
    """A copy of as many bytes as the work needs, in the same run."""
    value: Any = None
    """Of ``lab.measured``: what the function returned."""
    note: str = ""
    """Why there is no time (out of memory, an error, a wrong result), or which clock took its place."""
    noise: str = ""
    """What disturbed the measurement; empty for a quiet one."""
    uses: tuple[str, ...] = ()
    """Where what was measured is defined: ``cell cheap``, ``solution affine``, ``labkit.kernels affine``, and
    ``work affine``."""
    stamp: str = ""
    """The hash of that (`stamp_of`)."""
    device: str = ""
    card: str = ""
    """Which of the GPUs of its kind (gpu.card)."""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    date: str = ""

    @property
    def key(self) -> Key:
        """What identifies the measurement, whenever and wherever it was made."""
        axes = tuple(sorted(self.axes.items()))
        return self.title, self.way, axes, self.dtype, self.direction, self.clock, self.cache

    def to_json(self) -> str:
        """One line of JSON, without what is empty."""
        return json.dumps(
            {name: value for name, value in vars(self).items() if value not in (None, "", {}, ())}
        )


# ---- where a row is measured -------------------------------------------------------------------------------


@cache
def here() -> dict[str, str]:
    """The columns of a row that say on which device and with which versions this process measures.

    Without a GPU the device is "CPU, interpreted".
    """
    device, driver = "CPU, interpreted", ""
    if gpu.available():
        nvml = gpu.nvml()
        device = torch.cuda.get_device_properties(0).name
        driver = nvml.nvmlSystemGetDriverVersion() if nvml else "unknown"
    return {"device": device, "driver": driver, "torch": torch.__version__, "triton": triton.__version__}


def where_and_when() -> dict[str, Any]:
    """The columns of a row that say where it is measured, on which of the GPUs of its kind, and when."""
    return here() | {"date": datetime.now(UTC).isoformat(timespec="seconds"), "card": gpu.card()}


def folder_of(device: str) -> str:
    """The folder of a device's tapes: that of "NVIDIA H200" is nvidia-h200."""
    return "-".join(re.findall(r"[a-z0-9]+", device.lower()))


# ---- files -------------------------------------------------------------------------------------------------


def read(tape: Path) -> list[Row]:
    """The rows of a tape, none if it does not exist; ValueError, which says what to do, for a damaged one.

    A last line that was cut off while it was written is left out.
    """
    if not tape.exists():
        return []
    *lines, _ = tape.read_text(encoding="utf-8").split("\n")
    try:
        made = [json.loads(line) for line in lines]
        return [Row(**{**row, "uses": tuple(row.get("uses", ()))}) for row in made]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{tape} is damaged or of another version of labkit ({error}): put it back with `git restore`"
        ) from error


def append(tape: Path, row: Row) -> None:
    """Add a row, on the disk before this returns; OSError where that is full."""
    tape.parent.mkdir(parents=True, exist_ok=True)
    with tape.open("a", encoding="utf-8") as stream:
        stream.write(row.to_json() + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def write(tape: Path, rows: Iterable[Row]) -> None:
    """Replace a tape in one step."""
    paths.write_text(tape, "".join(row.to_json() + "\n" for row in rows))


def tapes(key: str) -> dict[str, Path]:
    """The tapes of a lesson (its name without the number) by device, the shown one first."""
    found = {
        tape.relative_to(paths.RECORDED).parts[0]: tape
        for tape in sorted(paths.RECORDED.glob(f"*/{key}.jsonl"))
    }
    return dict(sorted(found.items(), key=lambda each: each[0] != SHOWN))


# ---- stamps ------------------------------------------------------------------------------------------------


def stamp_of(lesson: Path, uses: Iterable[str]) -> str:
    """12 hex digits for what a row names in ``uses``. What is not there any more counts for nothing."""
    known = definitions(lesson, REACHED)
    trees = [dump(_parsed(file)) for file in CLOCK]
    for use in sorted(uses):
        kind, _, name = use.rpartition(" ")
        if kind == "work":
            trees += map(dump, reach(name, work_definitions(name)))
        elif kind == "labkit.kernels":
            trees += [dump(_parsed(file)) for file in reached_files([name])]
        elif kind in ("cell", "solution"):
            solutions = notebooks.solution_cells(lesson).values() if kind == "solution" else ()
            reached = reach(name, {**known, **_defined(solutions)})
            named = {each for tree in reached for each in imported_kernels(tree)}
            trees += [*map(dump, reached), *(dump(_parsed(file)) for file in reached_files(named))]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:12]


def uses_of(lesson: Path, way: str, function: Callable[..., Any], work: str = "") -> tuple[str, ...]:
    """Where a measured function is defined, as a row names it.

    ValueError, which names the way, for a function that is neither one of a cell tagged ``kernel`` or
    ``way``, nor a solution, nor labkit's, nor PyTorch's: what an edit of it would change could not be told.
    """
    known = [f"work {work}"] if work else []
    notebook = vars(sys.modules["__main__"])
    # Of what torch.compile made, the function that it was given.
    original = getattr(function, "_torchdynamo_orig_callable", function)
    for name in definitions(lesson, MEASURED):
        if notebook.get(name) is function or notebook.get(name) is original:
            return (f"cell {name}", *known)
    name, module = getattr(original, "__name__", ""), str(getattr(original, "__module__", ""))
    owner = str(getattr(getattr(original, "__self__", None), "__module__", None) or "torch")
    if module.startswith("labkit.kernels"):
        return (f"labkit.kernels {name}", *known)
    if module.startswith("labkit_solutions"):
        return (f"solution {name}", *known)
    vendors = ("torch", "triton", "labkit.work", "_operator", "builtins")
    if module.startswith(vendors) and owner.startswith(vendors):
        return tuple(known)  # the versions are in the row
    raise ValueError(
        f"way {way!r}: {name or original!r} has to be a function of a cell tagged kernel or way, of "
        "labkit.kernels or of PyTorch"
    )


def definitions(lesson: Path, tags: set[str]) -> Definitions:
    """What the lesson's cells with one of these tags define at their top level."""
    cells = notebooks.code_cells(notebooks.read_json(lesson))
    return _defined(cell["source"] for _, cell in cells if tags & set(notebooks.tags(cell)))


def _defined(sources: Iterable[str]) -> Definitions:
    found: Definitions = {}
    for source in sources:
        for statement in ast.parse(source).body:
            names: list[str] = []
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                names = [statement.name]
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                names = [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
            elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name)]
            for name in names:
                found.setdefault(name, []).append(statement)
    return found


def reach(name: str, known: Definitions) -> list[ast.stmt]:
    """The statements that define a name and those that it uses, in the order of their names."""
    found: Definitions = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in known and one not in found:
            found[one] = known[one]
            waiting += [n.id for tree in known[one] for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return [statement for each in sorted(found) for statement in found[each]]


def imported_kernels(tree: ast.AST) -> set[str]:
    """The names of ``labkit.kernels`` that code imports, or uses as ``lab.kernels.affine``."""
    found = {alias.name for _, alias in _imported(tree, "labkit.kernels")}
    chains = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return found | {chain.split("kernels.", 1)[1].split(".")[0] for chain in chains if "kernels." in chain}


def work_definitions(name: str) -> Definitions:
    """What the file defines in which a work of this name stands; nothing where there is none."""
    module = _exports(WORK, "labkit.work").get(name)
    return _defined([(WORK / f"{module}.py").read_text(encoding="utf-8")]) if module else {}


def _exports(folder: Path, package: str) -> dict[str, str]:
    """By each name that a package exports the module that it is from."""
    return {alias.name: module for module, alias in _imported(_parsed(folder / "__init__.py"), package)}


def reached_files(names: Iterable[str]) -> list[Path]:
    """The files of labkit.kernels that define these names, and those that these import."""
    package = "labkit.kernels"
    files = {file.stem: file for file in KERNELS.glob("[!_]*.py")}
    exports = _exports(KERNELS, package)
    waiting = [exports.get(name, name) for name in names]
    found: set[str] = set()
    while waiting:
        one = waiting.pop()
        if one in files and one not in found:
            found.add(one)
            waiting += [module or alias.name for module, alias in _imported(_parsed(files[one]), package)]
    return [files[each] for each in sorted(found)]


def _imported(tree: ast.AST, package: str) -> list[tuple[str, ast.alias]]:
    """What code imports from a package: of each name its module there ("" for a module itself)."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            module = (node.module or "").removeprefix(package).removeprefix(".")
            found += [(module, alias) for alias in node.names]
    return found


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def dump(node: Any) -> str:
    """A syntax tree as text, without docstrings, places and empty fields: the same with each Python."""
    if isinstance(node, list):
        texts = [each for each in node if not (isinstance(each, ast.Expr) and _is_text(each.value))]
        return f"[{', '.join(map(dump, texts))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    return f"{type(node).__name__}({', '.join(f'{name}={dump(value)}' for name, value in fields.items())})"


def _is_text(node: ast.AST) -> bool:
    """Whether an expression that stands alone is a text, and so documents something."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
