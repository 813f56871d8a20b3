"""The exercises of lesson 1."""

from labkit.tasks import Task, benchmark, fuse, fuse_hints, mask

TASKS = {
    "mask": Task("Complete the mask", mask.check, "double_kernel", "1a8fbbc6cbff", mask.SLIPS),
    "fuse": Task("Fuse the ReLU and the residual", fuse.check, "fused", "fed47c470ffd", fuse_hints.SLIPS),
    "benchmark": Task(
        "Repair a benchmark that lies", benchmark.check, "time_us", "e45768d9f192", benchmark.SLIPS
    ),
}
