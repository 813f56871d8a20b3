"""What the layers of an MLP move and compute, by the measurement contract."""

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from labkit import device, machine, works
from labkit.accuracy import Comparison
from labkit.machine import Roofs
from labkit.mlp_works import (
    CHAIN,
    GATE_UP,
    GEGLU,
    LINEAR_GELU,
    MATMUL,
    chain,
    gate_up,
    geglu,
    gelu,
    linear_gelu,
)
from labkit.sweeps import ALLOWED_ERROR

B, D, H = 7, 5, 11
SHAPE = {"batch": B, "width": D, "hidden": H}
DIRECTIONS = ("forward", "backward", "forward_backward")
WORKS = {"matmul": MATMUL, "linear_gelu": LINEAR_GELU, "chain": CHAIN, "gate_up": GATE_UP, "geglu": GEGLU}
BOTH_WAYS = [name for name in WORKS if name != "gate_up"]
SIZES = {
    "matmul": [(B, D), (D, D)],
    "linear_gelu": [(B, D), (H, D), (H,)],
    "chain": [(B, D), (D,), (B, D)],
    "gate_up": [(B, D), (2, H, D)],
    "geglu": [(B, D), (2, H, D), (D, H)],
}


def test_bytes_follow_the_contract():
    x, w, h, n = B * D, H * D, B * H, B * D
    expected = {
        "matmul": (2 * x + D * D, 3 * x + 2 * D * D),
        "linear_gelu": (x + h + w, x + h + x + 2 * w),  # X + Y + W; X + dY + dX + W + dW
        "chain": (3 * n, 5 * n),
        "geglu": (2 * x + 3 * w, 3 * x + 6 * w),
    }
    for itemsize in (2, 4):
        for name, (forward, backward) in expected.items():
            found = [WORKS[name].min_bytes(SHAPE, itemsize, d) for d in DIRECTIONS]
            assert found == [forward * itemsize, backward * itemsize, (forward + backward) * itemsize]
        assert GATE_UP.min_bytes(SHAPE, itemsize, "forward") == (x + 2 * w + h) * itemsize


@pytest.mark.parametrize("name", WORKS)
def test_forward_bytes_are_those_of_inputs_and_output(name):
    inputs = WORKS[name].inputs(SHAPE)
    tensors = [*inputs, WORKS[name].reference(*inputs)]
    biases = {"linear_gelu": H, "chain": D}  # one row: it does not count
    elements = sum(t.numel() for t in tensors) - biases.get(name, 0)
    assert WORKS[name].min_bytes(SHAPE, 4, "forward") == 4 * elements


def test_operations_are_those_of_the_products():
    expected = {"matmul": 2 * B * D * D, "linear_gelu": 2 * B * D * H, "geglu": 6 * B * D * H}
    for name, forward in expected.items():
        assert [WORKS[name].flops(SHAPE, d) for d in DIRECTIONS] == [forward, 2 * forward, 3 * forward]
    assert GATE_UP.flops(SHAPE, "forward") == 2 * B * D * 2 * H
    assert [CHAIN.flops(SHAPE, d) for d in DIRECTIONS] == [11 * B * D, 22 * B * D, 33 * B * D]


def test_gate_and_up_are_forward_only():
    with pytest.raises(ValueError, match="direction: gate and up are measured forward only, not backward"):
        GATE_UP.min_bytes(SHAPE, 2, "backward")


@pytest.mark.parametrize("name", WORKS)
def test_inputs_are_float32_of_the_layers_shapes(name):
    tensors = WORKS[name].inputs(SHAPE)
    assert [tuple(t.shape) for t in tensors] == SIZES[name]
    assert {t.dtype for t in tensors} == {torch.float32}
    assert {t.device.type for t in tensors} == {device.name()}
    again = WORKS[name].inputs(SHAPE)
    assert not any(torch.equal(*pair) for pair in zip(tensors, again, strict=True)), "random, every time"


