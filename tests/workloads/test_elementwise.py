"""What the layers of the course compute and move, by the measurement contract, and what a check sees."""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labkit import gpu
from labkit.measure import roofline
from labkit.measure.accuracy import ALLOWED_ERROR, Comparison
from labkit.measure.contender import Work
from labkit.measure.roofline import Roofs
from labkit.workloads import elementwise, grouped, mlp, network, recurrent, roofline_curves
from labkit.workloads.network import EXPANSION, GROUPS, NETWORK, OUTPUTS

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
    elements: tuple[int, int | None]
    """Read or written forward and backward; None where there is no backward."""
    flops: tuple[int, int | None]
    formula: Callable[..., Tensor]
    rows: int = 0
    """Elements of a bias, which the contract does not count: it is one row."""


ROWS, FULL, STATE, ROW, MLP = (6, 20), (6, 3, 5), (6, 5), (5,), (6, 5)
SQUARES = [(4, 5, 5), (4, 5)]
MANY = (340, 560), (1200, 2400)
g, m, r = grouped, mlp, recurrent
CASES: dict[str, Case] = {
    "affine": Case(elementwise.AFFINE, [MLP, ROW, ROW], (60, 90), (60, 120), lambda x, w, b: x * w + b, 10),
    "linear": Case(elementwise.LINEAR, [MLP, (5, 5), ROW], (85, 140), (300, 600), linear, 5),
    "row": Case(elementwise.product(lambda _, n: gpu.randn(n), 1), [MLP, ROW], (60, None), (30, None),
        torch.mul, 5),
    "all": Case(elementwise.product(gpu.randn, 2), [MLP, MLP], (90, None), (30, None), torch.mul),
    "grouped": Case(g.GROUPED, [ROWS, *SQUARES], *MANY, groups_apart, 20),
    "matmul": Case(m.MATMUL, [MLP, (5, 5)], (85, 140), (300, 600), linear),
    "linear_gelu": Case(m.LINEAR_GELU, [MLP, (11, 5), (11,)], (151, 236), (660, 1320),
        lambda *t: act(linear(*t)), 11),
    "chain": Case(m.CHAIN, [MLP, ROW, MLP], (90, 150), (330, 660), lambda x, b, other: act(x + b) * other, 5),
    "geglu": Case(m.GEGLU, [MLP, (2, 11, 5), (5, 11)], (225, 420), (1980, 3960),
        lambda x, w, d: geglu(x, *w, d)),
    "rms_norm": Case(r.RMS_NORM, [FULL, ROW], (185, 280), (360, 810), norm),
    "recurrence": Case(r.LINEAR_RECURRENCE, [FULL, FULL], (270, 450), (180, 270), steps),
    "gru": Case(r.MIN_GRU, [FULL, FULL], (270, 450), (360, 540), lambda z, c: steps(1 - z, z * c)),
    "rms": Case(r.RMS_RECURRENCE, [FULL, FULL, ROW], (275, 550), (540, 1260),
        lambda a, b, w: steps(a, b, None, w)),
}  # fmt: skip
WORKS = {name: case.work for name, case in CASES.items()} | {"network": NETWORK}
FORWARD_ONLY = [name for name, case in CASES.items() if case.elements[1] is None]
RECURRENT = [name for name, case in CASES.items() if case.sizes[:2] == [FULL, FULL]]
LONG = {"batch": 16, "time": 256, "width": 64}


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
    asked, refused = (DIRECTIONS[:1], DIRECTIONS[1:]) if name in FORWARD_ONLY else (DIRECTIONS, ())
    elements, flops = ((each[0], each[1], sum(n or 0 for n in each)) for each in (elements, flops))
    for at, direction in enumerate(asked):
        assert work.flops(SHAPE, direction) == flops[at]
        assert [work.min_bytes(SHAPE, size, direction) / size for size in (2, 4)] == [elements[at]] * 2
    for direction in refused:
        with pytest.raises(ValueError, match="direction: "):
            work.min_bytes(SHAPE, 2, direction)
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
    inputs = CASES[name].work.inputs({**LONG, "batch": 256, "groups": 6})
    result = CASES[name].work.reference(*inputs)
    assert 0.4 < result.std() < 1.6 and result.abs().max() < 50
    if name not in (*RECURRENT, "rms_norm"):
        assert abs(inputs[0].mean()) < 0.03 and 0.97 < inputs[0].std() < 1.03


@pytest.mark.parametrize("name", WORKS)
def test_every_work_can_be_checked_row_by_row_unless_it_is_checked_in_full(name):
    """The inputs that have rows are named: else the reference of some rows would not be that of all."""
    torch.manual_seed(0)
    work, direction = WORKS[name], "forward" if name in FORWARD_ONLY else "forward_backward"
    inputs = [t.requires_grad_() for t in work.inputs({"batch": 200, "time": 2, "width": 8, "groups": 2})]
    comparison = Comparison(work.reference, work.reference, direction, work.batched)
    if work.sample:
        assert work.sample["batch"] <= 64 and work.sample.get("time", 1) in (1, 16, 64, 256)
        assert comparison.at_full_size(inputs) < ALLOWED_ERROR["float32"] / 10
    else:
        assert name in ("row", "all"), "these have a second operand with rows"


def test_products_need_not_be_square():
    shape = {"batch": 3, "width": 5, "out": 9}
    assert m.MATMUL.reference(*m.MATMUL.inputs(shape)).shape == (3, 9)
    assert m.MATMUL.min_bytes(shape, 2, "backward") == 2 * (15 + 27 + 15 + 2 * 45)
    assert m.MATMUL.flops(shape, "forward") == 2 * 3 * 5 * 9


