"""The products of lessons 6 to 8, at sizes that no judge's case has: rows of odd length, no rows, no sum."""

import pytest
import torch
from torch.nn import functional

from labkit import notebooks, work
from labkit.exercises import judge
from labkit.measure import correctness

groups = work.grouped.reference
layer = work.linear_gelu.reference

SHAPES = ((64, 128), (37, 33), (150, 20), (1, 1), (0, 8), (4, 0))
"""Full; ragged, along K too; several tiles; one element; without rows; without a sum."""


def matrices(shape):
    return torch.randn(shape), torch.randn(50, shape[-1]) * max(1, shape[-1]) ** -0.5


def with_bias(shape):
    return *matrices(shape), torch.randn(50)


def in_groups(shape):
    width = shape[-1]
    return torch.randn(shape[0], 3 * width), torch.randn(3, width, width), torch.randn(3, width)


TAUGHT = {
    "product": ("06_matrix_product", functional.linear, matrices, SHAPES),
    "described": ("06_matrix_product", functional.linear, matrices, SHAPES),
    "linear_gelu": ("07_matmul_epilogue", layer, with_bias, SHAPES),
    "grouped": ("08_grouped_matmul", groups, in_groups, SHAPES[:-1]),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_a_taught_product_is_right_whatever_the_size(name):
    lesson, reference, inputs, shapes = TAUGHT[name]
    call = getattr(judge.solutions(lesson), name)
    correctness.check(call, reference, inputs, shapes=shapes, gradients=False, name=name)


def test_the_product_that_lesson_7_shows_is_right():
    shown = notebooks.load("07_matmul_epilogue").product
    correctness.check(shown, functional.linear, matrices, shapes=SHAPES, gradients=False, name="product")
