"""The suite of lesson 5: eight blocks of Linear, RMSNorm and GELU, launched in every way."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from labkit import device, lessons
from labkit import stack_works as work
from labkit.bench_plan import Part
from labkit.kernels import GraphedStep, blocks, norm_gelu
from labkit.sweeps import Contender

SHAPES = tuple(
    {"batch": batch, "width": width, "depth": 8}
    for batch, width in ((256, 64), (256, 128), (256, 256), (4096, 256))
)


def graphs() -> list[Part]:
    """Device time without launches; a step as Python sees it; forward with backward."""
    lesson = lessons.load("05_cuda_graphs")
    # names of their own: what a contender's code is, is read from what its call holds
    stack, step, one_launch = lesson.Stack, GraphedStep, blocks(99)
    bare, in_place, graphed = lesson.bare, lesson.in_place, _graphed
    eager = Contender("eager", work.stack, work.STACK)
    compiled = Contender("torch.compile", work.stack, work.STACK, compiled=True)
    launched = (
        Contender("labkit, a launch a block", blocks(1), work.STACK),
        Contender("labkit, one launch", one_launch, work.STACK),
    )
    made = {
        "reduce-overhead": lambda x, *w: torch.compile(stack(*w), mode="reduce-overhead", dynamic=False),
        "make_graphed_callables": lambda x, *w: graphed(partial(stack.forward, stack(*w)), x),
        "bare replay": lambda x, *w: bare(stack(*w), x),
        "labkit, GraphedStep": lambda x, *w: step(stack(*w)),
        "labkit, GraphedStep, no copy": lambda x, *w: in_place(step(stack(*w)), x),
        "labkit, GraphedStep, compiled": lambda x, *w: step(torch.compile(stack(*w), dynamic=False)),
        "labkit, GraphedStep, one launch": lambda x, *w: step(lambda x: one_launch(x, *w)),
    }
    replayed = (Contender(name, lesson.made_of(make), work.STACK) for name, make in made.items())
    fused = Contender("labkit", _with(norm_gelu), work.STACK)
    return [
        Part((eager, compiled, *launched), SHAPES, cache="warm"),
        Part((eager, compiled, *launched, *replayed), SHAPES, "host", clocks=("host",), cache="warm"),
        Part(
            (eager, compiled, fused),
            SHAPES,
            "training",
            directions=("backward", "forward_backward"),
            cache="warm",
        ),
    ]


def _graphed(module: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    device.own_workspaces()
    return cast(Callable[[Tensor], Tensor], torch.cuda.make_graphed_callables(module, (x.clone(),)))


def _with(between: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The stack with bias, norm and GELU in one kernel."""

    def fused(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        for matrix, shift, scale in zip(weight, bias, gain, strict=True):
            x = between(functional.linear(x, matrix), shift, scale)
        return x

    return fused
