"""Exercises of lesson 6: what is right, what people write instead, and what helps them on."""

from labkit import kernels
from labkit.exercises.engine import Exercise, Mistake, RaceSpec, layer_with_backward
from labkit.exercises.properties import KERNEL, KERNEL_CASES, NO_OTHER, POINTWISE, READ_ONCE, elements_at
from labkit.measure.correctness import DTYPES
from labkit.workloads import peers
from labkit.workloads.recurrent import RMS_NORM, rms_norm

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import next_power_of_2

EPS = 1e-6
RIVALS = dict.fromkeys(("F.rms_norm", "torch.compile"), rms_norm) | {
    "Liger": peers.liger_rms_norm,
    "labkit": kernels.rms_norm,
}

BACKWARD = {"direction": "backward", "as_layer": layer_with_backward(rms_norm)}


def race(rivals: dict[str, Any], batch: int, *widths: int, **how: Any) -> RaceSpec:
    """A race in float32, at 64 steps and these widths."""
    sizes = tuple({"batch": batch, "time": 64, "width": width} for width in widths)
    return RaceSpec(RMS_NORM, rivals, sizes, dtype="float32", **how)


# ---- a row a program ---------------------------------------------------------------------------------------


def row_inputs(batch: int, steps: int, width: int) -> dict[str, Any]:
    """x (batch, steps, width), with rows of all sizes, some so small that eps counts; weight (width,)."""
    sizes = 10.0 ** torch.randint(-3, 2, (batch, steps, 1))
    return {"x": sizes * (0.5 + torch.randn(batch, steps, width)), "weight": 1 + 0.5 * torch.randn(width)}


def mean(t: Tensor) -> Tensor:
    return t.mean(-1, keepdim=True)


def row_norms(*scales: Callable[[Tensor, int], Tensor], of: Any = torch.square) -> tuple[Any, ...]:
    """The layer with each of these scales: it multiplies x, and is made of the mean of ``of(x)`` and of H."""
    return tuple(lambda x, w, scale=each: w * x * scale(mean(of(x)), x.shape[-1]) for each in scales)


def right_scale(m: Tensor, H: int) -> Tensor:
    return torch.rsqrt(m + EPS)


def block_scale(m: Tensor, H: int) -> Tensor:
    """The scale when the sum is divided by the block's size."""
    return torch.rsqrt(m * H / next_power_of_2(H) + EPS)


(right_norm,) = row_norms(right_scale)


def lost(t: Tensor) -> Tensor:
    """NaN in the place of all numbers, but where a row fills its block: it has no masked places there."""
    return t if next_power_of_2(t.shape[-1]) == t.shape[-1] else torch.full_like(t, torch.nan)


row_norm = Exercise(
    "RMSNorm, a program a row",
    "row_norm",
    reference=right_norm,
    cases=((1, 1, 1), (1, 3, 5), (2, 3, 33)),
    large=((2, 2, 128), (1, 2, 2500)),
    inputs=row_inputs,
    dtypes=DTYPES,
    properties=(*POINTWISE, READ_ONCE),
    right="x is read once: the row stays in registers between its sum and its result.",
    race=race(RIVALS, 1024, 512, 64),  # as wide as the published rows, and so narrow that a row has 256 bytes
    mistakes={
        "unwritten": Mistake(
            "Some first rows are right, and behind them nothing was stored. Who should have?",
            "A program has one row. How many rows has x, if all its dimensions but the last are counted?",
        ),
        "sum-for-mean": Mistake(
            "Try a row of H ones: its root mean square is 1, so y is the weight. What is yours?",
            "tl.sum adds up. A mean divides the sum by how many numbers there are.",
            gives=row_norms(lambda m, H: torch.rsqrt(m * H + EPS)),
        ),
        "block-for-row": Mistake(
            "With 128 columns it is right, with 33 it is not. Which two sizes are alike only sometimes?",
            "The block has BH places and the row H numbers: the masked ones do not count.",
            gives=row_norms(block_scale),
        ),
        "root": Mistake(
            "Double x: y should stay as it is. What does yours do?",
            "The root mean square divides x, the mean square does not. tl.rsqrt is 1 over the root.",
            gives=row_norms(lambda m, H: 1 / (m + EPS), lambda m, H: torch.sqrt(m + EPS)),
        ),
        "eps": Mistake(
            "Only small rows are wrong. What is added to the mean square, and where?",
            "1e-6 is added to the mean, under the root; not to the sum, and not to the root.",
            gives=row_norms(
                lambda m, H: m.rsqrt(), lambda m, H: 1 / (m.sqrt() + EPS), lambda m, H: (m + EPS / H).rsqrt()
            ),
        ),
        "mean-of-x": Mistake(
            "Which comes first: the square of each number, or the sum over the row?",
            "Square each number, then add up: tl.sum(value * value, 0).",
            gives=row_norms(
                *(lambda m, H, k=k: (m * m * H**k + EPS).rsqrt() for k in (0, 1)), of=torch.positive
            ),
        ),
        "no-weight": Mistake(
            "The norm is right. Which argument have you not loaded?",
            "Each column has a weight, the same for all rows.",
            gives=lambda x, weight: right_norm(x, torch.ones_like(weight)),
        ),
        "weight-of-row": Mistake(
            "The first row is right, the others are NaN. How many numbers has the weight?",
            "H: its address has the column, and no row.",
            gives=lambda x, weight: right_norm(x, elements_at(weight, torch.arange(x.numel())).view_as(x)),
            when=lambda calls: any(call.loaded_outside for call in calls),  # so it is not the grid
        ),
    },
)

