"""weight * x / sqrt(mean of x² over a row + eps), x (batch, time, width), weight (width,)."""

from benchmarks.linear_recurrence import SEQUENCES
from benchmarks.run import Operation
from benchmarks.workloads.peers import liger_rms_norm
from benchmarks.workloads.recurrent import RMS_NORM, rms_norm
from labkit import kernels

OPERATION = Operation(
    "rms_norm",
    RMS_NORM,
    {"labkit": kernels.rms_norm, "eager": rms_norm, "torch.compile": rms_norm, "Liger": liger_rms_norm},
    {"": SEQUENCES},
)
