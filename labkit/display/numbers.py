"""What a lesson shows beside its races: its own numbers, what a call launches, roofs, what was published."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from labkit import gpu, paths
from labkit.display.style import digits, show
from labkit.display.table import MISSING, Measured, origin, show_table
from labkit.measure import clocks, copies, launch_counts, profiles, session
from labkit.measure.clocks import TimedCall, Timing
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


def measured(name: str, function: Callable[..., Any], *given: Callable[..., Any]) -> Any:
    """A number of the lesson's own: what a function returns on a GPU; elsewhere, what it returned there.

    ``function(*given)`` is one of a cell tagged ``way`` or ``kernel``. What it is ``given`` are functions: a
    clock that is the learner's or the solution's. A number knows where it was measured. A table (rows by
    name, each with numbers by column) is shown, and returned. Where nothing is recorded the result is a
    missing number.
    """
    known = session.current()
    row = known.number(name, lambda: function(*given), [function, *given])
    if row.value is None:
        show(
            "<p><em>Nothing was measured here, and nothing is recorded.</em></p>",
            f"{name}: nothing is recorded.",
        )
        return MISSING
    kind: Any = "live" if known.live else "recorded"
    if not isinstance(row.value, dict):
        return Measured(float(row.value), kind, row.device)
    heads = list(next(iter(row.value.values()), {}))
    texts = [[way, *(digits(each[head]) for head in heads)] for way, each in row.value.items()]
    show_table(name, ["", *heads], texts, *origin([row], known.live))
    return {
        way: {head: Measured(float(number), kind, row.device) for head, number in each.items()}
        for way, each in row.value.items()
    }


# ---- what a call launches ----------------------------------------------------------------------------------


def profile(name: str, call: Callable[..., Any], work: Work, dtype: str = "float32", **axes: int) -> Measured:
    """Show the kernels that a way launches at a size, and return how many they are.

    On a GPU torch's profiler sees them; elsewhere they are shown as recorded. Where nothing is recorded the
    operations of PyTorch are counted instead, which have no times.

    Args:
        name: of the way; with the sizes, the name of its row on a tape.
        call, work: a way, and what it computes, which makes its inputs.
        dtype, axes: of the inputs (``batch=256, width=160``).
    """
    known, at = session.current(), ", ".join(f"{axis} {size}" for axis, size in axes.items())
    inputs = session.drawn(work, axes, getattr(torch, dtype), "forward")

    def seen() -> list[list[Any]]:
        made = profiles.profile(lambda: call(*inputs))
        return [[kernel, round(us, 2)] for kernel, us in made]

    row = known.number(f"Launched by {name}: {at}, {dtype}", seen, [call], work.name)
    if row.value is None and not gpu.available():
        counted = launch_counts.count(lambda: call(*inputs))
        lines = [["", one.name] for one in counted]
        where = "Counted here, as operations of PyTorch."
    else:
        lines = together(row.value)
        where = origin([row], known.live)[0]
    number = len(lines) if row.value is None else len(row.value)
    title = f"{name} launches {number} kernel{'s' * (number != 1)} ({at})"
    show_table(title, [], lines, where)
    return Measured(number, "live" if known.live else "recorded", row.device or "no GPU, counted")


def together(kernels: Sequence[Sequence[Any]]) -> list[list[str]]:
    """A line for each kernel with its time; kernels of the same name are one line, with their time in all."""
    found: dict[str, list[float]] = {}
    for kernel, us in kernels:
        found.setdefault(kernel, []).append(us)
    lines = []
    for kernel, times in found.items():
        shown = kernel if len(kernel) <= 64 else f"{kernel[:40]} … {kernel[-20:]}"  # to fit a line
        lines.append([f"{digits(sum(times))} µs", f"{len(times)} × {shown}" if len(times) > 1 else shown])
    return lines


# ---- the roofs of a GPU ------------------------------------------------------------------------------------


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
    row = known.number(HOW, _measure_roofs, [])
    if row.value is None:
        raise ValueError("roofs: there is no GPU here, and none of the lesson's tapes has roofs")
    made = Roofs(row.value["copy"], {name: row.value[name] for name in SIDES})
    lines = [["memory, read and written", f"{digits(made.bytes_per_us / 1e6)} TB/s"]]
    lines += [
        [f"products of matrices in {name}", f"{digits(rate / 1e6)} TFLOP/s"]
        for name, rate in made.operations_per_us.items()
    ]
    show_table("Roofs of this GPU", [], lines, f"{HOW}.", *origin([row], known.live))
    return made


def _measure_roofs() -> dict[str, float]:
    """Bytes of a copy, and operations of a product in each dtype, in a microsecond."""
    copied = GIB * 2**30
    took = clocks.measure(copies.calls(copied))
    found = {"copy": copied / min(_us(each) for each in took.values())}
    for name, side in SIDES.items():
        pair = tuple(torch.randn(side, side, device=gpu.device()).to(getattr(torch, name)) for _ in range(2))
        found[name] = 2 * side**3 / _us(clocks.measure({name: TimedCall(torch.matmul, pair)})[name])
    return {name: float(f"{rate:.5g}") for name, rate in found.items()}


def _us(outcome: Timing | clocks.NotTimed) -> float:
    if not isinstance(outcome, Timing):
        raise RuntimeError(f"roofs: not measured: {outcome.note}")
    return outcome.median_us


# ---- other people's figures --------------------------------------------------------------------------------


def published(name: str, only: str = "") -> pd.DataFrame:
    """A published table by its name: a file of `labkit/data/published`, with its source in every row.

    With ``only``, the rows of those series whose name contains it. Every row has kind "published", a device,
    and the source.

    - ``pseudo_linear``: speedups of an elementwise ``x*w+b`` layer over nn.Linear, by width. The thread
      names neither device, dtype nor batch; "graphed" is torch.cuda.make_graphed_callables.
    - ``grouped_conv_3080ti``: times in ms of many small Linears, as a grouped convolution and as one batched
      matmul. Width and groups are "about 100"; rows, direction, and what was repeated how often are not
      given, so the ratio says more than either time.
    - ``rms_norm_l4``: times in ms of the two RMSNorm kernels of a library before (``old_ms``) and after
      (``new_ms``) a rewrite, by (B, T, H), in float32. The pull request's test file takes them by the wall
      clock, over 100 calls that are synchronised one by one and allocate their results. The new backward
      leaves a part of the weight's gradient for each row, and nobody adds these up in the times.
      (512, 128, 512) has no forward times.

    Raises ValueError for a name or a series that there is not.
    """
    files = {file.stem: file for file in sorted(paths.PUBLISHED.glob("*.csv"))}
    if name not in files:
        raise ValueError(f"name: nothing was published as {name!r}; there are {', '.join(files)}")
    # The default engine rounds the last digit of some figures.
    table = pd.read_csv(files[name], engine="python").assign(kind="published")
    chosen = table[table["series"].str.contains(only, regex=False)]
    if chosen.empty:
        raise ValueError(
            f"only: {name!r} has no series with {only!r}; it has {', '.join(table['series'].unique())}"
        )
    return chosen
