"""Exercises of lesson 5: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, case_values, difference
from labkit.exercises.properties import KERNEL_CASES, POINTWISE, READ_ONCE
from labkit.exercises.simulated_gpu import SimulatedGpu
from labkit.exercises.simulated_layers import CompiledFunction
from labkit.gpu import randn
from labkit.measure.correctness import TOLERANCE
from labkit.workloads.elementwise import product

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# ---- predict the replay ------------------------------------------------------------------------------------

Formula = Callable[[list[tuple[float, float]], float], float]


def kernels_us(kernels: list[tuple[float, float]]) -> float:
    """What the kernels take by themselves."""
    return sum(length for _, length in kernels)


def zero_if_none(formula: Formula) -> tuple[Formula, Formula]:
    """A formula as it is, and with 0 where there is no kernel."""
    return formula, lambda kernels, gap: formula(kernels, gap) if kernels else 0.0


def span_with(gaps: Callable[[int], int]) -> Formula:
    """The eager time, and so many of the graph's gaps for a number of kernels."""
    return zero_if_none(lambda kernels, gap: sum(kernels[-1]) - kernels[0][0] + gap * gaps(len(kernels)))[1]


replay = Exercise(
    "predict the replay from the timeline",
    "replay_us",
    reference=lambda kernels, gap: kernels_us(kernels) + gap * len(kernels[1:]),
    cases=(
        ([], 1.5),
        ([(40.0, 6.0)], 1.5),
        ([(15.0, 5.0), (20.0, 8.0), (28.0, 2.0)], 1.25),
        ([(7.0, 120.0), (130.0, 90.0), (222.5, 310.0)], 1.0),
        ([(300.0, 3.0), (315.0, 4.0), (319.0, 7.0), (326.5, 2.0)], 2.0),
    ),
    inputs=lambda kernels, gap: {"kernels": list(kernels), "gap_us": gap},
    untouched="7815b070b73a",
    right="A graph takes away the waiting, and nothing else: long kernels gain little by it.",
    mistakes={
        "eager-gaps": Mistake(
            "Beside the kernels, what else lies between the first start and the last end?",
            "The eager gaps, which a graph hasn't. Leave all starts alone: what is left to add up?",
            gives=(span_with(lambda n: 0), span_with(lambda n: n), span_with(lambda n: n - 1)),
        ),
        "gap-count": Mistake(
            "Draw one kernel, then three in a row. How many gaps are there?",
            "A gap has a kernel on both of its sides: none is before the first or after the last.",
            gives=(
                *zero_if_none(lambda k, gap: kernels_us(k) + gap),
                lambda k, gap: kernels_us(k) + gap * len(k),
            ),
        ),
        "no-gaps": Mistake(
            "What is the second argument for?",
            "In a graph, too, some time passes between two kernels. Add it for each two neighbours.",
            gives=lambda kernels, gap: kernels_us(kernels),
        ),
        "starts": Mistake(
            "Each kernel is two numbers. Which of them says how long the GPU is at work?",
            "The first is a place on the clock, and a sum of places means nothing. Add the others.",
            gives=zero_if_none(
                lambda kernels, gap: sum(start for start, _ in kernels) + gap * (len(kernels) - 1)
            ),
        ),
    },
)

# ---- capture it by hand ------------------------------------------------------------------------------------

WARM_UP, DID_NOT_WAIT = "a warm-up on a side stream", "the stream that did not wait"
GRAPH_COMPUTES, REPLAY_RETURNS = "the graph computes call of", "replay returns call of"
PYTHON_CALLS, GRAPH_REPLAYS = "calls by Python in a replay", "graph replays for one new"
INPUTS_UNCHANGED, SEPARATE_RESULTS = "x and each new as they were", "results in memory of their own"
RIGHT_CAPTURE = {
    WARM_UP: True,
    DID_NOT_WAIT: "none",
    GRAPH_COMPUTES: "new",
    REPLAY_RETURNS: "new",
    PYTHON_CALLS: 0,
    GRAPH_REPLAYS: 1,
    INPUTS_UNCHANGED: True,
    SEPARATE_RESULTS: True,
}
"""What is seen of a capture, and how it should be."""


