"""The interpreter replaces triton.language's functions once per launch, and puts them back."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported, below

import numpy as np
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


@triton.jit
def steps_kernel(x, y, steps):
    total = 0.0
    for step in range(steps):
        total += tl.load(x + step)
    for step in tl.range(0, steps, num_stages=2):
        total += tl.load(x + step)
    tl.store(y, total)


def test_a_loop_runs_to_a_number_that_the_kernel_was_given():
    """Triton 3.6 with numpy 2.4 needs labkit for it: an array of one element is no number any more."""
    interpreter.quicken()
    y = torch.full((1,), torch.nan)
    steps_kernel[(1,)](torch.arange(7.0), y, 5)
    assert y.item() == 20


def test_an_index_is_read_from_an_array_of_one_element():
    interpreter.quicken()
    scope = tritons._LangPatchScope()
    tritons._patch_lang_tensor(tl.tensor, scope)
    try:
        handle = tritons.TensorHandle(np.array([3], np.int32), tl.int32)
        assert list(range(tl.tensor(handle, tl.int32))) == [0, 1, 2]
    finally:
        scope.restore()
