"""Tasks of lesson 2: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, Property
from labkit.exercises.simulated_gpu import LogEntry, count, duration
from labkit.exercises.simulated_layers import BenchmarkGpu, BenchmarkLayer, KernelSequence

import math
from collections.abc import Callable, Sequence
from typing import Any

Part = list[LogEntry]
"""What a simulated GPU noted between two readings of a clock, with both."""


def parts_of(call: Call) -> list[Part]:
    """The timed parts: each between two readings, and for a graph clock from the first to the last one."""
    return call.passed["gpu"].timed_parts() if "gpu" in call.passed else [call.passed["call"].gpu.timed()]


def everywhere(found: Callable[[Part], Any]) -> Callable[[Sequence[Call]], bool]:
    """Whether each call of the answer has a part in which something is ``found``."""
    return lambda calls: all(any(map(found, parts_of(call))) for call in calls)


def off_by(calls_in: Callable[[Part], int], *factors: float) -> Callable[[Sequence[Call]], bool]:
    """Whether all results are too small by one of these factors; by any factor at all if none is given.

    ``calls_in(part)`` is how many calls of the layer the GPU worked off between the readings.
    """

    def found(calls: Sequence[Call]) -> bool:
        ratios = []
        for call in calls:
            parts = parts_of(call)
            number = calls_in(parts[0]) if len(parts) == 1 and hasattr(call.got, "__float__") else 0
            ratios += [duration(parts[0]) / number / float(call.got)] if number and call.got > 0 else []
        if len(ratios) < len(calls) or max(ratios) > 1.1 * min(ratios):
            return False
        near = any(math.isclose(ratios[0], factor, rel_tol=0.15) for factor in factors or (1.0,))
        return near == bool(factors)

    return found


# ---- a benchmark that lies ---------------------------------------------------------------------------------

DEVICES: tuple[Any, ...] = (
    (8.0, 9.0, 23, (2,)),
    (5.0, 7.0, 31, (3, 51)),
    (9.0, 6.0, 27, (11,), 9000.0),
    (6.0, 8.0, 29, (6, 21)),
)
"""Microseconds of a launch and of a wait, which calls are slow, and microseconds of compiling."""


def gpu_and_layer(device: int, batch: int, width: int, ns_per_element: float) -> dict[str, Any]:
    """A pretend GPU with speeds of its own, and a layer on it."""
    gpu = BenchmarkGpu(*DEVICES[device])
    layer = BenchmarkLayer(gpu, ns_per_element, batch, width)
    return {"gpu": gpu, "layer": layer, "batch": batch, "width": width}


NO_CALL = (
    "What happens between your two readings of the clock?",
    "Call layer(x) between two readings of gpu.clock_us(), many times.",
)


FEW_CALLS = (
    "Time the same call twenty times, one by one: are all of these times alike?",
    "Among few calls a slow one weighs much. Take the average of 50 calls, or a median.",
)
FEWEST = 5
"""So many calls have to be timed: now and then one is slow."""


def calls_timed(call: Call) -> int:
    return sum(count(part, "call") for part in parts_of(call))


def few_calls(call: Call) -> str:
    """What is wrong where only few calls were timed, though the number is right."""
    timed = calls_timed(call)
    return f"The number is right, but calls timed: {timed}. Any one may be slow." if timed < FEWEST else ""


def no_call(call: Call) -> str:
    """What is wrong where nothing was timed, though the number is right."""
    return "" if parts_of(call) else "The number is right, but no call of the layer was timed."


benchmark = Exercise(
    "a benchmark that lies",
    "time_us",
    reference=lambda gpu, layer, batch, width: batch * width * layer.ns_per_element / 1000,
    cases=((0, 16384, 1024, 0.06), (1, 32768, 512, 0.1), (2, 8192, 2048, 0.08), (3, 4096, 4096, 0.16)),
    inputs=gpu_and_layer,
    tolerance=0.05,
    properties=(Property("no-call", no_call, *NO_CALL), Property("few-calls", few_calls, *FEW_CALLS)),
    untouched="20f32713a54a",
    right="Draw and warm up, wait, read the clock. What lies between the readings is the calls, and no more.",
    mistakes={
        "draws-inside": Mistake(
            "Look at what stands between the two readings: what does the GPU work on there?",
            "gpu.randn is a kernel, too. Draw the input once, and wait for it, before the clock starts.",
            when=everywhere(lambda part: count(part, "draw")),
        ),
        "first-call-inside": Mistake(
            "Is every call of the layer like the others? Time the first and the second one, each by itself.",
            "The first call compiles the layer. Call it once before the clock starts.",
            when=everywhere(lambda part: count(part, "compile")),
        ),
        "no-wait-at-the-end": Mistake(
            "Look at the last reading of the clock: what is the GPU still doing by then?",
            "The calls are only in the queue. Call gpu.synchronize() right before you read the clock.",
            when=everywhere(lambda part: any(each.event == "clock" and each.pending for each in part[1:])),
        ),
        "no-wait-at-the-start": Mistake(
            "Look at the first reading of the clock: what is the GPU still doing by then?",
            "It still draws the input and warms up. Call gpu.synchronize() right before you read the clock.",
            when=everywhere(lambda part: part[0].pending),
        ),
        "unit": Mistake(
            "In which unit does gpu.clock_us() count, and which one is asked for?",
            "Both are microseconds: nothing is left to convert.",
            when=off_by(lambda part: count(part, "call"), 1e3, 1e6, 1e-3, 1e-6),
        ),
        "wrong-divisor": Mistake(
            "How many calls lie between the two readings, and what do you divide by?",
            "Divide by the number of calls that were timed. Those of the warm-up don't count.",
            when=off_by(lambda part: count(part, "call")),
        ),
        "another-clock": Mistake(
            "Your computer's clock and torch.cuda know nothing of a pretend GPU.",
            "gpu.clock_us() is the clock that runs along with it, gpu.synchronize() waits for it.",
            raises=r"torch\.cuda|CUDA|name '(time|datetime|timeit|perf_counter)' is not defined",
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


def calls_replayed(part: Part) -> int:
    """How many captured calls the replays in a part of the log have."""
    return sum(entry.calls for entry in part)


graph = Exercise(
    "the graph clock",
    "graph_us",
    reference=lambda call: call.device_us,
    cases=((3, 1.4, 5.0), (2, 3.0, 14.0), (5, 2.2, 9.0), (1, 40.0, 6.0), (1, 0.9, 5.0)),
    inputs=lambda *case: {"call": KernelSequence(*case)},
    call=run_graph_clock,
    tolerance=0.05,
    right="One launch for many calls: however slow Python is, what you read is the GPU's work.",
    mistakes={
        "compiles-inside": Mistake(
            "Which call of a layer is unlike all others, and where does it happen here?",
            "The first one compiles, and that can't be captured. Make one call before the capture begins.",
            raises="capturing: call compiles",
        ),
        "not-captured": Mistake(
            "No call was captured, so Python's time is in yours. Where do calls stand that are captured?",
            "Inside `with torch.cuda.graph(graph):` write `call()`, with its parentheses, many times.",
            when=lambda calls: not any(map(calls_captured, calls)),
        ),
        "no-replay": Mistake(
            "What does the GPU do between your two readings of the clock?",
            "A capture runs nothing. Only graph.replay() makes the GPU work: time that.",
            when=lambda calls: not any(count(parts_of(call)[0], "replay") for call in calls),
        ),
        "captures-inside": Mistake(
            "Look at what stands between the two readings: how much of it is Python's work?",
            "A capture launches every kernel from Python. Finish it before you read the clock.",
            when=everywhere(lambda part: count(part, "captured")),
        ),
        "stopped-early": Mistake(
            "Look at the last reading of the clock: where is the GPU by then?",
            "replay() returns when the graph is queued. Call torch.cuda.synchronize() before that reading.",
            when=everywhere(
                lambda part: any(entry.event == "clock" and entry.pending for entry in part[-1:])
            ),
        ),
        "no-wait-at-the-start": Mistake(
            "Look at the first reading of the clock: what is the GPU still doing by then?",
            "It is still at an earlier replay. Call torch.cuda.synchronize() before that reading, too.",
            when=everywhere(lambda part: part[0].event == "clock" and part[0].pending),
        ),
        "few-calls": Mistake(
            "A replay is a launch, too: some 8 microseconds. How many calls share it?",
            "Capture a loop of 100 calls, so that the launch hardly counts.",
            when=lambda calls: all(0 < calls_captured(call) < 10 for call in calls),
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
            "The first one also brings the graph to the GPU. Replay once, and wait, before the clock starts.",
            when=everywhere(lambda part: count(part, "upload")),
        ),
        "waits-between": Mistake(
            "What does the GPU do between two of your replays?",
            "It waits for Python. Replay several times, and wait once at the end.",
            when=everywhere(lambda part: count(part, "replay") > 1 and count(part, "synchronize") > 1),
        ),
    },
)
