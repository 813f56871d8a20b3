"""Lesson 7, exercise "original": find and mend the two errors of a published backward of RMSNorm."""

import functools
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labkit import checks
from labkit.tasks import Evidence, Wrong, some, whereabouts
from labkit.tasks.fuse import ROUNDED_TWICE
from labkit.tasks.recurrence import Sizes, compiled, layouts
from labkit.tasks.rms_original_hints import HINTS
from labkit.tasks.tiles import Call

SIZES: tuple[Sizes, ...] = ((2, 3, 20), (4, 9, 33), (3, 4, 32), (2, 5, 7), (1, 1, 40))
"""B, T and H; more elements than a program has and fewer, one row, and H that are no power of two."""
OTHER_SIZES: tuple[Sizes, ...] = ((2, 3, 20), (2, 9, 33))
"""Those tried in every dtype too, and in every layout."""
EPS = 1e-6
TOLD: Sizes = (4, 9, 33)
"""That of the call whose loads the evidence speaks of."""
LONG = (64, 512)
"""Rows and their length where it tells what each dy shows."""

Grads = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def check(rms_norm_grad: Grads) -> Evidence:
    """Compare ``rms_norm_grad(dy, x, weight)`` with float64, for dy = 2y; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls: list[_Norm] = []
    for sizes in SIZES:
        call = _Norm(rms_norm_grad, sizes, torch.float32)
        call.refuse_form()
        calls.append(call)
    calls[0].refuse_reused(lambda *tensors: rms_norm_grad(*tensors)[0])
    _refuse_values(calls)
    for call in calls:
        for name, places in call.strays().items():
            what = f"{some(places, 'place')} outside {name} got loaded, though the gradients are right"
            raise call.wrong("unmasked-load", f"{call}: {what}.")
    passed = len(calls)
    for dtype in checks.DTYPES:
        others = [
            _Norm(rms_norm_grad, sizes, dtype, layout=layout)
            for sizes in OTHER_SIZES
            for layout in layouts(dtype)
        ]
        for call in others:
            call.refuse_form()
            call.refuse_strides()
            _refuse_values([call])
        if dtype is torch.float16:
            _refuse_rounded_twice(others)
        passed += len(others)
    return Evidence(_evidence(_Norm(rms_norm_grad, TOLD, torch.float32), passed), passed)


class _Norm(Call):
    """One call; dy is twice the norm's output, so it is correlated with it."""

    def __init__(
        self, rms_norm_grad: Grads, sizes: Sizes, dtype: torch.dtype, *, layout: str = "contiguous"
    ) -> None:
        width = sizes[-1]
        scale = 0.5 + 1.5 * torch.rand(*sizes[:-1], 1)  # so that rows differ in their rms
        values = {
            "dy": torch.empty(sizes, dtype=dtype),
            "x": (scale * torch.randn(sizes)).to(dtype),
            "weight": (1 + 0.5 * torch.randn(width)).to(dtype),
        }
        self.x = values["x"].double().reshape(-1, width)
        self.weight = values["weight"].double()
        self.rms = _rms(self.x)
        values["dy"] = (2 * self.weight * self.x / self.rms).to(dtype).view(sizes)
        self.dy = values["dy"].double().reshape(-1, width)
        dot = (self.dy * self.weight * self.x).sum(1, keepdim=True)
        want = _dx(self.dy, self.x, self.weight, dot)
        self.want_dweight = (self.dy * self.x / self.rms).sum(0)
        self.dweight: Tensor = torch.empty(0)

        @functools.wraps(rms_norm_grad)
        def first_of(*tensors: Tensor) -> Tensor:
            self.returned = rms_norm_grad(*tensors)
            pair = self.returned if isinstance(self.returned, (tuple, list)) else ()
            if len(pair) == 2 and all(isinstance(each, Tensor) for each in pair):
                self.dweight = pair[1]
                return pair[0]
            raise self.wrong("not-a-pair", f"{self._name} returned {_told(self.returned)}, not two tensors.")

        super().__init__(first_of, values, want.view(sizes), HINTS, layout=layout)

    def refuse_handed_over(self) -> None:
        """`Wrong` for inputs that were written to, and for gradients of another shape or dtype."""
        super().refuse_handed_over()
        if self.dweight.shape != self.weight.shape or self.dweight.dtype != self.dtype:
            kind = str(self.dweight.dtype).removeprefix("torch.")
            shape = f"shape {tuple(self.dweight.shape)} and dtype {kind}"
            raise self.wrong("shape-or-dtype", f"{self}: the weight's gradient has {shape}.")

    def refuse_launches(self) -> None:
        """`Wrong` without a kernel; the rms and a sum over rows are PyTorch's."""
        if not self.seen.kernels:
            super().refuse_launches()

    def refuse_stores(self) -> None:
        """`Wrong` unless each element of dx is stored once, and nothing outside a tensor."""
        try:
            super().refuse_stores()
        except Wrong as wrong:
            observed = wrong.observed.replace(" of y ", " of dx ").replace("outside y", "outside dx or dw")
            observed = re.sub(", by .* programs", "", observed)  # of the last launch, which is a sum
            raise self.wrong(wrong.reason, observed) from None

    @property
    def dx(self) -> Tensor:
        """The first gradient, in float64 and by rows."""
        return self.got.double().reshape(-1, len(self.weight))

    @property
    def problem_dweight(self) -> str:
        """Where the weight's gradient is wrong, as the end of a sentence; empty when it's right."""
        found = checks.diagnose(self.dweight, self.want_dweight, checks.TOLERANCE[self.dtype])
        return whereabouts(found) if found else ""

    def refuse_strides(self) -> None:
        """`Wrong` when inputs of other strides come out wrong; contiguous ones came first, and passed."""
        for name, where in (("dx", self.problem), ("the weight's gradient", self.problem_dweight)):
            if self.layout != "contiguous" and where:
                raise self.wrong("strides", f"{self}: {name} is wrong in {where}")


