"""Lesson 4, exercise "bias": the epilogue of a grouped kernel, a row of bias for each group."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labkit import checks
from labkit.tasks import Evidence, some
from labkit.tasks.fuse import ROUNDED_TWICE
from labkit.tasks.group_bias_hints import HINTS
from labkit.tasks.grouped import Grouped, Sizes
from labkit.tasks.tiles import compiled, misread

SIZES: tuple[tuple[Sizes, ...], ...] = (
    ((33, 3, 20), (40, 2, 32), (7, 4, 24)),
    ((37, 3, 16), (40, 2, 33), (5, 3, 1), (35, 1, 7)),
)
"""Rows, groups and width. Tiles of the first ones are as wide as high: a bias along the wrong side fits them,
and has to be told before others make it an error."""
OTHER_SIZES: tuple[Sizes, ...] = ((33, 3, 20), (37, 3, 16))
"""Those tried in every dtype and layout too."""


def check(with_bias: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``with_bias(x, weight, bias)`` with float64, see that one kernel does it; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls: list[Grouped] = []
    for alike in SIZES:
        for sizes in alike:
            call = _call(with_bias, sizes)
            call.refuse_form()
            if not calls:
                call.refuse_reused(with_bias)
            calls.append(call)
        _refuse_values(calls)
        _refuse_loads_outside(calls)
    passed = len(calls)
    for dtype in checks.DTYPES:
        others = [
            _call(with_bias, sizes, dtype, layout) for sizes in OTHER_SIZES for layout in checks.LAYOUTS
        ]
        for call in others:
            call.refuse_form()
            call.refuse_strides()
            _refuse_values([call])
        if dtype is torch.float16:
            _refuse_rounded_twice(others)
        passed += len(others)
    return Evidence(_evidence(with_bias, passed), passed)


def _call(
    with_bias: Callable[..., Tensor],
    sizes: Sizes,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> Grouped:
    return Grouped(with_bias, sizes, dtype, HINTS, bias=True, layout=layout)


def _refuse_values(calls: list[Grouped]) -> None:
    """`Wrong` for the first call with a wrong output, by the mistake that explains all of them."""
    first = next((call for call in calls if call.problem), None)
    if first is not None:
        raise first.wrong(_reason(calls), f"{first}: the output is wrong in {first.problem}")


def _refuse_rounded_twice(calls: list[Grouped]) -> None:
    share = sum(call.differing() for call in calls) / sum(call.got.numel() for call in calls)
    if share > ROUNDED_TWICE:
        differing = f"In float16, {share:.0%} of the results are not the exact ones rounded once"
        raise calls[0].wrong("half-precision", f"{differing}: something on the way was rounded too.")


def _refuse_loads_outside(calls: list[Grouped]) -> None:
    for call in calls:
        for name, places in call.strays().items():
            reason = misread(call.kernel[0]) or "unmasked-load"
            raise call.wrong(reason, f"{call}: {some(places, 'place')} outside {name} got loaded.")


def _reason(calls: list[Grouped]) -> str:
    if all(call.gave(call.want) for call in calls):
        return "half-precision"
    for columns in zip(*map(_mistakes, calls), strict=True):
        if all(call.gave(other) for call, (_, other) in zip(calls, columns, strict=True)):
            return columns[0][0]
    return misread(calls[0].kernel[0]) or "wrong-values"


def _mistakes(call: Grouped) -> Iterator[tuple[str, Tensor]]:
    """What would have come out, had this or that mistake been made."""
    weight, bias = call.values["weight"].double(), call.values["bias"].double()
    x = call.by_group(call.values["x"])
    product = x @ weight
    group = torch.arange(call.groups)[:, None, None]
    row, d = torch.arange(call.rows)[:, None], torch.arange(call.width)

    def added(place: Tensor) -> Tensor:
        return _side_by_side(product + _at(bias, place))

    yield "no-bias", _side_by_side(product)
    yield "first-group", added(d)
    yield "tile-width", added(group * call.given("BD") + d)
    yield "one-number", added(group)
    yield "other-way-round", added(d * call.groups + group)
    for place in (row * call.width + d, (row * call.groups + group) * call.width + d, row):
        yield "by-rows", added(place)
    below = row % call.given("BM")
    yield "wrong-axis", added(group * call.width + below)
    masked = torch.where(below < call.width, _at(bias, group * call.width + below), 0.0)
    yield "wrong-axis", _side_by_side(product + masked)
    yield "before-product", _side_by_side((x + bias[:, None]) @ weight)
    yield "multiplied", _side_by_side(product * bias[:, None])


def _at(bias: Tensor, place: Tensor) -> Tensor:
    """Elements of the bias, NaN beyond its end."""
    inside = place < bias.numel()
    return bias.flatten()[place.clamp(max=bias.numel() - 1)].where(inside, math.nan)


def _side_by_side(by_group: Tensor) -> Tensor:
    return by_group.transpose(0, 1).flatten(1)


def _evidence(with_bias: Callable[..., Tensor], passed: int) -> str:
    """What was passed, and the pass over memory that the epilogue saves."""
    narrow, call = (_call(with_bias, (64, 4, width), torch.float16) for width in (5, 32))
    _, code = compiled(narrow, call)
    y, bias = (t.numel() * t.element_size() for t in (call.got, call.inputs["bias"]))
    units = ", ".join(f"{count} {kind}" for kind, count in code.matrix.items()) or "no mma"
    return (
        f"{passed} checks against float64. One launch. With 64 rows and 4 groups of 32 in float16 the "
        f"epilogue reads {bias} bytes of bias. A kernel of its own would read and write all of y besides: "
        f"{2 * y:,} bytes. Compiled for sm_90 it has {units} instructions, and spills {code.spills} bytes."
    )
