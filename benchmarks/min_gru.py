"""h_t = (1 - z_t) h_{t-1} + z_t candidate_t along time, all (batch, time, width): a minimal GRU."""

from benchmarks.linear_recurrence import SEQUENCES, short
from benchmarks.run import Operation
from benchmarks.workloads.recurrent import MIN_GRU, min_gru
from labkit import kernels

OPERATION = Operation(
    "min_gru",
    MIN_GRU,
    {"labkit": kernels.min_gru, "eager loop": min_gru},
    {"": SEQUENCES},
    only={"eager loop": short},
)
