"""The roofs of a GPU: how fast it moves data, and how fast it multiplies."""

import html
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from labkit import gpu
from labkit.display.style import digits, show
from labkit.display.table import origin, plain_table
from labkit.measure import clocks, roofline, session
from labkit.measure.clocks import Timing
from labkit.measure.cold_cache import TimedCall

COPIED = 2**30
"""Bytes that the copy reads and writes, together: many times the L2."""
SIDES = {"float32": 4096, "bfloat16": 8192}
"""Of the square matrices that are multiplied. TF32 is off."""
NAME = "Roofs of this GPU"


@dataclass(frozen=True)
class Roofs:
    """What a copy and a product of matrices reach."""

    bytes_per_us: float
    """Bytes that are read or written, in a microsecond: a million of them a second is 1 TB/s."""
    operations_per_us: Mapping[str, float]
    """Multiplications and additions in a microsecond, by dtype: a million of them a second is 1 TFLOP/s."""


def roofs() -> Roofs:
    """Measure the roofs of this GPU, show them as a table, and return them; elsewhere recorded ones.

    The roof of memory is a copy of 1 GiB, that of arithmetic a product of square matrices by cuBLAS; both
    with a cold cache, by the graph clock. ValueError where there is no GPU and nothing is recorded.
    """
    known = session.current()
    row = known.number(NAME, _measured, [])
    if row.value is None:
        raise ValueError("roofs: there is no GPU here, and none of the lesson's tapes has roofs")
    made = Roofs(row.value["copy"], {name: row.value[name] for name in SIDES})
    lines = [["memory, read and written", f"{digits(made.bytes_per_us / 1e6)} TB/s"]]
    lines += [
        [f"products of matrices in {name}", f"{digits(rate / 1e6)} TFLOP/s"]
        for name, rate in made.operations_per_us.items()
    ]
    where = "\n".join(origin([row], known.live))
    page = f"<p><strong>{NAME}</strong></p>{plain_table([], lines)}<p><small>{html.escape(where)}</small></p>"
    show(page, "\n".join([NAME, *map("  ".join, lines), where]))
    return made


def _measured() -> dict[str, float]:
    """Bytes of a copy, and operations of a product in each dtype, in a microsecond."""
    copies = clocks.measure(roofline.copy_calls(COPIED))
    found = {"copy": COPIED / min(_us(each) for each in copies.values())}
    for name, side in SIDES.items():
        pair = tuple(torch.randn(side, side, device=gpu.device()).to(getattr(torch, name)) for _ in range(2))
        found[name] = 2 * side**3 / _us(clocks.measure({name: TimedCall(torch.matmul, pair)})[name])
    return {name: float(f"{rate:.5g}") for name, rate in found.items()}


def _us(outcome: Timing | clocks.NotTimed) -> float:
    if not isinstance(outcome, Timing):
        raise RuntimeError(f"roofs: not measured: {outcome.note}")
    return outcome.median_us
