"""Exercises of lesson 8: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, case_values
from labkit.exercises.properties import FEWEST, KERNEL_CASES, PRODUCT, ROUNDED_ONCE, ROUNDED_TWICE
from labkit.kernels import gru as finished
from labkit.workloads.gru import GRU, GRU_BY_TIME, library_gru_by_time, resident_width

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

# ---- the step of a GRU -------------------------------------------------------------------------------------

Thirds = Sequence[Tensor]


def layer_inputs(B: int, T: int, H: int) -> dict[str, Tensor]:
    """gates (B, T, 3 H), weight (3 H, H) and bias (3 H,): h takes about as large a part as the gates."""
    weight = 2 * torch.randn(3 * H, H) / H**0.5
    return {"gates": torch.randn(B, T, 3 * H), "weight": weight, "bias": torch.randn(3 * H)}


def cell(h: Tensor, i: Thirds, w: Thirds, b: Thirds, operand: Any = None, curve: Any = torch.tanh) -> Tensor:
    """The next state; ``operand`` is what the products take for h, and ``curve`` the candidate's."""
    r, z, p = (linear(h if operand is None else operand, *each) for each in zip(w, b, strict=True))
    z = torch.sigmoid(i[1] + z)
    return (1 - z) * curve(i[2] + torch.sigmoid(i[0] + r) * p) + z * h


def states(step: Callable[..., Tensor] = cell, shift: int = 0) -> Any:
    """All states (B, T, H) of a step (h, i, w, b), or (h, new, i, w, b) with resets ``shift`` steps later."""

    def gives(gates: Tensor, weight: Tensor, bias: Tensor, reset: Tensor | None = None) -> Tensor:
        h, found = gates.new_zeros(len(gates), weight.shape[1]), []
        for t, now in enumerate(gates.unbind(1)):
            new = () if reset is None else (pad(reset, (shift, -shift))[:, t, None],)
            h = step(h, *new, now.chunk(3, 1), weight.chunk(3), bias.chunk(3))
            found.append(h)
        return torch.stack(found, 1)

    return gives


