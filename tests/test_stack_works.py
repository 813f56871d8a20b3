"""What a stack of blocks moves and computes, by the measurement contract."""

import pytest
import torch
from torch.nn import functional

from labkit.stack_works import EPS, STACK, block, depth_of, stack

B, W, L = 7, 5, 3
SHAPE = {"batch": B, "width": W, "depth": L}
DIRECTIONS = ("forward", "backward", "forward_backward")


def test_a_stack_is_eight_deep_where_the_shape_does_not_say():
    assert depth_of({"batch": 1, "width": 1}) == 8 and depth_of(SHAPE) == L
    shorter = {axis: size for axis, size in SHAPE.items() if axis != "depth"}
    assert [len(t) for t in STACK.inputs(shorter)[1:]] == [8, 8, 8]
    assert STACK.flops(shorter, "forward") * L == STACK.flops(SHAPE, "forward") * 8


def test_inputs_have_the_shapes_of_a_stack():
    assert [tuple(t.shape) for t in STACK.inputs(SHAPE)] == [(B, W), (L, W, W), (L, W), (L, W)]


def test_a_block_is_linear_norm_gain_and_gelu():
    x, weight, bias, gain = (t.double() for t in STACK.inputs(SHAPE))
    z = x @ weight[0].T + bias[0]
    n = z / (z.square().mean(1, keepdim=True) + EPS).sqrt() * gain[0]
    torch.testing.assert_close(block(x, weight[0], bias[0], gain[0]), functional.gelu(n, approximate="tanh"))


def test_a_stack_is_block_after_block():
    x, *weights = STACK.inputs(SHAPE)
    y = x
    for layer in zip(*weights, strict=True):
        y = block(y, *layer)
    assert torch.equal(stack(x, *weights), y)
    assert torch.equal(STACK.reference(x, *weights), y)


def test_layers_have_a_weight_bias_and_gain_each():
    x, weight, bias, gain = STACK.inputs(SHAPE)
    with pytest.raises(ValueError):
        stack(x, weight, bias[:-1], gain)


def test_bytes_are_those_of_one_pass():
    rows, weights = B * W, L * (W * W + 2 * W)
    forward, backward = 2 * rows + weights, 3 * rows + 2 * weights
    for itemsize in (2, 4):
        found = [STACK.min_bytes(SHAPE, itemsize, direction) for direction in DIRECTIONS]
        assert found == [forward * itemsize, backward * itemsize, (forward + backward) * itemsize]
    inputs = STACK.inputs(SHAPE)
    assert sum(t.nbytes for t in (*inputs, STACK.reference(*inputs))) == STACK.min_bytes(SHAPE, 4, "forward")


def test_operations_are_those_of_the_products():
    product = 2 * B * W * W
    assert [STACK.flops(SHAPE, d) for d in DIRECTIONS] == [L * product, 2 * L * product, 3 * L * product]
