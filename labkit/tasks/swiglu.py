"""Lesson 2, exercise "swiglu": the epilogue of a matmul of gate and up, silu(gate) * up."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu, softplus

from labkit import checks
from labkit.tasks import Evidence, some
from labkit.tasks.swiglu_hints import HINTS
from labkit.tasks.tiles import DTYPES, Call, compiled, misread

SIZES = ((33, 40, 70), (64, 32, 32), (1, 1, 1), (5, 19, 33))
"""M, H, K."""
USUAL, LARGE = 1.5, 100.0
"""Standard deviations of the gates: what a network has, and what overflows a careless exp."""
ROUNDED_TWICE = 0.02
"""Share of float16 results that may differ from the exact one rounded once; see `fuse.ROUNDED_TWICE`."""


def check(swiglu: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``swiglu(x, w_gate_up)`` with float64, and see that one kernel does it; `Wrong` if wrong."""
    torch.manual_seed(0)
    calls = [_Gated(swiglu, sizes, torch.float32) for sizes in SIZES]
    for call in calls:
        call.refuse_form()
    calls[0].refuse_reused(swiglu)
    _refuse_values(calls)
    _refuse_loads_outside(calls)
    passed, differing, halves = len(calls), 0, 0
    for dtype in DTYPES:
        passed += _refuse_overflow(swiglu, dtype)
        for sizes in SIZES[::3]:
            for layout in checks.LAYOUTS:
                call = _Gated(swiglu, sizes, dtype, layout=layout)
                call.refuse_form()
                call.refuse_strides()
                _refuse_values([call])
                passed += 1
                if dtype is torch.float16:
                    differing, halves = differing + call.differing(), halves + call.got.numel()
    if differing > ROUNDED_TWICE * halves:
        share = f"In float16, {differing / halves:.0%} of the results are not the exact ones rounded once"
        raise calls[0].wrong("half-precision", f"{share}: something on the way was rounded too.")
    return Evidence(_evidence(swiglu, passed), passed)


class _Gated(Call):
    """One call with gates of some size, and the exact gate and up."""

    def __init__(
        self,
        swiglu: Callable[..., Tensor],
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        layout: str = "contiguous",
        gates: float = USUAL,
    ) -> None:
        m, h, k = sizes
        spread = torch.tensor([gates, USUAL]) / k**0.5
        weights = torch.randn(2, h, k) * spread[:, None, None]
        values = {"x": torch.randn(m, k).to(dtype), "w_gate_up": weights.to(dtype)}
        self.gate, self.up = torch.einsum("mk, ghk -> gmh", *(value.double() for value in values.values()))
        super().__init__(swiglu, values, silu(self.gate) * self.up, HINTS, layout=layout)


def _refuse_values(calls: list[_Gated]) -> None:
    """`Wrong` for the first call with a wrong output, by the mistake that explains all of them."""
    first = next((call for call in calls if call.problem), None)
    if first is not None:
        raise first.wrong(_reason(calls), f"{first}: the output is wrong in {first.problem}")


def _reason(calls: list[_Gated]) -> str:
    if all(call.gave(call.want) for call in calls):
        return "half-precision"
    for columns in zip(*(_mistakes(call.gate, call.up) for call in calls), strict=True):
        if all(call.gave(other) for call, (_, other) in zip(calls, columns, strict=True)):
            return columns[0][0]
    return misread(calls[0].kernel[0]) or "wrong-values"


def _mistakes(gate: Tensor, up: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What would have come out, had this or that mistake been made."""
    yield "swapped", gate * silu(up)
    yield "swapped", gate * torch.sigmoid(up)
    yield "no-factor", torch.sigmoid(gate) * up
    yield "no-activation", gate * up
    yield "activation-last", silu(gate * up)
    yield "sum", silu(gate) + up
    yield "both-activated", silu(gate) * silu(up)
    for alone in (silu(gate), torch.sigmoid(gate), silu(gate) * gate):
        yield "no-up", alone
    quick = gate * torch.sigmoid(1.702 * gate)
    for other in (gelu(gate), quick, torch.relu(gate), gate.tanh(), softplus(gate)):
        yield "other-activation", other * up
    for share in (gate * torch.sigmoid(-gate), torch.sigmoid(-gate), silu(-gate)):
        yield "wrong-sign", share * up
    power = torch.exp(-gate)
    yield "no-one", gate / power * up
    for value in (gate + power * up, (gate + power) * up, gate * (1 + power) * up, gate / (1 + power * up)):
        yield "precedence", value


def _refuse_overflow(swiglu: Callable[..., Tensor], dtype: torch.dtype) -> int:
    """Gates of some hundreds, which are right in PyTorch; how many calls passed."""
    call = _Gated(swiglu, (33, 40, 70), dtype, gates=LARGE)
    call.refuse_form()
    if call.problem:
        least, most = call.gate.min().item(), call.gate.max().item()
        observed = f"{call} and gates from {least:.0f} to {most:.0f}: the output is wrong in {call.problem}"
        finite = bool(call.got.isfinite().all())
        raise call.wrong("wrong-values" if finite else "overflows", observed)
    return 1


def _refuse_loads_outside(calls: list[_Gated]) -> None:
    for call in calls:
        for name, places in call.strays().items():
            reason = misread(call.kernel[0]) or "unmasked-load"
            raise call.wrong(reason, f"{call}: {some(places, 'place')} outside {name} got loaded.")


def _evidence(swiglu: Callable[..., Tensor], passed: int) -> str:
    """What was passed, what never reaches memory, and what the compiled kernel is made of."""
    call = _Gated(swiglu, (64, 64, 64), torch.float16)
    (code,) = compiled(call)
    stored = len(call.seen.stored(call.got)) * call.got.element_size()
    both = 2 * math.prod(call.got.shape) * call.got.element_size()
    units = ", ".join(f"{count} {kind}" for kind, count in code.matrix.items()) or "no mma"
    return (
        f"{passed} checks against float64. One launch. With 64 rows and 64 hidden columns in float16 it "
        f"stores {stored:,} bytes. Unfused, {both:,} bytes of gate and up would be stored and loaded again "
        f"before those. Compiled for sm_90 it has {units} instructions, and spills {code.spills} bytes."
    )
