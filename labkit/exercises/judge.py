"""Judges answers: a cell's source, run in a process of its own, becomes a finding.

In that process Triton interprets and no GPU is seen, so a finding is the same on every machine. The notebook
calls ``judge_in_child``. A preloaded process (``process``) forks for it, and the fork runs ``judge_file``. A
kernel that is right when interpreted is then compiled for a GPU.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from labkit import child_process, interpreter, notebooks
from labkit.exercises import common_hints, engine, symptoms, vast
from labkit.exercises.engine import ALTERNATING, Call, Exercise, Finding
from labkit.measure import codegen, correctness, launch_counts

GUARD_ELEMENTS = 2**17
"""Elements around each tensor that are watched: further than any tile of an exercise reaches."""
ENVIRONMENT = dict(
    TRITON_INTERPRET="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", LABKIT_HEADLESS="1", MPLBACKEND="Agg"
)
"""The same on every machine: Triton interprets, no GPU is seen, nobody presses buttons."""
SHARED_BYTES, WARPS = 227 * 1024, 32
"""What a program may have on a GPU of compute capability 9.0 (CUDA C++ Programming Guide, table of technical
specifications)."""
REPEATED_CALLS = 4
"""The smallest case is called so often again: a ring of so many results hands one of them back."""
NOTHING_IS_LOST = "Nothing of your notebook is lost."


# ---- the notebook's process --------------------------------------------------------------------------------


def judge_in_child(
    lesson: str, name: str, file: Path, own: Path | None = None, *, seconds: float, **limits: Any
) -> Finding:
    """The finding for the cell in a file that hands in an answer to an exercise.

    ``own`` is the learner's copy of the notebook, whose kernel cells count in place of the published ones.
    The answer may run for so many seconds, and its kernels may take as many to compile; ``limits`` are
    ``memory`` and ``show`` of `PreloadedProcess.run`. Whatever it does becomes a finding, not an exception.
    """
    try:
        finding: Finding
        finding, kernels = process(lesson).run(
            judge_file, lesson, name, file.resolve(), own, seconds=seconds, **limits
        )
        compiled = codegen.compile_many(kernels, seconds)
    except (codegen.CompileError, ValueError) as error:
        return _refused(find(lesson)[name], error)
    except (TimeoutError, KeyboardInterrupt, child_process.ChildError) as error:
        return explain_end(error, file, seconds, lesson)
    for each in compiled:
        if each.shared_bytes > SHARED_BYTES or each.num_warps > WARPS:
            asks = f"{each.shared_bytes / 1024:.0f} KB of shared memory and {each.num_warps} warps a program"
            has = f"{SHARED_BYTES // 1024} KB and {WARPS}"
            observed = f"Interpreted it is right, but {each.kernel} asks for {asks}. An H100 has {has}."
            return Finding("wrong", observed, "too-much", hints=common_hints.TOO_MUCH)
        wanted = find(lesson)[name].compiled
        if wanted is not None and (problem := wanted.problem(each)):
            return Finding("wrong", problem, wanted.name, hints=wanted.hints)
    return finding


@cache
def process(lesson: str) -> child_process.PreloadedProcess:
    """The process that judges this session's answers to a lesson's exercises; it loads the lesson at once."""
    codegen.compile_server()  # gets ready, too
    return child_process.PreloadedProcess(prepare, lesson, environment=os.environ | ENVIRONMENT)


def _refused(exercise: Exercise, error: Exception) -> Finding:
    """The finding for a kernel that the compiler refuses though it is right when interpreted."""
    message = next(filter(None, reversed(str(error).strip().splitlines())), "")
    name, hints = symptoms.matching_mistake(exercise, f"CompileError: {message}\n")
    observed = f"Interpreted it is right, but the compiler for a GPU (sm_90) refuses it: {message}"
    if "{" in "".join(hints):  # nothing is known of the names on its line
        name, hints = "", ()
    return Finding("wrong", observed, name, hints=hints)


def explain_end(error: BaseException, file: Path, limit_s: float, lesson: str) -> Finding:
    """The finding for a process that ended without a finding."""
    trace = "\n".join(getattr(error, "__notes__", ()))
    number = re.search(rf'File "{re.escape(str(file))}", line (\d+) in', trace)
    where = ""
    if number is not None:
        line = file.read_text(encoding="utf-8").splitlines()[int(number[1]) - 1]
        where = f"line {number[1]}: {line.strip()}"
    if isinstance(error, KeyboardInterrupt):
        return Finding("interrupted", f"You stopped it. {NOTHING_IS_LOST}", where=where)
    if isinstance(error, TimeoutError):
        observed = f"It was still running after {limit_s:g} s, and was ended. {NOTHING_IS_LOST}"
        return Finding("stopped", observed, "endless", where, common_hints.ENDLESS)
    if not isinstance(error, child_process.ChildDiedError):
        observed = (
            f"The lesson's own cells of kernels, as they were last saved, do not run: {error}\n"
            f"Undo what you changed there, or restart from a fresh copy of {lesson}."
        )
        return Finding("error", observed, "lesson")
    observed = f"The process that ran your code is gone: {error}. {NOTHING_IS_LOST}"
    if re.search(r"\.(load|store)\(", where) or re.search("SIG(SEGV|BUS|ABRT)", str(error)):
        return Finding("crashed", observed, "wild", where, common_hints.WILD_ADDRESS)
    return Finding("crashed", observed, where=where)


# ---- the process that judges -------------------------------------------------------------------------------


def prepare(*lessons: str) -> None:
    """Do once, before the forks: patch the interpreter, load the lessons' kernel cells and exercises."""
    interpreter.patch()
    # The first launch, the first operation that is watched (for it PyTorch imports its compiler), the first
    # tensor without memory, the first random numbers: each imports much, for seconds. No fork should do that.
    codegen.empty_kernel[(1,)](torch.zeros(1))
    with launch_counts.recording():
        torch.zeros(1)
    abs(torch.randn(1, device="meta")), np.random.default_rng(0)
    for lesson in lessons:
        with suppress(Exception):  # what does not run is told of when there is an answer to judge
            find(lesson), notebooks.load(lesson), solutions(lesson)


