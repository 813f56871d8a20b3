"""Judges answers, in a process where Triton interprets and no GPU is seen.

So a verdict is the same on every machine. `lesson` calls ``prepare`` once in a process, which takes seconds,
and ``judge_file`` in a fork of it for each answer (`labkit.child_process`).
"""

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from labkit import child_process
from labkit.exercises import engine, slips
from labkit.exercises.engine import Call, Exercise, Finding
from labkit.lessons import notebooks
from labkit.measure import correctness
from labkit.profiling import codegen

FENCE = 2**18
"""Elements around each tensor that are watched: further than any tile of an exercise reaches."""


def environment() -> Mapping[str, str]:
    """The same on every machine: Triton interprets, no GPU is seen, nobody presses buttons."""
    return os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "LABKIT_HEADLESS": "1",
        "MPLBACKEND": "Agg",
    }


def prepare(lesson: str, compiler: child_process.Forkserver) -> None:
    """Load the lesson's setup and kernel cells and its exercises; ``compiler`` compiles for the forks."""
    from labkit.exercises import interpreted

    codegen.use_server(compiler)
    interpreted.as_compiled()
    find(lesson)
    notebooks.load(lesson)


@cache
def find(lesson: str) -> dict[str, Exercise]:
    """The exercises of a lesson by name, in order; ValueError for a lesson without any."""
    file = notebooks.resolve(lesson)
    file = file.parent / "exercises" / f"{file.stem}.py"
    if not file.exists():
        raise ValueError(f"lesson: there are no exercises for {lesson!r}")
    name = f"labkit_exercises_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {each.name: each for each in vars(module).values() if isinstance(each, Exercise)}


def judge_file(lesson: str, name: str, file: Path) -> Finding:
    """The finding for the cell in a file that hands in an answer to an exercise."""
    namespace = vars(notebooks.load(lesson))  # again: the notebook may have been saved meanwhile
    exercise = find(lesson)[name]
    try:
        answer = run_cell(lesson, namespace, exercise, file)
        return judge(exercise, answer, file) if answer else Finding("error", UNCHECKED)
    except BaseException as error:  # SystemExit too: whatever it is, the learner's code raised it
        return raised(exercise, error, file, namespace)


UNCHECKED = "The cell came to its end without its last line, tasks.check(...)."


def judge(exercise: Exercise, answer: Any, file: Path) -> Finding:
    """Call an answer on all cases, in every dtype and layout; the finding for the first that is not right.

    ``answer`` is a tuple of one: what the cell handed in.
    """
    first = exercise.dtypes[0]
    phases = [(first, layout) for layout in exercise.layouts]
    phases += [(dtype, "contiguous") for dtype in exercise.dtypes[1:]]
    done: list[Call] = []
    for number, (dtype, layout) in enumerate(phases):
        cases = exercise.cases if number else (*exercise.cases, *exercise.large)
        calls = [_call(exercise, answer[0], case, dtype, layout) for case in cases]
        found = _shared(done + calls) or engine.compare(exercise, calls)
        if found is not None and found.status == "error":
            broken = next(call for call in calls if call.error is not None)
            assert broken.error is not None
            return raised(exercise, broken.error, file, {}, str(broken), calls)
        if found is not None:
            return found
        done += calls
    return _again(exercise, answer[0], done) or _compiled(exercise, done, file) or _right(exercise, done)


def _call(
    exercise: Exercise, answer: Any, case: tuple[Any, ...], dtype: torch.dtype | None, layout: str
) -> Call:
    from labkit.exercises import interpreted

    torch.manual_seed(0)
    drawn = exercise.inputs(*case)
    fences = Fences()
    inputs = {name: _cast(value, dtype) for name, value in drawn.items()}
    given = {name: copy(value) if isinstance(value, list) else value for name, value in inputs.items()}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.numel():
            inputs[name] = fences.place(value, layout if value.dim() else "contiguous")
    call = Call(case, dtype, layout, inputs, given, None)
    try:
        with fences, interpreted.watched() as call.launches:  # what the fences do is no launch
            call.got = exercise.call(answer, *inputs.values())
    except Exception as error:
        call.error = error
    call.stray, call.loads_outside = fences.broken(), fences.crossed(call.launches.loads)
    if dtype is None:  # objects such as a pretend GPU have been used
        torch.manual_seed(0)
        given = exercise.inputs(*case)
    call.want = engine.want(exercise, given)
    return call


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and dtype else value


