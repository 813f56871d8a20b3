"""How many calls labkit.measure.correctness compares."""

from labkit import gpu
from labkit.measure import correctness


def calls_checked(shape: tuple[int, ...]) -> int:
    """For one of many shapes: on a GPU each dtype in each layout, else only the contiguous in each."""
    others = len(correctness.LAYOUTS) - 1 - (len(shape) < 2)  # transposed is contiguous in one dimension
    dtypes = len(correctness.DTYPES)
    return dtypes * (1 + others) if gpu.available() else dtypes + others
