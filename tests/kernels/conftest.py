"""What every test of a kernel has: a cache of its own and, interpreted, an eye on addresses."""

import numpy as np
import pytest
import torch

from labkit import interpreter


@pytest.fixture(autouse=True)
def own_cache(cache):
    """Nothing is taken from an earlier run's cache."""


class Fence(interpreter.Observer):
    """Fails a kernel at once if it uses an address outside all of its arguments.

    An argument is all from its first number to its last. So 16 bytes of which only the first belong to a
    tensor fail here, though no GPU would notice.
    """

    def launch(self, run, kernel, args, options):
        self.inside = [
            (t.data_ptr(), t[(-1,) * t.dim()].data_ptr() + t.itemsize)
            for t in tensors((*args, *options.values()))
        ]
        run(*args, **options)

    def store(self, addresses, size):
        if addresses.size and not any(
            a <= addresses.min() and addresses.max() + size <= z for a, z in self.inside
        ):
            found = np.any([(a <= addresses) & (addresses + size <= z) for a, z in self.inside], axis=0)
            assert found.all(), f"{np.sum(~found)} of {addresses.size} addresses are in no argument"

    def load(self, addresses, size, unfilled):
        self.store(addresses, size)

    atomic = store


def tensors(values):
    """The tensors among a kernel's arguments that have an element; those of descriptors, too."""
    for value in values:
        if isinstance(value, tuple):
            yield from tensors(value)
        elif isinstance(base := getattr(value, "base", value), torch.Tensor) and base.numel():
            yield base


@pytest.fixture(autouse=True)
def fenced():
    with interpreter.watching(Fence()):
        yield
