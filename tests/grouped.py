"""What the tests of grouped Linears share, those of the finished kernels and those of lesson 4."""

import pytest
import torch
from launches import ROOM

from labkit import checks, device
from labkit.grouped_works import grouped_reference
from labkit.kernels import grouped as family
from labkit.kernels.common import Gpu

KERNELS = ("once_kernel", "forward_kernel", "wide_kernel", "backward_kernel", "sum_kernel")
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def plain(x, weight, bias=None):
    return grouped_reference(x, weight, weight.new_zeros(()) if bias is None else bias)


def grouped(groups, d_in, d_out=None, bias=True):
    """Inputs whose x has the leading dimensions that are asked for."""
    d_out = d_in if d_out is None else d_out

    def inputs(leading):
        weight = torch.randn(groups, d_in, d_out) * max(d_in, 1) ** -0.5
        tensors = torch.randn(*leading, groups * d_in), weight, torch.randn(groups, d_out)
        return tensors[: 2 + bias]

    return inputs


def drawn(make, *leading, dtype=fp32, grad=False):
    torch.manual_seed(0)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in make(leading)]


def in_columns(x):
    """The same numbers, their memory (B, C, T)."""
    return x.mT.contiguous().mT


def gradients(call, tensors, upstream=None):
    """The output and the gradient of every tensor; upstream twice the output where nothing else is given."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, 2 * y.detach() if upstream is None else upstream)]


def assert_close(got, want, dtype=fp32):
    assert got.dtype is dtype and got.shape == want.shape
    problem = checks.diagnose(got.detach(), want.detach(), checks.TOLERANCE[dtype])
    assert not problem, problem


def assert_right(call, tensors, upstream=None):
    """Output and gradients in these very strides, which a copy in float64 need not have."""
    upstream = 2 * plain(*tensors).detach() if upstream is None else upstream
    wants = gradients(plain, [t.double() for t in tensors], upstream.double())
    for got, want in zip(gradients(call, tensors, upstream), wants, strict=True):
        assert_close(got, want, tensors[0].dtype)


def compiled(call, **options):
    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


def gpu(target, multiprocessors=132):
    return Gpu(multiprocessors, ROOM[target] * 1024, int(target.removeprefix("sm_")) >= 90)


def pretend(patch, one):
    """Let the host's part of the work believe that every tensor is on this GPU."""
    patch.setattr(family, "gpu_of", lambda _: one)


def meta(*shape, dtype=bf16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_both_ways(dtype, groups, d_in, d_out, rows, columns=False):
    """On meta tensors: what the host's part would launch, with its arguments."""
    _, *weights = (t.to("meta", dtype).requires_grad_() for t in grouped(groups, d_in, d_out)((1,)))
    C = groups * d_in
    x = meta(8, C, rows // 8, dtype=dtype).mT if columns else meta(rows, C, dtype=dtype)
    tensors = [x.requires_grad_(), *weights]
    y = family.grouped_linear(*tensors)
    torch.autograd.grad(y, tensors, torch.empty_like(y))


def examine(make, *leading, layouts=("contiguous",), dtypes=(fp32,), **options):
    """A check in some layouts only; all of them are the business of a few classes of shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        return checks.check(family.grouped_linear, plain, make, shapes=leading, dtypes=dtypes, **options)


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))
