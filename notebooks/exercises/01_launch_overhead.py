"""Exercises of lesson 1: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import ALL_DTYPES, Call, Exercise, Mistake
from labkit.exercises.properties import LOADS_INSIDE, POINTWISE, READ_ONCE
from labkit.pretend import Entry, Gpu, Layer

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, SupportsFloat

import torch
from torch import Tensor

# ---- a benchmark that lies ---------------------------------------------------------------------------------

DEVICES = (
    dict(launch_us=14.0, synchronize_us=20.0, hiccup_every=23),
    dict(launch_us=5.0, synchronize_us=7.0, hiccup_every=31),
    dict(launch_us=30.0, synchronize_us=25.0, compile_us=9000.0, hiccup_every=27),
)


def pretend(device: int, batch: int, width: int, ns_per_element: float) -> dict[str, Any]:
    """A pretend GPU with speeds of its own, and a layer on it."""
    gpu = Gpu(f"device {'ABC'[device]}", **DEVICES[device])  # type: ignore[arg-type]
    return {"gpu": gpu, "layer": Layer(gpu, ns_per_element), "batch": batch, "width": width}


def between(log: list[Entry], idle: bool) -> list[list[Entry]]:
    """Between two readings of the clock, with them; ``idle``: only of readings of an idle device."""
    at = [i for i, entry in enumerate(log) if entry.event == "clock" and not (idle and entry.pending)]
    return [log[first : last + 1] for first, last in pairwise(at)]


def timed(call: Call) -> list[list[Entry]]:
    """What lies between two readings that have calls of the layer between them, of an idle device if any."""
    for idle in (True, False):
        if found := [each for each in between(call.inputs["gpu"].log, idle) if count(each, "call")]:
            return found
    return []


def read(time_us: Any, gpu: Gpu, layer: Layer, batch: int, width: int) -> dict[str, Any]:
    """What a benchmark returns, and how it came to it."""
    got = time_us(gpu, layer, batch, width)
    found = timed(Call((), None, "", {"gpu": gpu}, {}, None))
    facts: dict[str, Any] = {"microseconds": got}
    if found and isinstance(got, SupportsFloat):
        facts[DIVIDED] = over_calls(float(got), found + between(gpu.log, True))
        facts[IDLE] = not any(each[0].pending or each[-1].pending for each in found)
        facts[SIZES] = all(e.shape == (batch, width) for each in found for e in each if e.event == "call")
    return facts


DIVIDED = "time between two readings over the calls between them"
IDLE = "device idle at the readings"
SIZES = "input of the layer is batch by width"


def over_calls(us: float, regions: list[list[Entry]]) -> bool:
    """Whether it lies among the times of one call in each region, or is the slope between two of them."""
    spans = {(span(each), count(each, "call")) for each in regions}
    means = [time / calls for time, calls in spans if calls]
    slopes = [(t - u) / (n - m) for t, n in spans for u, m in spans if n > m]
    return min(means) - 1e-6 * us <= us <= max(means) + 1e-6 * us or any(
        math.isclose(us, each, rel_tol=1e-6) for each in slopes
    )


def right_reading(gpu: Gpu, layer: Layer, batch: int, width: int) -> dict[str, Any]:
    """The device time of one call, from readings of an idle device's clock."""
    return {"microseconds": layer.device_us(batch, width), DIVIDED: True, IDLE: True, SIZES: True}


def count(region: list[Entry], event: str) -> int:
    """How many events of a kind lie between two readings."""
    return sum(entry.event == event for entry in region)


def span(region: list[Entry]) -> float:
    """Microseconds between two readings."""
    return region[-1].host_us - region[0].host_us


def inside(event: str) -> Any:
    """Whether an event lies between two readings of the clock, on all devices."""
    return lambda calls: all(any(count(each, event) for each in timed(c)) for c in calls)


