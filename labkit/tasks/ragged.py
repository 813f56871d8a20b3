"""Lesson 2, exercise "ragged": find the mask that a tiled matmul lacks along the dimension it sums over."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit import checks
from labkit.tasks import Evidence, some
from labkit.tasks.ragged_hints import HINTS
from labkit.tasks.tiles import DTYPES, Call, compiled, misread

SIZES = ((37, 41, 64), (33, 40, 70), (64, 33, 1), (5, 3, 31), (40, 70, 100), (3, 5, 97))
"""M, N, K. The first is right in the scaffold: its K is two whole tiles."""
OTHER_SIZES = ((33, 40, 70), (5, 3, 31))
"""Those tried in every dtype and layout too."""


def check(ragged: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``ragged(x, weight)`` with float64 where K is no multiple of a tile; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls: list[Call] = []
    for sizes in SIZES:
        call = _call(ragged, sizes, torch.float32)
        call.refuse_form()
        if not calls:
            call.refuse_reused(ragged)
        calls.append(call)
    _refuse_loads_of_other_rows(calls)
    _refuse_values(calls)
    _refuse_loads_outside(calls)
    _refuse_undefined(ragged)
    passed = len(calls)
    for dtype in DTYPES:
        for sizes in OTHER_SIZES:
            for layout in checks.LAYOUTS:
                other = _call(ragged, sizes, dtype, layout)
                other.refuse_form()
                other.refuse_strides()
                _refuse_values([other])
                passed += 1
    return Evidence(_evidence(ragged, passed), passed)


def _call(
    ragged: Callable[..., Tensor],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    layout: str = "contiguous",
    undefined: bool = False,
) -> Call:
    m, n, k = sizes
    values = {"x": torch.randn(m, k).to(dtype), "weight": torch.randn(n, k).to(dtype)}
    want = values["x"].double() @ values["weight"].double().T
    return Call(ragged, values, want, HINTS, layout=layout, undefined=undefined)


def _evidence(ragged: Callable[..., Tensor], passed: int) -> str:
    """What was passed, and what a ragged K costs in the compiled kernel."""
    whole, odd = _call(ragged, (33, 40, 64), torch.float16), _call(ragged, (33, 40, 70), torch.float16)
    widths = [code.widest_load for code in compiled(whole, odd)]
    depths = ", ".join(f"{k}" for k in sorted({k for _, _, k in SIZES}))
    return (
        f"{passed} checks against float64, with K of {depths}: nothing outside x and weight is loaded. "
        f"A mask makes a ragged K right, not free: compiled for sm_90 in float16, the widest loads have "
        f"{widths[0]} bits where K is 64, and {widths[1]} where it is 70, as rows then begin anywhere."
    )


def _refuse_loads_of_other_rows(calls: list[Call]) -> None:
    """Loads outside where K is a multiple of the depth have nothing to do with K."""
    for call in calls:
        if call.values["x"].shape[1] % call.given("BK") == 0 and (strays := call.strays()):
            name, places = next(iter(strays.items()))
            raise call.wrong(
                misread(call.kernel[0]) or "rows-unmasked",
                f"{call}: {some(places, 'place')} outside {name} got loaded.",
            )


def _refuse_values(calls: list[Call]) -> None:
    """`Wrong` for the first call with a wrong output, by the mistake that explains all of them."""
    first = next((call for call in calls if call.problem), None)
    if first is not None:
        raise first.wrong(_reason(calls), f"{first}: the output is wrong in {first.problem}")


def _refuse_loads_outside(calls: list[Call]) -> None:
    for call in calls:
        for name, places in call.strays().items():
            what = f"{some(places, 'place')} outside {name} got loaded"
            raise call.wrong("reads-outside", f"{call}: {what}, though the output is right.")


def _refuse_undefined(ragged: Callable[..., Tensor]) -> None:
    for sizes in OTHER_SIZES:
        call = _call(ragged, sizes, torch.float32, undefined=True)
        if call.problem:
            given = "with NaN for what masked loads leave undefined, the output is wrong in"
            raise call.wrong("no-other", f"{call}, and {given} {call.problem}")


@dataclass(frozen=True)
class _Places:
    """The places that the loop visits in the rows of an operand, and what a mask may compare them with."""

    row: Tensor
    k: Tensor
    depth: int
    """BK, the depth of a tile."""
    lines: int
    """BM or BN, the operand's rows in a tile."""
    M: int
    N: int
    K: int

    @property
    def start(self) -> Tensor:
        """Where the tile begins."""
        return self.k // self.depth * self.depth