@cache
def find(lesson: str) -> dict[str, Exercise]:
    """The exercises of a lesson by name, in order. An aside has none."""
    path = notebooks.resolve(lesson)
    file = path.parent / "exercises" / f"{path.stem}.py"
    if not file.exists():
        return {}
    found = vars(notebooks.import_file(f"labkit_exercises_{file.stem}", file))
    return {name: replace(each, name=name) for name, each in found.items() if isinstance(each, Exercise)}


def judge_file(
    lesson: str, name: str, file: Path, own: Path | None = None
) -> tuple[Finding, list[codegen.CompileRequest]]:
    """The finding for the cell in a file, and kernels that have to compile where it is right."""
    namespace = vars(notebooks.load(own or lesson))  # again: the notebook may have been saved meanwhile
    exercise = find(lesson)[name]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what an answer writes or deletes there is nobody's
        try:
            return judge(exercise, run_cell(lesson, namespace, exercise, file), file)
        except NotCheckedError as error:
            return Finding("error", str(error)), []
        except BaseException as error:  # SystemExit too: whatever it is, the learner's code raised it
            return symptoms.of_exception(exercise, error, file, namespace), []


class NotCheckedError(Exception):
    """A cell that came to its end without handing in an answer."""


class AnswerHandedIn(BaseException):
    """Leaves the cell at its check with the answer; not an Exception, which the cell itself might catch."""


class CellTasks:
    """Stands for ``tasks`` in a cell that is judged."""

    def __init__(self, lesson: str, exercise: Exercise) -> None:
        self._lesson, self._exercise = lesson, exercise

    def check(self, name: str, answer: Any, *beside: Any) -> None:
        if name == self._exercise.name:
            raise AnswerHandedIn(answer)

    def answer(self, name: str) -> Any:
        """The solution's: the learner's own answer lives in the notebook."""
        if name == self._exercise.name:
            raise NotCheckedError("tasks.answer gives the solution. This cell wants an answer of your own.")
        return getattr(solutions(self._lesson), find(self._lesson)[name].answer)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Solution, reset, progress, race: of these the learner's notebook shows something."""
        return lambda *args, **options: None


def run_cell(lesson: str, namespace: dict[str, Any], exercise: Exercise, file: Path) -> Any:
    """What the cell in a file hands in; NotCheckedError when it ends without a check."""
    # A module by this name: Triton, inspect and dataclasses look the source up through it.
    title = f"labkit_attempt_{exercise.name}"
    module = sys.modules[title] = ModuleType(title)
    special = {"__name__": title, "__file__": str(file), "tasks": CellTasks(lesson, exercise)}
    module.__dict__.update(namespace | special)
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    except AnswerHandedIn as handed_in:
        return handed_in.args[0]
    raise NotCheckedError("The cell came to its end without its last line, tasks.check(...).")


def solutions(lesson: str) -> ModuleType:
    """The file of solutions as a module: Triton reads the source of a kernel from its file."""
    file = notebooks.solutions_file(notebooks.resolve(lesson))
    return codegen.load_module(f"labkit_solutions_{file.stem}", str(file))