# ---- mend the published backward ---------------------------------------------------------------------------


def norm_inputs(batch: int, steps: int, width: int, eps: float) -> dict[str, Any]:
    """dy and x (batch, steps, width), weight (width,). dy is like y: a random one hides wrong sums."""
    x = (0.5 + torch.rand(batch, steps, 1)) * torch.randn(batch, steps, width)
    weight = 1 + 0.5 * torch.randn(width)
    y = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return {"dy": y + 0.5 * torch.randn_like(y), "x": x, "weight": weight, "eps": eps}


def norm_grad(start: Any = (1, 0), powers: Any = (1, -1, 0), over: Any = None) -> Callable[..., Any]:
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


OWN_ROW, COLUMN, WITHOUT_X, ELSEWHERE = (1, 0), (0, 1), (0, -1, 0), ((0, 1), (1, 1), (0, 0))
SOME_ROWS: Any = (
    *(lambda t: t[-1, -1], lambda t: t[0, 0]),
    *(lambda t: t[-1].sum(0), lambda t: t[:, -1].sum(0), lambda t: t.mean((0, 1))),
)


original = Exercise(
    "mend the published backward",
    "rms_norm_grad",
    reference=norm_grad(),
    cases=((1, 1, 1, 0.1), (2, 3, 5, 1e-6), (2, 5, 33, 1e-6)),
    large=((3, 5, 69, 0.1),),  # the last row lies in two blocks of 1024
    inputs=norm_inputs,
    properties=(KERNEL, *POINTWISE[1:]),
    **KERNEL_CASES,
    untouched="5c3a214bc975",
    right="But each element still does its row's whole sum: H times the work of one program a row.",
    race=race({"F.rms_norm": rms_norm, "labkit": kernels.rms_norm}, 512, 128, 256, 512, **BACKWARD),
    mistakes={
        "only-dx": Mistake(
            "dx is right now. If weight[3] grows a little, which numbers of y change, and by how much?",
            "Those of column 3, by x / rms. Left are what the kernel stores in dw, and the sum of its rows.",
            gives=wrong_grads((OWN_ROW,), (WITHOUT_X,), SOME_ROWS[:2]),
        ),
        "other-places": Mistake(
            "In rows of four, which places does your sum go through for element 6?",
            "It should be 4, 5, 6 and 7, as k goes from 0 to 3. What is 4, in terms of `row` and H?",
            gives=wrong_grads(ELSEWHERE) + wrong_grads(ELSEWHERE, (WITHOUT_X,), SOME_ROWS[:2]),
        ),
        "other-term": Mistake(
            "y = weight * (x / rms), in every row. What is the derivative of that by the weight?",
            "No weight is left in it. In the kernel x is `value`, and the rms is `r`.",
            gives=wrong_grads((OWN_ROW, COLUMN), (WITHOUT_X, (1, 0, 0), (1, 1, 0), (1, -1, 1), (0, 0, 0))),
        ),
        "not-all-rows": Mistake(
            "How many rows use the weight, and how many of them are in your result?",
            "Each one adds its part to the gradient: a sum. Which dimension of dw counts the rows?",
            gives=wrong_grads((OWN_ROW, COLUMN), over=SOME_ROWS),
        ),
    },
)

# ---- the backward's row part -------------------------------------------------------------------------------


def dealt_inputs(rows: int, width: int, programs: int) -> dict[str, Any]:
    """dy and x (rows, width), weight (width,), and the number of programs; dy is like y."""
    given = norm_inputs(1, rows, width, EPS)
    return {"dy": given["dy"][0], "x": given["x"][0], "weight": given["weight"], "programs": programs}


def row_gradients(dx: Any = None, dw: Any = None, rows: Any = None, scale: Any = right_scale) -> Any:
    """dx and the weight's gradient, or what a mistake makes of them.

    ``dx(g, w, u, s, x)`` and ``dw(...)`` compute with the upstream gradient g, the weight w, u = x s, and s =
    1 / rms, ``scale`` of the mean square and H; ``rows`` chooses the rows whose dw are added up.
    """

    def gives(dy: Tensor, x: Tensor, weight: Tensor, programs: int) -> tuple[Tensor, Tensor]:
        s = scale(mean(x.square()), x.shape[-1])
        given = dy, weight, x * s, s, x
        terms = (dw or (lambda g, w, u, s, x: g * u))(*given)
        return (dx or right_dx)(*given), (rows(terms, programs) if rows else terms).sum(0)

    return gives


