"""The task of lesson 10: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, case_values, difference
from labkit.exercises.simulated_gpu import SimulatedGpu
from labkit.exercises.simulated_layers import CompiledFunction
from labkit.measure.correctness import TOLERANCE

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UP, DID_NOT_WAIT = "streams on which call ran before the capture", "the stream that did not wait"
IN_GRAPH = "calls in the graph"
GRAPH_COMPUTES, REPLAY_RETURNS = "the graph computes call of", "replay returns call of"
AGAIN = "for x, or a tensor that was changed in place, replay returns call of"
FIRST_INPUT = "the first call gets"
GRADIENTS = "the first call and the capture with gradients"
PYTHON_CALLS, GRAPH_REPLAYS = "calls by Python in a replay", "graph replays for one new"
INPUTS_UNCHANGED, SEPARATE_RESULTS = "x and each new as they were", "results in memory made for them"
HOST_COPIES = "copies to the CPU in a replay"
RIGHT_CAPTURE: dict[str, Any] = {
    WARM_UP: "side",
    FIRST_INPUT: "x",
    IN_GRAPH: 1,
    GRADIENTS: True,
    DID_NOT_WAIT: "none",
    GRAPH_COMPUTES: "new",
    REPLAY_RETURNS: "new",
    AGAIN: "new",
}
RIGHT_CAPTURE |= {PYTHON_CALLS: 0, GRAPH_REPLAYS: 1, INPUTS_UNCHANGED: True, SEPARATE_RESULTS: True}
RIGHT_CAPTURE[HOST_COPIES] = 0
"""What is seen of a capture, and how it should be."""


def run_capture(graphed: Any, shape: tuple[int, ...], width: int, dtype: torch.dtype, replays: int) -> Any:
    """Have an answer capture on a simulated GPU, and replay; what was seen, by RIGHT_CAPTURE's keys."""
    gpu, results = SimulatedGpu(), []
    seen: dict[str, Any] = dict(RIGHT_CAPTURE)
    with gpu.unobserved(), gpu:
        with gpu.unobserved():
            weight = torch.randn(shape[-1], width).to(dtype)
            x, first, *drawn = (torch.randn(shape).to(dtype) for _ in range(2 * replays + 6))
            news, others = drawn[:replays], drawn[replays:]
            own = [each.clone() for each in (first, *news)]
        call = CompiledFunction(gpu, lambda x: 2 * torch.tanh(x @ weight))
        x.copy_(first)  # on the current stream, as all that the caller does
        torch.use_deterministic_algorithms(True)  # then memory that nobody has written is NaN
        try:
            replay = graphed(gpu.cuda, call, x)
        finally:
            torch.use_deterministic_algorithms(False)
        assert callable(replay), f"graphed returned a {type(replay).__name__}, not a function"
        # In the end the caller comes with x itself, twice with a tensor that now holds other numbers, and
        # once more with that.
        turns = [*news, x, news[0], news[0], news[0]]
        for new, before, other in zip(turns, [first, *turns[:-1]], others, strict=True):
            if replays < len(results) < len(turns) - 1:
                own[1] = others[-1] * (-1) ** len(results)
                new.copy_(own[1])
            replayed, calls, copies, memory = gpu.replays, call.calls, gpu.host_copies, gpu.memory()
            y = replay(new)
            seen[HOST_COPIES] += gpu.host_copies - copies
            assert isinstance(y, Tensor) and y.dtype == dtype, "replay returned no tensor of x's dtype"
            results.append(y)
            seen[SEPARATE_RESULTS] &= y.untyped_storage().data_ptr() not in memory
            y.clone()  # the caller reads it, on the current stream
            seen[PYTHON_CALLS] += call.calls - calls
            if gpu.replays - replayed != 1:
                seen[GRAPH_REPLAYS] = gpu.replays - replayed
            with gpu.unobserved():
                seen[INPUTS_UNCHANGED] &= all(map(torch.equal, (x, *news), own))
                named = ("new", new), ("the one before", before), ("x", first), ("x", x)
                facts = [(GRAPH_COMPUTES, call.captured), (REPLAY_RETURNS, y)]
                for fact, made in facts if len(results) <= replays else [(AGAIN, y)]:
                    wanted = [(name, call.function(given)) for name, given in named]
                    alike = [name for name, want in wanted if not difference(made, want, TOLERANCE[dtype])]
                    seen[fact] = seen[fact] if "new" in alike else (*alike, "neither")[0]
            x.copy_(other)  # the caller has other uses for x
            own[0] = other
    seen |= {WARM_UP: " and ".join(sorted(call.streams)), IN_GRAPH: call.in_graphs / max(1, gpu.captures)}
    seen[FIRST_INPUT] = "x" if all(torch.equal(given, first) for given in call.given) else "something else"
    return seen | {DID_NOT_WAIT: gpu.stream_without_wait(), GRADIENTS: call.goes_backward}


