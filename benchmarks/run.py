"""The loop of every benchmark: draw a size, check each contender against float64, time all that are right.

A size is drawn log-uniformly from an operation's ranges by a seed, in bfloat16 and float32 in turn. At each
size the contenders and a copy of the same bytes are timed in one interleaved run (labkit.measure.clocks), and
every contender becomes a row; one that fails, or is wrong, a row without a time and with a note.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads.base import Shape, Work
from labkit import gpu
from labkit.measure import clocks, session, tape
from labkit.measure.cold_cache import TimedCall
from labkit.measure.correctness import relative_error

Call = Callable[..., Tensor]
Ranges = dict[str, tuple[int, int, int]]
"""For each axis the least and the most size, and what every size is a multiple of."""
Row = dict[str, Any]

LARGE, SMALL = (2**24, 2**29), (2**16, 2**22)
"""Least and most bytes that a forward pass moves; launches hardly count in a large one, and do in a small."""
DTYPES = ("bfloat16", "float32")
ALLOWED_ERROR = {"bfloat16": 2e-2, "float32": 1e-3}
"""A larger relative error, by norms, is a wrong result and no rounding. TF32, which cuDNN's GRU takes for
float32 whatever it is told, has about 5e-4."""
PEERS = {
    "Liger": "liger-kernel",
    "fla, step by step": "fla-core",
    "fla, in chunks": "fla-core",
    "accelerated-scan": "accelerated-scan",
}
"""Contenders from other packages, and the package of each."""


@dataclass(frozen=True)
class Operation:
    """One operation, and all that compute it.

    ``work`` has the inputs for a size, the float64 reference, and the fewest bytes that have to move.
    ``contenders`` are plain functions of the inputs; the one named "torch.compile" is compiled before it is
    called. ``ranges`` are what sizes are drawn from, by the name of the suite; the first has the name "".
    ``layouts`` makes of the inputs what a contender keeps, where that is another form. ``only`` has the
    contenders that are not for everything: ``only[name](direction, dtype, size)``. ``bound`` names the roof:
    a "copy" of the same bytes, or a "product", which is cuBLAS's and among the contenders.
    """

    name: str
    work: Work
    contenders: dict[str, Call]
    ranges: dict[str, Ranges]
    directions: tuple[str, ...] = ("forward", "backward")
    layouts: dict[str, Callable[..., tuple[Tensor, ...]]] = field(default_factory=dict)
    only: dict[str, Callable[[str, str, Shape], bool]] = field(default_factory=dict)
    bound: str = "copy"

    def draw(self, suite: str, seed: int, number: int) -> tuple[Shape, str]:
        """Size and dtype ``number`` of a suite; "small" has small sizes of the first ranges.

        ValueError where the ranges hold no size that moves as many bytes as it should.
        """
        rng, dtype = random.Random(f"{seed} {self.name} {suite} {number}"), DTYPES[number % len(DTYPES)]
        least, most = SMALL if suite == "small" else LARGE
        for _ in range(10_000):
            size = {}
            for axis, (low, high, step) in self.ranges["" if suite == "small" else suite].items():
                size[axis] = step * round(math.exp(rng.uniform(math.log(low), math.log(high))) / step)
            if least <= self.work.min_bytes(size, getattr(torch, dtype).itemsize, "forward") <= most:
                return size, dtype
        raise ValueError(f"{self.name}: no size of {suite or 'its ranges'} moves {least} to {most} bytes")

    def kept(self, name: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs in the form in which a contender keeps them."""
        return self.layouts[name](*inputs) if name in self.layouts else inputs

    def whole(self, name: str, call: Call) -> Call:
        """A contender as a function of the inputs as they are drawn."""
        return lambda *inputs: call(*self.kept(name, inputs))


# ---- is it right? ------------------------------------------------------------------------------------------


