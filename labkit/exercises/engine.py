"""An exercise as data: a reference, cases, plausible mistakes with their hints, and properties of a kernel.

``notebooks/exercises/NN_name.py`` holds the exercises of a lesson. ``judge`` compares an answer with the
reference on all cases. An answer that behaves like a plausible mistake on all of them gets that mistake's
hints. One that behaves like none gets the smallest case where it differs, with the numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from labkit.measure import correctness

ALL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Status = Literal["right", "wrong", "error", "stopped", "crashed", "interrupted"]


@dataclass
class Launches:
    """What a call did. Addresses are those of lanes that a mask let through, one array for each access."""

    names: list[str] = field(default_factory=list)
    """Kernels and operations of PyTorch that do work, in order."""
    programs: list[int] = field(default_factory=list)
    """Of each of these; 0 for an operation of PyTorch."""
    kernels: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Each Triton kernel with its arguments by name."""
    loads: list[np.ndarray] = field(default_factory=list)
    stores: list[np.ndarray] = field(default_factory=list)
    tf32: bool = False
    """Whether a product of float32 blocks was to be taken in TF32."""
    half_sums: bool = False
    """Whether a product was to be summed up in float16."""

    def loaded(self, tensor: Tensor) -> np.ndarray:
        """Elements of a contiguous tensor that were loaded, one entry a lane, in ascending order."""
        return _elements(self.loads, tensor)

    def stored(self, tensor: Tensor) -> np.ndarray:
        """The same for stores."""
        return _elements(self.stores, tensor)


