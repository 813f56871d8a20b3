"""Exercises of lesson 1: what is right, what people write instead, and what helps them on."""

from labkit import kernels
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import LOADS_INSIDE, POINTWISE, READ_ONCE, column_mistakes
from labkit.exercises.simulated_gpu import count, duration
from labkit.exercises.simulated_layers import BenchmarkGpu, BenchmarkLayer, KernelSequence
from labkit.measure.correctness import DTYPES
from labkit.workloads.elementwise import AFFINE
from labkit.workloads.elementwise import affine as layer

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# ---- a benchmark that lies ---------------------------------------------------------------------------------

DEVICES = ((14.0, 20.0, 23), (5.0, 7.0, 31), (30.0, 25.0, 27, 9000.0))
"""Microseconds of a launch and of a wait, every which call is slow, and microseconds of compiling."""
IDLE = "device idle at the readings"
SIZES = "input of the layer is batch by width"


def gpu_and_layer(device: int, batch: int, width: int, ns_per_element: float) -> dict[str, Any]:
    """A simulated GPU with speeds of its own, and a layer on it."""
    gpu = BenchmarkGpu(*DEVICES[device])
    return {"gpu": gpu, "layer": BenchmarkLayer(gpu, ns_per_element), "batch": batch, "width": width}


def run_benchmark(time_us: Any, gpu: BenchmarkGpu, layer: BenchmarkLayer, batch: int, width: int) -> Any:
    """What a benchmark returns, and how it came to it."""
    facts: dict[str, Any] = {"microseconds": time_us(gpu, layer, batch, width)}
    if found := gpu.timed_parts():
        facts[IDLE] = not any(part[0].pending or part[-1].pending for part in found)
        facts[SIZES] = all(e.shape == (batch, width) for part in found for e in part if e.event == "call")
    return facts


def right_benchmark(gpu: BenchmarkGpu, layer: BenchmarkLayer, batch: int, width: int) -> dict[str, Any]:
    """The device time of one call, from readings of an idle device's clock."""
    return {"microseconds": batch * width * layer.ns_per_element / 1000, IDLE: True, SIZES: True}


def parts_of(call: Call) -> Any:
    """What lies between the readings of a clock, which are the first and the last one for a graph clock."""
    return call.passed["gpu"].timed_parts() if "gpu" in call.passed else [call.passed["call"].gpu.timed()]


def everywhere(found: Callable[[Any], Any]) -> Any:
    """Whether all calls have something, ``found(part)``, between two readings of the clock."""
    return lambda calls: all(any(map(found, parts_of(c))) for c in calls)


def off_by(calls_in: Callable[[Any], int], *factors: float) -> Any:
    """Whether all results are too small by one of these factors; by any factor at all if none is given.

    ``calls_in(part)`` is how many calls of the layer the device worked off between the readings.
    """

    def found(calls: Sequence[Call]) -> bool:
        ratios = []
        for c in calls:
            us, parts = c.got["microseconds"] if isinstance(c.got, dict) else c.got, parts_of(c)
            number = calls_in(parts[0]) if len(parts) == 1 and hasattr(us, "__float__") else 0
            ratios += [duration(parts[0]) / number / float(us)] if number and us > 0 else []
        near = [math.isclose(ratios[0], each, rel_tol=0.15) for each in factors or (1.0,) if ratios]
        return len(ratios) == len(calls) and max(ratios) < 1.1 * min(ratios) and any(near) == bool(factors)

    return found


benchmark = Exercise(
    "a benchmark that lies",
    "time_us",
    reference=right_benchmark,
    cases=((0, 1024, 1024, 0.1), (0, 4096, 2048, 0.05), (1, 1024, 1024, 0.13), (2, 4096, 2048, 0.08)),
    inputs=gpu_and_layer,
    call=run_benchmark,
    tolerance=0.05,
    untouched="4433f22ca731",
    right="Draw and warm up, wait, read the clock, call many times, wait, read, divide.",
    mistakes={
        "no-call": Mistake(
            "What happens between your two readings of the clock?",
            "Call layer(x) between two readings of gpu.clock_us(), many times.",
            when=lambda calls: not any(parts_of(c) for c in calls),
        ),
        "draws-inside": Mistake(
            "Look at what stands between the two readings: what does the device work on there?",
            "gpu.randn is a kernel, too. Draw the input once, before the clock starts.",
            when=everywhere(lambda part: count(part, "draw")),
        ),
        "first-call-inside": Mistake(
            "Is every call of the layer like the others? Print gpu.clock_us() after each of them.",
            "The first call compiles the layer. Call it once before the clock starts.",
            when=everywhere(lambda part: count(part, "compile")),
        ),
        "no-wait": Mistake(
            "Look at the first and at the last reading of the clock: what is the device still doing by then?",
            "All is only queued, and Python goes on. Call gpu.synchronize() right before both readings.",
            when=lambda calls: not any(c.got.get(IDLE, True) for c in calls),
        ),
        "waits-inside": Mistake(
            "Look into the loop: what does the device do between two calls?",
            "It waits for the host. Launch all calls, then wait once.",
            when=everywhere(lambda part: count(part, "synchronize") > 1 < count(part, "call")),
        ),
        "few-calls": Mistake(
            "How many calls lie between two of your readings, and share one wait?",
            "One launch, one wait and now and then a slow call should hardly count. Time 50 calls.",
            when=lambda calls: all(count(parts_of(c)[0], "call") < 10 for c in calls),
        ),
        "wrong-divisor": Mistake(
            "How many calls lie between the two readings, and what do you divide by?",
            "Divide by the number of calls that were timed. Those of the warm-up don't count.",
            when=off_by(lambda part: count(part, "call")),
        ),
        "another-clock": Mistake(
            "Your computer's clock and torch.cuda know nothing of a device in virtual time.",
            "gpu.clock_us() is the clock that runs along with it, gpu.synchronize() waits for it.",
            raises=r"torch\.cuda|CUDA|name '(time|datetime|timeit|perf_counter)' is not defined",
        ),
        "other-use": Mistake(
            "Which three functions does gpu have, and what does layer take?",
            "gpu has randn(batch, width), which draws an x, synchronize() and clock_us(). Call layer(x).",
            raises=r"'(Benchmark\w+|RandomTensor)' object|\(\) (takes|missing|got)|^TypeError: layer\(x\)",
        ),
    },
)

