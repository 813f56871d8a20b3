"""What tests of taught kernels share: some layouts, accesses that are counted, GPUs that are not here."""

import operators as op
import pytest
import torch
from operators import GPU, INTERPRETED, Case, bf16, drawn, fp32, meta
from operators import kernels_of as counted

__all__ = ["GPU", "INTERPRETED", "bf16", "counted", "drawn", "fp32", "meta"]


def examine(call, reference, inputs, *shapes, dtypes=(fp32,), gradients=False, **options):
    """Check a call against its float64 reference, in some of the layouts."""
    case = Case(call, reference, inputs, name="the kernel")
    op.examine(case, *shapes, dtypes=dtypes, gradients=gradients, **options)


def assert_no_backward(name, call, tensors):
    """Each argument that wants a gradient is refused; without autograd the call works."""
    for tensor in tensors:
        tensor.requires_grad_()
        with pytest.raises(RuntimeError, match=f"^{name} has no backward"):
            call(*tensors)
        with torch.no_grad():
            assert not call(*tensors).requires_grad
        tensor.requires_grad_(False)