def _told(returned: object) -> str:
    if isinstance(returned, (tuple, list)):
        return f"{len(returned)} of them" if returned else "none"
    return type(returned).__name__


def _rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _dx(dy: Tensor, x: Tensor, weight: Tensor, dot: Tensor) -> Tensor:
    rms = _rms(x)
    return dy * weight / rms - x * dot / (len(weight) * rms**3)


def _refuse_values(calls: list[_Norm]) -> None:
    """`Wrong` if a gradient is wrong, by the mistakes that explain both in all calls."""
    of_x = next((call for call in calls if call.problem), None)
    of_weight = next((call for call in calls if call.problem_dweight), None)
    first = of_x or of_weight
    if first is None:
        return
    problems = {"dx": first.problem, "the weight's gradient": first.problem_dweight}
    wrong = {name: where.rstrip(".") for name, where in problems.items() if where}
    told = ", and ".join(f"{name} is wrong in {where}" for name, where in wrong.items())
    dx = _explained([(call.dx, _sums(call)) for call in calls]) if of_x else ""
    dweight = _explained([(call.dweight, _reductions(call)) for call in calls]) if of_weight else ""
    raise first.wrong(_reason(dx, dweight), f"{first} and dy = 2y: {told}.")


def _reason(dx: str, dweight: str) -> str:
    """One reason of those for which dx and the weight's gradient are wrong; "" where one is right."""
    if (dx, dweight) in _KNOWN:
        return _KNOWN[dx, dweight]
    return dweight if dx in ("", "start") else dx


_KNOWN = {
    ("start", "as-given"): "nothing-mended",
    ("", "as-given"): "only-first",
    ("start", ""): "only-second",
}


def _explained(columns: list[tuple[Tensor, Iterator[tuple[str, Tensor]]]]) -> str:
    """The reason that explains a gradient in all calls."""
    gradients = [got for got, _ in columns]
    for others in zip(*(mistakes for _, mistakes in columns), strict=True):
        if all(_alike(got, other) for got, (_, other) in zip(gradients, others, strict=True)):
            return others[0][0]
    return "wrong-values"


def _alike(got: Tensor, other: Tensor) -> bool:
    return torch.allclose(got.double(), other, rtol=0.02, atol=0.02, equal_nan=True)