def _elements(addresses: list[np.ndarray], tensor: Tensor) -> np.ndarray:
    if not addresses:
        return np.zeros(0, np.int64)
    first = (np.concatenate(addresses).astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
    return np.sort(first[(first >= 0) & (first < tensor.numel())])


@dataclass
class Call:
    """One call of an answer, and everything that it did."""

    case: tuple[Any, ...]
    dtype: torch.dtype | None
    """Of the tensors; None for an exercise without any."""
    layout: str
    inputs: dict[str, Any]
    """As the answer got them."""
    given: dict[str, Any]
    """Copies, made before the call."""
    want: Any
    got: Any = None
    error: BaseException | None = None
    launches: Launches = field(default_factory=Launches)
    stray: int = 0
    """Elements from a tensor's end to the farthest store outside of it; 0 when there was none."""
    loads_outside: int = 0
    """Addresses outside of all tensors, but near one, that were loaded."""

    @property
    def exact(self) -> list[Any]:
        """The inputs, with tensors of floats in float64."""
        return [_double(value) for value in self.given.values()]

    def __str__(self) -> str:
        shown = {name: _short(value) for name, value in self.given.items()}
        said = ", ".join(f"{name} {value}" for name, value in shown.items() if not value.startswith("<"))
        kind = "" if self.dtype is None else f" in {_name(self.dtype)}"
        return f"With {said}{kind}" + (f", {self.layout}" if self.layout != "contiguous" else "")


class Mistake:
    """Something that people do, and two or three hints, each one leading a step further.

    An answer makes it when it behaves so on all cases: it returns what ``gives`` returns (several functions
    are variants of it), or it lacks the property named ``breaks``, or its exception and the line that raised
    it match the regular expression ``raises``, or ``when`` finds it in the calls. Where several of these are
    given, all of them have to hold.
    """

    def __init__(
        self,
        name: str,
        *hints: str,
        gives: Callable[..., Any] | tuple[Callable[..., Any], ...] = (),
        breaks: str = "",
        raises: str = "",
        when: Callable[[Sequence[Call]], bool] | None = None,
    ) -> None:
        self.name, self.hints = name, hints
        self.gives = (gives,) if callable(gives) else gives
        self.breaks, self.raises, self.when = breaks, raises, when


@dataclass(frozen=True)
class Property:
    """What a kernel has to be beside right. ``look`` returns what is wrong with a call, or ""."""

    name: str
    look: Callable[[Call], str]
    hints: tuple[str, ...]
    first: bool = False
    """Looked at before the values: what it finds explains wrong ones."""
    contiguous: bool = False
    """Asked of contiguous inputs only: copies of others are allowed."""


@dataclass(frozen=True)
class Exercise:
    """A task of a lesson.

    ``inputs(*case)`` draws the arguments of one call by name: float32 tensors on the CPU, numbers, objects.
    ``reference(*arguments)`` is right, in float64 where arguments are tensors. ``call(answer, *arguments)``
    calls an answer that is not simply called. Results are tensors, numbers, or a dict of facts by name.
    """

    name: str
    title: str
    answer: str
    """What the learner writes: its name in the cell's last line, and in the solution."""
    reference: Callable[..., Any]
    cases: tuple[tuple[Any, ...], ...]
    """The smallest first."""
    inputs: Callable[..., dict[str, Any]]
    large: tuple[tuple[Any, ...], ...] = ()
    """Further cases, tried in the first dtype and layout only."""
    mistakes: tuple[Mistake, ...] = ()
    properties: tuple[Property, ...] = ()
    call: Callable[..., Any] = lambda answer, *arguments: answer(*arguments)
    dtypes: tuple[torch.dtype | None, ...] = (None,)
    layouts: tuple[str, ...] = ("contiguous",)
    """Tried in the first dtype."""
    tolerance: float | None = None
    """Relative, of numbers and of tensors; None: a few roundings of the dtype."""
    compiles: bool = False
    """Whether kernels have to compile for sm_90, too."""
    right: str = ""
    """A sentence for who is right: what the answer is good for."""
    untouched: str = ""
    """`exercises.digest` of the cell as the lesson gives it, where it has no three dots to replace."""
    race: Callable[[], Any] | None = None
    """Makes the `race.Race` of a kernel: what it is timed beside."""


@dataclass(frozen=True)
class Finding:
    """What came out: a sentence about what was seen, the mistake by its name, the learner's line, hints."""

    status: Status
    observed: str = ""
    mistake: str = ""
    where: str = ""
    hints: tuple[str, ...] = ()
    checks: int = 0
    """How many calls were compared, where all were right."""


Look = Callable[[Call], tuple[str, str, tuple[str, ...]]]
"""The name of what a call lacks, a sentence about it ("" when nothing is wrong), and hints."""


# ---- judging -----------------------------------------------------------------------------------------------


def compare(exercise: Exercise, calls: Sequence[Call]) -> Finding | None:
    """What is wrong with calls of all cases in one dtype and layout; None when they are right."""
    # A right form first, then what explains wrong values, then values, then everything else.
    finished = [call for call in calls if call.error is None]
    broken = next((call for call in calls if call.error is not None), None)
    looks: list[Look] = [_form, *(_lacking(each) for each in exercise.properties if each.first)]
    looks.append(lambda call: ("", _values(exercise, call), ()))
    if broken is not None and 2 * len(finished) < len(calls):
        looks = []  # an exception in most calls says more than the others
    for look in looks:
        if found := _first(exercise, finished, calls, look):
            return found
    if broken is not None:
        return Finding("error", observed=str(broken))
    for each in exercise.properties:
        if not each.first and (found := _first(exercise, finished, calls, _lacking(each))):
            return found
    return None


def _first(exercise: Exercise, finished: Sequence[Call], calls: Sequence[Call], look: Look) -> Finding | None:
    """The finding for the first call where something is wrong: the mistake that all calls show, if any."""
    for call in finished:
        name, observed, hints = look(call)
        if observed:
            known = next((each for each in exercise.mistakes if _made(exercise, each, calls, name)), None)
            if known is not None:
                name, hints = known.name, known.hints
            elif call.layout != "contiguous" and not name:
                name, hints = "strides", STRIDES
            return Finding("wrong", f"{call}: {observed}", name, hints=hints)
    return None


def _made(exercise: Exercise, mistake: Mistake, calls: Sequence[Call], lacking: str) -> bool:
    """Whether an answer behaves like a mistake on all cases."""
    variants = mistake.gives
    if mistake.raises or not (variants or mistake.breaks or mistake.when):
        return False
    if lacking != mistake.breaks and (mistake.breaks or lacking == "form"):
        return False  # of a result of the wrong kind nothing else can be asked
    compared = [call for call in calls if call.error is None]
    if mistake.when is not None and not mistake.when(compared):
        return False
    return not variants or any(all(_gave(exercise, call, gives) for call in compared) for gives in variants)


def _gave(exercise: Exercise, call: Call, gives: Callable[..., Any]) -> bool:
    with np.errstate(all="ignore"):
        other = gives(*_again(exercise, call))
    return not difference(call.got, other, 4 * tolerance(exercise, call))


def _again(exercise: Exercise, call: Call) -> list[Any]:
    """Arguments for a reference: in float64, and objects such as a pretend GPU made anew."""
    if call.dtype is not None:
        return call.exact
    torch.manual_seed(0)
    return [_double(value) for value in exercise.inputs(*call.case).values()]


def want(exercise: Exercise, given: Mapping[str, Any]) -> Any:
    """What a right answer returns."""
    return exercise.reference(*[_double(value) for value in given.values()])


def tolerance(exercise: Exercise, call: Call) -> float:
    """The relative difference that is allowed in a call."""
    if exercise.tolerance is not None:
        return exercise.tolerance
    return 1e-6 if call.dtype is None else correctness.TOLERANCE[call.dtype]


def _form(call: Call) -> tuple[str, str, tuple[str, ...]]:
    """Whether a call returned the kind of thing that it should, and left its inputs alone."""
    for name, before in call.given.items():
        after = call.inputs[name]
        changed = isinstance(before, list) and before != after
        if isinstance(before, Tensor):
            changed = not torch.equal(before.nan_to_num(), after.nan_to_num())
        if changed:
            return "writes-input", f"{name} was changed.", WRITES_INPUT
    got, wanted = call.got, call.want
    if isinstance(wanted, tuple):
        if not isinstance(got, tuple) or len(got) != len(wanted):
            said = f"{len(got)} values" if isinstance(got, tuple) else f"a {type(got).__name__}"
            return "form", f"it returned {said}, not {len(wanted)} values.", RETURNS
        pairs = list(zip(got, wanted, strict=True))
    else:
        pairs = [(got, wanted)]
    for mine, right in pairs:
        if isinstance(right, Tensor) and not isinstance(mine, Tensor):
            return "form", f"it returned a {type(mine).__name__}, not a tensor.", RETURNS
        if isinstance(right, Tensor) and mine.shape != right.shape:
            said = f"shape {tuple(mine.shape)}, not {tuple(right.shape)}"
            return "form", f"the result has {said}.", RETURNS
        if isinstance(right, Tensor) and call.dtype is not None and mine.dtype != call.dtype:
            return "form", f"the result has dtype {_name(mine.dtype)}, not {_name(call.dtype)}.", RETURNS
        if isinstance(right, (int, float)) and not isinstance(right, bool) and _number(mine) is None:
            return "form", f"it returned {_short(mine)}, not a number.", RETURNS
    return "", "", ()


def _values(exercise: Exercise, call: Call) -> str:
    found = difference(call.got, call.want, tolerance(exercise, call))
    floats = [x for x in call.given.values() if isinstance(x, Tensor) and x.is_floating_point()]
    if "is nan" in found and floats and all(bool(each.isfinite().all()) for each in floats):
        found += " (NaN is what nobody wrote, or what was read outside of a tensor)"
    return found and f"{found}."


def _lacking(each: Property) -> Look:
    def look(call: Call) -> tuple[str, str, tuple[str, ...]]:
        skipped = each.contiguous and call.layout != "contiguous"
        return each.name, "" if skipped else each.look(call), each.hints

    return look


def difference(got: Any, want: Any, tolerance: float) -> str:
    """Where two results differ, in words and numbers; "" where they are alike.

    Tensors may differ by ``tolerance * (|want| + rms(want))`` at each element, numbers by ``tolerance *
    |want|``. Not-a-number is like itself.
    """
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor) or got.shape != want.shape:
            return f"it is {_short(got)}, not {_short(want)}"
        return _tensors(got, want, tolerance)
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"it is {_short(got)}, not a dict"
        keys = dict.fromkeys([*want, *got])
        parts = {k: difference(got.get(k), want.get(k), tolerance) for k in keys}
        return "; ".join(f"{key}: {said}" for key, said in parts.items() if said)
    if isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            return f"it is {_short(got)}, not {_short(want)}"
        pairs = enumerate(zip(got, want, strict=True), start=1)
        parts_of = {i: difference(a, b, tolerance) for i, (a, b) in pairs}
        return "; ".join(f"result {i}: {said}" for i, said in parts_of.items() if said)
    number, right = _number(got), _number(want)
    if right is None or isinstance(want, (bool, str)):
        return "" if got == want else f"it is {_short(got)}, not {_short(want)}"
    if number is None:
        return f"it is {_short(got)}, not {right:.6g}"
    both_nan = math.isnan(number) and math.isnan(right)
    alike = number == right or both_nan or abs(number - right) <= tolerance * abs(right)
    return "" if alike else f"it is {number:.6g}, not {right:.6g}"


