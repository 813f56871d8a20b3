"""Lesson 3: what the tests of its kernels, its module and its plans share."""

import torch
from launches import ROOM

from labkit import checks, device
from labkit.grouped_works import grouped_reference

NAME = "03_grouped_matmul"
KERNELS = ("step_kernel", "once_kernel", "forward_kernel", "wide_kernel", "backward_kernel", "sum_kernel")
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


def assert_close(got, want, dtype=fp32):
    assert got.dtype is dtype and got.shape == want.shape
    problem = checks.diagnose(got.detach(), want.detach(), checks.TOLERANCE[dtype])
    assert not problem, problem


def compiled(call, **options):
    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


def pretend(lesson, patch, target, multiprocessors=132):
    """Let the host's part of the lesson believe that it is on this GPU."""
    patch.setattr(device, "shared_bytes", lambda: ROOM[target] * 1024)
    patch.setattr(device, "has_tile_copies", lambda: int(target.removeprefix("sm_")) >= 90)
    patch.setattr(lesson, "multiprocessors", lambda: multiprocessors)


def meta(*shape, dtype=bf16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_both_ways(lesson, dtype, groups, d_in, d_out, rows, columns=False):
    """On meta tensors: what the host's part would launch, with its arguments."""
    make = grouped(groups, d_in, d_out)
    _, *weights = (t.to("meta", dtype).requires_grad_() for t in make((1,)))
    x = (
        meta(8, groups * d_in, rows // 8, dtype=dtype).mT
        if columns
        else meta(rows, groups * d_in, dtype=dtype)
    )
    tensors = [x.requires_grad_(), *weights]
    y = lesson.grouped_linear(*tensors)
    torch.autograd.grad(y, tensors, torch.empty_like(y))