def reset_before(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose candidate is made of the product with r * h."""
    r, z = torch.sigmoid(i[0] + linear(h, w[0], b[0])), torch.sigmoid(i[1] + linear(h, w[1], b[1]))
    return (1 - z) * torch.tanh(i[2] + linear(r * h, w[2], b[2])) + z * h


def matrices_apart(rows: int, h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose three matrices begin so many rows apart."""
    return cell(h, i, [torch.cat([*w])[k * rows :][: h.shape[1]] for k in range(3)], b)


def rows_apart(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The states when steps of gates are taken to begin H numbers apart."""
    steps = gates.flatten().unfold(0, gates.shape[2], weight.shape[1])[: gates[..., 0].numel()]
    return states()(steps.reshape(gates.shape), weight, bias)


def _rounded_carry(call: Call) -> str:
    if call.dtype is not torch.float16:  # to bfloat16 the interpreter rounds in a way of its own
        return ""

    def right(h: Tensor, *given: Any) -> Tensor:
        *new, i, w, b = given
        h = torch.where(new[0], 0.0, h) if new else h
        return cell(h, i, w, b, operand=h.half().to(h.dtype))

    given = call.originals.values()
    want = states(right)(*(each.double() if each.is_floating_point() else each for each in given))
    differing = int((call.got != want.to(torch.float16)).sum())
    if differing <= max(FEWEST, ROUNDED_TWICE * want.numel()):
        return ""
    return f"{differing / want.numel():.0%} of the states are not those of a float32 state, rounded once."


ROUNDED_CARRY = Property(
    "rounded-carry",
    _rounded_carry,
    "Which of your values have 16 bits? The operand of the products has to. What else?",
    "What was loaded has, and the sum of two such. The state stays float32: only `dot` gets its rounding.",
)


def _weights_again(call: Call) -> str:
    weight, programs = call.passed["weight"], -(-len(call.got) // 16)
    times = len(call.launches.loaded(weight)) / max(1, weight.numel()) / programs
    return f"each program loaded each weight {times:.3g} times." if times > 1 else ""


WEIGHTS_ONCE = Property(
    "weights-again",
    _weights_again,
    "The states are right. How many steps need the weights, and how often does your kernel load them?",
    "They are the same at each step: load them before the loop, and they stay on the multiprocessor.",
    contiguous_only=True,
)
STEP_PROPERTIES = (*(each for each in PRODUCT if each is not ROUNDED_ONCE), WEIGHTS_ONCE, ROUNDED_CARRY)
N_TWICE = Mistake(
    "An address has become a number between -1 and 1. Which name has two meanings in your kernel?",
    "`n` is the columns, which the next store and the next loads need. Call the candidate c.",
    raises="invalid operands of type pointer.*float",
)


def as_layer(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A whole layer: the input's product for all steps, and then the answer."""
    return lambda x, w_ih, w_hh, b_ih, b_hh: answer(linear(x, w_ih, b_ih), w_hh, b_hh)


def sizes() -> tuple[dict[str, int], ...]:
    """Few sequences and many, of the width whose weights stay on a multiprocessor of this GPU."""
    return tuple({"batch": batch, "time": 64, "width": resident_width()} for batch in (512, 4096))


RIVALS = {"cuDNN": library_gru_by_time, "labkit": finished}  # cuDNN in the layout that it likes best

gru = Exercise(
    "the step of a GRU",
    "gru",
    reference=states(),
    cases=((1, 1, 1), (2, 3, 5), (18, 2, 20)),
    large=((2, 2, 16), (1, 2, 33), (1, 12, 3), (35, 1, 4)),
    inputs=layer_inputs,
    right="The weights are loaded once for all steps, and h never leaves the multiprocessor.",
    properties=STEP_PROPERTIES,
    **KERNEL_CASES,
    mistakes={
        "unwritten": Mistake(
            "Let B be 17 and T be 3. Which states did nobody write, and who should have?",
            "A program has 16 sequences, T * H numbers apart. In the loop steps move the store, by H.",
        ),
        "row-length": Mistake(
            "How many numbers of `gates` has one step of one sequence?",
            "Three thirds of H numbers: steps lie 3 * H apart, the thirds H.",
            gives=rows_apart,
        ),
        "not-transposed": Mistake(
            "Step 0 is right, step 1 is not. Which of a matrix's two axes does `dot(a, w)` sum over?",
            "Over w's rows, the old features. Load it as rnn_kernel does, turned: weight + n * H + n.T.",
            gives=states(lambda h, i, w, b: cell(h, i, [each.T for each in w], b)),
        ),
        "same-matrix": Mistake(
            "How far is it from W_hr to W_hz in `weight`, and which matrices do your three loads bring?",
            "A matrix has H * H numbers.",
            gives=(states(partial(matrices_apart, 0)), states(partial(matrices_apart, 1))),
        ),
        "no-carry": Mistake(
            "Step 0 is right. Which h do the products of step 1 take?",
            "The state that a step makes has to be the one that the next begins with.",
            gives=states(lambda h, i, w, b: cell(0 * h, i, w, b)),
        ),
        "order": Mistake(
            "Which third of `gates` is r, and which one z?",
            "PyTorch's order is r, z, n, in gates, weight and bias.",
            gives=states(lambda h, *thirds: cell(h, *([each[1], each[0], each[2]] for each in thirds))),
        ),
        "other-bias": Mistake(
            "Take weights of zero. What is left of W_hr h + b_hr, and what of r · (W_hn h + b_hn)?",
            "Each of the three products of h has a third of `bias`, inside. gates have the input's already.",
            gives=(
                states(lambda h, i, w, b: cell(h, i, w, [0 * each for each in b])),
                states(lambda h, i, w, b: cell(h, (*i[:2], i[2] + b[2]), w, (*b[:2], 0 * b[2]))),
            ),
        ),
        "reset-before": Mistake(
            "That is the first paper's candidate. What does r multiply in PyTorch's: h, or the product?",
            "The product of h and its bias are made first, with h itself, and r scales the sum.",
            gives=states(reset_before),
        ),
        "no-r": Mistake(
            "Your r is computed. Where is it used?",
            "In the candidate: it scales W_hn h + b_hn.",
            gives=states(lambda h, i, w, b: cell(h, (i[0] + math.inf, *i[1:]), w, b)),
        ),
        "blend": Mistake(
            "Let z be 1. Which of candidate and old state should be left?",
            "The old one: z multiplies h, and 1 - z the candidate.",
            gives=states(lambda h, *thirds: cell(h, *([each[0], -each[1], each[2]] for each in thirds))),
        ),
        "no-tanh": Mistake(
            "Between which two numbers should the candidate lie?",
            "tanh of the whole sum brings it between -1 and 1.",
            gives=states(partial(cell, curve=lambda candidate: candidate)),
        ),
        "operand-dtype": Mistake(
            "Which dtype has the state, and which the weights? `dot` multiplies two blocks of one dtype.",
            "Give it the state rounded: state.to(wr.dtype). The state itself stays float32.",
            raises="Both operands must be same dtype",
        ),
        "n-twice": N_TWICE,
    },
    race=RaceSpec(GRU, RIVALS, sizes, roundings=4, as_layer=as_layer, works={"cuDNN": GRU_BY_TIME}),
)

# ---- what a step is made of --------------------------------------------------------------------------------

Clocks = tuple[float, ...]


def counts(BM: int, H: int) -> Clocks:
    """Cycles of the products, the weights' way and the special functions."""
    return 6 * BM * H * H / 4096, 6 * H * H / 128, 6 * BM * H / 16


def scaled(*factors: float) -> Callable[[int, int], Clocks]:
    """The cycles, each times a factor."""

    return lambda BM, H: tuple(map(mul, counts(BM, H), factors))


clocks = Exercise(
    "what a step is made of",
    "clocks",
    reference=counts,
    cases=((16, 64), (16, 128), (8, 128), (32, 32)),
    inputs=case_values("BM", "H"),
    right="With 16 sequences none of the three is small beside the others.",
    mistakes={
        "operations": Mistake(
            "How many operations are one multiplication and one addition?",
            "The rate counts both, so a sum of H products is 2 H operations.",
            gives=(scaled(1 / 2, 1, 1), scaled(1 / 2, 1 / 2, 1), scaled(1 / 2, 1, 1 / 2)),
        ),
        "one-matrix": Mistake(
            "How many matrices does h meet in a step?",
            "Three: for r, z and n. Products and bytes are three times as many.",
            gives=(scaled(1 / 3, 1 / 3, 1), scaled(1 / 3, 1, 1), scaled(1, 1 / 3, 1)),
        ),
        "numbers": Mistake(
            "Shared memory delivers 128 bytes a cycle. How many bytes has a number in bf16?",
            "Two, so three matrices are 3 * H * H * 2 bytes.",
            gives=scaled(1, 1 / 2, 1),
        ),
        "one-function": Mistake(
            "How many special functions does one sigmoid take, as it is computed here?",
            "An exponential and a reciprocal, for each of two gates and the candidate: tanh has both, too.",
            gives=tuple(scaled(1, 1, n / 6) for n in range(1, 6)),
        ),
        "for-each-sequence": Mistake(
            "16 sequences meet one matrix. Do its numbers have to come 16 times?",
            "A tile's products use each number for all of its rows. That is what a tile is for.",
            gives=lambda BM, H: (counts(BM, H)[0], BM * counts(BM, H)[1], counts(BM, H)[2]),
        ),
    },
)

# ---- episodes ----------------------------------------------------------------------------------------------


def episode_inputs(B: int, T: int, H: int, lost: bool = False) -> dict[str, Tensor]:
    """The same with reset (B, T). With ``lost`` h is NaN until an episode begins in the middle."""
    given, begins = layer_inputs(B, T, H), torch.rand(B, T) < 0.4
    if lost:
        given["gates"][:, 0] = math.nan
        begins[:, : T // 2], begins[:, T // 2] = False, True
    return given | {"reset": begins}


def begun_anew(h: Tensor, new: Tensor, *layer: Thirds) -> Tensor:
    """The right step: zero in place of h where an episode begins."""
    return cell(torch.where(new, 0.0, h), *layer)


reset = Exercise(
    "begin anew where an episode does",
    "episodes",
    reference=states(begun_anew),
    cases=((1, 1, 1), (2, 4, 5), (18, 2, 20)),
    large=((2, 6, 3, True), (1, 2, 33), (1, 12, 3)),
    inputs=episode_inputs,
    right="The choice costs one byte a step and sequence, and no number of the old episode gets through it.",
    properties=STEP_PROPERTIES,
    **KERNEL_CASES,
    mistakes={
        "which-steps": Mistake(
            "For which steps should h be zero before, and for which is yours?",
            "True means that an episode begins. `reset` is an address: (row, t) lies at row * T + t.",
            gives=(
                states(lambda h, new, *layer: cell(h, *layer)),
                states(lambda h, new, *layer: cell(0 * h.nan_to_num(), *layer)),
                states(lambda h, new, *layer: begun_anew(h, ~new, *layer)),
                states(lambda h, new, *layer: begun_anew(h, new[:1], *layer)),
            ),
        ),
        "a-step-late": Mistake(
            "Let T be 2, with a reset at step 1. Which state of yours was the first to change?",
            "Step t is the first of its episode where reset is true at t: h is zero *before* it.",
            gives=(states(begun_anew, 1), states(begun_anew, -1)),
        ),
        "half-reset": Mistake(
            "Two kinds of lines of a step use the old state. Which of them still has the old episode's?",
            "The products and z · h both have to lose it. Choose once, before both.",
            gives=(
                states(lambda h, new, *layer: cell(h, *layer, operand=torch.where(new, 0.0, h))),
                states(lambda h, new, *layer: cell(torch.where(new, 0.0, h), *layer, operand=h)),
            ),
        ),
        "stored-zero": Mistake(
            "What should the state of a reset's own step be: zero, or what gates make of a zero before it?",
            "The episode's first step is a step like all others. Only what comes from before goes.",
            gives=states(lambda h, new, *layer: torch.where(new, 0.0, cell(h, *layer))),
        ),
        "factor": Mistake(
            "Let h be NaN before a reset. What does your line make of it?",
            "0 times NaN is NaN. tl.where(condition, 0.0, state) never looks at what it does not choose.",
            gives=states(lambda h, new, *layer: cell(h * ~new, *layer)),
            when=lambda calls: calls[0].dtype is torch.float32,  # the case with NaN is tried in the first
        ),
        "n-twice": N_TWICE,
    },
)
