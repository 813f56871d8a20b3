"""The roofline: how fast a device copies, multiplies and launches, and the floors that follow from it.

The roofs of this device are measured once and cached. Those of recorded devices lie beside their tapes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit import gpu, paths
from labkit.measure import clocks, machine, rows
from labkit.measure.clocks import NotTimed, Timing
from labkit.measure.cold_cache import TimedCall
from labkit.measure.rows import Row

COPY_BYTES = tuple(4**k for k in range(6, 17))
"""Sizes of the copy roof, 4 KiB to 4 GiB, read and written bytes together."""
MATMUL_SIDE = {"float32": 4096, "float16": 8192, "bfloat16": 8192}
"""TF32 is off."""
FILE = "roofs.jsonl"


# ---- the roofs ---------------------------------------------------------------------------------------------


@triton.jit
def _copy_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, tl.load(source + at, inside), inside)


def triton_copy(source: Tensor, target: Tensor) -> Tensor:
    """Copy a contiguous tensor with the package's own kernel: 4 KiB per program, 16 bytes per thread."""
    block, count = 4096 // source.element_size(), source.numel()
    _copy_kernel[(triton.cdiv(count, block),)](source, target, count, BLOCK=block, num_warps=8)
    return target


COPIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Tensor.copy_": lambda source, target: target.copy_(source),
    "Triton copy": triton_copy,
}


