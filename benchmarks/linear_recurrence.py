"""h_t = a_t h_{t-1} + b_t along time, a, b and h (batch, time, width): beside a loop and other scans."""

from dataclasses import replace

from torch import Tensor

from benchmarks import peers
from benchmarks.run import Operation, Ranges
from labkit import kernels
from labkit.work import Shape, linear_recurrence

SEQUENCES: Ranges = {"batch": (1, 4096, 1), "time": (1, 8192, 1), "width": (16, 8192, 1)}
FEW_LONG: Ranges = {"batch": (1, 8, 1), "time": (8192, 32768, 1), "width": (32, 1024, 1)}


def short(direction: str, dtype: str, size: Shape) -> bool:
    """A loop of PyTorch has several launches a step, all of them in one graph."""
    return size["time"] <= 256


def single(direction: str, dtype: str, size: Shape) -> bool:
    """The peers' states, or their gradients, are float32."""
    return dtype == "float32"


def logarithms(shape: Shape) -> tuple[Tensor, ...]:
    """The inputs as fla takes them: its gates are logarithms from the start."""
    a, b = linear_recurrence.inputs(shape)
    return a.log(), b


FROM_LOGARITHMS = replace(
    linear_recurrence,
    name="linear_recurrence from logarithms",
    inputs=logarithms,
    reference=lambda log_a, b: linear_recurrence.reference(log_a.exp(), b),
)
SCANS = {"fla, step by step": peers.fla_recurrence, "accelerated-scan": peers.accelerated_scan}
OPERATION = Operation(
    "linear_recurrence",
    linear_recurrence,
    {"labkit": kernels.linear_recurrence, "eager loop": linear_recurrence.reference} | SCANS,
    {"": SEQUENCES, "few_long": FEW_LONG},
    works={"fla, step by step": FROM_LOGARITHMS},
    only={"eager loop": short, **dict.fromkeys(SCANS, single)},
)