Mask = Callable[[_Places], Tensor]


def _below(number: int) -> Mask:
    return lambda at: at.k < number


_INSIDE: Mask = lambda at: at.k < at.K  # noqa: E731  # a table of masks reads best in one form
_ALL: Mask = lambda at: at.k >= 0  # noqa: E731
_MASKS: dict[str, tuple[Mask, ...]] = {
    "off-by-one": (lambda at: at.k <= at.K,),
    "one-short": (lambda at: at.k < at.K - 1,),
    "start-twice": (lambda at: at.k < at.K - at.start,),
    "place-in-tile": (lambda at: at.k - at.start < at.K,),
    "whole-tiles": (lambda at: at.start + at.depth <= at.K, lambda at: at.start + at.depth < at.K),
    "first-tile": (lambda at: at.k < at.depth, lambda at: at.k < at.lines),
    "inverted": (lambda at: at.k >= at.K, lambda at: at.k > at.K),
    "wrong-axis": (lambda at: at.row % at.lines + at.start < at.K,),
    "wrong-bound": (lambda at: at.k < at.M, lambda at: at.k < at.N),
    # (row < M) & k joins 1 and k bit by bit, and keeps the last bit.
    "not-a-condition": (
        lambda at: at.k % 2 == 1,
        lambda at: at.k.clamp(max=at.K) % 2 == 1,
        lambda at: (at.k >= 0) & (at.K % 2 == 1),
    ),
    "literal": tuple(map(_below, range(1, 128))),
}
"""What a learner's condition on k may be in place of the right one, by reason."""


def _mistakes() -> Iterator[tuple[str, Mask, Mask]]:
    """A reason, and the masks of x and of weight that it stands for."""
    yield "no-mask", _ALL, _ALL
    yield "only-x", _INSIDE, _ALL
    yield "only-weight", _ALL, _INSIDE
    for reason, masks in _MASKS.items():
        for mask in masks:
            yield from ((reason, mask, mask), (reason, mask, _INSIDE), (reason, _INSIDE, mask))
    yield "wrong-bound", _MASKS["wrong-bound"][0], _MASKS["wrong-bound"][1]


def _reason(calls: list[Call]) -> str:
    """The mistake that explains the outputs of all calls."""
    misreading = misread(calls[0].kernel[0])
    if misreading in ("python-and", "chained"):  # what the mask is then is not what it says
        return misreading
    for reason, mask_x, mask_weight in _mistakes():
        if all(_explains(call, mask_x, mask_weight) for call in calls):
            return reason
    return misreading or "wrong-values"


def _explains(call: Call, mask_x: Mask, mask_weight: Mask) -> bool:
    x, weight = (value.double() for value in call.values.values())
    sizes = {"M": x.shape[0], "N": weight.shape[0], "K": x.shape[1]}
    a = _loaded(x, mask_x, call.given("BK"), call.given("BM"), sizes)
    b = _loaded(weight, mask_weight, call.given("BK"), call.given("BN"), sizes)
    return torch.allclose(call.got.double(), a @ b.T, rtol=0.02, atol=0.02, equal_nan=True)


def _loaded(operand: Tensor, mask: Mask, depth: int, lines: int, sizes: dict[str, int]) -> Tensor:
    """What the loop's loads bring of an operand (rows, K): beyond K the next row, after the last NaN."""
    row, k = torch.arange(len(operand))[:, None], torch.arange(0, -(-sizes["K"] // depth) * depth)
    at = row * sizes["K"] + k
    values = operand.flatten()[at.clamp(max=operand.numel() - 1)].where(at < operand.numel(), math.nan)
    return values.where(mask(_Places(row, k, depth, lines, **sizes)), 0.0)