def run_capture(graphed: Any, shape: tuple[int, ...], width: int, dtype: torch.dtype, replays: int) -> Any:
    """Have an answer capture on a simulated GPU, and replay; what was seen, by RIGHT_CAPTURE's keys."""
    gpu, results = SimulatedGpu(), []
    seen: dict[str, Any] = dict(RIGHT_CAPTURE)
    with gpu.unobserved(), gpu:
        with gpu.unobserved():
            weight = torch.randn(shape[-1], width).to(dtype)
            x, first, *drawn = (torch.randn(shape).to(dtype) for _ in range(2 * replays + 2))
            news, others = drawn[:replays], drawn[replays:]
            own = [each.clone() for each in (first, *news)]
        call = CompiledFunction(gpu, lambda x: 2 * torch.tanh(x @ weight))
        x.copy_(first)  # on the current stream, as all that the caller does
        replay = graphed(gpu.cuda, call, x)
        assert callable(replay), f"graphed returned a {type(replay).__name__}, not a function"
        for new, before, other in zip(news, [first, *news], others, strict=False):
            replayed, calls = gpu.replays, call.calls
            y = replay(new)
            assert isinstance(y, Tensor) and y.dtype == dtype, "replay returned no tensor of x's dtype"
            results.append(y)
            y.clone()  # the caller reads it, on the current stream
            seen |= {PYTHON_CALLS: call.calls - calls, GRAPH_REPLAYS: gpu.replays - replayed}
            with gpu.unobserved():
                seen[INPUTS_UNCHANGED] &= all(
                    torch.equal(*pair) for pair in zip((x, *news), own, strict=True)
                )
                named = ("new", new), ("the new before", before), ("x", first), ("x", x)
                for fact, made in ((GRAPH_COMPUTES, call.captured), (REPLAY_RETURNS, y)):
                    wanted = [(name, call.function(given)) for name, given in named]
                    alike = [name for name, want in wanted if not difference(made, want, TOLERANCE[dtype])]
                    seen[fact] = seen[fact] if "new" in alike else (*alike, "neither")[0]
            x.copy_(other)  # the caller has other uses for x
            own[0] = other
    seen[SEPARATE_RESULTS] = len({y.untyped_storage().data_ptr() for y in results}) == replays
    return seen | {DID_NOT_WAIT: gpu.stream_without_wait(), WARM_UP: call.on_a_side_stream}


def shows(fact: str, value: Any, is_it: bool = True) -> Callable[[Sequence[Call]], bool]:
    """Whether some capture shows this value of a fact, or, if not ``is_it``, another one."""
    return lambda calls: any(call.error is None and (call.got[fact] == value) is is_it for call in calls)


capture = Exercise(
    "capture it by hand",
    "graphed",
    reference=lambda *case: RIGHT_CAPTURE,
    cases=(((4, 6), 3, torch.float32, 3), ((5, 8), 8, torch.bfloat16, 3), ((2, 3, 8), 4, torch.float32, 40)),
    inputs=case_values("shape", "width", "dtype", "replays"),
    call=run_capture,
    untouched="b55776f2394a",
    right="One launch a replay. This was a simulated GPU, on which streams race unless they wait.",
    mistakes={
        "no-warm-up": Mistake(
            "What does call do when it runs for the first time, and never again?",
            "Have it run once before the capture, on a stream of its own: rule 1 above says how.",
            raises="compiles its kernels",
        ),
        "calls-again": Mistake(
            "What does Python launch in your replay, and what would be left to launch with a graph?",
            "The capture is done once, in graphed. Afterwards only the graph itself runs again.",
            when=shows(PYTHON_CALLS, 0, False),
        ),
        "current-stream": Mistake(
            "On which stream did call run before the capture? Rule 1 asks for another one.",
            "Make a stream. In its context, cuda.stream(...), all work of PyTorch goes to it.",
            when=shows(WARM_UP, False),
        ),
        "no-wait": Mistake(
            "Which streams use the same memory here? How does the later one know that it may?",
            "There is a handover to the side stream, and one back: wait_stream just before each.",
            when=shows(DID_NOT_WAIT, "none", False),
        ),
        "writes-x": Mistake(
            "Whose tensor do you copy into? Who still needs the values that were in it?",
            "Let the graph read a tensor that nobody else has, made like x before the capture.",
            when=shows(INPUTS_UNCHANGED, False),
        ),
        "stale-input": Mistake(
            "A graph remembers addresses. What lies at its input's when it is replayed?",
            "A name that refers to another tensor changes nothing there. Make a tensor for the graph to "
            "read before the capture, and let replay fill just that one, before it replays.",
            when=shows(GRAPH_COMPUTES, "x"),
        ),
        "shared-result": Mistake(
            "Get two results, then look at the first again. What did the second replay write to?",
            "The caller may keep any number of results: each replay hands out a tensor made anew.",
            when=lambda calls: (
                shows(SEPARATE_RESULTS, False)(calls) and not shows(REPLAY_RETURNS, "new", False)(calls)
            ),
        ),
    },
)

# ---- a kernel that a graph can replay ----------------------------------------------------------------------


def result_of_replay(scaled: Any, x: Tensor, factor: float, like_x: bool) -> Any:
    """What a replay leaves in the result, after x and factor have changed where they lie."""
    # The interpreter multiplies two numbers in bfloat16 by their bits: beside such an x a float32 factor.
    dtype = x.dtype if like_x and x.dtype is not torch.bfloat16 else torch.float32
    gpu, held = SimulatedGpu(), torch.empty((1,) if like_x else (), dtype=dtype)
    graph = gpu.cuda.CUDAGraph()
    with gpu:
        with gpu.unobserved():
            held.fill_(factor)
        with gpu.cuda.graph(graph):
            y = scaled(x, held)
        with gpu.unobserved():
            x.neg_(), held.mul_(-2)
        graph.replay()
        with gpu.unobserved():
            x.neg_()  # as it was
            assert torch.equal(held, torch.full_like(held, -2 * factor)), "factor was overwritten"
    return y


