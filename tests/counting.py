"""How many calls labkit.checks compares."""

from labkit import checks, device


def calls_checked(shape: tuple[int, ...]) -> int:
    """For one of many shapes: on a GPU each dtype in each layout, else only the contiguous in each."""
    others = len(checks.LAYOUTS) - 1 - (len(shape) < 2)  # transposed is contiguous in one dimension
    dtypes = len(checks.DTYPES)
    return dtypes * (1 + others) if device.has_gpu() else dtypes + others