def waits_between(calls: Sequence[Call]) -> bool:
    """Whether the host waits once a call, and not once in all."""
    return all(any(count(r, "synchronize") > 1 < count(r, "call") for r in timed(c)) for c in calls)


def other_divisor(calls: Sequence[Call]) -> bool:
    """Whether the time between the readings is divided by another number of calls, some more or fewer."""
    means = [span(timed(c)[0]) / count(timed(c)[0], "call") for c in calls if len(timed(c)) == 1]
    said = [float(us) for c in calls if isinstance(us := c.got["microseconds"], SupportsFloat) and us > 0]  # type: ignore[operator]
    if not len(means) == len(said) == len(calls):
        return False
    ratios = [mean / us for mean, us in zip(means, said, strict=True)]
    return max(ratios) - min(ratios) < 1e-6 < abs(ratios[0] - 1)


benchmark = Exercise(
    "benchmark",
    "a benchmark that lies",
    "time_us",
    reference=right_reading,
    cases=((0, 1024, 1024, 0.1), (0, 4096, 2048, 0.05), (1, 1024, 1024, 0.13), (2, 4096, 2048, 0.08)),
    inputs=pretend,
    call=read,
    tolerance=0.05,
    untouched="e45768d9f192",
    right="Draw and warm up, wait, read the clock, call many times, wait, read, divide.",
    mistakes=(
        Mistake(
            "constant",
            "The devices and layers differ, and so do their times. What is your result computed from?",
            "Return a difference of two readings of gpu.clock_us(), over the number of calls between.",
            when=lambda calls: len({repr(c.got["microseconds"]) for c in calls}) == 1,
        ),
        Mistake(
            "no-call",
            "What happens between your two readings of the clock?",
            "Call layer(x) between two readings of gpu.clock_us(), many times.",
            when=lambda calls: not any(timed(c) for c in calls),
        ),
        Mistake(
            "draws-inside",
            "Look at what stands between the two readings: what does the device work on there?",
            "gpu.randn is a kernel, too. Draw the input once, before the clock starts.",
            when=inside("draw"),
        ),
        Mistake(
            "other-shape",
            "Look at the tensor that the layer gets. Which sizes are asked for?",
            "Draw it with gpu.randn(batch, width), from the arguments.",
            when=lambda calls: any(not c.got.get(SIZES, True) for c in calls),
        ),
        Mistake(
            "first-call-inside",
            "Is every call of the layer like the others? Print gpu.clock_us() after each of them.",
            "The first call compiles the layer. Call it once before the clock starts.",
            when=inside("compile"),
        ),
        Mistake(
            "stopped-early",
            "Look at the last reading of the clock: where is the device by then?",
            "A launch is queued, and Python goes on. gpu.synchronize() waits for the device: call it "
            "after the loop, before you read the clock.",
            when=lambda calls: all(
                [entry for entry in c.inputs["gpu"].log if entry.event == "clock"][-1].pending for c in calls
            ),
        ),
        Mistake(
            "started-early",
            "Look at the first reading of the clock: what is the device still doing by then?",
            "Drawing and warming up are queued, too. Call gpu.synchronize() before the first reading.",
            when=lambda calls: all(timed(c)[0][0].pending for c in calls),
        ),
        Mistake(
            "waits-inside",
            "Look into the loop: what does the device do between two calls?",
            "It waits for the host. Launch all calls, then wait once.",
            when=waits_between,
        ),
        Mistake(
            "few-calls",
            "How far apart are two of your results on one device? Print them.",
            "A launch and a wait are in your time, and now and then a call is slow. Time 50 calls "
            "between two readings, so that these hardly count.",
            when=lambda calls: all(count(timed(c)[0], "call") < 10 for c in calls),
        ),
        Mistake(
            "wrong-divisor",
            "How many calls lie between the two readings, and what do you divide by?",
            "Divide by the number of calls that were timed. Those of the warm-up don't count.",
            when=other_divisor,
        ),
        Mistake(
            "another-clock",
            "Your computer's clock and torch.cuda know nothing of a device in virtual time.",
            "gpu.clock_us() is the clock that runs along with it, gpu.synchronize() waits for it.",
            raises=r"torch\.cuda|CUDA|name '(time|datetime|timeit|perf_counter)' is not defined",
        ),
        Mistake(
            "other-use",
            "Which three functions does gpu have, and what does layer take?",
            "gpu.randn(batch, width) draws an input x, layer(x) launches, gpu.synchronize() waits, "
            "gpu.clock_us() reads the clock.",
            raises=r"'(Gpu|Layer|Drawn)' object|\(\) (takes|missing|got)|^TypeError: layer\(x\)",
        ),
    ),
)

