"""The interpreter replaces triton.language's functions once per launch, and puts them back."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported, below

import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter as tritons

from labkit import device, interpreter

pytestmark = pytest.mark.skipif(device.has_gpu(), reason="on a GPU Triton compiles, nothing is replaced")


@triton.jit
def doubled(value):
    return value * 2


@triton.jit
def sums_kernel(x, y, width, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, tl.cdiv(width, BLOCK) * BLOCK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += doubled(tl.load(x + at, at < width, other=0.0))
    tl.store(y, tl.sum(total))


def sums(x):
    y = torch.full((1,), torch.nan)
    sums_kernel[(1,)](x, y, x.numel(), BLOCK=16)
    return y.item()


def test_a_kernel_with_helpers_is_right_and_the_language_is_put_back():
    interpreter.quicken()
    x = torch.arange(100.0)
    before = tl.load, tl.tensor.__add__
    for _ in range(2):
        assert sums(x) == 2 * x.sum()
        assert (tl.load, tl.tensor.__add__) == before


def test_it_is_searched_at_most_once_per_launch(monkeypatch):
    """Not at all where a helper that somebody called outside a kernel has left it replaced."""
    interpreter.quicken()
    searched = []
    search = tritons._patch_builtin
    monkeypatch.setattr(
        tritons, "_patch_builtin", lambda where, *rest: (searched.append(where), search(where, *rest))
    )
    sums(torch.ones(100))
    assert searched.count(tl) == tl.core.is_builtin(tl.load)


def test_quickening_twice_is_quickening_once():
    interpreter.quicken()
    before = tritons._patch_lang
    interpreter.quicken()
    assert tritons._patch_lang is before


def test_a_kernel_that_fails_leaves_the_language_as_it_was():
    interpreter.quicken()
    before = tl.load
    with pytest.raises(tritons.InterpreterError):
        sums_kernel[(1,)](torch.ones(4), None, 4, BLOCK=16)
    assert tl.load is before
    assert sums(torch.ones(4)) == 8
