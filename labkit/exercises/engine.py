"""An exercise as data: a reference, cases, plausible mistakes with their hints, and properties of a kernel.

``notebooks/exercises/NN_name.py`` holds the exercises of a lesson. ``judge`` compares an answer with the
reference on all cases. An answer that behaves like a plausible mistake on all of them gets that mistake's
hints. One that behaves like none gets the smallest case where it differs, with the numbers.
"""

import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from labkit.exercises import common_hints
from labkit.measure import correctness
from labkit.measure.clocks import Cache, Clock
from labkit.measure.correctness import dtype_name
from labkit.measure.launch_counts import Recorded
from labkit.work import Shape

ALTERNATING = "every other input transposed"
"""A layout for inputs together: what takes its addresses from the strides of another input is wrong in it."""
JudgeStatus = Literal["not attempted", "right", "wrong", "error", "stopped", "crashed", "interrupted"]


@dataclass
class Call:
    """One call of an answer, and everything that it did."""

    case: tuple[Any, ...]
    dtype: torch.dtype | None
    """Of the tensors; None for an exercise without any."""
    layout: str
    passed: dict[str, Any]
    """Arguments passed to the answer."""
    originals: dict[str, Any]
    """Their values before the call."""
    want: Any
    got: Any = None
    error: BaseException | None = None
    launches: Recorded = field(default_factory=Recorded)
    stored_outside: int = 0
    """Elements from a tensor's end to the farthest store outside of it; 0 when there was none."""
    loaded_outside: int = 0
    """Addresses outside of all tensors, but near one, that were loaded."""

    def result_tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor of the result with the right one."""
        got, want = (each if isinstance(each, tuple) else (each,) for each in (self.got, self.want))
        if len(got) != len(want):  # the wrong form, which is told
            return []
        return [(mine, right) for mine, right in zip(got, want, strict=True) if isinstance(right, Tensor)]

    def __str__(self) -> str:
        shown = {name: short(value) + _numbers_of(value) for name, value in self.originals.items()}
        inputs = ", ".join(f"{name} {value}" for name, value in shown.items() if not value.startswith("<"))
        dtype = "" if self.dtype is None else f" in {dtype_name(self.dtype)}"
        return f"With {inputs}{dtype}" + (f", {self.layout}" if self.layout != "contiguous" else "")


class Mistake:
    """Something that people do, and hints, each one leading a step further.

    An answer makes it when it behaves so on all cases: it returns what ``gives`` returns (several functions
    are variants of it), or its exception and the line that raised it match the regular expression ``raises``,
    or ``when`` finds it in the calls. Each mistake has one of these.
    """

    def __init__(
        self,
        *hints: str,
        gives: Callable[..., Any] | tuple[Callable[..., Any], ...] = (),
        raises: str = "",
        when: Callable[[Sequence[Call]], bool] | None = None,
    ) -> None:
        self.hints, self.raises, self.when = hints, raises, when
        self.gives = (gives,) if callable(gives) else gives


class Property:
    """A requirement beyond right values: one launch, no store outside.

    ``problem(call)`` returns a sentence, or "" (for an exercise's ``compiled`` it gets a kernel). It is
    checked after the values, or ``before_values`` if it can explain wrong ones; in all layouts, or in
    ``contiguous_only`` if others may be copied first.
    """

    def __init__(
        self,
        name: str,
        problem: Callable[[Any], str],
        *hints: str,
        before_values: bool = False,
        contiguous_only: bool = False,
    ) -> None:
        self.name, self.problem, self.hints = name, problem, hints
        self.before_values, self.contiguous_only = before_values, contiguous_only


@dataclass(frozen=True)
class RaceSpec:
    """What an answer is timed beside (``rivals``, functions by name), on which work, sizes and dtype.

    A rival named 'torch.compile' is compiled before it is timed.
    """

    work: Any
    """A `labkit.work.Work`."""
    rivals: Mapping[str, Callable[..., Any]]
    sizes: tuple[Shape, ...]
    dtype: str = "bfloat16"
    roundings: int = 1
    """How many tensors in 16 bits a result passes through, itself included."""
    direction: str = "forward"
    """What is timed; "backward" is for an answer that computes gradients."""
    as_layer: Callable[[Callable[..., Any]], Callable[..., Tensor]] = lambda answer: answer
    """Makes of the answer what does the work, such as a layer whose backward it is."""
    works: Mapping[str, Any] = field(default_factory=dict)
    """The work of a rival that takes the same inputs in another layout."""
    clocks: tuple[Clock, ...] = ("graph",)
    cache: Cache = "cold"
    counted: bool = True
    """Whether launches and bytes, counted without a GPU, tell the ways apart: those of products do not."""


@dataclass(frozen=True)
class Exercise:
    """A task of a lesson. Its name is the variable's in ``notebooks/exercises/NN_name.py``.

    ``inputs(*case)`` draws the arguments of one call by name: float32 tensors on the CPU, numbers, objects.
    ``reference(*arguments)`` is right, in float64 where arguments are tensors. ``call(answer, *arguments)``
    calls an answer that is not simply called. Results are tensors, numbers, or a dict of facts by name.
    """

    title: str
    answer: str
    """What the learner writes: its name in the cell's last line, and in the solution."""
    reference: Callable[..., Any]
    cases: tuple[tuple[Any, ...], ...]
    """The smallest first."""
    inputs: Callable[..., dict[str, Any]]
    large: tuple[tuple[Any, ...], ...] = ()
    """Further cases, tried in the first dtype and layout only."""
    vast: tuple[tuple[Any, ...], ...] = ()
    """Cases of millions of rows, most of more than 2**31 elements: only corners of the grid run (`vast`)."""
    mistakes: Mapping[str, Mistake] = field(default_factory=dict)
    properties: tuple[Property, ...] = ()
    compiled: Property | None = None
    """Of each kernel as it is compiled for a GPU, a `codegen.CompiledKernel`."""
    call: Callable[..., Any] = lambda answer, *arguments: answer(*arguments)
    dtypes: tuple[torch.dtype | None, ...] = (None,)
    layouts: tuple[str, ...] = ("contiguous",)
    """Tried in the first dtype."""
    tolerance: float | None = None
    """Relative, of numbers and of tensors; None: a few roundings of the dtype."""
    right: str = ""
    """A sentence that is shown with a right answer: what the answer is good for."""
    untouched: str = ""
    """Digest of the unchanged cell (`tasks.source_digest`), for cells that contain no `...`."""
    race: RaceSpec | None = None
    """None for an exercise without a kernel."""
    name: str = ""
    """Set by `judge.find`."""


@dataclass(frozen=True)
class Finding:
    """What came out: a sentence about what was seen, the mistake by its name, the learner's line, hints."""

    status: JudgeStatus
    observed: str = ""
    mistake: str = ""
    where: str = ""
    hints: tuple[str, ...] = ()
    checks: int = 0
    """How many calls were compared, where all were right."""


def defined_in_cell(name: str) -> Callable[..., Any]:
    """For `RaceSpec.as_layer`: what the answer's cell defines by this name, and what calls the answer."""

    def layer(answer: Callable[..., Any]) -> Any:
        if name not in answer.__globals__:
            raise ValueError(f"{name}: the cell has to define it, with a call of {answer.__name__}")
        return answer.__globals__[name]

    return layer


def case_values(*names: str) -> Callable[..., dict[str, Any]]:
    """The inputs of an exercise whose cases are the arguments themselves, with these names."""
    return lambda *case: dict(zip(names, case, strict=True))


# ---- judging -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What is wrong with one call: it raised an exception (``call.error``), or a property does not hold."""

    call: Call
    observed: str = ""
    """What the property says of the call; "" for an exception."""
    property: Property | None = None
    """None for an exception."""


def first_problem(exercise: Exercise, calls: Sequence[Call]) -> Problem | None:
    """The first problem in calls of all cases in one dtype and layout; None when they are right.

    Returns the first call that raised if more than half raised, or if all others are right.
    """
    finished = [call for call in calls if call.error is None]
    raised = [call for call in calls if call.error is not None]
    if len(raised) > len(finished):
        return Problem(raised[0])
    values = Property(WRONG_VALUES, lambda call: _wrong_values(exercise, call))
    before = [each for each in exercise.properties if each.before_values]
    after = [each for each in exercise.properties if not each.before_values]
    # What comes after the values says nothing about an answer that raised in some cases.
    looked_at = (INPUTS_UNCHANGED, FORM, DTYPE, *before, values, *([] if raised else after))
    with_elements, empty = ([call for call in finished if _is_empty(call) is no] for no in (False, True))
    for part in (with_elements, empty):  # what goes wrong without elements tells less
        for each, call in itertools.product(looked_at, part):
            if each.contiguous_only and call.layout != "contiguous":
                continue
            if observed := each.problem(call):
                return Problem(call, observed, each)
    return Problem(raised[0]) if raised else None


def _is_empty(call: Call) -> bool:
    """Whether one of the tensors that the answer got has no element."""
    return any(isinstance(each, Tensor) and not each.numel() for each in call.passed.values())


def explain(exercise: Exercise, problem: Problem, calls: Sequence[Call]) -> Finding:
    """The finding for a property that does not hold.

    Its hints are those of the exercise's first mistake that the answer makes on all calls that it finished,
    else the property's own.
    """
    wrong, call = problem.property, problem.call
    assert wrong is not None, "an exception is explained by symptoms"
    name, hints = wrong.name, wrong.hints
    if name == WRONG_VALUES:
        strided = call.layout != "contiguous"
        general = common_hints.NOT_A_NUMBER if MADE_NAN in problem.observed else common_hints.UNKNOWN
        by_kernel = general if call.dtype else ()
        name, hints = ("strides", common_hints.STRIDES) if strided else ("", by_kernel)
    observed = problem.observed
    # A result of the wrong form cannot be compared with a mistake's; and what goes wrong in another layout
    # alone is about the layout.
    if wrong not in (FORM, DTYPE) and call.layout == "contiguous":
        alike = [each for each in calls if _is_empty(call) or not _is_empty(each)]
        finished = [each for each in alike if each.error is None]
        for known, mistake in exercise.mistakes.items():
            if _makes_mistake(exercise, mistake, finished):
                name, hints = known, mistake.hints
                wrong_calls = [each for each in finished if mistake.gives and _wrong_values(exercise, each)]
                if wrong_calls:  # its hints are about the values, so these are shown, too
                    call = wrong_calls[0]
                    observed = _wrong_values(exercise, call)
                break
    return Finding("wrong", f"{call}: {observed}", name, hints=hints)


def _makes_mistake(exercise: Exercise, mistake: Mistake, finished: Sequence[Call]) -> bool:
    """Whether an answer behaves like a mistake on all cases that it finished.

    What a mistake returns has to be wrong in one of them: an answer that is off by roundings only is like the
    right result, and does not make a mistake that shows at larger sizes.
    """
    if mistake.when is not None:
        return mistake.when(finished)

    def made(gives: Callable[..., Any]) -> bool:
        wrong = False
        for call in finished:
            # The tolerance fits the roundings of the right formula. A wrong one may round more.
            allowed = 4 * tolerance(exercise, call)
            with np.errstate(all="ignore"):
                other = gives(*reference_arguments(exercise, call))
                right = exercise.reference(*reference_arguments(exercise, call))
            if difference(call.got, other, allowed):
                return False
            wrong = wrong or bool(difference(other, right, allowed))
        return wrong

    return any(made(gives) for gives in mistake.gives)


def reference_arguments(exercise: Exercise, call: Call) -> list[Any]:
    """Arguments for a reference: tensors in float64, and objects such as a simulated GPU made anew."""
    given = call.originals
    if call.dtype is None:
        torch.default_generator.manual_seed(0)
        given = exercise.inputs(*call.case)
    return [
        value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in given.values()
    ]


def tolerance(exercise: Exercise, call: Call) -> float:
    """The relative difference that is allowed in a call."""
    if exercise.tolerance is not None:
        return exercise.tolerance
    return 1e-6 if call.dtype is None else correctness.TOLERANCE[call.dtype]


def _changed_input(call: Call) -> str:
    for name, before in call.originals.items():
        after = call.passed[name]
        if isinstance(before, Tensor) and not torch.equal(before.nan_to_num(), after.nan_to_num()):
            return f"{name} was changed."
    return ""


def _wrong_form(call: Call) -> str:
    got, wanted = call.got, call.want
    if isinstance(wanted, tuple) and (not isinstance(got, tuple) or len(got) != len(wanted)):
        said = f"{len(got)} values" if isinstance(got, tuple) else f"a {type(got).__name__}"
        return f"it returned {said}, not {len(wanted)} values."
    pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
    for number, (mine, right) in enumerate(pairs, start=1):
        which = f"result {number}" if isinstance(wanted, tuple) else "the result"
        if isinstance(right, Tensor):
            if not isinstance(mine, Tensor):
                return f"{which} is a {type(mine).__name__}, not a tensor."
            if mine.shape != right.shape:
                return f"{which} has shape {tuple(mine.shape)}, not {tuple(right.shape)}."
        if _number(right) is not None and not isinstance(right, Tensor) and _number(mine) is None:
            return f"it returned {short(mine)}, not a number."
    return ""


def _wrong_dtype(call: Call) -> str:
    results = call.result_tensors()
    for number, (mine, _) in enumerate(results, start=1):
        if call.dtype is not None and mine.dtype != call.dtype:
            which = f"result {number}" if len(results) > 1 else "the result"
            return f"{which} has dtype {dtype_name(mine.dtype)}, not {dtype_name(call.dtype)}."
    return ""


MADE_NAN = " (NaN is what nobody wrote, what was read outside of a tensor, or 0 / 0, or inf / inf)"
"""Said of a NaN that comes out of numbers."""


def _wrong_values(exercise: Exercise, call: Call) -> str:
    allowed = tolerance(exercise, call)
    found = difference(call.got, call.want, allowed)
    if not found:
        return ""
    inputs = [x for x in call.originals.values() if isinstance(x, Tensor) and x.is_floating_point()]
    if inputs and all(bool(each.isfinite().all()) for each in inputs):
        for got, want in call.result_tensors():
            wrong = correctness.wrong_elements(got, want, allowed).nonzero()
            if len(wrong) and got[tuple(wrong[0])].isnan():
                found += MADE_NAN
                break
    return f"{found}."


def difference(got: Any, want: Any, tolerance: float) -> str:
    """Where two results differ, in words and numbers; "" where they are alike.

    Tensors may differ by ``tolerance * (|want| + rms(want))`` at each element, numbers by ``tolerance *
    |want|``. Not-a-number is like itself.
    """
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor) or got.shape != want.shape:
            return f"yours is {short(got)}, it should be {short(want)}"
        return _tensors(got, want, tolerance)
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"yours is {short(got)}, it should be a dict"
        pairs = {str(key): (got.get(key), want.get(key)) for key in (*want, *got)}
    elif isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            return f"yours is {short(got)}, it should be {short(want)}"
        pairs = {f"result {i}": pair for i, pair in enumerate(zip(got, want, strict=True), start=1)}
    else:
        return _numbers(got, want, tolerance)
    parts = {name: difference(*pair, tolerance) for name, pair in pairs.items()}
    return "; ".join(f"{name}: {problem}" for name, problem in parts.items() if problem)


