"""What the tests of products share: the modules' kernels, what a fused product keeps, and all launches."""

import itertools
from typing import Any
from unittest import mock

import operators as op
import torch
from cases import with_gate_up
from operators import assert_close, bf16, drawn, fp32, meta

from labkit.kernels import common, linear, mlp
from labkit.measure import correctness
from labkit.work import gate_up

__all__ = ["KERNELS", "assert_close", "bf16", "fp32", "kept_is_right", "launch_all"]
KERNELS = {
    common: ("pad_kernel",),
    linear: ("linear_kernel",),
    mlp: ("gate_up_kernel", "gated_kernel", "gate_up_grad_kernel"),
}


def kept_is_right(rows: int, width: int, hidden: int, dtype: torch.dtype = fp32) -> None:
    """Gate, up and their product, each in its own place and nothing anywhere else."""
    fences = correctness.GuardZones()
    x, w_gate_up = drawn(with_gate_up(hidden), rows, width, dtype=dtype)
    with fences:
        placed = [fences.place(t, "contiguous") for t in (x, w_gate_up)]
        got, kept = mlp.gate_up_forward(placed[0], placed[1], True)
    assert kept.shape == (rows, 2, hidden)
    for side, weight in enumerate(w_gate_up):
        assert_close(kept[:, side], x.double() @ weight.double().T, dtype)
    assert_close(got, gate_up.reference(x.double(), w_gate_up.double()), dtype)
    assert fences.broken() == 0


def launch_all(dtype: torch.dtype, sizes: tuple[int, int, int], training: bool) -> None:
    """On meta tensors, for (rows, hidden, width), calls that reach every kernel; ``training``: both ways."""
    M, H, K = sizes
    shapes = ((M, K), (H, K)), ((M, K), (2, H, K), (K, H))
    calls: tuple[Any, ...] = linear.matmul, mlp.geglu_mlp
    for (call, its), library in itertools.product(zip(calls, shapes, strict=True), (False, True)):
        tensors = [meta(*shape, dtype=dtype) for shape in its]
        with (
            mock.patch.object(linear, "library_is_fast", lambda *_: False),
            mock.patch.object(mlp, "library_is_faster", lambda *_, chosen=library: chosen),
        ):
            if training:
                op.launch_both_ways(call, *tensors)
            else:
                call(*tensors)
