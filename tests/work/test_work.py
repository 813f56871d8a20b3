"""What works cost and compute, counted from their tensors and written out anew."""

import pytest
import torch
from torch.nn import functional

from labkit import work

SIZES = {"batch": 3, "width": 5, "out": 7}
GROUPS = {"batch": 3, "groups": 2, "width": 5}
ROWS = 3


def gelu(z):
    return functional.gelu(z, approximate="tanh")


def by_group(x, weight, bias):
    parts = [part @ w + b for part, w, b in zip(x.chunk(len(weight), 1), weight, bias, strict=True)]
    return torch.cat(parts, 1)


def layers(x, weight):
    for w in weight:
        x = x + (x @ w.T).clamp(min=0).square()
    return x


WORKS = {
    "matmul": (work.matmul, SIZES, lambda x, w: x @ w.T),
    "square matmul": (work.matmul, {"batch": 3, "width": 5}, lambda x, w: x @ w.T),
    "linear_gelu": (work.linear_gelu, SIZES, lambda x, w, b: gelu(x @ w.T + b)),
    "linear_relu": (work.linear_relu, SIZES, lambda x, w, b: (x @ w.T + b).clamp(min=0)),
    "gate_up": (work.gate_up, SIZES, lambda x, w: gelu(x @ w[0].T) * (x @ w[1].T)),
    "grouped": (work.grouped, GROUPS, by_group),
    "network": (work.network, {"batch": 3, "width": 5, "depth": 4}, layers),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_product_is_what_its_docstring_says_and_costs_what_its_tensors_have(name):
    of, size, written_out = WORKS[name]
    given = [each.double() for each in of.inputs(size)]
    y = of.reference(*given)
    torch.testing.assert_close(y, written_out(*given))
    matrices = given[1].numel()
    counted = given if name == "grouped" else given[:2]  # elsewhere a bias is too small to count
    assert of.min_bytes(size, 2, "forward") == 2 * (sum(each.numel() for each in counted) + y.numel())
    # Each element of the matrices is multiplied with each row, and the product is added.
    assert of.flops(size, "forward") == 2 * ROWS * matrices


@pytest.mark.parametrize("name", ["matmul", "square matmul", "grouped", "network"])
def test_a_backward_pass_reads_the_inputs_and_dy_and_writes_all_gradients(name):
    of, size, _ = WORKS[name]
    given = of.inputs(size)
    moved = 2 * sum(each.numel() for each in given) + of.reference(*given).numel()
    assert of.min_bytes(size, 4, "backward") == 4 * moved
    assert of.flops(size, "backward") == 2 * of.flops(size, "forward")


def test_a_norm_and_a_softmax_are_what_their_docstrings_say_and_read_x_once():
    x, weight = work.rms_norm.inputs({"batch": 3, "width": 5})
    x, weight = x.double(), weight.double()
    rows = [w * row / (row.square().sum() / 5 + 1e-6).sqrt() for row, w in zip(x, [weight] * 3, strict=True)]
    torch.testing.assert_close(work.rms_norm.reference(x, weight), torch.stack(rows))
    (x,) = work.softmax.inputs({"batch": 3, "width": 5})
    powers = x.double().exp()
    torch.testing.assert_close(work.softmax.reference(x.double()), powers / powers.sum(1, keepdim=True))
    for each in (work.rms_norm, work.softmax):
        moved = [each.min_bytes({"batch": 3, "width": 5}, 2, way) for way in ("forward", "backward")]
        assert moved == [2 * 2 * 15, 3 * 2 * 15]
        assert each.flops({"batch": 3, "width": 5}, "forward") in (4 * 15, 5 * 15)


def test_a_gru_is_that_of_pytorch_in_both_layouts():
    size = {"batch": 2, "time": 4, "width": 3}
    x, *weights = (each.double() for each in work.gru.inputs(size))
    module = torch.nn.GRU(3, 3, batch_first=True, dtype=torch.float64, device=x.device)
    for mine, theirs in zip(weights, module.parameters(), strict=True):
        theirs.data.copy_(mine)
    want = module(x)[0]
    torch.testing.assert_close(work.gru.reference(x, *weights), want)
    flat = torch.cat([each.flatten() for each in weights])
    torch.testing.assert_close(work.gru_by_time.reference(x.transpose(0, 1), flat).transpose(0, 1), want)
    assert work.gru.min_bytes(size, 2, "forward") == 2 * (2 * x.numel() + flat.numel())
    assert work.gru.flops(size, "forward") == 2 * 8 * sum(each.numel() for each in weights[:2])


def test_time_last_is_the_recurrence_of_views_whose_steps_lie_side_by_side():
    a, b = work.time_last.inputs({"batch": 2, "time": 4, "width": 3})
    assert a.shape == (2, 4, 3) and a.stride() == b.stride() == (12, 1, 4)


@pytest.mark.parametrize("normed", [False, True])
def test_a_recurrence_is_what_its_docstring_says_and_moves_each_tensor_once(normed):
    of, size = work.rms_recurrence if normed else work.linear_recurrence, {"batch": 2, "time": 4, "width": 3}
    a, b, *weight = (each.double() for each in of.inputs(size))
    assert a.shape == b.shape == (2, 4, 3) and ((a > 0) & (a < 1)).all()
    for sequence, h in enumerate(of.reference(a, b, *weight)):
        state = [0.0] * 3
        for t in range(4):
            state = [a[sequence, t, n] * state[n] + b[sequence, t, n] for n in range(3)]
            if normed:
                root = (sum(u * u for u in state) / 3 + 1e-6) ** 0.5
                state = [w * u / root for w, u in zip(weight[0], state, strict=True)]
            torch.testing.assert_close(h[t], torch.stack(state))
    moved = [of.min_bytes(size, 2, way) for way in ("forward", "backward")]
    assert moved == [2 * 3 * 24, 2 * (6 if normed else 5) * 24]