# ---- the mask ----------------------------------------------------------------------------------------------

BEYOND = 64
"""Elements that both tensors have beyond `count`: nobody may read or write them."""


def doubling(count: int, block: int, programs: int) -> dict[str, Any]:
    """x (count + BEYOND), and how the kernel is launched."""
    return {"x": torch.arange(1.0, count + BEYOND + 1), "count": count, "BLOCK": block, "programs": programs}


def launch(kernel: Any, x: Tensor, count: int, block: int, programs: int) -> dict[str, Any]:
    """What is in y afterwards, where -1 stands for nothing."""
    y = torch.full_like(x, -1.0)
    kernel[(programs,)](x, y, count, BLOCK=block)
    return {"y, which held -1 before": y}


def doubled(stores: Any) -> Any:
    """What y holds when exactly the places for which ``stores(at, count, block)`` is true are stored."""

    def gives(x: Tensor, count: int, block: int, programs: int) -> dict[str, Any]:
        at = torch.arange(len(x))
        stored = stores(at, count, block) & (at < block * programs)
        return {"y, which held -1 before": torch.where(stored, 2 * x, -1.0)}

    return gives


def loads_beyond(call: Call) -> str:
    """What was loaded of x beyond `count`."""
    beyond = int((call.launches.loaded(call.inputs["x"]) >= call.inputs["count"]).sum())
    return f"{beyond} places beyond the end of x were loaded, though y is right." if beyond else ""