def with_dx(*formulas: Any) -> tuple[Any, ...]:
    """The gradients with each of these formulas for dx."""
    return tuple(map(row_gradients, formulas))


def right_dx(g: Tensor, w: Tensor, u: Tensor, s: Tensor, x: Tensor) -> Tensor:
    return s * (g * w - u * mean(g * w * u))


def block_dx(g: Tensor, w: Tensor, u: Tensor, s: Tensor, x: Tensor) -> Tensor:
    """dx when the sum of w g u is divided by the block's size."""
    return s * (g * w - u * mean(g * w * u) * x.shape[-1] / next_power_of_2(x.shape[-1]))


backward = Exercise(
    "the backward's row part",
    "rms_norm_backward",
    reference=row_gradients(),
    cases=((1, 4, 2), (5, 3, 2), (9, 33, 4)),
    large=((3, 640, 2), (6, 128, 9)),
    inputs=dealt_inputs,
    dtypes=DTYPES,
    properties=(KERNEL, *POINTWISE[1:], READ_ONCE),
    right="x and dy are read once, dx is written once; parts are few, and come in one order.",
    race=race(RIVALS, 1024, 512, 513, **BACKWARD),
    mistakes={
        "no-other": Mistake(
            *NO_OTHER.hints,
            gives=(
                lambda *given: tuple(map(lost, row_gradients()(*given))),
                lambda *given: (lost(row_gradients()(*given)[0]), row_gradients()(*given)[1]),
            ),
        ),
        "mean-term": Mistake(
            "Double x in one row: y stays as it is. So what is the sum of dx times x over a row?",
            "Zero, nearly. The term that makes it so is u times the mean, taken away from w g.",
            gives=with_dx(
                lambda g, w, u, s, x: s * g * w, lambda g, w, u, s, x: s * (g * w + u * mean(g * w * u))
            ),
        ),
        "weight-missing": Mistake(
            "With a weight of ones it is right. Where does the weight stand in dx?",
            "y = w u: what comes to u from above is w g, in both places of the formula.",
            gives=with_dx(
                lambda g, w, u, s, x: s * (g - u * mean(g * u)),
                lambda g, w, u, s, x: s * (g * w - u * mean(g * u)),
                lambda g, w, u, s, x: s * (g - u * mean(g * w * u)),
                lambda g, w, u, s, x: s * w * (g - u * mean(g * u)),
            ),
        ),
        "x-for-u": Mistake(
            "If x is ten times as large, u is as before, and dx a tenth. Which of your factors know that?",
            "u = x / rms stands twice in dx, and the whole difference is divided by rms.",
            gives=with_dx(
                lambda g, w, u, s, x: g * w - u * mean(g * w * u),
                lambda g, w, u, s, x: g * w - s * u * mean(g * w * u),
                lambda g, w, u, s, x: s * (g * w - x * mean(g * w * x)),
                lambda g, w, u, s, x: s * (g * w - u * mean(g * w * x)),
            ),
        ),
        "sum-for-mean": Mistake(
            "With one column it is right. What is H times too large?",
            "The formula has a mean, and tl.sum adds up.",
            gives=with_dx(lambda g, w, u, s, x: s * (g * w - u * x.shape[-1] * mean(g * w * u))),
        ),
        "block-for-row": Mistake(
            *row_norm.mistakes["block-for-row"].hints,
            gives=(*with_dx(block_dx), *(row_gradients(dx, scale=block_scale) for dx in (None, block_dx))),
        ),
        "dw-rows": Mistake(
            "A program has several rows. How many of them are in what it stores of the weight's gradient?",
            "dw begins with zeros before the loop, and each row adds its part.",
            gives=(
                row_gradients(rows=lambda terms, programs: terms[-min(programs, len(terms)) :]),
                row_gradients(dw=lambda g, w, u, s, x: 0 * x),
            ),
        ),
        "dw-term": Mistake(
            "y = w u. What is its derivative by w, times the upstream gradient?",
            "g u, for each row: no weight, and u in place of x.",
            # g times x, w u, 1 or s
            gives=tuple(
                row_gradients(dw=lambda g, w, u, s, x, i=i: g * (x, w * u, 1 + 0 * x, s)[i]) for i in range(4)
            ),
        ),
        "summed-dw": Mistake(
            "How many numbers has the weight's gradient, and how many does your row add?",
            "One for each column: nothing of it is summed over a row, and no lane needs another's.",
            gives=row_gradients(dw=lambda g, w, u, s, x: (g * u).sum(-1, keepdim=True).expand_as(x)),
        ),
    },
)