def _sums(call: _Norm) -> Iterator[tuple[str, Tensor]]:
    """The gradients of x by what each element sums over."""
    width, count = len(call.weight), call.x.numel()
    idx, k = torch.arange(count)[:, None], torch.arange(width)
    row, column = idx // width, idx % width

    def summed(of_dy: Tensor, of_x: Tensor) -> Tensor:
        product = _flat(call.dy, of_dy) * _flat(call.x, of_x)
        return _dx(call.dy, call.x, call.weight, (product * call.weight).sum(1).view_as(call.x))

    own, start = row * width + k, column + k
    yield "half-precision", summed(own, own)
    yield "start", summed(start, start)
    yield "half-start", summed(own, start)
    yield "half-start", summed(start, own)
    yield "from-element", summed(idx + k, idx + k)
    yield "row-for-start", summed(row + k, row + k)
    yield "first-row", summed(k + 0 * idx, k + 0 * idx)
    for begin in (0, row * width):
        rotated = begin + (column + k) % width
        yield "rotated", summed(rotated, rotated)
    yield "no-sum", _dx(call.dy, call.x, call.weight, torch.zeros(()))


def _flat(rows: Tensor, place: Tensor) -> Tensor:
    """Elements by their places in the flat tensor, zero beyond its end."""
    inside = place < rows.numel()
    return rows.flatten()[place.clamp(max=rows.numel() - 1)].where(inside, 0.0)


def _reductions(call: _Norm) -> Iterator[tuple[str, Tensor]]:
    """The weight's gradients by the term of an element, and by how rows are put together."""
    dy, unit = call.dy, call.x / call.rms
    yield "half-precision", (dy * unit).sum(0)
    for at in (-1, 0):
        yield "as-given", dy[at]
        yield "not-reduced", (dy * unit)[at]
    by_step = (dy * unit).view(call.values["x"].shape)
    for part in (by_step[0], by_step[-1], by_step[:, 0], by_step[:, -1]):
        yield "part-of-rows", part.sum(0)
    yield "mean", (dy * unit).mean(0)
    terms = {
        "no-factor": dy,
        "no-rms": dy * call.x,
        "times-rms": dy * call.x * call.rms,
        "with-weight": dy * unit * call.weight,
        "no-x": dy / call.rms,
    }
    for reason, term in terms.items():
        for reduced in (term.sum(0), term[-1], term[0], term.mean(0)):
            yield reason, reduced


def _refuse_rounded_twice(calls: list[_Norm]) -> None:
    of_x = sum(call.differing() for call in calls) / sum(call.got.numel() for call in calls)
    wants = [(call.dweight, call.want_dweight.to(call.dtype)) for call in calls]
    of_weight = sum(int((got != want).sum()) for got, want in wants) / sum(got.numel() for got, _ in wants)
    for name, share in (("dx", of_x), ("the weight's gradient", of_weight)):
        if share > ROUNDED_TWICE:
            differing = f"In float16, {share:.0%} of {name} are not the exact numbers rounded once"
            raise calls[0].wrong("half-precision", f"{differing}: something on the way was rounded too.")


def _evidence(call: _Norm, passed: int) -> str:
    """What was passed, what another upstream gradient would have hidden, and what the mended kernel costs."""
    compiled(call)
    times = len(call.seen.loaded(call.inputs["dy"])) / call.dy.numel()
    random, correlated = _first_error()
    rows, width = LONG
    slow = (
        f" Right isn't fast: your kernel loads each number of dy {times:g} times for rows of "
        f"{len(call.weight)}; a program that has a whole row needs it once."
    )
    return (
        f"{passed} checks against float64, with dy = 2y. In {rows} rows of {width} the first error changes "
        f"dx by {random:.0%} with a random dy, where it nearly hides, and by {correlated:.0%} with dy = 2y."
        f"{slow if times > 2 else ''}"
    )


def _first_error() -> Iterator[float]:
    """What a sum that begins at the wrong place changes in dx, as a share: with a random dy, with dy = 2y."""
    draw = torch.Generator().manual_seed(0)
    x, other = (torch.randn(LONG, generator=draw, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.5 * torch.randn(LONG[1], generator=draw, dtype=torch.float64)
    k = torch.arange(LONG[1])
    for dy in (other, 2 * weight * x / _rms(x)):
        from_columns = (_flat(dy * x, k[:, None] + k) * weight).sum(1)  # the same in every row
        own = (dy * weight * x).sum(1, keepdim=True)
        wrong, exact = (_dx(dy, x, weight, dot) for dot in (from_columns, own))
        yield float((wrong - exact).norm() / exact.norm())
