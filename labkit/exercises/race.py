"""A learner's kernel at the sizes of its race, before it is timed, and what is counted of it without a GPU.

On a GPU it first runs there in a process of its own: a wild address, a hang or a result that is wrong at size
becomes a verdict, never a dead notebook.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit import child_process, gpu, interpreter, notebooks
from labkit.display.style import show
from labkit.display.table import show_table
from labkit.exercises import common_hints, engine, judge
from labkit.exercises.engine import Exercise, Finding, RaceSpec
from labkit.measure import correctness, launch_counts

LIMIT_S = 60.0
"""Seconds for the first run at size, compiling included."""
MOST_PROGRAMS = 4000
"""Of a launch that is counted: an interpreted program takes half a millisecond."""
COUNTED_ROWS = 256
"""So many rows at most are counted: the others would add as much for each row."""
FENCE_BYTES = 2**28
"""Around each tensor at size, at most; less where a thirty-second of the GPU's free memory is less."""


def problem_at_size(lesson: str, exercise: Exercise, file: Path) -> Finding | None:
    """What is wrong with the learner's kernel at the race's sizes on this GPU; None if nothing, or no GPU."""
    if not gpu.available():
        return None
    try:
        with gpu.locked():
            found: str = child_process.run(_run_at_size, lesson, exercise.name, file, seconds=LIMIT_S)
    except child_process.ChildError as error:
        observed = f"At the race's size, in a process of its own, it failed: {error}"
        return Finding("crashed", observed, "wild", hints=common_hints.WILD_ADDRESS)
    except (TimeoutError, KeyboardInterrupt) as error:
        return judge.explain_end(error, file, LIMIT_S, lesson)
    return Finding("wrong", found, "at-size", hints=common_hints.AT_SIZE) if found else None


