"""What the benchmarked layers compute and move, by the measurement contract."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.workloads import elementwise, grouped, mlp, recurrent
from benchmarks.workloads.base import Work
from labkit import gpu

SHAPE = {"batch": 6, "time": 3, "width": 5, "groups": 4, "hidden": 11, "depth": 3}
DIRECTIONS = ("forward", "backward", "forward_backward")
EPS = 1e-6


def act(z: Tensor) -> Tensor:
    return z / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    return torch.einsum("...i,oi->...o", x, weight) + bias


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight


def groups_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (rows, groups * in), weight (groups, in, out), bias (groups, out)."""
    parts = x.split(weight.shape[1], -1)
    return torch.cat([part @ w + b for part, w, b in zip(parts, weight, bias, strict=True)], -1)


def steps(a: Tensor, b: Tensor, h0: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """h = a h + b from step to step, with a norm of each state where there is a weight."""
    h, states = torch.zeros_like(b[:, 0]) if h0 is None else h0, []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        h = h if weight is None else norm(h, weight)
        states.append(h)
    return torch.stack(states, 1)


def geglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(act(linear(x, gate)) * linear(x, up), down)


class Case(NamedTuple):
    work: Work
    sizes: list[tuple[int, ...]]
    """Of the inputs at SHAPE."""
    elements: tuple[int, int]
    """Read or written forward and backward."""
    flops: tuple[int, int]
    formula: Callable[..., Tensor]
    rows: int = 0
    """Elements of a bias, which the contract does not count: it is one row."""


ROWS, FULL, STATE, ROW, MLP = (6, 20), (6, 3, 5), (6, 5), (5,), (6, 5)
SQUARES = [(4, 5, 5), (4, 5)]
MANY = (340, 560), (1200, 2400)
g, m, r = grouped, mlp, recurrent
CASES: dict[str, Case] = {
    "affine": Case(elementwise.AFFINE, [MLP, ROW, ROW], (60, 90), (60, 120), lambda x, w, b: x * w + b, 10),
    "grouped": Case(g.GROUPED, [ROWS, *SQUARES], *MANY, groups_apart, 20),
    "matmul": Case(m.MATMUL, [MLP, (5, 5)], (85, 140), (300, 600), linear),
    "chain": Case(m.CHAIN, [MLP, ROW, MLP], (90, 150), (330, 660), lambda x, b, other: act(x + b) * other, 5),
    "geglu": Case(m.GEGLU, [MLP, (2, 11, 5), (5, 11)], (225, 420), (1980, 3960),
        lambda x, w, d: geglu(x, *w, d)),
    "rms_norm": Case(r.RMS_NORM, [FULL, ROW], (185, 280), (360, 810), norm),
    "recurrence": Case(r.LINEAR_RECURRENCE, [FULL, FULL], (270, 450), (180, 270), steps),
    "gru": Case(r.MIN_GRU, [FULL, FULL], (270, 450), (360, 540), lambda z, c: steps(1 - z, z * c)),
    "rms": Case(r.RMS_RECURRENCE, [FULL, FULL, ROW], (275, 550), (540, 1260),
        lambda a, b, w: steps(a, b, None, w)),
}  # fmt: skip
RECURRENT = [name for name, case in CASES.items() if case.sizes[:2] == [FULL, FULL]]


def sizes_of(work: Work, shape: dict[str, int]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in work.inputs(shape)]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_its_formula_on_random_inputs_of_its_sizes(name):
    torch.manual_seed(0)
    case = CASES[name]
    inputs = case.work.inputs(SHAPE)
    assert [tuple(t.shape) for t in inputs] == case.sizes
    assert {(t.dtype, t.device.type) for t in inputs} == {(torch.float32, gpu.device())}
    assert all(t.is_contiguous() for t in inputs)
    again = case.work.inputs(SHAPE)
    assert not any(torch.equal(*pair) for pair in zip(inputs, again, strict=True)), "random, every time"
    exact = [t.double() for t in inputs]
    torch.testing.assert_close(case.work.reference(*exact), case.formula(*exact))


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_operations_follow_the_contract(name):
    work, _, elements, flops, _, rows = CASES[name]
    elements, flops = ((*each, sum(each)) for each in (elements, flops))
    for at, direction in enumerate(DIRECTIONS):
        assert work.flops(SHAPE, direction) == flops[at]
        assert [work.min_bytes(SHAPE, size, direction) / size for size in (2, 4)] == [elements[at]] * 2
    inputs = work.inputs(SHAPE)
    moved = sum(t.numel() for t in (*inputs, work.reference(*inputs)))
    assert elements[0] == moved - rows, "all inputs are read and the result is written, once"


@pytest.mark.parametrize("name", CASES)
def test_axes_that_are_left_out_have_their_usual_sizes(name):
    work = CASES[name].work
    short = {axis: SHAPE[axis] for axis in ("batch", "width", "time")}
    whole = {**short, "groups": 100, "hidden": 20, "depth": 8, "out": 5}
    assert sizes_of(work, short) == sizes_of(work, whole)
    assert work.min_bytes(short, 2, "forward") == work.min_bytes(whole, 2, "forward")
    assert work.flops(short, "forward") == work.flops(whole, "forward")


@pytest.mark.parametrize("name", CASES)
def test_inputs_and_results_have_size_one(name):
    """Half precision holds them all, and none hides another from a check."""
    torch.manual_seed(0)
    inputs = CASES[name].work.inputs({"batch": 256, "time": 256, "width": 64, "groups": 6})
    result = CASES[name].work.reference(*inputs)
    assert 0.4 < result.std() < 1.6 and result.abs().max() < 50
    if name not in (*RECURRENT, "rms_norm"):
        assert abs(inputs[0].mean()) < 0.03 and 0.97 < inputs[0].std() < 1.03


def test_products_need_not_be_square():
    shape = {"batch": 3, "width": 5, "out": 9}
    assert m.MATMUL.reference(*m.MATMUL.inputs(shape)).shape == (3, 9)
    assert m.MATMUL.min_bytes(shape, 2, "backward") == 2 * (15 + 27 + 15 + 2 * 45)
    assert m.MATMUL.flops(shape, "forward") == 2 * 3 * 5 * 9