# ---- calls -------------------------------------------------------------------------------------------------


def judge(exercise: Exercise, answer: Any, file: Path) -> tuple[Finding, list[codegen.CompileRequest]]:
    """Call an answer on all cases, in every dtype and layout; the finding for the first that is not right.

    With it come the kernels that have to compile for a GPU: none where something is wrong.
    """
    phases = [(exercise.dtypes[0], layout) for layout in exercise.layouts]
    phases += [(dtype, "contiguous") for dtype in exercise.dtypes[1:]]
    done: list[Call] = []
    for number, (dtype, layout) in enumerate(phases):
        calls = [_call(exercise, answer, case, dtype, layout) for case in exercise.cases]
        finding = _finding(exercise, calls, file)
        # Large cases take seconds. They are for what small ones don't tell: whether it is right, or why not.
        told = finding is not None and (finding.status == "error" or finding.mistake in exercise.mistakes)
        # PyTorch in a kernel's place would fill the memory with results of a thousand steps.
        launched = exercise.dtypes == (None,) or any(call.launches.kernels for call in calls)
        if not number and launched and not told:
            calls += [_call(exercise, answer, case, dtype, layout) for case in exercise.large]
            finding = _finding(exercise, calls, file)
        if found := _reused_memory(done + calls) or finding:
            return found, []
        done += calls
    first = [call for call in done if call.launches.kernels][:1] * REPEATED_CALLS
    again = [replace(call, got=exercise.call(answer, *call.passed.values())) for call in first]
    if found := _reused_memory([*done, *again]) or _called_again(exercise, answer):
        return found, []
    found, at_size = vast.run(exercise, answer, file)
    return (found, []) if found else (_right(exercise, done), _kernels(exercise, at_size, done))


def _finding(exercise: Exercise, calls: list[Call], file: Path) -> Finding | None:
    """What is wrong in these calls, and why; None where nothing is."""
    problem = engine.first_problem(exercise, calls)
    if problem is None:
        return None
    if problem.call.error is not None:
        return symptoms.of_exception(exercise, problem.call.error, file, {}, str(problem.call))
    finding = engine.explain(exercise, problem, calls)
    if finding.mistake:
        return finding
    return engine.explain(replace(exercise, mistakes=symptoms.of(exercise, calls)), problem, calls)


