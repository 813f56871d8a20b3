"""The interpreter replaces triton.language's functions once per launch, and puts them back."""

import pytest
import torch
import triton
import triton.language as tl

from labkit import gpu, triton_interpreter_patches

pytestmark = pytest.mark.skipif(gpu.available(), reason="on a GPU Triton compiles, nothing is replaced")


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
    triton_interpreter_patches.patch_interpreter()
    x = torch.arange(100.0)
    before = tl.load, tl.tensor.__add__
    for _ in range(2):
        assert sums(x) == 2 * x.sum()
        assert (tl.load, tl.tensor.__add__) == before


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
    triton_interpreter_patches.patch_interpreter()
    y = torch.full((1,), torch.nan)
    steps_kernel[(1,)](torch.arange(7.0), y, 5)
    assert y.item() == 20


@triton.jit
def wrapping_kernel(x, y):
    at = tl.arange(0, 2)
    value = tl.load(x + at)
    tl.store(y + at, value + 1)
    tl.store(y + 2 + at, value * 3)
    tl.store(y + 4 + at, -2 - value)


def test_integers_wrap_around_as_on_a_gpu():
    triton_interpreter_patches.patch_interpreter()
    x = torch.tensor([2**31 - 1, 5], dtype=torch.int32)
    y = torch.zeros(6, dtype=torch.int32)
    wrapping_kernel[(1,)](x, y)
    assert y.tolist() == [-(2**31), 6, 2**31 - 3, 15, 2**31 - 1, -7]


def test_pointers_that_differ_in_more_than_their_names_are_told_apart():
    triton_interpreter_patches.patch_interpreter()
    kinds = [
        tl.pointer_type(of, space, const)
        for of in (tl.float32, tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, 2))
        for space in (1, 2)
        for const in (False, True)
    ]
    for kind in kinds:
        block = tl.block_type(kind, [4])
        assert block.element_ty == kind and sum(block == tl.block_type(other, [4]) for other in kinds) == 1


@triton.jit
def dot_kernel(x, w, y, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)
    places = at[:, None] * SIDE + at[None, :]
    tl.store(y + places, tl.dot(tl.load(x + places), tl.load(w + places), tl.load(y + places)))


def test_a_product_of_bfloat16_is_that_of_its_values():
    triton_interpreter_patches.patch_interpreter()
    x, w = (torch.randn(16, 16).bfloat16() for _ in range(2))
    y = torch.ones(16, 16)
    dot_kernel[(1,)](x, w, y, SIDE=16)
    torch.testing.assert_close(y, 1 + x.float() @ w.float())