def _numbers(got: Any, want: Any, tolerance: float) -> str:
    """How two numbers, or objects that are compared as they are, differ."""
    number, right = _number(got), _number(want)
    if right is None or isinstance(want, (bool, str)):
        return "" if got == want else f"yours is {short(got)}, it should be {short(want)}"
    if number is None:
        return f"yours is {short(got)}, it should be {right:.6g}"
    alike = np.isclose(number, right, rtol=tolerance, atol=0, equal_nan=True)
    return "" if alike else f"yours is {number:.6g}, it should be {right:.6g}"


def _tensors(got: Tensor, want: Tensor, tolerance: float) -> str:
    """How many elements differ, and the first of them."""
    wrong = correctness.wrong_elements(got, want, tolerance).nonzero()
    if not len(wrong):
        return ""
    index = tuple(wrong[0].tolist())
    differs = f"is {got[index]:.6g}, not {want[index]:.6g}"
    if want.dim() == 0:
        return f"it {differs}"
    verb = "is" if len(wrong) == 1 else "are"
    return f"{len(wrong)} of {want.numel()} elements {verb} wrong; the one at {list(index)} {differs}"


def _number(value: Any) -> float | None:
    """A number, also one of numpy's or a tensor of no dimension; None for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (Tensor, np.ndarray)):
        return float(value) if value.ndim == 0 else None
    return float(value) if isinstance(value, (numbers.Real, np.number, Decimal)) else None


def _numbers_of(value: Any) -> str:
    """The numbers of a tensor that has few, to work a case out by hand."""
    few = isinstance(value, Tensor) and 0 < value.numel() <= FEW
    return f" [{', '.join(f'{number:.4g}' for number in value.flatten().tolist())}]" if few else ""


def short(value: Any) -> str:
    """A value in a message: a tensor by its shape, a long text by its type."""
    if isinstance(value, Tensor):
        return f"({', '.join(map(str, value.shape))})"
    if isinstance(value, float):
        return f"{value:.6g}"
    said = repr(value)
    return said if len(said) <= 80 else type(value).__name__


FEW = 4
"""So many numbers of a tensor are shown in a message."""
WRONG_VALUES = "wrong-values"
"""The property of right values; a finding names the mistake instead, if one is known."""
FORM = Property("form", _wrong_form, *common_hints.FORM)
DTYPE = Property("dtype", _wrong_dtype, *common_hints.DTYPE)
INPUTS_UNCHANGED = Property("writes-input", _changed_input, *common_hints.WRITES_INPUT)