def differs(fact: str) -> Callable[[Sequence[Call]], bool]:
    """Whether some capture shows another value of a fact than it should."""
    return lambda calls: any(call.error is None and call.got[fact] != RIGHT_CAPTURE[fact] for call in calls)


capture = Exercise(
    "a safe capture",
    "graphed",
    reference=lambda *case: RIGHT_CAPTURE,
    cases=(((4, 6), 3, torch.float32, 3), ((5, 8), 8, torch.bfloat16, 3), ((2, 3, 8), 4, torch.float32, 40)),
    inputs=case_values("shape", "width", "dtype", "replays"),
    call=run_capture,
    right="One launch a replay. This was a simulated GPU, on which streams race unless they wait.",
    mistakes={
        "torch-cuda": Mistake(
            "Write cuda.Stream(), cuda.CUDAGraph() and cuda.graph(...), without torch.",
            raises=r"dummy base class|requires CUDA support|CUDA driver version|No CUDA GPUs|NVIDIA driver"
            r"|no CUDA-capable device",
        ),
        "no-wait": Mistake(
            "There is a handover to the side stream, and one back: wait_stream just before each. "
            "Inside of `with cuda.stream(side)` the current stream is the side stream.",
            when=differs(DID_NOT_WAIT),
        ),
        "stale-input": Mistake(
            "The graph knows addresses, not names. In each replay, first copy the new numbers into the "
            "tensor that it reads: place.copy_(new).",
            when=lambda calls: any(call.error is None and call.got[GRAPH_COMPUTES] == "x" for call in calls),
        ),
        "shared-result": Mistake(
            "The caller may keep any number of results: each replay hands out a tensor made anew.",
            when=differs(SEPARATE_RESULTS),
        ),
        "on-the-cpu": Mistake(
            "The result stays on the GPU. A copy to the CPU waits for the GPU, in each replay.",
            when=differs(HOST_COPIES),
        ),
        "gradients": Mistake(
            "Who trains wants gradients of call: leave them on, in the first call and in the capture.",
            when=differs(GRADIENTS),
        ),
        "changes-x": Mistake(
            "Each replay copies new numbers into the place that the graph reads. If that place is x itself, "
            "the caller's x changes. Let the place begin as a copy: x.clone().",
            when=differs(INPUTS_UNCHANGED),
        ),
        "no-first-call": Mistake(
            "Nothing may be compiled in a capture. Call it once before, on the side stream.",
            raises="compiles its kernels",
        ),
        "by-python": Mistake(
            "What does a replay need Python for? Which line of `replay` calls the network, or captures it?",
            "Both come before. A replay copies the new numbers in, launches the graph, and copies y out.",
            when=differs(PYTHON_CALLS),
        ),
        "twice": Mistake(
            "In training each call is a step. How many are in your graph, and how many launches in a replay?",
            "One call, captured once, and one graph.replay().",
            when=lambda calls: differs(IN_GRAPH)(calls) or differs(GRAPH_REPLAYS)(calls),
        ),
        "first-input": Mistake(
            "What stands in the place that the graph reads, when it is called for the first time?",
            "The numbers of x: it begins as a copy, x.clone().",
            when=differs(FIRST_INPUT),
        ),
        "old-result": Mistake(
            "In which order does a replay copy in, launch the graph, and copy out?",
            "In this one. It copies out the y that was made inside of the capture.",
            when=lambda calls: differs(REPLAY_RETURNS)(calls) or differs(AGAIN)(calls),
        ),
        "first-call": Mistake(
            "The first call belongs on a stream of its own: inside of `with cuda.stream(side):`.",
            when=lambda calls: any(call.error is None and call.got[WARM_UP] == "current" for call in calls),
        ),
    },
)
