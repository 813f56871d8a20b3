"""h_t = a_t h_{t-1} + b_t along time, a, b and h (batch, time, width): beside a loop and other scans."""

from torch import Tensor

from benchmarks.run import Operation, Ranges
from benchmarks.workloads import peers
from benchmarks.workloads.base import Shape
from benchmarks.workloads.recurrent import LINEAR_RECURRENCE, linear_recurrence
from labkit import kernels

SEQUENCES: Ranges = {"batch": (1, 4096, 1), "time": (1, 8192, 1), "width": (16, 8192, 1)}
FEW_LONG: Ranges = {"batch": (1, 8, 1), "time": (8192, 32768, 1), "width": (32, 1024, 1)}


def short(direction: str, dtype: str, size: Shape) -> bool:
    """A loop of PyTorch has several launches a step, all of them in one graph."""
    return size["time"] <= 256


def single(direction: str, dtype: str, size: Shape) -> bool:
    """The peers' states, or their gradients, are float32."""
    return dtype == "float32"


def logarithm(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The inputs as fla takes them: its gates are logarithms from the start."""
    return a.log(), b


FLA = {"fla, step by step": peers.fla_recurrence, "fla, in chunks": peers.fla_chunked_recurrence}
SCANS = FLA | {"accelerated-scan": peers.accelerated_scan}
OPERATION = Operation(
    "linear_recurrence",
    LINEAR_RECURRENCE,
    {"labkit": kernels.linear_recurrence, "eager loop": linear_recurrence} | SCANS,
    {"": SEQUENCES, "few_long": FEW_LONG},
    layouts=dict.fromkeys(FLA, logarithm),
    only={"eager loop": short, **dict.fromkeys(SCANS, single)},
)
