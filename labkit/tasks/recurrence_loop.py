"""Lesson 7, exercise "recurrence": the loop over time of h_t = a_t * h_(t-1) + b_t."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from labkit.checks import FENCE
from labkit.tasks import Evidence, Wrong, some
from labkit.tasks.recurrence import (
    LONG,
    SIZES,
    Sizes,
    Steps,
    compiled,
    drawn,
    refuse_others,
    refuse_values,
    scan,
)
from labkit.tasks.recurrence_loop_hints import HINTS


def check(recurrence: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``recurrence(a, b)`` with float64, see where its loop stores; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls: list[Steps] = []

    def call_of(sizes: Sizes, dtype: torch.dtype, layout: str = "contiguous") -> Steps:
        values = drawn(sizes, dtype)
        want = scan(values["a"].double(), values["b"].double())
        return Steps(recurrence, values, want, HINTS, layout=layout)

    for sizes in SIZES:
        call = call_of(sizes, torch.float32)
        call.refuse_handed_over()
        call.refuse_launches()
        _refuse_reading_h(call)
        calls.append(call)
    _refuse_stores(calls)
    calls[0].refuse_reused(recurrence)
    refuse_values(calls, _mistakes)
    for call in calls:
        call.refuse_loads_outside()
    passed = len(calls) + refuse_others(call_of, _mistakes)
    return Evidence(_evidence(call_of(LONG, torch.float16), passed), passed)


def _refuse_reading_h(call: Steps) -> None:
    loads = len(call.seen.loaded(call.got))
    if loads:
        raise call.wrong("through-memory", f"{call}: the kernel loaded from h {some(loads, 'time')}.")


def _refuse_stores(calls: list[Steps]) -> None:
    for call in calls:
        try:
            call.refuse_stores()
        except Wrong as wrong:
            raise call.wrong(_walked(calls) or wrong.reason, wrong.observed) from None


def _walked(calls: list[Steps]) -> str:
    """The reason for which a program stored where it did in all calls; "" where none is known."""
    for columns in zip(*map(_walks, calls), strict=True):
        pairs = zip(calls, columns, strict=True)
        if all(np.array_equal(call.seen.stored(call.got), places) for call, (_, places) in pairs):
            return columns[0][0]
    return ""


def _walks(call: Steps) -> Iterator[tuple[str, np.ndarray]]:
    """Where a call would have stored, had this or that mistake been made."""
    rows, steps, width = call.sizes

    def places(stride: int, first: int, count: int, masked: bool = True) -> np.ndarray:
        row = torch.arange(rows)[:, None, None]
        step = torch.arange(first, first + count)[:, None]
        channel = torch.arange(-(-width // call.block) * call.block)
        if masked:
            channel = channel[:width]
        found = (row * steps * width + step * stride + channel).flatten().sort().values.numpy()
        return found[(found >= -FENCE) & (found < call.want.numel() + FENCE)]

    yield "unmasked-store", places(width, 0, steps, False)
    yield "not-advanced", places(0, 0, steps)
    yield "not-advanced", places(0, 0, steps, False)
    for stride in (1, call.block, steps, rows, steps * width):
        yield "wrong-stride", places(stride, 0, steps)
        yield "wrong-stride", places(stride, 0, steps, False)
    yield "one-ahead", places(width, 1, steps)
    yield "from-one", places(width, 1, steps - 1)
    yield "one-short", places(width, 0, steps - 1)
    yield "one-more", places(width, 0, steps + 1)
    for at in (steps - 1, steps, 0):
        yield "only-last", places(width, at, 1)


def _mistakes(call: Steps) -> Iterator[tuple[str, Tensor]]:
    """What would have come out, had this or that mistake been made."""
    a, b = call.a, call.b
    yield "no-carry", b
    yield "no-decay", b.cumsum(1)
    yield "no-b", torch.zeros_like(b)
    yield "swapped", scan(b, a)
    yield "before-product", scan(a, b, lambda state, a, b: a * (state + b))
    yield "wrong-factor", (a * b).cumsum(1)
    yield "complement", scan(a, (1 - a) * b)
    yield "stored-early", _later(call.want)
    yield "backwards", scan(a.flip(1), b.flip(1)).flip(1)
    yield "same-step", scan(a[:, :1].expand_as(a), b[:, :1].expand_as(b))
    for shift in (1, -1):
        for other in (_later(a, shift), _beyond(a, shift)):
            yield "shifted", scan(other, b)
        for other in (_later(b, shift), _beyond(b, shift)):
            yield "shifted", scan(a, other)
        yield "shifted", scan(_beyond(a, shift), _beyond(b, shift))


def _later(tensor: Tensor, shift: int = 1) -> Tensor:
    """Each step's values at the step that comes ``shift`` after it; zeros where there are none."""
    moved = torch.zeros_like(tensor)
    if shift > 0:
        moved[:, shift:] = tensor[:, :-shift]
    else:
        moved[:, :shift] = tensor[:, -shift:]
    return moved


def _beyond(tensor: Tensor, shift: int) -> Tensor:
    """The same where the addresses go on into the row before or after; NaN outside the tensor."""
    steps = tensor.flatten(0, 1)
    moved = torch.full_like(steps, torch.nan)
    if shift > 0:
        moved[shift:] = steps[:-shift]
    else:
        moved[:shift] = steps[-shift:]
    return moved.view_as(tensor)


def _evidence(call: Steps, passed: int) -> str:
    """What was passed, what crosses memory, and what a step waits for."""
    code = compiled(call)
    numbers, stores = call.got.numel(), len(call.seen.stored(call.got))
    loads = sum(len(call.seen.loaded(t)) for t in call.inputs.values())
    moved = (loads + stores) / numbers
    waits = sum(code.barriers.values()) + sum(code.shuffles.values())
    alone = ": the state stays in registers, and no thread waits for another at a step"
    return (
        f"{passed} checks against float64, of up to {call.sizes[1]} steps. For {numbers:,} numbers of h it "
        f"loads {loads:,} and stores {stores:,}: {moved:g} for each, "
        f"{'the least there can be' if moved <= 3 else '3 would do'}. Compiled for sm_90 the kernel has "
        f"{waits or 'no'} barriers and shuffles, and spills {code.spills} bytes"
        f"{'' if waits or code.spills else alone}."
    )