class Fences(correctness.Fences):
    """Fences around what a call allocates with values, too."""

    def __init__(self) -> None:
        super().__init__(FENCE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket not in _WITH_VALUES or not made.numel():
            return made
        room = self.allocate(made.untyped_storage().nbytes() // made.element_size(), made)
        return room.as_strided(made.size(), made.stride(), room.storage_offset()).copy_(made)

    def crossed(self, addresses: list[np.ndarray]) -> int:
        """How many of these addresses lie in a fence."""
        read = np.unique(np.concatenate(addresses)) if addresses else np.zeros(0)
        found = 0
        for block, count, _ in self._blocks:
            size, first = block.element_size(), block.data_ptr()
            inner = (read >= first + FENCE * size) & (read < first + (FENCE + count) * size)
            whole = (read >= first) & (read < first + len(block) * size)
            found += int((whole & ~inner).sum())
        return found


_WITH_VALUES = {
    getattr(torch.ops.aten, name)
    for name in (
        "clone", "_to_copy", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like",
        "new_zeros", "new_ones", "new_full",
    )
}  # fmt: skip


def _shared(calls: list[Call]) -> Finding | None:
    """Whether the result of one call lies in the memory of another's: it is right only until then."""
    seen: set[int] = set()
    for call in calls:
        tensors = [each for each in tree_leaves(call.got) if isinstance(each, Tensor) and each.numel()]
        memory = {each.untyped_storage().data_ptr() for each in tensors}
        if call.launches.kernels and memory & seen:
            observed = "A later call handed back the memory of an earlier call's result."
            return Finding("wrong", observed, "reused", hints=REUSED)
        seen |= memory
    return None


def _again(exercise: Exercise, answer: Any, done: list[Call]) -> Finding | None:
    """Whether results are still right after another call, on the first call's inputs."""
    calls = [call for call in done if call.launches.kernels]
    if not calls:
        return None
    again = replace(calls[0], got=exercise.call(answer, *calls[0].inputs.values()))
    for call in calls:
        if found := engine.difference(call.got, call.want, engine.tolerance(exercise, call)):
            return Finding("wrong", f"{call}: after later calls, {found}.", "reused", hints=REUSED)
    return _shared([*calls, again])


REUSED = (
    "What happens to the first result when somebody calls your function again?",
    "Make the result anew in each call: torch.empty_like costs next to nothing.",
)


def _compiled(exercise: Exercise, done: list[Call], file: Path) -> Finding | None:
    """What the compiler for a GPU refuses though it is right when interpreted."""
    if not exercise.compiles:
        return None
    half = [call for call in done if call.dtype is torch.float16] or done
    kernels = [one for call in (done[-1], half[0]) for one in call.launches.kernels[:1]]
    try:
        codegen.compile_many([_request(*each) for each in kernels])
    except codegen.CompileError as error:
        message = next(filter(None, reversed(str(error).strip().splitlines())), "")
        found = _explained(exercise, f"CompileError: {message}", "")
        hints = found.hints if "{" not in "".join(found.hints) else ()
        observed = f"Interpreted it is right, but the compiler for a GPU (sm_90) refuses it: {message}"
        return Finding("wrong", observed, found.name if hints else "", hints=hints)
    return None


def _request(kernel: Any, given: dict[str, Any]) -> codegen.Request:
    options = {name: given[name] for name in ("num_warps", "num_stages") if given.get(name)}
    arguments = {name: value for name, value in given.items() if name in kernel.arg_names}
    return codegen.request(kernel, arguments, target="sm_90", **options)


def _right(exercise: Exercise, done: list[Call]) -> Finding:
    kinds = [engine._name(dtype) for dtype in exercise.dtypes if dtype is not None]
    cases = len(exercise.cases) + len(exercise.large)
    said = [f"{cases} cases"] * (cases > 1) + kinds
    said += [f"{len(exercise.layouts)} layouts"] * (len(exercise.layouts) > 1)
    calls = f"{len(done)} calls are right ({', '.join(said)}). " if len(done) > 1 else ""
    observed = f"{calls}{exercise.right}".strip()
    return Finding("right", observed, checks=len(done))


# ---- running a cell ----------------------------------------------------------------------------------------


class _HandedIn(BaseException):
    """Leaves the cell at its check; not an Exception, which the cell itself might catch."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class _Desk:
    """Stands for ``tasks`` in the cell."""

    def __init__(self, lesson: str, exercise: Exercise) -> None:
        self._lesson, self._exercise = lesson, exercise

    def check(self, name: str, answer: Any) -> None:
        if name == self._exercise.name:
            raise _HandedIn(answer)

    def answer(self, name: str) -> Any:
        """The solution's: the learner's own lives in the notebook."""
        return getattr(solutions(self._lesson), find(self._lesson)[name].answer)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Solution, reset, progress, race: of these the learner's notebook shows something."""
        return lambda *args, **options: None


def run_cell(lesson: str, namespace: dict[str, Any], exercise: Exercise, file: Path) -> tuple[Any, ...]:
    """What the cell hands in; () when it ends without a check."""
    # A module by this name: Triton, inspect and dataclasses look the source up through it.
    title = f"labkit_attempt_{exercise.name}"
    module = ModuleType(title)
    own = {"__name__": title, "__file__": str(file), "tasks": _Desk(lesson, exercise)}
    module.__dict__.update(namespace | own)
    sys.modules[title] = module
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    except _HandedIn as handed:
        return (handed.answer,)
    return ()


def solutions(lesson: str) -> ModuleType:
    """The file of solutions as a module: Triton reads the source of a kernel from its file."""
    file = notebooks.solutions_file(notebooks.resolve(lesson))
    return codegen.load_module(f"labkit_solutions_{file.stem}", str(file))


# ---- exceptions --------------------------------------------------------------------------------------------


def raised(
    exercise: Exercise,
    error: BaseException,
    file: Path,
    namespace: Mapping[str, Any],
    call: str = "",
    calls: list[Call] | None = None,
) -> Finding:
    """The finding for an exception, with hints at what it usually means."""
    observed, where = _message(error), _where(error, file)
    mistake = _explained(exercise, observed, where, calls)
    missing = re.search(r"'(\w+)'", observed)
    facts = {
        "name": missing[1] if missing else "it",
        "seen": ", ".join(_seen(error, file, namespace)) or "none of yours",
        "given": ", ".join(_given(namespace)) or "torch, triton and tl",
    }
    hints = tuple(_filled(hint, facts) for hint in mistake.hints)
    return Finding("error", f"{observed}" + f" ({call})" * bool(call), mistake.name, where, hints)


def _filled(hint: str, facts: Mapping[str, str]) -> str:
    for name, value in facts.items():
        hint = hint.replace(f"{{{name}}}", value)
    return hint


def _explained(
    exercise: Exercise, observed: str, where: str, calls: list[Call] | None = None
) -> engine.Mistake:
    told = f"{observed}\n{where}"
    own = [
        each
        for each in exercise.mistakes
        if each.raises and (each.when is None or (calls is not None and each.when(calls)))
    ]
    return next(each for each in (*own, *slips.SLIPS) if re.search(each.raises, told))


def _seen(error: BaseException, file: Path, namespace: Mapping[str, Any]) -> list[str]:
    """The answer's own names at its line that was running."""
    for one in reversed(list(_chain(error))):
        frames = [frame for frame, _ in traceback.walk_tb(one.__traceback__)]
        own = [frame for frame in frames if frame.f_code.co_filename == str(file)]
        if own:
            names = [name for name in own[-1].f_locals if not name.startswith("_")]
            return names if own[-1].f_code.co_name != "<module>" else [n for n in names if n not in namespace]
    return []


def _given(namespace: Mapping[str, Any]) -> list[str]:
    """What the lesson has for the cell: modules from elsewhere, and its own functions and kernels."""

    def fits(value: Any) -> bool:
        if isinstance(value, ModuleType):
            return not value.__name__.startswith("labkit")
        return getattr(getattr(value, "fn", value), "__module__", None) == namespace.get("__name__")

    return sorted(name for name, value in namespace.items() if not name.startswith("_") and fits(value))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, the last one first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _message(error: BaseException) -> str:
    cause = list(_chain(error))[-1] if type(error).__name__ == "InterpreterError" else error
    text = str(cause)[:500]
    if isinstance(cause, MemoryError):
        text = "it needed more memory than an answer may have, a quarter of this machine's"
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _where(error: BaseException, file: Path) -> str:
    """The answer's own line that was running, "line 3: ..."; empty when none of its lines was."""
    for one in reversed(list(_chain(error))):
        if isinstance(one, SyntaxError) and one.filename == str(file):
            return f"line {one.lineno}: {(one.text or '').strip()}"
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if frame.filename == str(file)]
        if frames:
            return f"line {frames[-1].lineno}: {frames[-1].line}"
    return ""


# ---- other ends --------------------------------------------------------------------------------------------


def ended(error: BaseException, file: Path, limit_s: float, lesson: str) -> Finding:
    """The finding for a process that came to another end than a verdict."""
    where = _traced(file, "\n".join(getattr(error, "__notes__", ())))
    if isinstance(error, KeyboardInterrupt):
        return Finding("interrupted", f"You stopped it. {LOST}", where=where)
    if isinstance(error, TimeoutError):
        observed = f"It was still running after {limit_s:g} s, and was ended. {LOST}"
        return Finding("stopped", observed, "endless", where, ENDLESS)
    if getattr(error, "raised", False):
        observed = f"The lesson's own cells of kernels, as they were last saved, do not run: {error}\n{FRESH}"
        return Finding("error", observed.format(lesson), "lesson")
    observed = f"The process that ran your code is gone: {error}. {LOST}"
    wild = re.search(r"\.(load|store)\(", where) is not None
    return Finding("crashed", observed, "wild" if wild else "", where, WILD if wild else ())


LOST = "Nothing of your notebook is lost."
FRESH = "Undo what you changed there, or restart from a fresh copy of {}."
ENDLESS = (
    "Does a loop never end? The line that was running, where it could be told, stands above.",
    "Print what the loop's condition depends on, inside the loop: what is printed appears above.",
)
WILD = (
    "This load or store went to a wild address. Every place has to be inside its tensor, or masked.",
    "Print the smallest and the largest of your places in the last program, and compare with the size.",
)


def _traced(file: Path, trace: str) -> str:
    """The answer's innermost line in the traceback of a process, "line 3: ..."; "" where there is none."""
    found = re.search(rf'File "{re.escape(str(file))}", line (\d+) in', trace)
    if found is None:
        return ""
    number = int(found[1])
    return f"line {number}: {file.read_text(encoding='utf-8').splitlines()[number - 1].strip()}"