def test_hidden_is_four_times_the_width_and_out_the_width_where_left_out():
    shape, wide = {"batch": 3, "width": 5}, {"batch": 3, "width": 5, "hidden": 20, "out": 5}
    for name in WORKS:
        sizes = [tuple(t.shape) for t in WORKS[name].inputs(shape)]
        assert sizes == [tuple(t.shape) for t in WORKS[name].inputs(wide)]
        assert WORKS[name].min_bytes(shape, 2, "forward") == WORKS[name].min_bytes(wide, 2, "forward")
        assert WORKS[name].flops(shape, "forward") == WORKS[name].flops(wide, "forward")
    assert tuple(GEGLU.inputs(shape)[1].shape) == (2, 20, 5)


def test_a_matmul_need_not_be_square():
    shape = {"batch": 3, "width": 5, "out": 9}
    x, weight = MATMUL.inputs(shape)
    assert MATMUL.reference(x, weight).shape == (3, 9)
    assert MATMUL.min_bytes(shape, 2, "forward") == 2 * (15 + 45 + 27)
    assert MATMUL.min_bytes(shape, 2, "backward") == 2 * (15 + 27 + 15 + 2 * 45)
    assert MATMUL.flops(shape, "forward") == 2 * 3 * 5 * 9


@pytest.mark.parametrize("name", WORKS)
def test_outputs_have_size_one(name):
    torch.manual_seed(0)
    shape = {"batch": 300, "width": 200}
    inputs = WORKS[name].inputs(shape)
    assert abs(inputs[0].mean().item()) < 0.02 and 0.98 < inputs[0].std().item() < 1.02
    assert 0.4 < WORKS[name].reference(*inputs).std().item() < 1.6


def test_references_are_the_formulas():
    def act(z):
        return z / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))

    def doubles(work):
        return [t.double() for t in work.inputs(SHAPE)]

    torch.manual_seed(0)
    x, weight = doubles(MATMUL)
    torch.testing.assert_close(MATMUL.reference(x, weight), torch.einsum("bi,oi->bo", x, weight))
    x, weight, bias = doubles(LINEAR_GELU)
    torch.testing.assert_close(linear_gelu(x, weight, bias), act(torch.einsum("bi,oi->bo", x, weight) + bias))
    x, bias, other = doubles(CHAIN)
    expected = torch.stack([act(row + bias) * times for row, times in zip(x, other, strict=True)])
    torch.testing.assert_close(chain(x, bias, other), expected)
    x, w_gate_up, w_down = doubles(GEGLU)
    gate, up = (torch.einsum("bi,hi->bh", x, w) for w in w_gate_up)
    torch.testing.assert_close(gate_up(x, w_gate_up), act(gate) * up)
    expected = torch.einsum("bh,oh->bo", act(gate) * up, w_down)
    torch.testing.assert_close(geglu(x, w_gate_up, w_down), expected)
    assert [w.reference for w in (LINEAR_GELU, CHAIN, GATE_UP, GEGLU)] == [linear_gelu, chain, gate_up, geglu]


@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("all_rows", [True, False])
def test_every_work_can_be_checked_row_by_row(name, all_rows):
    """The inputs that have rows are named: else the reference of some rows would not be that of all."""
    work = WORKS[name]
    inputs = [t.requires_grad_() for t in work.inputs({"batch": 200, "width": 24})]
    comparison = Comparison(work.reference, work.reference, "forward_backward", work.batched)
    assert comparison.at_full_size(inputs, all_rows=all_rows) < 1e-5


# Is what an honest bfloat16 kernel does far enough from what is called wrong?