# ---- the graph clock ---------------------------------------------------------------------------------------


def run_graph_clock(graph_us: Any, call: KernelSequence) -> Any:
    """What a graph clock returns where torch.cuda and the clocks are the simulated GPU's."""
    with call.gpu.replaces_cuda(graph_us):
        return graph_us(call)


def calls_captured(call: Call) -> int:
    """How many calls of the layer were captured."""
    return count(call.passed["call"].gpu.log, "captured")


def calls_replayed(part: Any) -> int:
    """How many captured calls the replays in a part of the log have."""
    return sum(entry.calls for entry in part)


graph = Exercise(
    "the graph clock",
    "graph_us",
    reference=lambda call: call.device_us,
    cases=((3, 1.4, 5.0), (2, 3.0, 14.0), (5, 2.2, 9.0), (1, 40.0, 6.0)),
    inputs=lambda *case: {"call": KernelSequence(*case)},
    call=run_graph_clock,
    tolerance=0.05,
    right="However slow Python is: a replay is launched once, so what you read is the device's work.",
    mistakes={
        "compiles-inside": Mistake(
            "Which call of a layer is unlike all others, and where does it happen here?",
            "The first one compiles, and that can't be captured. Make one call before the capture begins.",
            raises="capturing: call compiles",
        ),
        "waits-inside": Mistake(
            "Inside the capture nothing runs: launches are written down. What is there to wait for?",
            "torch.cuda.synchronize() belongs before the first reading of the clock and before the last.",
            raises="capturing: the host waited",
        ),
        "replays-inside": Mistake(
            "When is the capture complete? Look at the indentation of the replay.",
            "The capture ends with the `with` block: replay below it.",
            raises="capturing: a graph was replayed",
        ),
        "not-captured": Mistake(
            "Which of your calls were captured? Those outside of the capture cost Python's time again.",
            "Make the calls inside `with torch.cuda.graph(graph):`, all of them but the warm-up.",
            when=lambda calls: not any(map(calls_captured, calls)),
        ),
        "no-replay": Mistake(
            "What does the device do between your two readings of the clock?",
            "A capture runs nothing. Only graph.replay() makes the device work: time that.",
            when=lambda calls: not any(count(parts_of(c)[0], "replay") for c in calls),
        ),
        "captures-inside": Mistake(
            "Look at what stands between the two readings: how much of it is Python's work?",
            "A capture launches every kernel from Python. Finish it before you read the clock.",
            when=everywhere(lambda part: count(part, "captured")),
        ),
        "stopped-early": Mistake(
            "Look at the last reading of the clock: where is the device by then?",
            "replay() returns when the graph is queued. Call torch.cuda.synchronize() before that reading.",
            when=everywhere(lambda part: any(e.event == "clock" and e.pending for e in part[-1:])),
        ),
        "few-calls": Mistake(
            "A replay is a launch, too: some 8 us. How many calls share it?",
            "Capture a loop of 100 calls, so that the launch hardly counts.",
            when=lambda calls: all(0 < calls_captured(c) < 10 for c in calls),
        ),
        "unit": Mistake(
            "In which unit does your clock count, and which one is asked for?",
            "perf_counter counts seconds, elapsed_time milliseconds. A second has 1e6 microseconds.",
            when=off_by(calls_replayed, 1e3, 1e6),
        ),
        "wrong-divisor": Mistake(
            "How many calls ran between the two readings, and what do you divide by?",
            "Each replay runs every captured call: divide by calls times replays, and mind the unit.",
            when=off_by(calls_replayed),
        ),
        "first-replay": Mistake(
            "Is every replay like the others? Time each one by itself.",
            "The first one also uploads the graph. Replay once, and wait, before the clock starts.",
            when=everywhere(lambda part: count(part, "upload")),
        ),
    },
)

