"""What the layers of the course compute, the packages they are compared with, and published figures."""

from labkit.workloads import grouped, mlp, network, peers, published, recurrent, stack
from labkit.workloads.elementwise import AFFINE, LINEAR, RESIDUAL, product
from labkit.workloads.floor_lines import floors, regimes

__all__ = [
    "AFFINE",
    "LINEAR",
    "RESIDUAL",
    "floors",
    "grouped",
    "mlp",
    "network",
    "peers",
    "product",
    "published",
    "recurrent",
    "regimes",
    "stack",
]
