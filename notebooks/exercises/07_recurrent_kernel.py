"""Exercises of lesson 7: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake
from labkit.exercises.properties import KERNEL, KERNEL_CASES, POINTWISE, READ_ONCE

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# ---- mend the published backward ---------------------------------------------------------------------------


def norm_inputs(batch: int, steps: int, width: int, eps: float) -> dict[str, Any]:
    """dy and x (batch, steps, width), weight (width,). dy is like y: a random one hides wrong sums."""
    x = (0.5 + torch.rand(batch, steps, 1)) * torch.randn(batch, steps, width)
    weight = 1 + 0.5 * torch.randn(width)
    y = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return {"dy": y + 0.5 * torch.randn_like(y), "x": x, "weight": weight, "eps": eps}


def norm_grad(
    start: tuple[int, int] = (1, 0), powers: tuple[int, int, int] = (1, -1, 0), over: Any = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """dx and the weight's gradient, or what a mistake makes of them.

    An element's sum begins at ``start[0] * (its row's first place) + start[1] * (its column)``. To the
    weight's gradient it adds dy times these ``powers`` of x, rms and weight; ``over`` makes (H,) of them.
    """

    def gives(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        H, r, element = x.shape[-1], (x.square().mean(-1, keepdim=True) + eps).sqrt(), torch.arange(x.numel())
        place = (start[0] * (element // H * H) + start[1] * (element % H))[:, None] + torch.arange(H)
        pairs = F.pad((dy * x).flatten(), (0, H))[place]  # zero beyond the end
        dx = dy * weight / r - x * (pairs @ weight).view_as(x) / (H * r**3)
        terms = dy * x ** powers[0] * r ** powers[1] * weight ** powers[2]
        return dx, over(terms) if over else terms.sum((0, 1))

    return gives


def wrong_grads(starts: Any = ((1, 0),), powers: Any = ((1, -1, 0),), over: Any = (None,)) -> Any:
    """All combinations of mistakes in the two gradients."""
    return tuple(norm_grad(*each) for each in product(starts, powers, over))


OWN_ROW, COLUMN, ONLY_DY = (1, 0), (0, 1), (0, 0, 0)
SOME_ROWS: Any = (
    *(lambda t: t[-1, -1], lambda t: t[0, 0]),
    *(lambda t: t[-1].sum(0), lambda t: t[:, -1].sum(0), lambda t: t.mean((0, 1))),
)

original = Exercise(
    "mend the published backward",
    "rms_norm_grad",
    reference=norm_grad(),
    cases=((1, 1, 1, 0.1), (2, 3, 5, 1e-6), (4, 5, 33, 1e-6), (1, 2, 70, 0.1)),
    large=((1, 1, 1025, 0.1),),
    inputs=norm_inputs,
    properties=(KERNEL, *POINTWISE[1:]),
    **KERNEL_CASES,
    untouched="779766a3842e",
    right="But each element still does its row's whole sum: H times the work of one program a row.",
    mistakes={
        "only-dx": Mistake(
            "dx is right now. If weight[3] grows a little, which numbers of y change, and by how much?",
            "Those of column 3 in every row, by x / rms: this times dy is what an element adds.",
            "Two lines are left, then: what the kernel stores in dw, and what PyTorch makes of its rows.",
            gives=wrong_grads((OWN_ROW,), (ONLY_DY,), SOME_ROWS[:2]),
        ),
        "other-places": Mistake(
            "In rows of four, which places does your sum go through for element 6?",
            "It should be 4, 5, 6 and 7, as k goes from 0 to 3. What is 4, in terms of `row` and H?",
            gives=(
                *wrong_grads((COLUMN, (1, 1), (0, 0))),
                *wrong_grads((COLUMN, (1, 1), (0, 0)), (ONLY_DY,), SOME_ROWS[:2]),
            ),
        ),
        "other-term": Mistake(
            "y = weight * (x / rms), in every row. What is the derivative of that by the weight?",
            "No weight is left in it. In the kernel x is `value`, and the rms is `r`.",
            gives=wrong_grads((OWN_ROW, COLUMN), (ONLY_DY, (1, 0, 0), (1, 1, 0), (1, -1, 1), (0, -1, 0))),
        ),
        "not-all-rows": Mistake(
            "How many rows use the weight, and how many of them are in your result?",
            "Each one adds its part to the gradient: a sum. Which dimension of dw counts the rows?",
            gives=wrong_grads((OWN_ROW, COLUMN), over=SOME_ROWS),
        ),
    },
)

# ---- the loop over time ------------------------------------------------------------------------------------


def sequence_inputs(batch: int, steps: int, width: int, zeros: float = 0.05) -> dict[str, Tensor]:
    """a, of which some are negative and a share is zero, and b, both (batch, steps, width)."""
    shape = batch, steps, width
    a = 1 - 1.4 * torch.rand(shape).square()
    return {"a": torch.where(torch.rand(shape) < zeros, 0.0, a), "b": torch.randn(shape)}


def states_with_step(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """h (B, T, H) from tensors (B, T, ...), where each h is ``step(the last one, *the tensors at t)``."""

    def gives(*tensors: Tensor) -> Tensor:
        h = [torch.zeros_like(tensors[0][:, 0])]
        for now in zip(*(each.unbind(1) for each in tensors), strict=True):
            h.append(step(h[-1], *now))
        return torch.stack(h[1:], 1)

    return gives


right_states = states_with_step(lambda h, a, b: a * h + b)


def stores_like(walks: Callable[[int, int, int], Sequence[tuple[int, int, int]]]) -> Any:
    """Whether all calls store to the places of one of the walks.

    From T, H and BH these are how far the steps are apart, which one is first, and how many there are.
    """

    def there(call: Call, which: int) -> bool:
        B, T, H = call.want.shape
        apart, first, count = walks(T, H, call.launches.kernels[0][1].get("BH", 128))[which]
        step = first + np.arange(count)[:, None]
        at = np.sort((np.arange(B)[:, None, None] * T * H + step * apart + np.arange(H)).ravel())
        return np.array_equal(call.launches.stored(call.got), at[(at >= 0) & (at < B * T * H)])

    def found(calls: Sequence[Call]) -> bool:
        seen = all(isinstance(call.got, Tensor) and call.launches.kernels for call in calls)
        return seen and any(all(there(call, i) for call in calls) for i in range(len(walks(1, 1, 1))))

    return found


recurrence = Exercise(
    "the loop over time",
    "recurrence",
    reference=right_states,
    cases=((1, 1, 1), (2, 1, 5), (2, 5, 20), (1, 2, 128), (2, 2, 140), (1, 70, 8)),
    large=((1, 1, 1030), (1, 500, 1)),  # longer ones would let a wrong stride leave the fences
    inputs=sequence_inputs,
    properties=(*POINTWISE, READ_ONCE),
    **KERNEL_CASES,
    right="Each number crosses memory once, and the state never leaves the registers.",
    mistakes={
        "stride": Mistake(
            "How many numbers of h lie between a channel and the same channel one step later?",
            "A step has all channels of the tensor, other programs' too. Which line moves `at` so far?",
            when=stores_like(lambda T, H, BH: [(apart, 0, T) for apart in (0, 1, BH, T, T * H)]),
        ),
        "other-steps": Mistake(
            "Let T be 3. Which step does `at` stand for at each of your stores?",
            "Steps 0, 1 and 2 are stored once each, inside the loop, and `at` begins with step 0.",
            when=stores_like(
                lambda T, H, BH: [
                    *((H, 1, T), (H, 1, T - 1), (H, 0, T - 1), (H, 0, T + 1)),
                    *((H, T - 1, 1), (H, T, 1)),  # one store, after the loop
                ]
            ),
        ),
        "no-carry": Mistake(
            "Try it with a = 1 and b = 1: h should be 1, 2, 3. What is yours?",
            "It is 1 at every step. Which name does the next round read, and which one do you set?",
            gives=lambda a, b: b,
        ),
        "formula": Mistake(
            "Work out two steps by hand for a = 0.5 and b = 1: h is 1, then 1.5. What is yours?",
            "One of a and b multiplies the old state and nothing else, the other is added as it is.",
            gives=(
                states_with_step(lambda h, a, b: h + b),
                states_with_step(lambda h, a, b: a * h),
                states_with_step(lambda h, a, b: h * b + a),
                states_with_step(lambda h, a, b: a * (h + b)),
                states_with_step(lambda h, a, b: h + a * b),
                states_with_step(lambda h, a, b: a * h + (1 - a) * b),
            ),
        ),
        "another-round": Mistake(
            "Write down two rounds of your loop by hand. Which a, b and h are in the second one?",
            "Those of step 1: load both anew, make the new state, store that, and then move on.",
            gives=(
                lambda a, b: F.pad(right_states(a, b), (0, 0, 1, -1)),
                lambda a, b: right_states(a[:, :1].expand_as(a), b[:, :1].expand_as(b)),
            ),
        ),
    },
)

# ---- an episode ends ---------------------------------------------------------------------------------------


def episode_inputs(batch: int, steps: int, width: int, infinite: bool = False) -> dict[str, Tensor]:
    """a, b (batch, steps, width) and reset (batch, steps). With ``infinite`` h is so until the middle."""
    given, begins = sequence_inputs(batch, steps, width, zeros=0), torch.rand(batch, steps) < 0.3
    if infinite:
        given["b"][:, 0] = math.inf
        begins[:, : steps // 2], begins[:, steps // 2] = False, True
    return given | {"reset": begins}


def states_with_resets(
    step: Any = lambda h, a, b, new: torch.where(new, b, a * h + b), place: Any = None
) -> Any:
    """The states with another step, or with the resets at ``place(row, t, channel, T, H)``."""

    def gives(a: Tensor, b: Tensor, reset: Tensor) -> Tensor:
        row, t, channel = torch.meshgrid(*map(torch.arange, a.shape), indexing="ij")
        at = place(row, t, channel, *a.shape[1:]) if place else row * a.shape[1] + t
        around = F.pad(reset.flatten(), (1, a.numel()), value=True)  # as the memory there is
        return states_with_step(step)(a, b, around[at + 1])

    return gives


reset = Exercise(
    "begin anew where an episode does",
    "with_reset",
    reference=states_with_resets(),
    cases=((1, 1, 1), (2, 5, 20), (1, 2, 128), (2, 6, 33, True), (2, 2, 140), (1, 70, 8)),
    large=((1, 1, 1030), (1, 300, 1)),
    inputs=episode_inputs,
    properties=(*POINTWISE, READ_ONCE),
    **KERNEL_CASES,
    untouched="dc6ee6833d95",
    right="The choice costs one byte for each step of a row, which all of its channels share.",
    mistakes={
        "which-steps": Mistake(
            "For which steps should h be b alone, and for which is yours?",
            "True means that an episode begins. `reset` is an address: what is the value for row and t?",
            gives=(
                states_with_resets(lambda h, a, b, new: a * h + b),
                lambda a, b, reset: b,
                lambda a, b, reset: states_with_resets()(a, b, ~reset),
            ),
        ),
        "another-step": Mistake(
            "Step t is the first of its episode where reset is true at t. Where does yours begin anew?",
            "One step off. At a reset, which h is dropped: the last one, or the one to be stored?",
            gives=(
                states_with_resets(place=lambda row, t, channel, T, H: row * T + t - 1),
                states_with_resets(place=lambda row, t, channel, T, H: row * T + t + 1),
            ),
        ),
        "another-place": Mistake(
            "In (B, T), how many values lie between two rows, and how many between two steps?",
            "T and 1. All channels of a step share one value, so no channel is in its address.",
            gives=(
                states_with_resets(place=lambda row, t, channel, T, H: t),
                states_with_resets(place=lambda row, t, channel, T, H: row * T),
                states_with_resets(place=lambda row, t, channel, T, H: row * H + t),
                states_with_resets(place=lambda row, t, channel, T, H: (row * T + t) * H + channel),
            ),
        ),
        "drops-b": Mistake(
            "What should h be at a reset, and what is yours?",
            "It is b_t there: only what comes from the step before goes.",
            gives=states_with_resets(lambda h, a, b, new: torch.where(new, 0.0, a * h + b)),
        ),
        "only-stored": Mistake(
            "At a reset your h is right. From which number does the next step go on?",
            "From `state`, which has heard nothing of the reset.",
            gives=lambda a, b, reset: torch.where(reset[..., None], b, right_states(a, b)),
        ),
        "factor": Mistake(
            "Let h be infinite before a reset. What does your line make of it?",
            "0 times infinity is NaN, so no factor drops a number, whatever it is. A choice does.",
            "Choose between zero and the whole product, or between zero and the old state.",
            gives=(
                states_with_resets(lambda h, a, b, new: a * h * ~new + b),
                states_with_resets(lambda h, a, b, new: a * h - a * h * new + b),
                states_with_resets(lambda h, a, b, new: b * new + (a * h + b) * ~new),
            ),
        ),
    },
)