def exact(work: Work, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The right output, and the gradient of each input for an upstream gradient of twice the output, in
    float64. The upstream gradient is rounded to the inputs' dtype, as the contenders get it."""
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    output = work.reference(*leaves)
    upstream = (2 * output.detach()).to(inputs[0].dtype).double()
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def check(call: Call, inputs: tuple[Tensor, ...], wanted: list[Tensor], direction: str) -> str:
    """What is wrong with a call, or "". ``inputs`` require gradients, ``wanted`` is what `exact` returns.

    It is called as it will be timed: forward without gradients. Where a backward pass is timed alone, the
    second one of one forward pass has to be right.
    """
    with torch.set_grad_enabled(direction != "forward"):
        output = call(*inputs)
    if output.shape != wanted[0].shape:
        return f"wrong result: a shape of {tuple(output.shape)}, not {tuple(wanted[0].shape)}"
    found, dtype = [output], str(inputs[0].dtype).removeprefix("torch.")
    if direction != "forward":
        upstream, again = (2 * wanted[0]).to(output.dtype), direction == "backward"
        for _ in range(1 + again):
            gradients = torch.autograd.grad(output, inputs, upstream, retain_graph=again)
        found += gradients
    for got, want in zip(found, wanted[: len(found)], strict=True):
        error = relative_error(got.detach(), want)
        if not error <= ALLOWED_ERROR[dtype]:  # or NaN
            return f"wrong result: a relative error of {error:.1e}"
    return ""


# ---- how long does it take? --------------------------------------------------------------------------------


def measure_size(
    operation: Operation, suite: str, seed: int, number: int, *, peers: bool = False, clock: str = ""
) -> Iterator[Row]:
    """Draw a size, check the contenders and time them: a row for each contender, direction and clock.

    Large sizes are timed by the graph clock with a cold cache, small ones also by the host's, and both warm,
    as between the layers of a small network. ``clock`` asks for one clock. Where the float64 reference does
    not fit: torch.OutOfMemoryError.
    """
    work, (size, dtype) = operation.work, operation.draw(suite, seed, number)
    usual, cache = (("graph", "host"), "warm") if suite == "small" else (("graph",), "cold")
    torch.manual_seed(seed)
    with gpu.full_float32():
        like: dict[str, Any] = {"device": gpu.device(), "dtype": getattr(torch, dtype)}
        inputs = tuple(t.to(**like).requires_grad_() for t in work.inputs(size))
        wanted = exact(work, inputs)
        for direction in operation.directions:
            notes: dict[str, str] = {}
            calls: dict[str, TimedCall] = {}
            for name, call in operation.contenders.items():
                is_for_this = operation.only.get(name, lambda *_: True)(direction, dtype, size)
                if not is_for_this or (name in PEERS and not peers):
                    continue
                try:
                    if name == "torch.compile":
                        torch.compiler.reset()  # else it has the code of an earlier size, or a dynamic one
                        call = torch.compile(call, dynamic=False)
                    notes[name] = check(operation.whole(name, call), inputs, wanted, direction)
                    if not notes[name]:
                        calls[name] = clocks.timed_call(call, operation.kept(name, inputs), direction)
                except Exception as error:  # it becomes the note of this contender's row
                    notes[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            moved = work.min_bytes(size, like["dtype"].itemsize, direction)
            copies = session.copy_calls(moved) if operation.bound == "copy" else {}
            for how in [clock] if clock else usual:
                timed: dict[str, Any] = {**clocks.measure(calls | copies, clock=how, cache=cache)}  # type: ignore[arg-type]
                took = [timed[name].median_us for name in copies if hasattr(timed[name], "median_us")]
                copied = session.copied_bytes(moved)  # of whole pages, a little more
                copy_us = min(took) * moved / copied if took and how == "graph" else None
                for name, note in notes.items():
                    timing = timed.get(name)
                    yield {
                        "suite": f"{operation.name}/{suite}".strip("/"),
                        "contender": name,
                        "direction": direction,
                        "dtype": dtype,
                        "shape": size,
                        "clock": getattr(timing, "clock", how),  # "events" where a graph cannot hold the call
                        "cache": cache,
                        **{each: getattr(timing, each, None) for each in ("median_us", "p20_us", "p80_us")},
                        "copy_us": copy_us,
                        "note": note or getattr(timing, "note", ""),
                        "peer": peer(name),
                        "seed": seed,
                        **tape.where_and_when(),
                    }
    torch.cuda.empty_cache()


def peer(name: str) -> str:
    """Package and version of a contender from another package, its name alone where it is missing."""
    try:
        return f"{PEERS[name]} {version(PEERS[name])}" if name in PEERS else ""
    except PackageNotFoundError:
        return PEERS[name]