def _run_at_size(lesson: str, name: str, file: Path) -> str:
    """Run the answer in a file at each size of its race between fences; what is wrong, or ""."""
    exercise = judge.find(lesson)[name]
    race = exercise.race
    assert race is not None, "who has no race is not run at its sizes"
    answer = race.as_layer(judge.run_cell(lesson, vars(notebooks.load(lesson)), exercise, file))
    dtype = getattr(torch, race.dtype)
    for size in race.sizes:
        torch.manual_seed(0)
        given = [each.to(dtype) for each in race.work.inputs(size)]
        fence = min(FENCE_BYTES, torch.cuda.mem_get_info()[0] // 32)
        fences = correctness.GuardZones(fence // dtype.itemsize)
        placed = [fences.place(each, "contiguous") for each in given]
        with gpu.full_float32():
            want = _results(race, race.work.reference, [each.float() for each in given])
            with fences:
                got = _results(race, answer, placed)
            torch.cuda.synchronize()
        said = ", ".join(f"{axis} {count}" for axis, count in size.items())
        if stray := fences.broken():
            return f"At {said} it stores outside of its tensors, up to {stray} elements away."
        for mine, right in zip(got, want, strict=True):
            allowed = correctness.TOLERANCE[dtype] * race.roundings
            if found := engine.difference(mine.float(), right, allowed):
                return f"At {said}, {found}."
    return ""


def _results(race: RaceSpec, call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The output; of a race backward the gradients, for an upstream gradient of twice the output."""
    if race.direction == "forward":
        with torch.no_grad():
            return [call(*given)]
    leaves = [each.requires_grad_() for each in given]
    output = call(*leaves)
    return list(torch.autograd.grad(output, leaves, 2 * output.detach()))


# ---- without a GPU -----------------------------------------------------------------------------------------


def compiled(spec: RaceSpec) -> dict[str, Callable[..., Any]]:
    """The rivals of a race, 'torch.compile' compiled: on a GPU, as elsewhere nothing of them is timed."""
    compile_it = gpu.available()
    return {
        name: torch.compile(call, dynamic=False) if compile_it and name == "torch.compile" else call
        for name, call in spec.rivals.items()
    }


def count(spec: RaceSpec, answer: Callable[..., Any], beside: Mapping[str, Callable[..., Any]]) -> None:
    """Race by what can be counted without a GPU: launches, and bytes that are read and written.

    An address that is read again counts once: on a GPU it comes from a cache, if it is read again soon.
    """
    size, dtype = dict(spec.sizes[0]), getattr(torch, spec.dtype)
    if "batch" in size:
        size["batch"] = min(size["batch"], COUNTED_ROWS)
    lines = []
    for name, call in {**spec.rivals, **beside, "your kernel": spec.as_layer(answer)}.items():
        if name in ("torch.compile", "labkit"):  # the one is not compiled here, the other is launched alike
            continue
        given = [each.to(dtype) for each in spec.work.inputs(size)]
        try:
            lines.append((name, *map("{:,}".format, moved(*counted(call, given, spec.direction)))))
        except _TooManyProgramsError:
            lines.append((name, "", "more programs than are counted here", "", ""))
    read, written = sum(each.nbytes for each in given), spec.work.reference(*given).nbytes
    if spec.direction == "backward":  # the inputs and dy, and the gradients of the inputs
        read, written = read + written, read
    lines.append(("each number once", "1", f"{read:,}", f"{written:,}", f"{read + written:,}"))
    heads = ["", "launches", "bytes read", "bytes written", "in all"]
    where = ", ".join(f"{axis} {count}" for axis, count in size.items())
    said = (
        f"Counted here, in the interpreter: {where}, {spec.dtype}. "
        "A number counts once for each launch that reads it, however often the launch does."
    )
    if len({line[1:] for line in lines}) == 1:  # no table of lines that are alike
        who = "All of these ways touch" if len(lines) > 2 else "Your kernel touches"
        alike = f"{who} as few bytes as can be, {lines[0][-1]}. {said}"
        show(f"<p><small>{alike}</small></p>", alike)
        return
    show_table("", heads, lines, said)


def counted(
    call: Callable[..., Any], given: list[torch.Tensor], direction: str
) -> tuple[Callable[..., Any], list[Any]]:
    """What is counted of a way, its forward or its backward pass alone, and what that is called with."""
    if direction == "forward":
        return torch.no_grad()(call), given
    leaves = [each.detach().requires_grad_() for each in given]
    y = call(*leaves)
    return torch.autograd.grad, [y, leaves, torch.randn_like(y)]


def moved(call: Callable[..., Any], given: list[Any]) -> tuple[int, int, int, int]:
    """Of a call without a GPU: launches, bytes read, bytes written, and both. Each address counts once."""
    addresses = _Addresses()
    with interpreter.watching(addresses):
        made = launch_counts.count(lambda: call(*given))
    read = sum(one.bytes_read for one in made if not one.programs) + addresses.bytes(addresses.loads)
    written = sum(one.bytes_written for one in made if not one.programs) + addresses.bytes(addresses.stores)
    return len(made), read, written, read + written


class _TooManyProgramsError(Exception):
    """So many that an interpreter would take long."""


class _Addresses(interpreter.Observer):
    """The distinct addresses that interpreted kernels load and store, with how many bytes lie at each."""

    def __init__(self) -> None:
        self.loads: dict[int, set[int]] = {}
        self.stores: dict[int, set[int]] = {}

    def grid(self, *sizes: int) -> None:
        if math.prod(sizes) > MOST_PROGRAMS:
            raise _TooManyProgramsError

    def load(self, addresses: Any, size: int, unfilled: bool) -> None:
        self.loads.setdefault(size, set()).update(addresses.tolist())

    def store(self, addresses: Any, size: int) -> None:
        self.stores.setdefault(size, set()).update(addresses.tolist())

    def bytes(self, seen: dict[int, set[int]]) -> int:
        """How many bytes lie at the addresses seen."""
        return sum(size * len(places) for size, places in seen.items())
