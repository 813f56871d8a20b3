"""The stamp of a row: a hash of what was measured. An edit of that makes the row stale, and no other one.

What is measured stands in a lesson's cells tagged ``kernel`` or ``way``, in its solutions, in
``labkit.kernels`` and in ``labkit.work``. Syntax trees are hashed, without docstrings, so neither a comment
nor the formatting counts. Of the cells, and of ``labkit.work``, those definitions count that the measured
function, or the work, reaches by name; of ``labkit.kernels`` whole files, those that are reached by import
statements. The clock, and the copy beside which everything is timed, count for every row.
"""

import ast
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from labkit import notebooks, paths

MEASURED = {"kernel", "way"}
"""Tags of the cells that define what may be measured."""
REACHED = {"setup", *MEASURED}
"""Tags of the cells whose definitions count where they are reached from there."""
KERNELS, WORK = paths.PACKAGE / "kernels", paths.PACKAGE / "work"
CLOCK = [paths.PACKAGE / "measure" / f"{name}.py" for name in ("clocks", "copies")]
Definitions = dict[str, list[ast.stmt]]
"""By name the statements that define it, each import and each redefinition too."""


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


# ---- cells and solutions -----------------------------------------------------------------------------------


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


# ---- labkit's own files ------------------------------------------------------------------------------------


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
