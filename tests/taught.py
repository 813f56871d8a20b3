"""What tests of taught kernels share: some layouts, accesses that are counted, GPUs that are not here."""

import re

import operators as op
import pytest
import torch
from launches import POINTWISE
from operators import GPU, INTERPRETED, Case, bf16, drawn, fp32, meta
from operators import kernels_of as counted

from labkit.profiling import codegen

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


def compiled(launches, targets=POINTWISE):
    """Recorded launches as compiled for other GPUs: a launch's targets one after the other."""
    asked = [(made, target) for made in launches for target in targets]
    return codegen.compile_many(
        codegen.request(made.kernel, made.arguments, target=target, **made.options) for made, target in asked
    )


def assert_float32(ttir):
    """Half precision is only loaded and stored, never computed with."""
    half = re.findall(r"arith\.\w+f .*xb?f16>", ttir)
    assert half and all(re.match(r"arith\.(extf|truncf) ", line) for line in half)


def assert_loads_wide(made):
    """Of two launches in bfloat16 the first loads 128 bits at once, the second, of an odd width, a number."""
    found = compiled(made)
    assert len(found) == 2 * len(POINTWISE)
    for index, one in enumerate(found):
        assert set(one.loads) == ({128} if index < len(found) / 2 else {16}), one
        assert one.spills == 0, one
        assert_float32(one.ttir)
        assert one.ttir.count("arith.truncf") == 1, one