class Fused(torch.autograd.Function):
    """GeGLU as a fused kernel does it: gate and up saved in bfloat16, the activation in float32."""

    @staticmethod
    def forward(ctx, x, w_gate_up, w_down):
        gate, up = (functional.linear(x.float(), w.float()) for w in w_gate_up)
        hidden = (gelu(gate) * up).to(x.dtype)
        ctx.save_for_backward(x, w_gate_up, w_down, gate.to(x.dtype), up.to(x.dtype))
        return functional.linear(hidden, w_down)

    @staticmethod
    def backward(ctx, dy):
        x, w_gate_up, w_down, gate, up = ctx.saved_tensors
        with torch.enable_grad():
            g, u = gate.float().requires_grad_(), up.float().requires_grad_()
            hidden = gelu(g) * u
        dhidden = (dy @ w_down).float()  # rounded to bfloat16 between the two kernels
        dgate, dup = (t.to(x.dtype) for t in torch.autograd.grad(hidden, (g, u), dhidden))
        dx = dgate @ w_gate_up[0] + dup @ w_gate_up[1]
        return dx, torch.stack([dgate.T @ x, dup.T @ x]), dy.T @ hidden.to(x.dtype)


def in_bfloat16(work, shape) -> list[Tensor]:
    torch.manual_seed(0)
    return [t.bfloat16().requires_grad_() for t in work.inputs(shape)]


@pytest.mark.parametrize("call", [geglu, Fused.apply], ids=["eager", "fused"])
@pytest.mark.parametrize("shape", [{"batch": 64, "width": 96}, {"batch": 700, "width": 64, "hidden": 172}])
def test_honest_bfloat16_passes_with_room(call, shape):
    comparison = Comparison(call, geglu, "forward_backward")
    inputs = in_bfloat16(GEGLU, shape)
    errors = [comparison.complete(inputs), comparison.at_full_size(inputs, all_rows=False)]
    assert 1e-3 < max(errors) < ALLOWED_ERROR["bfloat16"] / 2


def test_the_other_gelu_is_as_good_as_bfloat16_tells():
    """erf or tanh: they differ by less than a rounding, so no check in bfloat16 tells them apart."""

    def with_erf(x, w_gate_up, w_down):
        gate, up = (functional.linear(x, w) for w in w_gate_up)
        return functional.linear(functional.gelu(gate) * up, w_down)

    inputs = [t.double().requires_grad_() for t in GEGLU.inputs({"batch": 64, "width": 64})]
    assert 1e-5 < Comparison(with_erf, geglu, "forward_backward").complete(inputs) < 2e-3


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda x, w, d: geglu(x, w.flip(0), d),
        lambda x, w, d: geglu(x, w, d * 1.03),
        lambda x, w, d: functional.linear(functional.silu(x @ w[0].T) * (x @ w[1].T), d),
        lambda x, w, d: functional.linear(gelu((x @ w[0].T) * (x @ w[1].T)), d),
    ],
    ids=["up first", "3 % too large", "silu", "activation after the product"],
)
def test_a_wrong_geglu_is_far_outside(spoilt):
    inputs = in_bfloat16(GEGLU, {"batch": 64, "width": 96})
    assert Comparison(spoilt, geglu, "forward_backward").complete(inputs) > ALLOWED_ERROR["bfloat16"]


# Floors of panels whose axes are batch and width

ROOFS = Roofs(
    kind="live",
    device="toy",
    date="2026-01-01",
    copy=((1000, 1e-3), (10**10, 1e4)),  # 10^6 bytes per microsecond at every size
    matmul={"bfloat16": 4e14},
    node_us=2.0,
    host_us=9.0,
)


def test_floors_and_regimes_take_the_hidden_layer_from_the_width(monkeypatch):
    monkeypatch.setattr(machine, "roofs", lambda: ROOFS)
    highest = {
        100: ("memory", 2 * (2 * 100 * 8192 + 3 * 4 * 8192**2) / 1e6),
        1000: ("arithmetic", 6 * 1000 * 4 * 8192**2 / 4e8),
    }
    for batch, (name, us) in highest.items():
        panel = pd.DataFrame({"width": [16, 1024, 8192], "batch": batch, "dtype": "bfloat16"})
        line = works.floors(geglu=GEGLU)(panel)["floor of geglu"]
        assert (line(16), line(8192)) == pytest.approx((2.0, us))
        assert [span for _, _, span in works.regimes(GEGLU)(panel)] == ["launch", name]
