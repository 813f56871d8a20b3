"""A learner's kernel at the sizes of its race, before it is timed.

On a GPU it first runs there in a process of its own: a wild address, a hang or a result that is wrong at size
becomes a verdict, never a dead notebook.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit import child_process, gpu, notebooks
from labkit.exercises import common_hints, engine, judge
from labkit.exercises.engine import Exercise, Finding, RaceSpec
from labkit.measure import correctness, lock

LIMIT_S = 60.0
"""Seconds for the first run at size, compiling included."""
FENCE_BYTES = 2**28
"""Around each tensor at size, at most; less where a thirty-second of the GPU's free memory is less."""


def race_of(exercise: Exercise) -> RaceSpec:
    """The race of an exercise; ValueError for one that has none."""
    if exercise.race is None:
        raise ValueError(f"name: {exercise.name!r} has no kernel that could race")
    return exercise.race


def sizes_of(race: RaceSpec) -> tuple[Any, ...]:
    """The sizes of a race on this GPU."""
    return race.sizes() if callable(race.sizes) else race.sizes


def problem_at_size(lesson: str, exercise: Exercise, file: Path) -> Finding | None:
    """What is wrong with the learner's kernel at the race's sizes on this GPU; None if nothing, or no GPU."""
    if not gpu.available():
        return None
    try:
        with lock.gpu_lock():
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
    race = race_of(exercise)
    answer = race.as_layer(judge.run_cell(lesson, vars(notebooks.load(lesson)), exercise, file))
    dtype = getattr(torch, race.dtype)
    for size in sizes_of(race):
        torch.manual_seed(0)
        given = [each.to(dtype) for each in race.work.inputs(size)]
        assert race.work.reference is not None, "a race has a right result"
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
