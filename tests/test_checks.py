"""checks.check: what it accepts, and what it refuses with which sentence. Most calls here are wrong."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported, below

import itertools
import math

import pytest
import triton
import triton.language as tl

from labkit import checks, device
from labkit.checks import Fences, check, diagnose
from labkit.ops import differentiable

FLOAT32 = (torch.float32,)


# x * w + b: the kernel with everything that can be left out of it


@triton.jit
def affine_kernel(x, w, b, y, rows, width, LOAD: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    load = column < (width if LOAD == 0 else width + LOAD)
    store = column < (width if STORE == 0 else width + STORE)
    scale, shift = tl.load(w + column, load, 0.0), tl.load(b + column, load, 0.0)
    value = tl.load(x + row * width + column, load, 0.0).to(tl.float32) * scale + shift
    tl.store(y + row * width + column, value, store)


def affine(x, w, b, *, load=0, store=0, missing_columns=0, missing_rows=0, contiguous=True):
    """Right as it is; each option breaks something."""
    if contiguous:
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    y, width = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    rows = x.numel() // width if width else 0
    grid = (rows - missing_rows, triton.cdiv(width, 64) - missing_columns)
    if min(grid) > 0:
        affine_kernel[grid](x, w, b, y, rows, width, LOAD=load, STORE=store, BLOCK=64)
    return y


def reference(x, w, b):
    return x * w + b


def vectors(shape):
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def one(shape):
    return (torch.randn(shape),)


def refused(call, wanted=reference, inputs=vectors, **options):
    """The sentence with which a wrong call is refused."""
    options = {"gradients": False, "dtypes": FLOAT32} | options
    with pytest.raises(AssertionError) as caught:
        check(call, wanted, inputs, name="it", **options)
    return str(caught.value)


# What is right


def test_a_right_kernel_passes_every_shape_dtype_and_layout():
    report = check(affine, reference, vectors, gradients=False)
    layouts = 2 * 3 + 6 * 4 - 1 - 1  # two shapes of one dimension... counted below
    shapes, dtypes = len(checks.SHAPES), len(checks.DTYPES)
    flat = sum(len(shape) < 2 for shape in checks.SHAPES)
    assert layouts
    assert report.passed == dtypes * (4 * shapes - flat)
    assert 0 < report.worst_error < 1e-2
    assert report.name == "affine"


def test_a_report_is_a_sentence_and_data_for_who_counts_checks():
    report = check(affine, reference, vectors, gradients=False, dtypes=FLOAT32, shapes=[(3, 5)])
    text = str(report)
    assert text.startswith("affine is right: 4 checks against float64 (outputs; 1 shapes, 4 layouts, float32)")
    assert "worst relative error" in text
    shown = report._repr_mimebundle_()
    assert shown["application/vnd.labkit.check+json"] == {"name": "affine", "passed": 4}
    assert text == shown["text/plain"]
    assert text in shown["text/html"]


def test_gradients_are_counted_too():
    def gradient(dy, x, w, b):
        rows = tuple(range(x.dim() - 1))
        return dy * w, (dy.float() * x).sum(rows).to(w.dtype), dy.float().sum(rows).to(b.dtype)

    operator = differentiable("checked_affine", affine, gradient)
    report = check(operator, reference, vectors, shapes=[(37, 161), (19,), (0, 8)])
    assert report.passed == 4 * 3 * (4 + 3 + 4)
    assert "outputs and gradients" in str(report)


def test_integers_a_scalar_output_and_expanded_outputs_are_no_obstacle():
    def total(x):
        return x.float().sum().to(x.dtype)

    assert check(total, torch.sum, one, shapes=[(3, 5)]).passed
    assert check(lambda x: x.sum(0, keepdim=True).expand_as(x), lambda x: x.sum(0, keepdim=True).expand_as(x), one, shapes=[(3, 5)], dtypes=FLOAT32).passed


# What each mistake is called
