"""Exercises of lesson 5: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, case_values, difference
from labkit.exercises.properties import FULL_FLOAT32, POINTWISE, READ_ONCE, ROUNDED_ONCE, elements_at
from labkit.exercises.simulated_gpu import SimulatedGpu
from labkit.exercises.simulated_layers import CompiledFunction
from labkit.kernels import fused_mlp
from labkit.measure.correctness import DTYPES, TOLERANCE
from labkit.workloads import stack

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# ---- capture it by hand ------------------------------------------------------------------------------------

WARM_UP, DID_NOT_WAIT = "a warm-up on a side stream", "the stream that did not wait"
GRAPH_COMPUTES, REPLAY_RETURNS = "the graph computes call of", "replay returns call of"
PYTHON_CALLS, GRAPH_REPLAYS = "calls by Python in a replay", "graph replays for one new"
INPUTS_UNCHANGED, SEPARATE_RESULTS = "x and each new as they were", "results in memory of their own"
RIGHT_CAPTURE = {WARM_UP: True, DID_NOT_WAIT: "none", GRAPH_COMPUTES: "new", REPLAY_RETURNS: "new"}
RIGHT_CAPTURE |= {PYTHON_CALLS: 0, GRAPH_REPLAYS: 1, INPUTS_UNCHANGED: True, SEPARATE_RESULTS: True}
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
                seen[INPUTS_UNCHANGED] &= all(map(torch.equal, (x, *news), own))
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
    untouched="64c9268d348a",
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
            "Make a tensor for the graph to read before the capture. replay copies new into just that one.",
            when=shows(GRAPH_COMPUTES, "x"),
        ),
        "shared-result": Mistake(
            "Get two results, then look at the first again. What did the second replay write to?",
            "The caller may keep any number of results: each replay hands out a tensor made anew.",
            when=shows(SEPARATE_RESULTS, False),
        ),
    },
)

# ---- one kernel for the network ----------------------------------------------------------------------------


def network_inputs(rows: int, width: int, depth: int) -> dict[str, Any]:
    """x (rows, width), weight (depth, width, width), bias and gain (depth, width)."""
    x, weight = torch.randn(rows, width), torch.randn(depth, width, width) * width**-0.5
    bias, gain = 0.3 * torch.randn(depth, width), 1 + 0.1 * torch.randn(depth, width)
    return {"x": x, "weight": weight, "bias": bias, "gain": gain}


def tile_width(W: int) -> int:
    """Columns of a tile: a power of two, and at least 16."""
    return max(16, 2 ** (W - 1).bit_length())


Step = Callable[[int], int]
none, row, square, tile = (lambda W: 0), (lambda W: W), (lambda W: W * W), (lambda W: tile_width(W) ** 2)
"""From one block's parameters to the next one's: none, that of a bias, of a weight, of a tile of weight."""
WRONG_STEPS: list[tuple[Step, ...]] = [
    *list(itertools.product((none, square), (none, row), (none, row)))[:-1],  # the last one is right
    *((step,) * 3 for step in (row, square, lambda W: 1)),
    *((tile, row, row), (tile, tile_width, tile_width), (square, tile_width, tile_width)),
]


def steps_of(*steps: Step) -> Callable[..., Tensor]:
    """What comes out when a block's weight, bias and gain begin so far behind the last block's."""

    def gives(x: Tensor, *parameters: Tensor) -> Tensor:
        first = [torch.arange(each[0].numel()).view_as(each[0]) for each in parameters]
        for i in range(len(parameters[0])):
            places = [at + i * step(x.shape[1]) for at, step in zip(first, steps, strict=True)]
            x = stack.block(x, *map(elements_at, parameters, places))
        return x

    return gives


def padded_mean(x: Tensor, weight: Tensor, *two: Tensor) -> Tensor:
    """The stack when the norm divides by the columns of the tile, of which the last ones are zero."""
    more = 0, tile_width(x.shape[1]) - x.shape[1]
    return stack.stack(pad(x, more), pad(weight, more * 2), *(pad(t, more) for t in two))[:, : x.shape[1]]


RIVALS = {"eager": stack.stack, "a launch a block": fused_mlp(1), "labkit": fused_mlp(99)}
SIZES = ({"batch": 256, "width": 128, "depth": 8}, {"batch": 65536, "width": 128, "depth": 8})
"""Too few rows to give every multiprocessor some, and more than 16 for each of 16 programs on each."""

network = Exercise(
    "one kernel for the network",
    "network",
    reference=stack.stack,
    cases=((1, 1, 1), (5, 8, 2), (37, 20, 3)),
    large=((16, 64, 4),),
    inputs=network_inputs,
    dtypes=DTYPES,
    # between two blocks 16 bits are allowed
    properties=(FULL_FLOAT32, *(each for each in POINTWISE if each is not ROUNDED_ONCE), READ_ONCE),
    right="One launch, whatever the depth: between two blocks the rows stay on their multiprocessor.",
    mistakes={
        "step": Mistake(
            "With two blocks, print what your loop loads in its second turn. Whose is it?",
            "A block's weight has W * W elements, its bias and its gain W. BW is only the tile's width.",
            gives=tuple(itertools.starmap(steps_of, WRONG_STEPS)),
        ),
        "not-carried": Mistake(
            "What is the second block's input, and what does your loop multiply in its second turn?",
            "The result of a turn has to take the name that the next turn reads.",
            gives=lambda x, weight, bias, gain: stack.block(x, weight[-1], bias[-1], gain[-1]),
        ),
        "too-few": Mistake(
            "How often does your loop run for L = 1, and for L = 3?",
            "range(L) runs from 0 to L - 1, which is once for each block.",
            gives=(
                lambda x, weight, bias, gain: stack.stack(x, weight[:-1], bias[:-1], gain[:-1]),
                lambda x, weight, bias, gain: stack.stack(x, weight[:1], bias[:1], gain[:1]),
                lambda x, weight, bias, gain: stack.stack(x, weight[1:], bias[1:], gain[1:]),
            ),
        ),
        "transposed": Mistake(
            "nn.Linear multiplies by the transposed weight. Which index of it steps by W in your tile?",
            "The block above loads (in, out): its rows are n[:, None], and they step by 1.",
            gives=lambda x, weight, *two: stack.stack(x, weight.mT, *two),
        ),
        "padded-mean": Mistake(
            "How many columns has a row, and how many has the tile?",
            "The mean is over W columns. Those that fill up to a power of two are zero and do not count.",
            gives=padded_mean,
        ),
        "unmasked": Mistake(
            "Which of your four loads brings what lies beyond its tensor?",
            "Columns beyond W take part in the product and in the sum: mask all loads, with other=0.0.",
            when=lambda calls: any(call.loaded_outside and call.got.isnan().any() for call in calls),
        ),
    },
    race=RaceSpec(stack.STACK, RIVALS, SIZES, roundings=8),
)

# ---- the museum --------------------------------------------------------------------------------------------

EXHIBIT_HINTS = (
    "Four batches went in, one after the other. Whose gradient came out each time?",
    "Follow the second batch line by line: where does the graph read, and did it get there?",
    "After the first batch the sum is right. Whose memory is it in, and who writes there next?",
    "`total` is `change` itself. Think of where a graph puts its output.",
    "Ten calls share the time. Do all ten do the same?",
    "Time the compiled function once more. What was gone by then?",
    "8192 x 8192 times the same is 1.1e12 operations. How many a second would that be?",
    "More than any GPU can do. How would Python know, when it reads the clock, that it is done?",
    "How could bytes come faster than memory gives them?",
    "Compare the tensor's size with the L2's, and think of who used it just before.",
)
"""Two for each exhibit."""
CAUSES = {1: "c", 2: "e", 3: "b", 4: "a", 5: "d"}


def compare_letters(diagnosis: Any, exhibits: int) -> dict[str, Any]:
    """How many letters are right, and the first exhibit with another one."""
    assert isinstance(diagnosis, dict) and {*diagnosis} == {*CAUSES}, "not a letter for each of 1 to 5"
    letters = {number: str(diagnosis[number]).strip().lower() or "no letter" for number in CAUSES}
    others = [f"{number}: {letters[number]}" for number in CAUSES if letters[number] != CAUSES[number]]
    return {"right ones": exhibits - len(others), "the first other one": (*others, "none")[0]}


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
        f"exhibit-{number}": Mistake(
            *EXHIBIT_HINTS[2 * number - 2 : 2 * number],
            when=lambda calls, number=number: calls[0].got["the first other one"].startswith(f"{number}:"),
        )
        for number in CAUSES
    },
)