class _MadeAnywhere(TorchFunctionMode):
    """Collects the tensors that are made without saying where, or on the CPU by its name."""

    factories = frozenset(
        {
            torch.empty,
            torch.zeros,
            torch.ones,
            torch.full,
            torch.rand,
            torch.randn,
            torch.arange,
            torch.tensor,
        }
    )
    like = frozenset(  # not new_empty, with which Triton's interpreter sees tensors as the CPU's
        {
            torch.empty_like,
            torch.zeros_like,
            torch.ones_like,
            torch.full_like,
            Tensor.new_zeros,
            Tensor.new_ones,
            Tensor.new_full,
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, device = func(*args, **(kwargs or {})), (kwargs or {}).get("device")
        if func is Tensor.to and any(isinstance(each, torch.device) for each in (*args[1:], device)):
            self.made = [each for each in self.made if each.data_ptr() != made.data_ptr()]  # moved to x's
        by_name = [each for each in (*args[1:], device) if isinstance(each, str)]  # x.device is no text
        nowhere = func in self.factories and not device
        placed = func in self.factories or func in self.like or func is Tensor.to
        if nowhere or func is Tensor.cpu or (placed and "cpu" in by_name):
            self.made.append(made)
        return made


def _called_again(exercise: Exercise, answer: Any) -> Finding | None:
    """Whether a right answer is wrong for other numbers in tensors of the same shapes, or not on the GPU.

    That is, whether it returns a tensor, or gives one to a kernel, that would be on the CPU there.
    """
    if exercise.dtypes == (None,):  # it has no kernel
        return None
    watched = _MadeAnywhere()
    for layout in (exercise.layouts[-1], "contiguous"):
        call = _call(exercise, answer, exercise.cases[-1], exercise.dtypes[0], layout, watched, seed=1)
        allowed = engine.tolerance(exercise, call)
        if call.error is None and (wrong := engine.difference(call.got, call.want, allowed)):
            observed = f"Called again, with other numbers in tensors of the same shapes: {wrong}."
            return Finding("wrong", observed, "stale", hints=common_hints.STALE)
    used = tree_leaves([call.got, [given for _, given in call.launches.kernels]])
    memory = {each.untyped_storage().data_ptr() for each in used if isinstance(each, Tensor) and each.dim()}
    if not any(each.untyped_storage().data_ptr() in memory for each in watched.made if each.dim()):
        return None
    observed = "On a machine with a GPU a tensor would be on the CPU: one that you made, or moved there."
    return Finding("wrong", observed, "device", hints=common_hints.DEVICE)


def _call(
    exercise: Exercise,
    answer: Any,
    case: tuple[Any, ...],
    dtype: torch.dtype | None,
    layout: str,
    within: AbstractContextManager[Any] | None = None,
    seed: int = 0,
) -> Call:
    def cast(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats and dtype else value

    torch.default_generator.manual_seed(seed)  # without a word to GPUs, which takes a millisecond
    inputs = {name: cast(value) for name, value in exercise.inputs(*case).items()}
    given, fences = dict(inputs), JudgeGuardZones()
    several = 0  # tensors of two dimensions and more: those that can be transposed
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.numel():
            several += value.dim() > 1
            own = ("transposed", "contiguous")[several % 2] if layout == ALTERNATING else layout
            inputs[name] = fences.place(value, own if value.dim() else "contiguous")
    call = Call(case, dtype, layout, inputs, given, None)
    try:
        # not what the fences do
        with within or nullcontext(), fences, launch_counts.recorded() as call.launches:
            call.got = exercise.call(answer, *inputs.values())
    except Exception as error:
        call.error = error
    call.stored_outside, call.loaded_outside = fences.broken(), fences.crossed(call.launches.loads)
    call.want = exercise.reference(*engine.reference_arguments(exercise, call))
    return call


class JudgeGuardZones(correctness.GuardZones):
    """Guard zones around everything that a call makes, uninitialised or not."""

    def __init__(self) -> None:
        super().__init__(GUARD_ELEMENTS)

    def watches(self, func: Any, made: Any) -> bool:
        is_new = all(value.alias_info is None for value in func._schema.returns)
        return is_new and isinstance(made, Tensor) and made.numel() > 0

    def crossed(self, addresses: list[np.ndarray]) -> int:
        """How many of these addresses lie in a fence."""
        read = np.unique(np.concatenate(addresses)) if addresses else np.zeros(0)
        found = 0
        for block, count, _ in self._blocks:
            place = (read.astype(np.int64) - block.data_ptr()) // block.element_size()
            inside = (place >= GUARD_ELEMENTS) & (place < GUARD_ELEMENTS + count)
            found += int(((place >= 0) & (place < len(block)) & ~inside).sum())
        return found


def _reused_memory(calls: list[Call]) -> Finding | None:
    """Whether the result of one call lies in the memory of another's: it is right only until then."""
    seen: set[int] = set()
    for call in calls:
        tensors = [each for each in tree_leaves(call.got) if isinstance(each, Tensor) and each.numel()]
        memory = {each.untyped_storage().data_ptr() for each in tensors}
        if call.launches.kernels and memory & seen:
            observed = "A later call handed back the memory of an earlier call's result."
            return Finding("wrong", observed, "reused", hints=common_hints.REUSED_MEMORY)
        seen |= memory
    return None


def _kernels(exercise: Exercise, at_size: list[Call], done: list[Call]) -> list[codegen.CompileRequest]:
    """Kernels to compile for a GPU: of the first vast case, or of the last call, and of one in float16."""
    large = [call for call in at_size if call.case == exercise.vast[0]]
    half = [call for call in done if call.dtype is torch.float16]
    requests = {}
    for call in (*(large or done[-1:]), *half[:1]):
        for kernel, given in call.launches.kernels:
            options = {name: given[name] for name in ("num_warps", "num_stages") if given.get(name)}
            arguments = {name: value for name, value in given.items() if name in kernel.arg_names}
            made = codegen.request(kernel, arguments, target="sm_90", **options)
            requests[made.kernel, call.dtype, call.case] = made
    return list(requests.values())


def _right(exercise: Exercise, done: list[Call]) -> Finding:
    dtypes = [correctness.dtype_name(dtype) for dtype in exercise.dtypes if dtype is not None]
    cases = len(exercise.cases) + len(exercise.large)
    kinds = [f"{cases} cases"] * (cases > 1) + dtypes
    kinds += [f"{len(exercise.layouts)} layouts"] * (len(exercise.layouts) > 1)
    calls = f"{len(done)} calls are right ({', '.join(kinds)}). " if len(done) > 1 else ""
    return Finding("right", f"{calls}{exercise.right}".strip(), checks=len(done))
