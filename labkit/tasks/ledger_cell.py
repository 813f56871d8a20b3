"""Lesson 9, exercise "cell": two recurrences in one loop, led by the same gates, the second normalised."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.recurrent_works import min_gru, rms_recurrence
from labkit.tasks import Evidence, Wrong, some
from labkit.tasks.fuse import ROUNDED_TWICE
from labkit.tasks.ledger_cell_hints import HINTS
from labkit.tasks.ledger_cell_mistakes import mistakes
from labkit.tasks.recurrence import Sizes, compiled, layouts
from labkit.tasks.tiles import DTYPES, Call

SIZES: tuple[Sizes, ...] = (
    (2, 5, 20),
    (3, 4, 32),
    (1, 5, 33),
    (2, 3, 7),
    (2, 3, 130),
    (2, 1, 5),
    (1, 1, 1),
)
"""Rows of the batch, steps, features: as many features as a block has lanes, and fewer; one step, one row."""
OTHER_SIZES: tuple[Sizes, ...] = ((2, 5, 20), (1, 4, 33))
"""Those tried in every dtype too, and in every layout."""
SMALL = 1e-3
"""A size of the candidates whose mean square is that of eps."""
RAGGED: Sizes = (2, 4, 20)
LONG: Sizes = (1, 64, 40)
"""Steps enough to tell a gate or a state that is rounded at each of them."""
SEPARATE = 6
"""How often a kernel for each recurrence would load or store, for a number of the result."""


def check(both: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``both(z, candidate, gain)`` with float64, see what its kernel touched; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls = [_Cell(both, sizes) for sizes in SIZES]
    calls += [_Cell(both, RAGGED, scale=scale) for scale in (SMALL, 0.0)]
    for call in calls:
        call.refuse_form()
    calls[0].refuse_reused(both)
    _refuse_values(calls)
    for call in calls:
        for name, places in call.strays().items():
            what = f"{some(places, 'place')} outside {name} got loaded, though the result is right"
            raise call.wrong("unmasked-load", f"{call}: {what}.")
    _refuse_undefined(both)
    passed = len(calls) + 1
    for dtype in DTYPES:  # the interpreter has no constants of bfloat16, such as the 1 of 1 - gate
        others = [
            _Cell(both, sizes, dtype, layout=layout) for sizes in OTHER_SIZES for layout in layouts(dtype)
        ]
        if dtype is torch.float16:
            others.append(_Cell(both, LONG, dtype))
        for other in others:
            other.refuse_form()
            other.refuse_strides()
            _refuse_values([other])
        if dtype is torch.float16:  # to bfloat16 the interpreter rounds in a way of its own
            _refuse_rounded_twice(others)
        passed += len(others)
    return Evidence(_evidence(_Cell(both, LONG), passed), passed)


class _Cell(Call):
    """One call; ``scale`` is the candidates' size."""

    def __init__(
        self,
        both: Callable[..., Tensor],
        sizes: Sizes,
        dtype: torch.dtype = torch.float32,
        *,
        scale: float = 1.0,
        layout: str = "contiguous",
        undefined: bool = False,
    ) -> None:
        self.sizes, self.scale = sizes, scale
        values = {
            "z": torch.sigmoid(torch.randn(sizes)).to(dtype),
            "candidate": (scale * torch.randn(sizes)).to(dtype),
            "gain": (1 + 0.5 * torch.randn(sizes[-1])).to(dtype),
        }
        z, candidate, gain = (value.double() for value in values.values())
        want = rms_recurrence(1 - z, min_gru(z, candidate), gain)
        super().__init__(both, values, want, HINTS, layout=layout, undefined=undefined)

    def __str__(self) -> str:
        size = {1.0: "", 0.0: ", all candidates zero"}.get(self.scale, f", candidates of size {self.scale:g}")
        return f"{super().__str__()}{size}"

    @property
    def ragged(self) -> bool:
        """Whether the block has lanes that are no features."""
        width = self.sizes[-1]
        return bool(width & (width - 1))

    def refuse_stores(self) -> None:
        """`Wrong` unless each element of the result is stored once, and nothing else."""
        try:
            super().refuse_stores()
        except Wrong as wrong:
            observed = re.sub(r"\bof y\b", "of the result", wrong.observed)
            observed = observed.replace("outside y", "outside the result")
            raise self.wrong(self._only_last() or wrong.reason, observed) from None

    def _only_last(self) -> str:
        """The reason of one who stores after the loop; "" where it isn't that."""
        rows, steps, width = self.sizes
        last = (torch.arange(rows)[:, None] + 1) * steps * width - width + torch.arange(width)
        found = self.seen.stored(self.got).tolist()
        return "only-last" if steps > 1 and found == last.flatten().tolist() else ""


def _refuse_values(calls: Sequence[_Cell]) -> None:
    """`Wrong` for the first call with a wrong result, by the mistake that explains all of them."""
    first = next((call for call in calls if call.problem), None)
    if first is not None:
        raise first.wrong(_reason(calls), f"{first}: the result is wrong in {first.problem}")


def _reason(calls: Sequence[_Cell]) -> str:
    if all(call.gave(call.want) for call in calls):
        return "half-precision"
    for columns in zip(*(mistakes(*_exact(call)) for call in calls), strict=True):
        if all(call.gave(other) for call, (_, other) in zip(calls, columns, strict=True)):
            return columns[0][0]
    if not any(call.problem for call in calls if not call.ragged):
        return "masked-lanes"
    return "wrong-values"


def _refuse_rounded_twice(calls: Sequence[_Cell]) -> None:
    share = sum(call.differing() for call in calls) / sum(call.got.numel() for call in calls)
    if share > ROUNDED_TWICE:
        differing = f"In float16, {share:.0%} of the results are not the exact ones rounded once"
        raise calls[0].wrong("half-precision", f"{differing}: a gate or a state was rounded on the way too.")


def _exact(call: _Cell) -> list[Tensor]:
    return [value.double() for value in call.values.values()]


def _refuse_undefined(both: Callable[..., Tensor]) -> None:
    """What a mask shuts out is zero when interpreted, and anything on a GPU."""
    call = _Cell(both, RAGGED, undefined=True)
    if call.problem:
        where = "where lanes that a load's mask shuts out hold NaN, as they may on a GPU"
        raise call.wrong("no-other", f"{call}, {where}: the result is wrong in {call.problem}")


def _evidence(call: _Cell, passed: int) -> str:
    """What was passed, what crosses memory, and what a step waits for."""
    code = compiled(call)
    numbers, stores = call.got.numel(), len(call.seen.stored(call.got))
    loads = sum(len(call.seen.loaded(call.inputs[name])) for name in ("z", "candidate"))
    shuffles, barriers = sum(code.shuffles.values()), sum(code.barriers.values())
    each = (loads + stores) / numbers
    return (
        f"{passed} checks against float64. For {numbers:,} numbers of the result it loads {loads:,} and "
        f"stores {stores:,}, {each:g} for each; a kernel for each recurrence would take {SEPARATE}, since s "
        f"would go out and come back, and z come twice. The mean has a price: compiled for sm_90 with "
        f"{code.num_warps} warps the kernel has {shuffles} shuffles and {barriers} barriers for the sum of "
        f"every step. It spills {code.spills} bytes."
    )