# ---- the mask ----------------------------------------------------------------------------------------------

BEYOND = 64
"""Elements that both tensors have beyond `count`: nobody may read or write them."""


def doubling_inputs(count: int, block: int, programs: int) -> dict[str, Any]:
    """x (count + BEYOND), and how the kernel is launched."""
    return {"x": torch.arange(1.0, count + BEYOND + 1), "count": count, "BLOCK": block, "programs": programs}


def launch_doubling(kernel: Any, x: Tensor, count: int, block: int, programs: int) -> dict[str, Any]:
    """What is in y afterwards, where -1 stands for nothing."""
    y = torch.full_like(x, -1.0)
    kernel[(programs,)](x, y, count, BLOCK=block)
    return {"y, which held -1 before": y}


def doubled_where(*masks: Any) -> tuple[Any, ...]:
    """What y holds when exactly the places for which ``mask(at, count, block)`` is true are stored."""

    def gives(x: Tensor, count: int, block: int, programs: int, mask: Any) -> dict[str, Any]:
        at = torch.arange(len(x))
        stored = mask(at, count, block) & (at < block * programs)
        return {"y, which held -1 before": torch.where(stored, 2 * x, -1.0)}

    return tuple(partial(gives, mask=each) for each in masks)


def loads_beyond(call: Call) -> str:
    """What was loaded of x beyond `count`."""
    beyond = int((call.launches.loaded(call.passed["x"]) >= call.passed["count"]).sum())
    return f"{beyond} places beyond the end of x were loaded, though y is right." if beyond else ""


mask = Exercise(
    "the mask of a kernel",
    "double_kernel",
    reference=doubled_where(lambda at, count, block: at < count)[0],
    cases=((1, 4, 1), (10, 4, 3), (8, 4, 2), (7, 16, 1), (100, 32, 4), (5, 4, 8)),
    inputs=doubling_inputs,
    call=launch_doubling,
    properties=(Property("loads-outside", loads_beyond, *LOADS_INSIDE.hints),),
    dtypes=(torch.float32,),
    right="Each element is stored once, and nothing beyond the end is touched.",
    mistakes={
        "no-mask": Mistake(
            "The last block reaches beyond the tensor. Which of its places may be stored?",
            "A mask has true or false for each place in `at`: make it with a comparison.",
            gives=doubled_where(lambda at, count, block: at >= 0),
        ),
        "off-by-one": Mistake(
            "Python counts from 0. What is the number of the last element of a tensor of 10?",
            "It is 9. Place 10, equal to `count`, is already outside.",
            gives=doubled_where(lambda at, count, block: at <= count),
        ),
        "one-block": Mistake(
            "BLOCK is one program's share, and tl.arange(0, BLOCK) is the same in each. What differs?",
            "`at` counts through the whole tensor: compare that with `count`.",
            gives=doubled_where(lambda at, n, block: at < block, lambda at, n, block: at % block < n),
        ),
        "whole-blocks": Mistake(
            "The last block is partly inside. What does your mask say about it?",
            "You need an answer for each place, not one for each program: start from `at`.",
            gives=doubled_where(
                lambda at, n, block: at < n // block * block, lambda at, n, block: at // block * block < n
            ),
        ),
        "size-of-address": Mistake(
            "x and y are addresses, which don't know how many elements there are. Which argument does?",
            "Compare `at`, the numbers of the places, with `count`.",
            raises=r"no len\(\)|\.(shape|numel|size|dim)\b|pointer<|cannot add pointers",
        ),
    },
)

# ---- the layer as one kernel -------------------------------------------------------------------------------


def layer_inputs(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), weight and bias (width,)."""
    return {"x": torch.randn(rows, width), "weight": torch.randn(width), "bias": torch.randn(width)}


RIVALS = {"eager": layer, "torch.compile": layer, "labkit": kernels.affine}

affine = Exercise(
    "the layer as one kernel",
    "affine",
    reference=layer,
    cases=((1, 1), (3, 5), (37, 33)),
    large=((5, 640), (2, 3000)),
    inputs=layer_inputs,
    dtypes=DTYPES,
    properties=(*POINTWISE, READ_ONCE),
    right="One launch, one pass: x is read once, y is written once, and nothing else is as long.",
    # a width that is a power of two, and one whose rows no wide load can take
    race=RaceSpec(AFFINE, RIVALS, ({"batch": 32768, "width": 1024}, {"batch": 32768, "width": 161})),
    mistakes={
        **column_mistakes(layer),
        "no-bias": Mistake(
            "Subtract your result from the right one for two rows: what is missing, in both of them alike?",
            "Load bias as you load weight, and add it.",
            gives=lambda x, weight, bias: x * weight,
        ),
        "bias-first": Mistake(
            "What is multiplied by the weight in the formula: x, or x + bias?",
            "Multiply first, then add.",
            gives=lambda x, weight, bias: (x + bias) * weight,
        ),
    },
)
