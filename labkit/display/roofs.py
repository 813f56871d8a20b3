"""The roofs of a GPU: how fast it moves data, and how fast it multiplies."""

import html
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from labkit import gpu
from labkit.display.style import digits, show
from labkit.display.table import origin, plain_table
from labkit.measure import clocks, session
from labkit.measure.clocks import Timing
from labkit.measure.cold_cache import TimedCall
from labkit.work import Shape, Work

GIB = 1
"""What the copy reads and writes, together, in GiB: many times the L2."""
SIDES = {"float32": 4096, "bfloat16": 8192}
"""Of the square matrices that are multiplied. TF32 is off."""
HOW = (
    f"A copy of {GIB} GiB, and cuBLAS's products of matrices of "
    + ", ".join(f"{side} x {side} in {name}" for name, side in SIDES.items())
    + "; graph clock, cold cache"
)
"""What is measured: also the name of the row on a tape, so other sizes are another row."""


@dataclass(frozen=True)
class Roofs:
    """What a copy and a product of matrices reach."""

    bytes_per_us: float
    """Bytes that are read or written, in a microsecond: a million of them a second is 1 TB/s."""
    operations_per_us: Mapping[str, float]
    """Multiplications and additions in a microsecond, by dtype: a million of them a second is 1 TFLOP/s."""

    def floor_us(self, work: Work, shape: Shape, dtype: str, direction: str = "forward") -> float:
        """The least time of a work in microseconds: of its bytes or of its operations, the longer one.

        The roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009; here as time.
        """
        moved = work.min_bytes(shape, getattr(torch, dtype).itemsize, direction)
        return max(moved / self.bytes_per_us, work.flops(shape, direction) / self.operations_per_us[dtype])


def roofs() -> Roofs:
    """Measure the roofs of this GPU, show them as a table, and return them; elsewhere recorded ones.

    The roof of memory is a large copy, that of arithmetic a product of large matrices. ValueError where there
    is no GPU and nothing is recorded.
    """
    known = session.current()
    row = known.number(HOW, _measured, [])
    if row.value is None:
        raise ValueError("roofs: there is no GPU here, and none of the lesson's tapes has roofs")
    made = Roofs(row.value["copy"], {name: row.value[name] for name in SIDES})
    lines = [["memory, read and written", f"{digits(made.bytes_per_us / 1e6)} TB/s"]]
    lines += [
        [f"products of matrices in {name}", f"{digits(rate / 1e6)} TFLOP/s"]
        for name, rate in made.operations_per_us.items()
    ]
    where = "\n".join([f"{HOW}.", *origin([row], known.live)])
    title = "Roofs of this GPU"
    page = (
        f"<p><strong>{title}</strong></p>{plain_table([], lines)}<p><small>{html.escape(where)}</small></p>"
    )
    show(page, "\n".join([title, *map("  ".join, lines), where]))
    return made


def _measured() -> dict[str, float]:
    """Bytes of a copy, and operations of a product in each dtype, in a microsecond."""
    copied = GIB * 2**30
    copies = clocks.measure(session.copy_calls(copied))
    found = {"copy": copied / min(_us(each) for each in copies.values())}
    for name, side in SIDES.items():
        pair = tuple(torch.randn(side, side, device=gpu.device()).to(getattr(torch, name)) for _ in range(2))
        found[name] = 2 * side**3 / _us(clocks.measure({name: TimedCall(torch.matmul, pair)})[name])
    return {name: float(f"{rate:.5g}") for name, rate in found.items()}


def _us(outcome: Timing | clocks.NotTimed) -> float:
    if not isinstance(outcome, Timing):
        raise RuntimeError(f"roofs: not measured: {outcome.note}")
    return outcome.median_us
