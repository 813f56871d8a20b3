"""What every test of a kernel has: a cache of its own and, interpreted, an eye on addresses."""

import numpy as np
import pytest
import torch

import labkit


@pytest.fixture(autouse=True)
def own_cache(cache):
    """Nothing is taken from an earlier run's cache."""


@pytest.fixture(autouse=True)
def fenced(monkeypatch):
    """An interpreted kernel fails at once if it uses an address outside all of its arguments.

    An argument is all from its first number to its last. So 16 bytes of which only the first belong to a
    tensor fail here, though no GPU would notice.
    """
    if labkit.gpu.available():
        return
    from triton.runtime import interpreter

    arguments, builder = [], interpreter.InterpreterBuilder

    def tensors(values):
        for value in values:
            if isinstance(value, tuple):
                yield from tensors(value)
            elif isinstance(base := getattr(value, "base", value), torch.Tensor) and base.numel():
                yield base

    def look(pointers, mask):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        used = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64)
        if used.size and not any(a <= used.min() and used.max() + size <= z for a, z in arguments):
            inside = np.any([(a <= used) & (used + size <= z) for a, z in arguments], axis=0)
            assert inside.all(), f"{np.sum(~inside)} of {used.size} addresses are in no argument"

    def to_host(self, args, kwargs):
        here = original_to_host(self, args, kwargs)
        arguments[:] = [
            (t.data_ptr(), t[(-1,) * t.dim()].data_ptr() + t.itemsize)
            for t in tensors((*here[0], *here[1].values()))
        ]
        return here

    def load(self, pointers, mask, *rest, **more):
        look(pointers, mask)
        return original_load(self, pointers, mask, *rest, **more)

    def store(self, pointers, value, mask, *rest, **more):
        look(pointers, mask)
        return original_store(self, pointers, value, mask, *rest, **more)

    def atomic(self, op, pointers, value, mask, *rest):
        look(pointers, mask)
        return original_atomic(self, op, pointers, value, mask, *rest)

    original_to_host = interpreter.GridExecutor._init_args_hst
    original_load, original_store = builder.create_masked_load, builder.create_masked_store
    original_atomic = builder.create_atomic_rmw
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", to_host)
    monkeypatch.setattr(builder, "create_masked_load", load)
    monkeypatch.setattr(builder, "create_masked_store", store)
    monkeypatch.setattr(builder, "create_atomic_rmw", atomic)