# Recurrences


@pytest.mark.parametrize("name", ["recurrence", "gru", "rms"])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_state_lost_between_blocks_of_time_is_seen_at_the_sampled_size(name, size, direction):
    """Also backward, where only the gradient's way from block to block is cut; in every dtype."""
    torch.manual_seed(0)
    work = CASES[name].work

    def forgetful(*inputs: Tensor) -> Tensor:
        parts, state = [], None
        for start in range(0, inputs[0].shape[1], size):
            block = [t[:, start : start + size] if t.ndim == 3 else t for t in inputs]
            parts.append(work.reference(*block, state))
            state = parts[-1][:, -1].detach() if direction != "forward" else None
        return torch.cat(parts, 1)

    capped = {axis: min(size, work.sample.get(axis, size)) for axis, size in {**LONG, "time": 4096}.items()}
    inputs = [t.requires_grad_(direction != "forward") for t in work.inputs(capped)]
    error = Comparison(forgetful, work.reference, direction).complete(inputs)
    assert error > 2 * max(ALLOWED_ERROR.values())


# The network of the last lesson


def whole_network(x, w_in, b_in, gain_in, w_gates, b_gates, gain, w_gate_up, w_down, w_out, b_out):
    """A Linear for each head before and within, a gate, two states from step to step, and a GeGLU MLP."""
    each = x.shape[-1] // GROUPS
    features = norm(groups_apart(x, w_in, b_in), gain_in)
    gates = groups_apart(features, w_gates, b_gates).unflatten(-1, (GROUPS, 2 * each))
    z, candidate = gates[..., :each].flatten(-2).sigmoid(), gates[..., each:].flatten(-2)
    s, r, states = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        s = (1 - z[:, t]) * s + z[:, t] * candidate[:, t]
        r = norm((1 - z[:, t]) * r + s, gain)
        states.append(r)
    r = torch.stack(states, 1)
    return linear(r + geglu(r, *w_gate_up, w_down), w_out, b_out)


@pytest.mark.parametrize(("batch", "time", "width"), [(3, 5, 8), (1, 1, 4), (2, 7, 20)])
def test_the_network_is_its_formula_and_costs_what_pytorch_counts(batch, time, width):
    torch.manual_seed(0)
    shape = {"batch": batch, "time": time, "width": width}
    inputs = [t.double().requires_grad_() for t in NETWORK.inputs(shape)]
    assert inputs[0].shape == (batch, time, width) and inputs[-1].shape == (OUTPUTS,)
    assert inputs[7].shape == (2, EXPANSION * width, width)
    with FlopCounterMode(display=False) as ahead:
        y = NETWORK.reference(*inputs)
    torch.testing.assert_close(y, whole_network(*inputs))
    dy = torch.ones_like(y)
    with FlopCounterMode(display=False) as back:
        gradients = torch.autograd.grad(y, inputs, dy)
    flops = [ahead.get_total_flops(), back.get_total_flops()]
    if width > 4:  # what einsum does with heads of one feature PyTorch does not call a product
        assert [NETWORK.flops(shape, direction) for direction in DIRECTIONS] == [*flops, sum(flops)]
    moved = [sum(t.numel() for t in each) for each in ((*inputs, y), (*inputs, dy, *gradients))]
    for size in (2, 4):
        found = [NETWORK.min_bytes(shape, size, direction) for direction in DIRECTIONS]
        assert found == [size * n for n in (*moved, sum(moved))]
    with pytest.raises(ValueError, match="width: 130"):
        NETWORK.inputs({**shape, "width": 130})


@pytest.mark.parametrize("width", [4, 128])
def test_products_are_what_each_layer_multiplies(width):
    w_in, _, _, w_gates, _, _, w_gate_up, w_down, w_out, _ = network.weights(width)
    products = [w.numel() for w in (w_in, w_gates, w_gate_up, w_down, w_out)]
    assert list(network.multiplications(width).values()) == products


# Floors of a panel, whose axis is the width

RATES = {"float32": 1e14, "bfloat16": 4e14}
# 10^6 bytes per microsecond at every size
ROOFS = Roofs("live", "toy", "2026-01-01", ((1000, 1e-3), (10**10, 1e4)), RATES, 2.0, 9.0)


def panel(*widths, batch=1000, dtype="float32"):
    return pd.DataFrame({"width": widths, "batch": batch, "dtype": dtype})


@pytest.mark.parametrize(
    ("batch", "dtype", "width", "expected"),
    [
        (1000, "float32", 16, 2.0), (1000, "bfloat16", 1000, 6.0),  # a launch; bytes
        (1000, "float32", 400, 3.84),  # (2 B N + N N) 4 bytes at 10^6 per us
        (5000, "float32", 2000, 400.0),  # 2 B N N operations at 10^8 per us
    ],
)  # fmt: skip
def test_the_floor_is_the_highest_of_three_of_the_panel(monkeypatch, batch, dtype, width, expected):
    monkeypatch.setattr(roofline, "roofs", lambda: ROOFS)
    lines = roofline_curves.floors(affine=elementwise.AFFINE, linear=elementwise.LINEAR)(
        panel(16, 4096, batch=batch, dtype=dtype)
    )
    assert list(lines) == ["floor of affine", "floor of linear"]
    assert lines["floor of linear"](width) == pytest.approx(expected)
    assert roofline_curves.floors(linear=elementwise.LINEAR)(panel()) == {}
