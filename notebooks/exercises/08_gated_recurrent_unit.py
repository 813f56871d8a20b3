"""Exercises of lesson 8: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, case_values
from labkit.exercises.properties import FEWEST, KERNEL_CASES, PRODUCT, ROUNDED_ONCE, ROUNDED_TWICE
from labkit.kernels import gru as finished
from labkit.workloads.gru import GRU, library_gru

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# ---- the step of a GRU -------------------------------------------------------------------------------------

Thirds = Sequence[Tensor]


def layer_inputs(B: int, T: int, H: int) -> dict[str, Tensor]:
    """gates (B, T, 3 H), weight (3 H, H) and bias (3 H,): h takes about as large a part as the gates."""
    weight = 2 * torch.randn(3 * H, H) / H**0.5
    return {"gates": torch.randn(B, T, 3 * H), "weight": weight, "bias": torch.randn(3 * H)}


def cell(h: Tensor, i: Thirds, w: Thirds, b: Thirds, operand: Tensor | None = None) -> Tensor:
    """The next state; ``operand`` is what the products take for h, if it is not h."""
    r, z, p = (linear(h if operand is None else operand, *each) for each in zip(w, b, strict=True))
    z = torch.sigmoid(i[1] + z)
    return (1 - z) * torch.tanh(i[2] + torch.sigmoid(i[0] + r) * p) + z * h


def states(step: Callable[..., Tensor] = cell) -> Any:
    """All states (B, T, H) that a step gives."""

    def gives(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        h, found = gates.new_zeros(len(gates), weight.shape[1]), []
        for now in gates.unbind(1):
            h = step(h, now.chunk(3, 1), weight.chunk(3), bias.chunk(3))
            found.append(h)
        return torch.stack(found, 1)

    return gives


def another_order(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step that takes the first third for z and the second for r."""
    return cell(h, *([each[1], each[0], each[2]] for each in (i, w, b)))