def _tensors(got: Tensor, want: Tensor, tolerance: float) -> str:
    """Elements that differ: how many, and the first of them. What is not finite has to be so in both."""
    got, want = got.detach().double(), want.detach().double()
    finite = want[want.isfinite()]
    rms = finite.square().mean().sqrt() if finite.numel() else torch.zeros(())
    alike = want.isfinite() & ((got - want).abs() <= tolerance * (want.abs() + rms))
    alike |= (got == want) | (got.isnan() & want.isnan())
    wrong = (~alike).nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    verb = "is" if len(wrong) == 1 else "are"
    share = "" if want.dim() == 0 else f"{len(wrong)} of {want.numel()} elements {verb} wrong; "
    place = "it" if want.dim() == 0 else f"the one at {list(at)}"
    return f"{share}{place} is {got[at]:.6g}, not {want[at]:.6g}"


def _number(value: Any) -> float | None:
    """A number, also one of numpy's or a tensor of no dimension; None for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (Tensor, np.ndarray)):
        return float(value) if value.ndim == 0 else None
    return float(value) if isinstance(value, (int, float, np.number)) else None


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"({', '.join(map(str, value.shape))})"
    if isinstance(value, float):
        return f"{value:.6g}"
    said = repr(value)
    return said if len(said) <= 80 else f"{type(value).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


RETURNS = (
    "What does your function return, on every way through it?",
    "The text above the cell says what is asked for: one number, or a tensor of which shape and dtype.",
)
WRITES_INPUT = (
    "Which line stores into something that your function was given, or takes something out of it?",
    "The caller still needs its inputs: make a tensor or a list of your own.",
)
STRIDES = (
    "With contiguous inputs this is right. What do your addresses suppose about the layout in memory?",
    "x.contiguous() gives a tensor whose rows lie one behind the other, and copies only where it has to.",
)
