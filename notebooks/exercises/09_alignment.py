"""The task of lesson 9: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, wrong_exactly_where
from labkit.measure.codegen import CompiledKernel

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

reference = work.grouped.reference

BEFORE = judge.find("08_grouped_matmul")
"""Its task is the same layer with one tile a program. Most of its mistakes can be made here, too."""
ROWS = 64
"""Rows of a tile, as the text says."""


def part_inputs(rows: int, groups: int, width: int, per: int, poisoned: bool = False) -> dict[str, Any]:
    """Those of lesson 8, and so many tiles for each program."""
    return {**BEFORE["grouped"].inputs(rows, groups, width, poisoned), "per": per}


def programs(call: Call) -> int:
    """How many programs each group needs, with tiles of half as many rows at the least."""
    return math.ceil(call.case[0] / (ROWS // 2) / call.case[3])


def matrix_again(call: Call) -> str:
    """Of all programs together: each has one group's matrix, once."""
    weight = call.passed["weight"]
    times = len(call.launches.loaded(weight)) / weight.numel() / programs(call)
    return f"matrices are loaded {times:.3g} times as often as needed." if times > 1 else ""


def unknown_width(call: Call) -> str:
    """Whether a kernel is told the width of a group as an ordinary number. 100 is no other size of a case."""
    for kernel, given in call.launches.kernels:
        for name, parameter in inspect.signature(kernel.fn).parameters.items():
            ordinary = "constexpr" not in str(parameter.annotation)
            if ordinary and isinstance(given.get(name), int) and given[name] == call.case[2] == 100:
                return f"{name} is an ordinary argument, so its loads have 2 bytes on a GPU."
    return ""


def stages_of(per: int) -> tuple[int, ...]:
    """The stages that the answer is asked for, if it is: in one case, for the others it has a default."""
    return (2,) if per == 30 else ()


def no_stages(call: Call) -> str:
    """Whether the launch is not told how many stages the loop has."""
    asked, launched = stages_of(call.passed["per"]), [given for _, given in call.launches.kernels]
    told = all(given.get("num_stages") and given["num_stages"] in (asked or range(99)) for given in launched)
    return "" if told else "num_stages does not reach the launch."


def waiting_loads(kernel: CompiledKernel) -> str:
    """Whether no load runs ahead, as a copy to shared memory, which takes 4 bytes at least."""
    can = kernel.widest_load >= 32
    return (
        ""
        if kernel.async_copies or not can
        else "Compiled for an H100, nothing is copied to shared memory ahead of the products."
    )


def sums_go_on(every: bool) -> Callable[..., Tensor]:
    """What comes out when a program's sums go on from tile to tile; with ``every``, the bias does, too."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor, per: int) -> Tensor:
        y = reference(x, weight, bias * every)
        tiles = pad(y, (0, 0, 0, -len(x) % ROWS)).view(-1, ROWS, y.shape[1])
        sums = torch.cat([part.cumsum(0) for part in tiles.split(per)]).flatten(0, 1)
        return sums[: len(x)] + bias.flatten() * (not every)

    return gives


stays = Exercise(
    "the matrix stays",
    "stays",
    reference=lambda x, weight, bias, per: reference(x, weight, bias),
    cases=((1, 1, 1, 13), (70, 2, 5, 13), (900, 2, 20, 13)),
    large=(
        (70, 3, 12, 13, True),
        (70, 3, 16, 1),
        (4500, 2, 3, 30),
        (900, 2, 8, 4),
        (900, 2, 3, 20),
        (5, 2, 100, 13),
        (3, 1, 140, 13),
    ),
    vast=((4096, 100, 100, 13), (70_000, 2000, 20, 13), (64, 70_000, 200, 13)),
    inputs=part_inputs,
    call=lambda answer, x, weight, bias, per: answer(x, weight, bias, per, *stages_of(per)),
    properties=(
        *PRODUCT,
        Property(
            "matrix-again",
            matrix_again,
            "Which of your loads depend on the tile, and which do not? And how many programs has each group?",
            "What does not change stands before the loop: the matrix, and the bias. "
            "And a group needs triton.cdiv(triton.cdiv(R, 64), per) programs, no more.",
        ),
        Property(
            "no-stages",
            no_stages,
            "Your function has an argument num_stages. Who has to know of it?",
            "The launch: stays_kernel[programs](..., num_stages=num_stages).",
        ),
        Property(
            "unknown-width",
            unknown_width,
            "What does the compiler have to know of D, so that a thread can load 8 or 16 bytes at once?",
            "D: tl.constexpr, as in the kernel above.",
        ),
    ),
    **KERNEL_CASES,
    compiled=Property(
        "waiting-loads",
        waiting_loads,
        "The results are right. What has to be so, that Triton lets a loop's loads run ahead?",
        "It does that in a `for` loop over range, never in a `while`, and with two stages at least: the "
        "launch has num_stages=num_stages.",
    ),
    right="Each program loads its matrix once, and no load of x waits for a result.",
    race=RaceSpec(
        work.grouped,
        {"labkit": kernels.grouped_linear},
        tuple({"batch": 4096, "groups": 100, "width": width} for width in (100, 104, 128)),
    ),
    mistakes={
        "running-sum": Mistake(
            "In lesson 6 the sum went on along K. Here a tile has all of K, so each tile begins anew.",
            gives=(sums_go_on(False), sums_go_on(True)),
        ),
        "neighbour": BEFORE["grouped"].mistakes["neighbour"],
        "each-tile": Mistake(
            "With one tile a program it is right. Which tile does each turn of the loop take, and store?",
            "From program_id(1) * per on, one after the other; and each is stored inside of the loop.",
            when=wrong_exactly_where(lambda call: min(call.case[3], math.ceil(call.case[0] / ROWS)) > 1),
        ),
    },
)