mask = Exercise(
    "mask",
    "the mask of a kernel",
    "double_kernel",
    reference=doubled(lambda at, count, block: at < count),
    cases=((1, 4, 1), (10, 4, 3), (8, 4, 2), (7, 16, 1), (100, 32, 4), (5, 4, 8)),
    inputs=doubling,
    call=launch,
    properties=(replace(LOADS_INSIDE, look=loads_beyond),),
    dtypes=(torch.float32,),
    compiles=True,
    right="Each element is stored once, and nothing beyond the end is touched.",
    mistakes=(
        Mistake(
            "no-mask",
            "The last block reaches beyond the tensor. Which of its places may be stored?",
            "A mask has true or false for each place in `at`: make it with a comparison.",
            gives=doubled(lambda at, count, block: at >= 0),
        ),
        Mistake(
            "off-by-one",
            "Python counts from 0. What is the number of the last element of a tensor of 10?",
            "It is 9. Place 10, equal to `count`, is already outside.",
            gives=doubled(lambda at, count, block: at <= count),
        ),
        Mistake(
            "one-short",
            "Which element is never written? Look at the last one of each size.",
            "Places count from 0 to count - 1, and all of them are inside.",
            gives=doubled(lambda at, count, block: at < count - 1),
        ),
        Mistake(
            "one-block",
            "BLOCK is the size of one program's share. How do programs after the first come out?",
            "`at` counts through the whole tensor: in the second program all of it is beyond BLOCK.",
            gives=doubled(lambda at, count, block: at < block),
        ),
        Mistake(
            "whole-blocks",
            "The last block is partly inside. What does your mask say about it?",
            "You need an answer for each place, not one for each program: start from `at`.",
            gives=(
                doubled(lambda at, count, block: at < count // block * block),
                doubled(lambda at, count, block: at // block * block < count),
                doubled(lambda at, count, block: at // block < count // block),
            ),
        ),
        Mistake(
            "inverted",
            "True means: this place is loaded and stored. Which side of the comparison are they on?",
            "Turn the comparison round.",
            gives=(
                doubled(lambda at, count, block: at >= count),
                doubled(lambda at, count, block: at > count),
            ),
        ),
        Mistake(
            "size-of-address",
            "x and y are addresses, which don't know how many elements there are. Which argument does?",
            "Compare `at`, the numbers of the places, with `count`.",
            raises=r"no len\(\)|\.(shape|numel|size|dim)\b|pointer<|cannot add pointers",
        ),
    ),
)

# ---- fuse what surrounds the layer -------------------------------------------------------------------------


def residual_inputs(*shape: int) -> dict[str, Any]:
    """x and residual (..., width), weight and bias (width,)."""
    width = shape[-1]
    return {
        "x": torch.randn(shape),
        "weight": torch.randn(width),
        "bias": torch.randn(width),
        "residual": torch.randn(shape),
    }


def block(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """A residual block: relu(x*w + b) + residual."""
    return torch.relu(x * weight + bias) + residual


def with_column(column: Any, beyond_end: float) -> Any:
    """What comes out when weight and bias are loaded at another column than the element's.

    ``beyond_end`` is what the ReLU makes of the NaN that lies beyond the end of both: NaN or 0.
    """

    def gives(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        at = column(torch.arange(x.numel()), x.shape[-1])
        beyond = at >= len(weight)
        value = x.flatten() * weight[at % len(weight)] + bias[at % len(weight)]
        value = torch.where(beyond, beyond_end, value.relu())
        return (value + residual.flatten()).view(x.shape)

    return gives


def beside() -> Any:
    """96 MiB in bfloat16, where memory decides."""
    from labkit.exercises.race import Race
    from labkit.works import RESIDUAL

    rivals = {"eager": block, "torch.compile": block}
    return Race(RESIDUAL, rivals, ({"batch": 49152, "width": 1024},), compiled=("torch.compile",))


fuse = Exercise(
    "fuse",
    "fuse what surrounds the layer",
    "fused",
    reference=block,
    cases=((1, 1), (3, 5, 33), (37, 33), (5, 640), (2, 3000)),
    inputs=residual_inputs,
    dtypes=ALL_DTYPES,
    layouts=("contiguous", "transposed", "strided"),
    properties=(*POINTWISE, READ_ONCE),
    compiles=True,
    right="One launch moves three tensors; eager execution moves nine.",
    race=beside,
    mistakes=(
        Mistake(
            "no-residual",
            "What is added after the ReLU?",
            "Load residual at `at`, like x, and add it last.",
            gives=lambda x, weight, bias, residual: torch.relu(x * weight + bias),
        ),
        Mistake(
            "relu-last",
            "Read the formula from the inside out: what is inside the ReLU, and what is outside?",
            "The residual comes after the ReLU, and may make the result negative again.",
            gives=lambda x, weight, bias, residual: torch.relu(x * weight + bias + residual),
        ),
        Mistake(
            "no-relu",
            "Which values of x*w + b does the ReLU change?",
            "tl.maximum(value, 0.0) sets the negative ones to zero.",
            gives=lambda x, weight, bias, residual: x * weight + bias + residual,
        ),
        Mistake(
            "element-for-column",
            "weight has `width` elements. Which one belongs to element `at` of x?",
            "Rows lie one behind the other, so the column is what is left of `at` after whole rows.",
            gives=tuple(with_column(lambda at, width: at, end) for end in (0.0, math.nan)),
        ),
        Mistake(
            "row-for-column",
            "at // width counts whole rows. Which number says how far inside its row an element is?",
            "The remainder of the same division.",
            gives=tuple(with_column(lambda at, width: at // width, end) for end in (0.0, math.nan)),
        ),
    ),
)