def copied_bytes(total_bytes: int) -> int:
    """How much the copy beside a kernel really moves: rounded up, to 1 KiB, above 8 MiB to 2 MiB.

    Odd sizes cost a copy up to half its speed, and a kernel must not look good beside a slow copy.
    """
    unit = 2**21 if total_bytes > 2**23 else 2**10
    return -(-total_bytes // unit) * unit


def copy_calls(total_bytes: int) -> dict[str, TimedCall]:
    """Two ways to move ``copied_bytes(total_bytes)``, half of them read, half written."""
    source = torch.randn(copied_bytes(total_bytes) // 8, device=gpu.device())
    pair = (source, torch.empty_like(source))
    return {name: TimedCall(copy, pair) for name, copy in COPIES.items()}


@dataclass(frozen=True)
class Roofs:
    """The measured ceilings of one device."""

    kind: str
    device: str
    date: str
    copy: tuple[tuple[int, float], ...]
    """(bytes read and written, microseconds) of the faster copy, by size, cold."""
    matmul: dict[str, float]
    """Floating-point operations per second of a large square matmul, by dtype."""
    node_us: float
    """Device time of the smallest kernel as one node of a graph: the launch floor of the graph clock."""
    host_us: float
    """Host time of the smallest PyTorch operation: the launch floor of an eager call."""
    noise: tuple[str, ...] = ()
    """What disturbed them, each once (labkit.measure.noise)."""

    def table(self) -> pd.DataFrame:
        """The roofs as a learner reads them."""
        lines = {
            "copy, 4 GiB or the largest that fits": f"{self.bandwidth / 1e12:.2f} TB/s",
            "copy, 16 MiB": f"{2**24 / dict(self.copy)[2**24] / 1e6:.2f} TB/s",
            **{f"matmul, {dtype}": f"{rate / 1e12:.0f} TFLOP/s" for dtype, rate in self.matmul.items()},
            "smallest kernel in a graph": f"{self.node_us:.2f} us",
            "smallest call from Python": f"{self.host_us:.1f} us",
        }
        name = f"{self.device}, {self.kind} {self.date}"
        return pd.DataFrame({name: lines})

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the largest copy."""
        size, microseconds = self.copy[-1]
        return size / microseconds * 1e6


def roofs(*, again: bool = False) -> Roofs | None:
    """This device's roofs: from the cache, measured when there is none (about 15 s on an H200).

    Each card, driver and version has a cache of its own; one that cannot be read is measured again. Without
    a GPU they are those of a recorded device, and None when nothing was recorded yet.
    """
    if not gpu.available():
        return recorded_roofs()
    path = cache_path()
    if not again:
        with suppress(ValueError, OSError):  # absent, torn, or of another schema
            return _from_rows(rows.read(path))
    measured = list(measure_roofs())
    rows.write(path, measured)
    return _from_rows(measured)


def recorded_roofs(device: str = "") -> Roofs | None:
    """The roofs of a recorded device, of the first one without a name; None where it left none."""
    for path in sorted(paths.RECORDED.glob(f"*/{FILE}")):
        found = rows.read_recorded(path)
        if found and device in ("", found[0].device):
            return _from_rows(found)
    return None


def roofs_of(table: pd.DataFrame) -> Roofs | None:
    """The roofs of the device that a table's rows are from, live rows first: no floor of another machine.

    None where there are no rows, or that device left no roofs.
    """
    if table.empty or "device" not in table:
        return None if table.empty else roofs()
    live = table[table["kind"] == rows.LIVE]
    device = str((table if live.empty else live)["device"].iloc[0])
    kept = recorded_roofs(device) if live.empty else None
    return kept or (roofs() if device == machine.identity().device else None)


def cache_path() -> Path:
    """Where the roofs of this card and these versions are kept."""
    here, card = machine.identity(), gpu.card()
    which = f"{here.slug}-{card}" if card else here.slug
    return paths.cache() / "roofs" / f"{which}-{here.driver}-{here.torch}-{here.triton}.jsonl"


def measure_roofs() -> Iterator[Row]:
    """Measure the roofs now; one row of the contract's schema for each figure."""
    memory = machine.identity().memory_bytes
    for size in (size for size in COPY_BYTES if 2 * size < memory):
        for name, outcome in clocks.measure(copy_calls(size), budget_s=0.05).items():
            yield _row("roofs/copy", name, outcome, shape={"bytes": size}, min_bytes=size)
    for dtype, side in MATMUL_SIDE.items():
        a, b = (torch.randn(side, side, device=gpu.device()).to(getattr(torch, dtype)) for _ in range(2))
        outcome = clocks.measure({"matmul": TimedCall(torch.matmul, (a, b))})["matmul"]
        flops = 2 * side**3
        yield _row("roofs/matmul", "cuBLAS", outcome, dtype=dtype, shape={"side": side}, flops=flops)
    tiny = TimedCall(lambda t: t + 1, (torch.randn(1, device=gpu.device()),))
    sizes: dict[str, Any] = {"shape": {"elements": 1}, "min_bytes": 8, "flops": 1}
    for clock in ("graph", "host"):
        outcome = clocks.measure({"add": tiny}, clock=clock, cache="warm")["add"]
        yield _row("roofs/launch", "smallest kernel", outcome, **sizes)


def _row(
    suite: str, contender: str, outcome: Timing | NotTimed, *, dtype: str = "float32", **columns: Any
) -> Row:
    if isinstance(outcome, NotTimed):
        raise RuntimeError(f"{suite}: the roof could not be measured: {outcome.note}")
    columns |= {"dtype": dtype, "direction": "forward"} | vars(outcome) | machine.row_columns()
    return Row(suite=suite, contender=contender, **columns)


def _from_rows(measured: list[Row]) -> Roofs:
    """Rows of the suites roofs/...; ValueError when any of them is missing or has no time."""
    if not all(row.median_us and row.median_us > 0 for row in measured):
        raise ValueError("roofs: the file holds a roof without a time")
    times = [(row, row.median_us or math.nan) for row in measured]
    copies: dict[int, float] = {}  # microseconds of the faster copy, by bytes
    for row, us in times:
        if row.suite == "roofs/copy":
            copies[row.shape["bytes"]] = min(copies.get(row.shape["bytes"], math.inf), us)
    matmul = {row.dtype: row.flops / us * 1e6 for row, us in times if row.suite == "roofs/matmul"}
    launches = {row.clock: us for row, us in times if row.suite == "roofs/launch"}
    if not copies or set(MATMUL_SIDE) - set(matmul) or {"graph", "host"} - set(launches):
        raise ValueError("roofs: the file lacks a copy, a matmul of a dtype, or a launch")
    where, noise = measured[0], dict.fromkeys(row.noise for row in measured if row.noise)
    origin, copy = (where.kind, where.device, where.date[:10]), tuple(sorted(copies.items()))
    return Roofs(*origin, copy, matmul, launches["graph"], launches["host"], tuple(noise))


# ---- floors -----------------------------------------------------------------------------------------------


def floor_us(roofs: Roofs, *, min_bytes: float, flops: float = 0.0, dtype: str = "float32") -> float:
    """No version runs faster: the largest of launch, memory and arithmetic floor, in microseconds.

    ``min_bytes`` must cross device memory at least once (each input read, each output written), at the
    rate of a large copy; ``flops`` are done at the rate of a large matmul in ``dtype``.
    The roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009; here as time, with launches.
    """
    arithmetic = flops / roofs.matmul[dtype] * 1e6 if flops else 0.0
    return max(roofs.node_us, min_bytes / roofs.bandwidth * 1e6, arithmetic)