def scaled_at(within: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The result where only some places, by their numbers, find a factor."""
    return lambda x, factor, _: 2 * factor * x.where(within(torch.arange(x.numel())).view_as(x), torch.nan)


safe = Exercise(
    "a kernel that a graph can replay",
    "scaled",
    reference=lambda x, factor, _: 2 * x * float(torch.tensor(factor)),
    cases=(((1,), 2.75, True), ((7,), 2.7183, False), ((33, 40), 2.7183, False), ((5000,), 2.75, True)),
    inputs=lambda size, factor, like_x: {"x": torch.randn(size), "factor": factor, "like_x": like_x},
    call=result_of_replay,
    properties=(*POINTWISE, READ_ONCE),
    **KERNEL_CASES,
    untouched="c8aeb6787b10",
    right="It was captured and replayed, and found a new factor where the old one had been.",
    mistakes={
        "host-read": Mistake(
            "Which line wants to know the factor's value, and where does that value lie?",
            "On the GPU, where nothing runs during a capture. Who can wait for it instead of Python?",
            "The kernel, when it runs: hand over the tensor itself, of which it gets the address.",
            raises="not permitted when stream is capturing: Python asked",
        ),
        "not-loaded": Mistake(
            "What is `factor` in the kernel now: a number, or the place where one lies?",
            "An address, as x is. What brings the number that lies at an address?",
            raises=r"pointer<|cannot add pointers|cannot cast|invalid operands of type",
        ),
        "many-factors": Mistake(
            "How many numbers lie at factor, and how many addresses does your load name?",
            "One number, at the very address that the kernel was given. Add no places to it.",
            when=lambda calls: any(call.loaded_outside for call in calls),
            gives=(
                scaled_at(lambda at: at < 1),
                scaled_at(lambda at: at < 1024),
                scaled_at(lambda at: at % 1024 == 0),
            ),
        ),
        "mask-for-one": Mistake(
            "How many numbers does this load bring, and how many has its mask?",
            "A mask is for places that may lie outside. One address, always inside, needs none.",
            raises="cannot be block type if pointer argument is not a block",
        ),
    },
    race=RaceSpec(
        product(lambda batch, width: randn(1), reads=1),
        {"eager": torch.mul, "torch.compile": torch.mul},
        # a small tensor, where launches count, and 96 MiB, where memory does
        ({"batch": 256, "width": 1024}, {"batch": 49152, "width": 1024}),
    ),
)

# ---- the museum --------------------------------------------------------------------------------------------

CAUSES = {1: "c", 2: "e", 3: "b", 4: "a", 5: "d"}


def compare_letters(diagnosis: Any, exhibits: int) -> dict[str, Any]:
    """How many letters are right, and the first exhibit with another one."""
    assert isinstance(diagnosis, dict) and {*diagnosis} == {*CAUSES}, "not a letter for each of 1 to 5"
    letters = {number: str(diagnosis[number]).strip().lower() or "no letter" for number in CAUSES}
    others = [f"{number}: {letters[number]}" for number in CAUSES if letters[number] != CAUSES[number]]
    return {"right ones": exhibits - len(others), "the first other one": (*others, "none")[0]}


def first_wrong_exhibit(number: int) -> Callable[[Sequence[Call]], bool]:
    """Whether this is the first exhibit without its letter."""
    return lambda calls: calls[0].got["the first other one"].startswith(f"{number}:")


museum = Exercise(
    "diagnose the exhibits",
    "diagnosis",
    reference=lambda exhibits: {"right ones": exhibits, "the first other one": "none"},
    cases=((len(CAUSES),),),
    inputs=case_values("exhibits"),
    call=compare_letters,
    untouched="98ccf47b20de",
    right="1 and 2 give wrong results: compare on new inputs. The others give right ones, and wrong times.",
    mistakes={
        "exhibit-1": Mistake(
            "Two batches went in, one after the other. Whose answer came out?",
            "Follow the second batch line by line: where does the graph read, and did it get there?",
            when=first_wrong_exhibit(1),
        ),
        "exhibit-2": Mistake(
            "The result was right when it came. Who wrote to its memory later?",
            "How many different tensors does the list hold? Think of where a graph puts its output.",
            when=first_wrong_exhibit(2),
        ),
        "exhibit-3": Mistake(
            "Eager and compiled go through the same loop. What does only one of them do in it?",
            "Time a second call of the compiled stack. What was gone by then?",
            when=first_wrong_exhibit(3),
        ),
        "exhibit-4": Mistake(
            "8192 x 8192 times the same is 1.1e12 operations. How many a second would that be?",
            "More than any GPU can do. How would Python know, when it reads the clock, that it is done?",
            when=first_wrong_exhibit(4),
        ),
        "exhibit-5": Mistake(
            "The line marks what memory can give. How could bytes come faster than that?",
            "Compare the tensor's size with the L2's, and think of who used it just before.",
            when=first_wrong_exhibit(5),
        ),
    },
)
