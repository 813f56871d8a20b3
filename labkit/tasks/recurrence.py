"""What lesson 7's recurrences over (B, T, H) are judged by: one call, and what its kernel did."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from labkit import checks, codegen
from labkit.tasks import Wrong, some, whereabouts
from labkit.tasks.fuse import ROUNDED_TWICE
from labkit.tasks.tiles import Call

Sizes = tuple[int, int, int]
"""Rows of the batch B, steps T, channels H."""

SIZES: tuple[Sizes, ...] = (
    (2, 5, 20),
    (3, 4, 128),
    (1, 7, 33),
    (2, 3, 130),
    (2, 9, 7),
    (2, 1, 5),
    (1, 1, 1),
)
"""A program's channels exactly, fewer, and some more; few steps and one, few rows and one."""
OTHER_SIZES: tuple[Sizes, ...] = ((2, 6, 33), (1, 3, 130))
"""Those tried in every dtype too, and in every layout."""
LONG: Sizes = (1, 64, 40)
"""Steps enough to tell a state that is rounded at each of them."""
BLOCK = 128
"""A program's channels, as the scaffolds have them."""

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The next state from the state, and from a and b of the step, each (B, H)."""
Mistakes = Callable[["Steps"], Iterator[tuple[str, Tensor]]]
"""The outputs of wrong answers, with their reasons, in the same order for every call."""


class Steps(Call):
    """One call on a and b (B, T, H), and perhaps more. Only finite results are looked at."""

    sizes: Sizes

    def __init__(
        self,
        answer: Callable[..., Tensor],
        values: Mapping[str, Tensor],
        want: Tensor,
        hints: Mapping[str, tuple[str, ...]],
        *,
        layout: str = "contiguous",
    ) -> None:
        self.a, self.b = values["a"].double(), values["b"].double()
        rows, steps, channels = want.shape
        self.sizes = rows, steps, channels
        super().__init__(answer, values, want, hints, layout=layout)

    @property
    def block(self) -> int:
        """Channels of a program."""
        return int(self.kernel[1].get("BH", BLOCK))

    @property
    def problem(self) -> str:
        """Where the output is wrong, as the end of a sentence; empty if nowhere."""
        finite = self.want.isfinite()
        got, want = (each.where(finite, 0.0) for each in (self.got, self.want))
        found = checks.diagnose(got, want, checks.TOLERANCE[self.dtype])
        return whereabouts(found) if found else ""

    def refuse_stores(self) -> None:
        """`Wrong` unless each element of h is stored once, and nothing else."""
        try:
            super().refuse_stores()
        except Wrong as wrong:
            raise self.wrong(wrong.reason, re.sub(r"\by\b", "h", wrong.observed)) from None

    def refuse_loads_outside(self) -> None:
        """`Wrong` where places outside an input were loaded."""
        for name, places in self.strays().items():
            what = f"{some(places, 'place')} outside {name} got loaded, though h is right"
            raise self.wrong("unmasked-load", f"{self}: {what}.")


def drawn(sizes: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    """a, which keeps half of the state or more, and b."""
    return {"a": (0.5 + 0.5 * torch.rand(sizes)).to(dtype), "b": torch.randn(sizes).to(dtype)}


def scan(a: Tensor, b: Tensor, step: Step = lambda state, a, b: a * state + b) -> Tensor:
    """The states (B, T, H) from a and b of all steps."""
    state, states = torch.zeros_like(b[:, 0]), []
    for of_a, of_b in zip(a.unbind(1), b.unbind(1), strict=True):
        state = step(state, of_a, of_b)
        states.append(state)
    return torch.stack(states, 1)


def refuse_values(calls: Sequence[Steps], mistakes: Mistakes) -> None:
    """`Wrong` for the first call with a wrong output, by the mistake that explains all of them."""
    first = next((call for call in calls if call.problem), None)
    if first is not None:
        raise first.wrong(_reason(calls, mistakes), f"{first}: h is wrong in {first.problem}")


def _reason(calls: Sequence[Steps], mistakes: Mistakes) -> str:
    if all(call.gave(call.want) for call in calls):
        return "half-precision"
    for columns in zip(*map(mistakes, calls), strict=True):
        if all(call.gave(other) for call, (_, other) in zip(calls, columns, strict=True)):
            return columns[0][0]
    return "wrong-values"


def refuse_others(call_of: Callable[..., Steps], mistakes: Mistakes) -> int:
    """`Wrong` for what goes wrong in another dtype or layout, or after many steps; how many calls passed.

    ``call_of(sizes, dtype, layout)`` makes a call.
    """
    passed = 0
    for dtype in checks.DTYPES:
        others = [call_of(sizes, dtype, layout) for sizes in OTHER_SIZES for layout in layouts(dtype)]
        if dtype is torch.float16:
            others.append(call_of(LONG, dtype, "contiguous"))
        for call in others:
            call.refuse_form()
            call.refuse_strides()
            refuse_values([call], mistakes)
        if dtype is torch.float16:  # to bfloat16 the interpreter rounds in a way of its own
            _refuse_rounded_twice(others)
        passed += len(others)
    return passed


def layouts(dtype: torch.dtype) -> list[str]:
    """Those tried in a dtype: what a layout spoils shows in float32, where no rounding stands beside it."""
    return list(checks.LAYOUTS) if dtype is torch.float32 else ["contiguous"]


def _refuse_rounded_twice(calls: Sequence[Steps]) -> None:
    share = sum(call.differing() for call in calls) / sum(call.got.numel() for call in calls)
    if share > ROUNDED_TWICE:
        differing = f"In float16, {share:.0%} of the results are not the exact ones rounded once"
        raise calls[0].wrong("half-precision", f"{differing}: the state was rounded on the way too.")


def compiled(call: Call) -> codegen.Compiled:
    """The kernel of a call as compiled for sm_90; `Wrong` when the compiler refuses it."""
    try:
        return codegen.compile_many([codegen.request(*call.kernel, target="sm_90")])[0]
    except codegen.CompileError as error:
        message = next(filter(None, reversed(str(error).strip().splitlines())), "")
        observed = f"The compiler for sm_90 refuses the kernel: {message}"
        raise call.wrong("not-compiled", observed) from error
