"""Lesson 4, exercise "neighbour": keep a tile that is wider than its group out of the next group."""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit import checks
from labkit.tasks import Evidence, Wrong, neighbour_masks, some
from labkit.tasks.grouped import Grouped, Sizes
from labkit.tasks.neighbour_hints import HINTS
from labkit.tasks.tiles import compiled

SIZES: tuple[tuple[Sizes, ...], ...] = (
    ((33, 3, 20), (40, 1, 24), (7, 2, 31)),
    ((37, 3, 16), (40, 2, 33), (5, 3, 1), (35, 2, 7)),
)
"""Rows, groups and width. Tiles of the first ones are as wide as high: a mask along the wrong side fits them,
and has to be told before others make it an error. A width of 16 is right in the scaffold."""
OTHER_SIZES: tuple[Sizes, ...] = ((33, 3, 20), (5, 2, 33))
"""Those tried in every dtype and layout too, and with another group poisoned."""
POISONED = 1


def check(neighbour: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``neighbour(x, weight)`` with float64, see that groups keep to themselves; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls: list[Grouped] = []
    for alike in SIZES:
        for sizes in alike:
            call = _call(neighbour, sizes)
            call.refuse_handed_over()
            call.refuse_launches()
            if not calls:
                call.refuse_reused(neighbour)
            calls.append(call)
        _refuse_stores(calls)
        _refuse_values(calls)
        _refuse_leaks(neighbour, calls)
        _refuse_loads_outside(calls)
    _refuse_undefined(neighbour)
    passed = len(calls) + len(OTHER_SIZES)
    for dtype in checks.DTYPES:
        for sizes in OTHER_SIZES:
            for layout in checks.LAYOUTS:
                other = _call(neighbour, sizes, dtype, layout=layout)
                other.refuse_form()
                other.refuse_strides()
                _refuse_values([other])
                passed += 1
    return Evidence(_evidence(neighbour, passed), passed)


def _call(
    neighbour: Callable[..., Tensor],
    sizes: Sizes,
    dtype: torch.dtype = torch.float32,
    *,
    layout: str = "contiguous",
    undefined: bool = False,
    poisoned: int | None = None,
) -> Grouped:
    return Grouped(neighbour, sizes, dtype, HINTS, layout=layout, undefined=undefined, poisoned=poisoned)


def _refuse_stores(calls: list[Grouped]) -> None:
    """The interpreter runs one program after the other, so a neighbour may have put right what was spoilt."""
    for call in calls:
        if strays := _stored_elsewhere(call):
            hidden = "" if call.problem else ", though here the output came out right"
            raise call.wrong(
                neighbour_masks.mistake(calls, "unmasked-store"),
                f"{call}: {some(strays, 'value')} went into another group than the program's own{hidden}. "
                "On a GPU programs run in any order, so which value stays is chance.",
            )
    for call in calls:
        try:
            call.refuse_stores()
        except Wrong as wrong:
            raise call.wrong(neighbour_masks.mistake(calls, wrong.reason), wrong.observed) from None


def _stored_elsewhere(call: Grouped) -> int:
    """How many values a program stored in y in another group than the one that its first value is in."""
    strays = 0
    for places in filter(len, call.seen.each_store(call.got)):
        group = places % (call.groups * call.width) // call.width
        strays += int(((group != group[0]) & (places < call.got.numel())).sum())
    return strays


def _refuse_values(calls: list[Grouped]) -> None:
    first = next((call for call in calls if call.problem), None)
    if first is not None:
        reason = neighbour_masks.mistake(calls, "wrong-values")
        raise first.wrong(reason, f"{first}: the output is wrong in {first.problem}")


def _refuse_leaks(neighbour: Callable[..., Tensor], calls: list[Grouped]) -> None:
    """What is NaN or infinite in one group must not reach another, not even as 0 times it."""
    for sizes in OTHER_SIZES:
        call = _call(neighbour, sizes, poisoned=POISONED)
        if call.problem:
            raise call.wrong(
                neighbour_masks.mistake(calls, "wrong-values"),
                f"{call}, where group {POISONED} of x is NaN and its weight infinite: "
                f"the other groups' output is wrong in {call.problem}",
            )


def _refuse_loads_outside(calls: list[Grouped]) -> None:
    for call in calls:
        for name, places in call.strays().items():
            known = neighbour_masks.mask(calls, name) != "none"
            reason = neighbour_masks.mistake(calls, "reads-outside") if known else "reads-outside"
            what = f"{some(places, 'place')} outside {name} got loaded"
            raise call.wrong(reason, f"{call}: {what}, though the output is right.")


def _refuse_undefined(neighbour: Callable[..., Tensor]) -> None:
    for sizes in OTHER_SIZES:
        call = _call(neighbour, sizes, undefined=True)
        if call.problem:
            given = "with NaN for what masked loads leave undefined, the output is wrong in"
            raise call.wrong("no-other", f"{call}, and {given} {call.problem}")


def _evidence(neighbour: Callable[..., Tensor], passed: int) -> str:
    """What was passed, and what an odd width costs: multiplications by zero, and narrow loads."""
    narrow, whole, odd = (_call(neighbour, (33, 2, width), torch.float16) for width in (5, 32, 33))
    _, of_whole, of_odd = (code.widest_load for code in compiled(narrow, whole, odd))
    widths = ", ".join(f"{width}" for width in sorted({width for alike in SIZES for _, _, width in alike}))
    tile = odd.given("BD")
    return (
        f"{passed} checks against float64, with D of {widths}: each program stores to its own group only, "
        "and NaN in one group stays there. A mask makes any D right, not free: where D is "
        f"{odd.width} the tile is {tile} wide, and {(odd.width / tile) ** 2:.0%} of its multiplications "
        f"count. Compiled for sm_90 in float16 the widest loads have {of_whole} bits where D is "
        f"{whole.width}, and {of_odd} where it is {odd.width}."
    )
