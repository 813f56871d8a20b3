"""Lesson 7, exercise "reset": a recurrence that begins anew where an episode does."""

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labkit import checks
from labkit.tasks import Evidence, Wrong
from labkit.tasks.recurrence import (
    OTHER_SIZES,
    SIZES,
    Sizes,
    Steps,
    compiled,
    drawn,
    refuse_others,
    refuse_values,
    scan,
)
from labkit.tasks.recurrence_reset_hints import HINTS

OFTEN = 0.3
"""Share of the steps that begin an episode."""
POISONS = {
    "state": "where b is infinite or NaN before a reset, and so is h up to it",
    "decay": "where a is infinite or NaN at each reset",
}
LEFT = {
    ("state",): "zeroed-decay",
    ("decay",): "zeroed-state",
    ("state", "decay"): "multiplied",
}
"""What a kernel does whose h isn't b at a reset, by the poisons that come through."""


def check(with_reset: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``with_reset(a, b, reset)`` with float64, also where h is NaN before; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls: list[_Episodes] = []

    def call_of(sizes: Sizes, dtype: torch.dtype, layout: str = "contiguous", poison: str = "") -> _Episodes:
        return _Episodes(with_reset, sizes, dtype, layout, poison)

    for sizes in SIZES:
        call = call_of(sizes, torch.float32)
        call.refuse_form()
        calls.append(call)
    calls[0].refuse_reused(with_reset)
    refuse_values(calls, _mistakes)
    for call in calls:
        call.refuse_loads_outside()
    passed = len(calls) + _refuse_leaks(call_of) + refuse_others(call_of, _mistakes)
    return Evidence(_evidence(call_of((1, 64, 128), torch.float16), passed), passed)


Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""The next state from where it begins anew, the state, a and b."""


def _begun_anew(fresh: Tensor, state: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(fresh, b, a * state + b)


class _Episodes(Steps):
    """One call; ``poison`` is "state", "decay" or none of `POISONS`."""

    def __init__(
        self, with_reset: Callable[..., Tensor], sizes: Sizes, dtype: torch.dtype, layout: str, poison: str
    ) -> None:
        rows, steps, channels = sizes
        values = drawn(sizes, dtype)
        self.reset = torch.rand(rows, steps) < OFTEN
        if poison:
            self.reset[:, steps // 2] = True  # with steps before it, and after
        odd = torch.where(torch.rand(channels) < 0.5, math.inf, math.nan).to(dtype)
        if poison == "state":
            values["b"][:, 0] = odd  # kept by every step until a reset
            self.reset[:, 0] = False
        if poison == "decay":
            values["a"] = torch.where(self.reset[..., None], odd, values["a"])
        self.a, self.b = values["a"].double(), values["b"].double()
        fenced = _fenced(self.reset, layout)

        @functools.wraps(with_reset)
        def called(*tensors: Tensor) -> Tensor:
            return with_reset(*tensors[:2], fenced)

        super().__init__(called, values, self.states(self.reset), HINTS, layout=layout)
        # Fences are for numbers that may be NaN, so this one is looked at beside them.
        self.values = {**self.values, "reset": self.reset}
        self.inputs["reset"] = fenced

    def states(self, reset: Tensor, step: Step = _begun_anew) -> Tensor:
        """The states with these resets, (B, T) or (B, T, H)."""
        fresh = iter((reset if reset.dim() == 3 else reset[..., None]).unbind(1))
        return scan(self.a, self.b, lambda state, a, b: step(next(fresh), state, a, b))


def _fenced(reset: Tensor, layout: str) -> Tensor:
    """A copy of ``reset`` laid out as `checks.LAYOUTS` says, in the middle of many that are true."""

    class _True(checks.Fences):
        def allocate(self, count: int, like: Tensor) -> Tensor:
            return like.new_ones(count + 2 * checks.FENCE)[checks.FENCE : checks.FENCE + count]

    return _True().place(reset, layout)


def _refuse_leaks(call_of: Callable[..., _Episodes]) -> int:
    """`Wrong` where what should be forgotten comes through as NaN; how many calls passed."""
    left: dict[str, Wrong] = {}
    for poison, where in POISONS.items():
        for sizes in OTHER_SIZES:
            call = call_of(sizes, torch.float32, poison=poison)
            if call.problem and poison not in left:
                left[poison] = call.wrong("wrong-values", f"{call}, {where}: h is wrong in {call.problem}")
    if left:
        reason = LEFT[tuple(left)]
        raise Wrong(reason, next(iter(left.values())).observed, HINTS[reason])
    return len(POISONS) * len(OTHER_SIZES)


def _mistakes(call: Steps) -> Iterator[tuple[str, Tensor]]:
    """What would have come out, had this or that mistake been made."""
    assert isinstance(call, _Episodes)
    (rows, steps, channels), reset = call.sizes, call.reset
    row, step = torch.arange(rows)[:, None], torch.arange(steps)
    none = torch.zeros_like(reset)
    yield "no-reset", call.states(none)
    yield "inverted", call.states(~reset)
    yield "always", call.b
    yield "off-by-one", call.states(torch.cat([none[:, :1], reset[:, :-1]], 1))
    yield "off-by-one", call.states(torch.cat([reset[:, 1:], none[:, :1]], 1))
    for shift in (1, -1):
        yield "off-by-one", call.states(_at(reset, row * steps + step + shift))
    yield "drops-b", call.states(reset, lambda fresh, state, a, b: (a * state + b).where(~fresh, 0.0))
    yield "held", call.states(reset, lambda fresh, state, a, b: state.where(fresh, a * state + b))
    yield "only-output", call.b.where(reset[..., None], call.states(none))
    yield "first-row", call.states(_at(reset, 0 * row + step))
    yield "first-step", call.states(_at(reset, row * steps + 0 * step))
    for place in (row * channels + step, step * rows + row, row + step, row + 0 * step, row * rows + step):
        yield "wrong-place", call.states(_at(reset, place))
    channel = torch.arange(channels)
    everywhere = (row * steps + step)[..., None] * channels + channel
    for each in (everywhere, row[..., None] * steps + channel + 0 * everywhere, channel + 0 * everywhere):
        yield "by-channel", call.states(_at(reset, each))


def _at(reset: Tensor, place: Tensor) -> Tensor:
    """Elements of reset by their places, true beyond its ends as the memory there is."""
    inside = (place >= 0) & (place < reset.numel())
    return reset.flatten()[place.clamp(0, reset.numel() - 1)] | ~inside


def _evidence(call: Steps, passed: int) -> str:
    """What was passed, and what the mask costs."""
    code = compiled(call)
    rest = {name: t for name, t in call.inputs.items() if name != "reset"} | {"h": call.got}
    mask, others = call.inputs["reset"].numel(), sum(t.numel() * t.element_size() for t in rest.values())
    steps = len(call.seen.loaded(call.inputs["reset"]))
    return (
        f"{passed} checks against float64. What is infinite or NaN before a reset stays before it, and no "
        "value of a matters at one. The mask is cheap: with a row of 64 steps and 128 channels in float16 "
        f"its {mask} bytes, loaded {steps} times, stand beside {others:,} of a, b and h. Compiled for sm_90 "
        f"the kernel spills {code.spills} bytes."
    )
