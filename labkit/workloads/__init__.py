"""What the layers of the course compute, the packages they are compared with, and published figures."""

from labkit.workloads import grouped, gru, mlp, network, peers, published, recurrent, stack
from labkit.workloads.elementwise import AFFINE, LINEAR, product
from labkit.workloads.roofline_curves import floors

__all__ = [
    "AFFINE", "LINEAR", "floors", "grouped", "gru", "mlp", "network", "peers", "product", "published",
    "recurrent", "stack",
]  # fmt: skip