def bias_outside(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose candidate adds its bias beside r."""
    return cell(h, (i[0], i[1], i[2] + b[2]), w, (b[0], b[1], 0 * b[2]))


def reset_before(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose candidate is made of the product with r * h."""
    r, z = torch.sigmoid(i[0] + linear(h, w[0], b[0])), torch.sigmoid(i[1] + linear(h, w[1], b[1]))
    return (1 - z) * torch.tanh(i[2] + linear(r * h, w[2], b[2])) + z * h


def other_blend(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step that keeps 1 - z of the old state."""
    return cell(h, (i[0], -i[1], i[2]), (w[0], -w[1], w[2]), (b[0], -b[1], b[2]))


def without_r(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose candidate does not know r."""
    return cell(h, (i[0] + math.inf, i[1], i[2]), w, b)


def without_tanh(h: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose candidate is the sum as it is."""
    r, z, p = (linear(h, *each) for each in zip(w, b, strict=True))
    z = torch.sigmoid(i[1] + z)
    return (1 - z) * (i[2] + torch.sigmoid(i[0] + r) * p) + z * h


def rows_apart(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The states when steps of gates are taken to begin H numbers apart."""
    (B, T, width), H = gates.shape, weight.shape[1]
    at = torch.arange(B)[:, None, None] * T * H + torch.arange(T)[:, None] * H + torch.arange(width)
    return states()(gates.flatten()[at], weight, bias)


def stored_at(keep: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The right states, but NaN where ``keep`` is false of sequence and step."""

    def gives(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        right = states()(gates, weight, bias)
        row, t = torch.arange(len(right))[:, None, None], torch.arange(right.shape[1])[:, None]
        return right.where(keep(row, t).expand(right.shape), math.nan)

    return gives


def all_in_one_place(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The last state where the first belongs, and nothing elsewhere."""
    right = states()(gates, weight, bias)
    return torch.cat((right[:, -1:], torch.full_like(right[:, 1:], math.nan)), 1)


def padded(H: int) -> bool:
    """Whether a block of features is wider than H."""
    return H < 16 or H & (H - 1) != 0


def nan_where_padded(keep: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The right states; where a block is wider than H only those that ``keep`` is true of, else NaN."""

    def gives(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (stored_at(keep) if padded(weight.shape[1]) else states())(gates, weight, bias)

    return gives


def _rounded_carry(call: Call) -> str:
    if call.dtype is not torch.float16:  # to bfloat16 the interpreter rounds in a way of its own
        return ""

    def rounded_operand(h: Tensor, *rest: Any) -> Tensor:
        return cell(h, *rest, operand=h.to(torch.float16).to(h.dtype))

    want = states(rounded_operand)(*(each.double() for each in call.originals.values()))
    differing = int((call.got != want.to(torch.float16)).sum())
    if differing <= max(FEWEST, ROUNDED_TWICE * want.numel()):
        return ""
    return f"{differing / want.numel():.0%} of the states are not those of a float32 state, rounded once."


ROUNDED_CARRY = Property(
    "rounded-carry",
    _rounded_carry,
    "Which of your values have 16 bits? The operand of the products has to. What else?",
    "What was loaded has, and so has the sum of two such numbers. With a float32 number it is float32.",
    "The state, too, stays float32 from step to step: give its rounding to `dot`, and to nobody else.",
)
STEP_PROPERTIES = tuple(each for each in PRODUCT if each is not ROUNDED_ONCE)


def as_layer(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A whole layer: the input's product for all steps, and then the answer."""
    return lambda x, w_ih, w_hh, b_ih, b_hh: answer(linear(x, w_ih, b_ih), w_hh, b_hh)


gru = Exercise(
    "the step of a GRU",
    "gru",
    reference=states(),
    cases=((1, 1, 1), (2, 3, 5), (2, 2, 16), (18, 2, 20)),
    large=((1, 2, 33), (1, 12, 3), (35, 1, 4)),
    inputs=layer_inputs,
    right="The weights are loaded once for all steps, and h never leaves the multiprocessor.",
    properties=(*STEP_PROPERTIES, ROUNDED_CARRY),
    **KERNEL_CASES,
    mistakes={
        "nothing-stored": Mistake(
            "h is all NaN, as new_empty left it. Which line writes a state of it?",
            "As in rnn_kernel: tl.store in the loop, one state a step.",
            gives=lambda gates, weight, bias: math.nan * states()(gates, weight, bias),
        ),
        "first-rows": Mistake(
            "The first 16 sequences are right, and nobody wrote the others. Who should have?",
            "tl.program_id(0) tells a program which 16 sequences are its own.",
            gives=stored_at(lambda row, t: row < 16),
        ),
        "one-place": Mistake(
            "With T = 3, where does the state of step 2 belong, and where is yours?",
            "Sequences lie T * H numbers apart, steps H. Which of the two moves your store in the loop?",
            gives=(all_in_one_place, stored_at(lambda row, t: t == 0)),
        ),
        "row-length": Mistake(
            "How many numbers of `gates` has one step of one sequence?",
            "Three thirds of H numbers: steps lie 3 * H apart, the thirds H.",
            gives=rows_apart,
        ),
        "not-transposed": Mistake(
            "Step 0 is right, step 1 is not. Which of a matrix's two axes does `dot(a, w)` sum over?",
            "It sums over w's rows. A row of W_hr belongs to one new feature, and a column to an old one.",
            "Load it with in and out exchanged, as rnn_kernel does: weight + n * H + n.T.",
            gives=states(lambda h, i, w, b: cell(h, i, [each.T for each in w], b)),
        ),
        "same-matrix": Mistake(
            "How far is it from W_hr to W_hz in `weight`, and which matrices do your three loads bring?",
            "A matrix has H * H numbers.",
            gives=states(lambda h, i, w, b: cell(h, i, [w[0]] * 3, b)),
        ),
        "no-carry": Mistake(
            "Step 0 is right. Which h do the products of step 1 take?",
            "The state that a step makes has to be the one that the next begins with.",
            gives=states(lambda h, i, w, b: cell(0 * h, i, w, b)),
        ),
        "order": Mistake(
            "Which third of `gates` is r, and which one z?",
            "PyTorch's order is r, z, n, in gates, weight and bias.",
            gives=states(another_order),
        ),
        "no-bias": Mistake(
            "Take weights of zero. What is left of W_hr h + b_hr?",
            "Each of the three products of h has a third of `bias`. gates have the input's already.",
            gives=states(lambda h, i, w, b: cell(h, i, w, [0 * each for each in b])),
        ),
        "bias-outside": Mistake(
            "With zero weights, what does r multiply in the candidate?",
            "r · (W_hn h + b_hn): the bias of the product of h stands inside.",
            gives=states(bias_outside),
        ),
        "reset-before": Mistake(
            "That is the first paper's candidate. What does r multiply in PyTorch's: h, or the product?",
            "The product of h and its bias are made first, with h itself, and r scales the sum.",
            gives=states(reset_before),
        ),
        "no-r": Mistake(
            "Your r is computed. Where is it used?",
            "In the candidate: it scales W_hn h + b_hn.",
            gives=states(without_r),
        ),
        "blend": Mistake(
            "Let z be 1. Which of candidate and old state should be left?",
            "The old one: z multiplies h, and 1 - z the candidate.",
            gives=states(other_blend),
        ),
        "no-tanh": Mistake(
            "Between which two numbers should the candidate lie?",
            "tanh of the whole sum brings it between -1 and 1.",
            gives=states(without_tanh),
        ),
        "operand-dtype": Mistake(
            "Which dtype has the state, and which the weights? `dot` multiplies two blocks of one dtype.",
            "Give it the state rounded: state.to(wr.dtype). The state itself stays float32.",
            raises="Both operands must be same dtype",
        ),
        "no-other": Mistake(
            "Which number stands where a load was masked? The products add it up.",
            "On a GPU whatever the register held before. Yours has to add nothing: other=0.0, in each load.",
            gives=(nan_where_padded(lambda row, t: t < 0), nan_where_padded(lambda row, t: t == 0)),
        ),
    },
    race=RaceSpec(
        GRU,
        {"cuDNN": library_gru, "labkit": finished},
        tuple({"batch": batch, "time": 64, "width": 128} for batch in (512, 4096)),
        roundings=4,
        as_layer=as_layer,
    ),
)

# ---- what a step is made of --------------------------------------------------------------------------------

Clocks = tuple[float, float, float]


def counts(BM: int, H: int) -> Clocks:
    """Cycles of the products, the weights' way and the special functions."""
    return 6 * BM * H * H / 4096, 6 * H * H / 128, 6 * BM * H / 16


def scaled(*factors: float) -> Callable[[int, int], Clocks]:
    """The cycles, each times a factor."""

    def gives(BM: int, H: int) -> Clocks:
        products, weights, functions = (a * f for a, f in zip(counts(BM, H), factors, strict=True))
        return products, weights, functions

    return gives


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
            gives=scaled(1 / 2, 1, 1),
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
            "An exponential and a reciprocal, for each of two gates and the candidate.",
            gives=(scaled(1, 1, 1 / 2), scaled(1, 1, 1 / 3), scaled(1, 1, 2 / 3), scaled(1, 1, 1 / 6)),
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


def begun_anew(h: Tensor, new: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """The right step: zero in place of h where an episode begins."""
    return cell(torch.where(new, 0.0, h), i, w, b)


def with_resets(step: Callable[..., Tensor] = begun_anew, shift: int = 0) -> Any:
    """All states that a step (h, new, i, w, b) gives, with the resets ``shift`` steps later."""

    def gives(gates: Tensor, weight: Tensor, bias: Tensor, reset: Tensor) -> Tensor:
        h, found, T = gates.new_zeros(len(gates), weight.shape[1]), [], gates.shape[1]
        for t, now in enumerate(gates.unbind(1)):
            new = reset[:, t - shift, None] if 0 <= t - shift < T else torch.zeros(len(gates), 1).bool()
            h = step(h, new, now.chunk(3, 1), weight.chunk(3), bias.chunk(3))
            found.append(h)
        return torch.stack(found, 1)

    return gives


def only_operand(h: Tensor, new: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose products take zero, and whose blend takes the old state."""
    return cell(h, i, w, b, operand=torch.where(new, 0.0, h))


def only_blend(h: Tensor, new: Tensor, i: Thirds, w: Thirds, b: Thirds) -> Tensor:
    """A step whose blend takes zero, and whose products take the old state."""
    return cell(torch.where(new, 0.0, h), i, w, b, operand=h)


reset = Exercise(
    "begin anew where an episode does",
    "episodes",
    reference=with_resets(),
    cases=((1, 1, 1), (2, 4, 5), (2, 6, 3, True), (18, 2, 20)),
    large=((1, 2, 33), (1, 12, 3)),
    inputs=episode_inputs,
    right="The choice costs one byte a step and sequence, and no number of the old episode gets through it.",
    properties=STEP_PROPERTIES,
    **KERNEL_CASES,
    mistakes={
        "which-steps": Mistake(
            "For which steps should h be zero before, and for which is yours?",
            "True means that an episode begins. `reset` is an address: load (row, t) of it.",
            gives=(
                with_resets(lambda h, new, i, w, b: cell(h, i, w, b)),
                with_resets(lambda h, new, i, w, b: cell(0 * h.nan_to_num(), i, w, b)),
                with_resets(lambda h, new, i, w, b: begun_anew(h, ~new, i, w, b)),
            ),
        ),
        "a-step-late": Mistake(
            "Let T be 2, with a reset at step 1. Which state of yours was the first to change?",
            "Step t is the first of its episode where reset is true at t: h is zero *before* it.",
            gives=(with_resets(shift=1), with_resets(shift=-1)),
        ),
        "only-products": Mistake(
            "Two kinds of lines of a step use the old state. Which of them still has the old episode's?",
            "The products have lost it, but z · h has not. Choose once, before both.",
            gives=with_resets(only_operand),
        ),
        "only-blend": Mistake(
            "Two kinds of lines of a step use the old state. Which of them still has the old episode's?",
            "z · h has lost it, but the products have not. Choose once, before both.",
            gives=with_resets(only_blend),
        ),
        "stored-zero": Mistake(
            "What should the state of a reset's own step be: zero, or what gates make of a zero before it?",
            "The episode's first step is a step like all others. Only what comes from before goes.",
            gives=with_resets(lambda h, new, i, w, b: torch.where(new, 0.0, cell(h, i, w, b))),
        ),
        "factor": Mistake(
            "Let h be NaN before a reset. What does your line make of it?",
            "0 times NaN is NaN, so no factor drops a number, whatever it is. A choice does.",
            "tl.where(condition, 0.0, state) never looks at what it does not choose.",
            gives=with_resets(lambda h, new, i, w, b: cell(h * ~new, i, w, b)),
        ),
    },
)
