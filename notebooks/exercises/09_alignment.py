"""The task of lesson 9: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, PRODUCT
from labkit.work.grouped import reference

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

BEFORE = judge.find("08_grouped_matmul")
"""Its task is the same layer with one tile a program. Most of its mistakes can be made here, too."""
ROWS, PER = 64, 13
"""Rows of a tile, and tiles of a program, as the text says."""


def programs(call: Call) -> int:
    """How many programs each group needs."""
    return math.ceil(call.case[0] / ROWS / PER)


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


def no_stages(call: Call) -> str:
    """Whether the launch is not told how many stages the loop has."""
    told = all(given.get("num_stages") for _, given in call.launches.kernels)
    return "" if told else "num_stages does not reach the launch."


def sums_go_on(every: bool) -> Callable[..., Tensor]:
    """What comes out when a program's sums go on from tile to tile; with ``every``, the bias does, too."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = reference(x, weight, bias * every)
        tiles = pad(y, (0, 0, 0, -len(x) % ROWS)).view(-1, ROWS, y.shape[1])
        sums = torch.cat([part.cumsum(0) for part in tiles.split(PER)]).flatten(0, 1)
        return sums[: len(x)] + bias.flatten() * (not every)

    return gives


stays = Exercise(
    "the matrix stays",
    "stays",
    reference=reference,
    cases=((1, 1, 1), (70, 2, 5), (900, 2, 20)),
    large=((70, 3, 12, True), (70, 3, 16), (1700, 2, 3), (5, 2, 100)),
    inputs=BEFORE["grouped"].inputs,
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
    right="Each program loads its matrix once, and no load of x waits for a result.",
    race=RaceSpec(
        work.grouped,
        {"labkit": kernels.grouped_linear},
        tuple({"batch": 4096, "groups": 100, "width": width} for width in (100, 104, 128)),
    ),
    mistakes={
        name: mistake
        for name, mistake in BEFORE["grouped"].mistakes.items()
        if name
        in (
            "neighbour",
            "transposed",
            "no-bias",
            "weight-stride",
            "matrix-rows",
            "first-weight",
            "bias-row",
            "one-load",
            "swapped",
        )
    }
    | {
        "running-sum": Mistake(
            "The first tile of each program is right. What does your sum hold when the second one begins?",
            "In lesson 6 the sum went on along K. Here a tile has all of K, so each tile begins anew.",
            gives=(sums_go_on(False), sums_go_on(True)),
        ),
        "unwritten": Mistake(
            "Which tiles are the first one of program 0 and of program 1, and which is the last one?",
            "Does the launch have G programs on axis 0, and triton.cdiv(triton.cdiv(R, 64), per) on axis 1?",
            "Program i on axis 1 has the tiles from i * per to i * per + per - 1, if there are so many.",
        ),
        "stores-outside": BEFORE["grouped"].mistakes["stores-outside"],
    },
)
