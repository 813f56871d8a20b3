"""Tasks of lesson 2: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, Property
from labkit.exercises.simulated_gpu import LogEntry, count
from labkit.exercises.simulated_layers import BenchmarkGpu, BenchmarkLayer, KernelSequence

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
    "What do you time, and by which clock? Your computer's knows nothing of a pretend GPU.",
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
            "gpu.randn is a kernel, too. Draw the input once, and wait for it, before the clock starts.",
            when=everywhere(lambda part: count(part, "draw")),
        ),
        "first-call-inside": Mistake(
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
        "another-clock": Mistake(
            "Your computer's clock and torch.cuda know nothing of a pretend GPU.",
            "gpu.clock_us() is the clock that runs along with it, gpu.synchronize() waits for it.",
            raises=r"torch\.cuda|CUDA|name '(time|datetime|timeit|perf_counter)' is not defined",
        ),
        "no-call": Mistake(*NO_CALL, when=lambda calls: not any(map(parts_of, calls))),
        "few-calls": Mistake(
            *FEW_CALLS, when=lambda calls: all(calls_timed(call) < FEWEST for call in calls)
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
        "not-captured": Mistake(
            "No call was captured. Inside `with torch.cuda.graph(graph):` write `call()`, with its "
            "parentheses, many times.",
            when=lambda calls: not any(map(calls_captured, calls)),
        ),
        "no-replay": Mistake(
            "A capture runs nothing. Only graph.replay() makes the GPU work: time that.",
            when=lambda calls: not any(count(parts_of(call)[0], "replay") for call in calls),
        ),
        "stopped-early": Mistake(
            "Look at the last reading of the clock: where is the GPU by then?",
            "replay() returns when the graph is queued. Call torch.cuda.synchronize() before that reading.",
            when=everywhere(
                lambda part: any(entry.event == "clock" and entry.pending for entry in part[-1:])
            ),
        ),
        "few-calls": Mistake(
            "A replay is a launch, too: some 8 microseconds. How many calls share it?",
            when=lambda calls: all(0 < calls_captured(call) < 10 for call in calls),
        ),
        "first-replay": Mistake(
            "The first replay also brings the graph to the GPU. Replay once, and wait, before the clock "
            "starts.",
            when=everywhere(lambda part: count(part, "upload")),
        ),
        "begun-early": Mistake(
            "Look at the first reading of the clock: what is the GPU still doing by then?",
            "The first replay has been queued, and is not over. Wait for it before the clock starts.",
            when=everywhere(lambda part: part[0].pending),
        ),
        "waits-between": Mistake(
            "While Python launches a replay, and while it waits for it, what does the GPU do?",
            "It is idle for some of that time. Replay several times, and wait once at the end.",
            when=everywhere(
                lambda part: (
                    not part[0].pending and (count(part, "replay") == 1 or count(part, "synchronize") > 1)
                )
            ),
        ),
    },
)
