"""What tests of taught kernels share: some layouts, accesses that are counted, GPUs that are not here."""

import re

import pytest
import torch
from launches import POINTWISE

from labkit import gpu
from labkit.measure import correctness
from labkit.profiling import codegen, launch_counts

GPU = pytest.mark.skipif(not gpu.available(), reason="CUDA graphs and thousands of steps need a GPU")
INTERPRETED = pytest.mark.skipif(
    gpu.available(), reason="a kernel's accesses can be watched only where it is interpreted"
)
bf16, fp32 = torch.bfloat16, torch.float32


def examine(call, reference, inputs, *shapes, layouts=("contiguous",), dtypes=(fp32,), gradients=False):
    """Check a call against its float64 reference, in some of the layouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correctness, "LAYOUTS", {name: correctness.LAYOUTS[name] for name in layouts})
        correctness.check(call, reference, inputs, shapes=shapes, dtypes=dtypes, gradients=gradients)


def drawn(inputs, *shape, dtype=fp32):
    """Inputs of a shape, from seed 0, on the device of the tests."""
    torch.manual_seed(0)
    return [t.to(gpu.device(), dtype) for t in inputs(shape)]


def meta(*shape, dtype=fp32):
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(call, *tensors):
    """The launches of a call between fences of NaN, so that strays hit nothing else.

    A load without its mask gives the right result wherever what it read too much is not used: its bytes tell.
    """
    fences = correctness.GuardZones()
    placed = [fences.place(tensor, "contiguous") for tensor in tensors]
    with fences:
        return [launch for launch in launch_counts.count(lambda: call(*placed)).launches if launch.programs]


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
