"""Tasks of lesson 17: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, defined_in_cell
from labkit.exercises.properties import FEWEST, KERNEL_CASES, PRODUCT, ROUNDED_ONCE, ROUNDED_TWICE
from labkit.measure.launch_counts import elements

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Thirds = Sequence[Tensor]


def layer_inputs(B: int, T: int, H: int, scale: float = 1.0) -> dict[str, Tensor]:
    """gates (B, T, 3 H), weight (3 H, H) and bias (3 H,): h counts about as much as gates of scale 1."""
    weight = 2 * torch.randn(3 * H, H) / H**0.5
    return {"gates": scale * torch.randn(B, T, 3 * H), "weight": weight, "bias": torch.randn(3 * H)}


def cell(h: Tensor, i: Thirds, w: Thirds, b: Thirds, operand: Any = None) -> Tensor:
    """The next state; ``operand`` is what the products take for h."""
    r, z, p = (linear(h if operand is None else operand, *each) for each in zip(w, b, strict=True))
    z = torch.sigmoid(i[1] + z)
    return (1 - z) * torch.tanh(i[2] + torch.sigmoid(i[0] + r) * p) + z * h


def states(step: Callable[..., Tensor] = cell) -> Callable[..., Tensor]:
    """All states (B, T, H) of a step (h, i, w, b)."""

    def gives(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        h, found = gates.new_zeros(len(gates), weight.shape[1]), []
        for now in gates.unbind(1):
            h = step(h, now.chunk(3, 1), weight.chunk(3), bias.chunk(3))
            found.append(h)
        return torch.stack(found, 1)

    return gives


def reset_before(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose candidate is made of the product with r * h."""
    r, z = torch.sigmoid(i[0] + linear(h, w[0], b[0])), torch.sigmoid(i[1] + linear(h, w[1], b[1]))
    return (1 - z) * torch.tanh(i[2] + linear(r * h, w[2], b[2])) + z * h


def rows_apart(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The states when steps of gates are taken to begin H numbers apart."""
    steps = gates.flatten().unfold(0, gates.shape[2], weight.shape[1])[: gates[..., 0].numel()]
    return states()(steps.reshape(gates.shape), weight, bias)


def near_thirds(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The states when the three matrices are taken to lie H numbers apart, and not H rows."""
    H = weight.shape[1]
    return states()(gates, torch.cat([weight[third : third + H] for third in range(3)]), bias)


def rounded_carry(call: Call) -> str:
    if call.dtype is not torch.float16:  # to bfloat16 the interpreter rounds in a way of its own
        return ""
    right = states(lambda h, i, w, b: cell(h, i, w, b, operand=h.half().to(h.dtype)))
    want = right(*(each.double() for each in call.originals.values()))
    differing = int((call.got != want.to(torch.float16)).sum())
    if differing <= max(FEWEST, ROUNDED_TWICE * want.numel()):
        return ""
    return f"{differing / want.numel():.0%} of the states are not those of a float32 state, rounded once."


ROUNDED_CARRY = Property(
    "rounded-carry",
    rounded_carry,
    "Which of your values have 16 bits? The first block of each tl.dot has to. What else?",
    "What was loaded has, and the sum of two such. The state stays float32: only tl.dot gets it rounded.",
)


MANY_STEPS = 50
"""More than there are loads of weights in a program that has them before its loop."""


def weights_again(call: Call) -> str:
    """Whether there are as many loads of weights as steps, however many programs share the sequences."""
    weight, steps = call.passed["weight"], call.case[1]
    loads = sum(len(elements([each], weight)) > 0 for each in call.launches.loads)
    many = steps > MANY_STEPS and loads >= steps
    return f"with {steps} steps there are {loads} loads of weights." if many else ""


WEIGHTS_ONCE = Property(
    "weights-again",
    weights_again,
    "The states are right. How many steps need the weights, and how often does your kernel load them?",
    "They are the same at each step: load them before the loop, and they stay on the multiprocessor.",
    contiguous_only=True,
)


gru = Exercise(
    "all steps of a GRU",
    "gru",
    reference=states(),
    cases=((1, 1, 1), (2, 3, 5), (18, 2, 20)),
    large=((2, 2, 16), (1, 2, 33), (1, 300, 3), (35, 1, 4), (1, 1, 100), (2, 3, 5, 100.0)),
    vast=((512, 3, 60), (2**24, 2, 70)),
    inputs=layer_inputs,
    right="The weights are loaded once for all steps, and h never comes back from memory.",
    properties=(*(each for each in PRODUCT if each is not ROUNDED_ONCE), WEIGHTS_ONCE, ROUNDED_CARRY),
    **KERNEL_CASES,
    mistakes={
        "row-length": Mistake(
            "A step of `gates` has three thirds of H numbers: steps lie 3 * H apart, the thirds H.",
            gives=rows_apart,
        ),
        "static-loop": Mistake(
            "tl.static_range writes a loop out while the kernel is compiled. Is T known by then?",
            "No, it is an ordinary argument: for t in range(T).",
            raises="static_range",
        ),
        "gates-swapped": Mistake(
            "Which third is W_hr's, and which is W_hz's? r stands inside of the candidate, z blends.",
            gives=states(lambda h, *thirds: cell(h, *([each[1], each[0], each[2]] for each in thirds))),
        ),
        "one-matrix": Mistake(
            "Three products of h: does each of them have a matrix of its own?",
            gives=states(lambda h, i, w, b: cell(h, i, [w[0]] * 3, b)),
        ),
        "near-thirds": Mistake(
            "W_hr has H rows of H numbers. How far behind its first number does W_hz begin?",
            "H * H numbers: weight + H * H + n * H + old.",
            gives=near_thirds,
        ),
        "columns-lost": Mistake(
            "`n` holds the columns. Which line of yours has put something else there?",
            "Call the candidate by another name.",
            raises=r"operands of type pointer<[^\n]*\n[^\n]*tl\.(?:store|load)\([^\n]*\bn\b",
        ),
        "not-turned": Mistake(
            "tl.dot(h, w) adds up along w's rows, the old features. Load it as rnn_kernel does, turned: "
            "weight + n * H + old.",
            gives=states(lambda h, i, w, b: cell(h, i, [each.T for each in w], b)),
        ),
        "bias-beside-r": Mistake(
            "Take weights of zero. What is left of W_hr h + b_hr, and what of r · (W_hn h + b_hn)?",
            gives=states(lambda h, i, w, b: cell(h, (*i[:2], i[2] + b[2]), w, (*b[:2], 0 * b[2]))),
        ),
        "r-on-h": Mistake(
            "The product of h and its bias are made first, with h itself, and r multiplies their sum.",
            gives=states(reset_before),
        ),
        "blend": Mistake(
            "Let z be 1. Which of candidate and old state should be left?",
            gives=states(lambda h, *thirds: cell(h, *([each[0], -each[1], each[2]] for each in thirds))),
        ),
    },
    race=RaceSpec(
        work.gru,
        {"labkit": kernels.gru},
        ({"batch": 512, "time": 64, "width": 128},),
        dtype="bfloat16",
        roundings=4,
        as_layer=defined_in_cell("gru_layer"),
        works={"cuDNN": work.gru_by_time},
        counted=False,
    ),
)
