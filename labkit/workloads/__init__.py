"""What the layers of the course compute, the packages they are compared with, and published figures."""

from labkit.workloads.elementwise import AFFINE, LINEAR, product
from labkit.workloads.floor_lines import floors, regimes

__all__ = ["AFFINE", "LINEAR", "floors", "product", "regimes"]
