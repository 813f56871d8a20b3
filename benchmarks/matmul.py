"""x @ weight.T, x (batch, width), weight (out, width), forward, beside cuBLAS, whose time is the roof."""

from torch.nn.functional import linear

from benchmarks.run import Operation, Ranges
from labkit import kernels, work

ALIGNED: Ranges = {"batch": (64, 8192, 1), "width": (64, 8192, 8), "out": (64, 8192, 8)}
ANY: Ranges = ALIGNED | {"width": (64, 8192, 1), "out": (64, 8192, 1)}
FEW_ROWS: Ranges = ALIGNED | {"batch": (1, 64, 1)}

OPERATION = Operation(
    "matmul",
    work.matmul,
    {"labkit": kernels.matmul, "cuBLAS": linear},
    {"": ALIGNED, "any": ANY, "few_rows": FEW_ROWS},
    directions=("forward",),
    bound="product",
)
