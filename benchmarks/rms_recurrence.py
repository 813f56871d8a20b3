"""u_t = a_t h_{t-1} + b_t, h_t = rms_norm(u_t) * weight, a, b and h (batch, time, width), weight (width,)."""

from benchmarks.linear_recurrence import short
from benchmarks.run import Operation
from benchmarks.workloads.base import Shape
from benchmarks.workloads.recurrent import RMS_RECURRENCE, rms_recurrence
from labkit import kernels


def short_single(direction: str, dtype: str, size: Shape) -> bool:
    """In 16 bits a loop of PyTorch rounds the state at each step, and each norm makes more of that."""
    return short(direction, dtype, size) and dtype == "float32"


OPERATION = Operation(
    "rms_recurrence",
    RMS_RECURRENCE,
    {"labkit": kernels.rms_recurrence, "eager loop": rms_recurrence},
    {"": {"batch": (256, 16384, 1), "time": (1, 512, 1), "width": (16, 4096, 1)}},
    only={"eager loop": short_single},
)
