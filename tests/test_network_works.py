"""The capstone's network is what its words say, step by step; and what it moves and computes."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labkit import device, network_works
from labkit.accuracy import Comparison
from labkit.network_works import EXPANSION, GROUPS, NETWORK, OUTPUTS
from labkit.recurrent_works import EPS, rms_norm
from labkit.sweeps import ALLOWED_ERROR

B, T, H = 3, 5, 8
SHAPE = {"batch": B, "time": T, "width": H}
LONG = {"batch": 16, "time": 64, "width": 32}
SHAPES = [SHAPE, {"batch": 1, "time": 1, "width": 4}, {"batch": 2, "time": 7, "width": 20}]
DIRECTIONS = ("forward", "backward", "forward_backward")
NAMES = ["w_in", "b_in", "gain_in", "w_gates", "b_gates", "gain", "w_gate_up", "w_down", "w_out", "b_out"]


def doubles(shape: dict[str, int] = SHAPE) -> list[Tensor]:
    return [t.double().requires_grad_() for t in NETWORK.inputs(shape)]


def linear_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    """weight (out, in)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def normed(row: Tensor, gain: Tensor) -> Tensor:
    return gain * row / ((row * row).sum() / len(row) + EPS).sqrt()


def gelu(value: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
    return value / 2 * (1 + inner.tanh())


@torch.no_grad()
def by_hand(x: Tensor, *weights: Tensor) -> Tensor:
    """A sequence after the other, step after step, a Linear for each head."""
    w_in, b_in, gain_in, w_gates, b_gates, gain, w_gate_up, w_down, w_out, b_out = weights
    batch, time, width = x.shape
    each = width // GROUPS
    own = [slice(g * each, (g + 1) * each) for g in range(GROUPS)]
    first = [linear_of(w_in[g].T, b_in[g]) for g in range(GROUPS)]
    logits = [linear_of(w_gates[g].T[:each], b_gates[g][:each]) for g in range(GROUPS)]
    candidates = [linear_of(w_gates[g].T[each:], b_gates[g][each:]) for g in range(GROUPS)]
    y = x.new_empty(batch, time, OUTPUTS)
    for row in range(batch):
        s, r = x.new_zeros(width), x.new_zeros(width)
        for t in range(time):
            features = torch.cat([first[g](x[row, t, own[g]]) for g in range(GROUPS)])
            features = normed(features, gain_in)
            logit = torch.cat([logits[g](features[own[g]]) for g in range(GROUPS)])
            candidate = torch.cat([candidates[g](features[own[g]]) for g in range(GROUPS)])
            z = 1 / (1 + (-logit).exp())
            s = (1 - z) * s + z * candidate
            r = normed((1 - z) * r + s, gain)
            inside = gelu(w_gate_up[0] @ r) * (w_gate_up[1] @ r)
            y[row, t] = w_out @ (r + w_down @ inside) + b_out
    return y


# What is computed


@pytest.mark.parametrize("shape", SHAPES)
def test_the_network_is_its_formula(shape):
    torch.manual_seed(0)
    inputs = doubles(shape)
    torch.testing.assert_close(NETWORK.reference(*inputs), by_hand(*inputs))


def test_each_head_multiplies_its_own_features():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    weight, bias = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    parts = [linear_of(weight[g].T, bias[g])(x[..., 3 * g : 3 * g + 3]) for g in range(2)]
    torch.testing.assert_close(network_works.heads(x, weight, bias), torch.cat(parts, -1))


def test_each_head_has_its_logits_before_its_candidates():
    gates = torch.tensor([[10, 11, 20, 21, 12, 13, 22, 23]])  # logits are 1x, candidates 2x
    logit, candidate = network_works.split(gates, 2)
    assert logit.tolist() == [[10, 11, 12, 13]]
    assert candidate.tolist() == [[20, 21, 22, 23]]
    logit, candidate = network_works.split(gates, 1)
    assert logit.tolist() == [[10, 11, 20, 21]] and candidate.tolist() == [[12, 13, 22, 23]]


def test_the_cell_without_memory_is_a_norm_of_its_candidates():
    """Where the gate is one, and where it is zero the states stay what they were: nothing."""
    torch.manual_seed(0)
    candidate, gain = torch.randn(B, T, H, dtype=torch.float64), torch.rand(H, dtype=torch.float64)
    opened = torch.cat([torch.full_like(candidate, 1e3), candidate], -1)
    torch.testing.assert_close(network_works.cell(opened, gain, 1), rms_norm(candidate, gain))
    closed = torch.cat([torch.full_like(candidate, -1e3), candidate], -1)
    assert not network_works.cell(closed, gain, 1).any()


def test_the_gate_of_geglu_comes_first_and_its_gelu_is_that_of_tanh():
    torch.manual_seed(0)
    x, both, down = (torch.randn(*size, dtype=torch.float64) for size in ((7, 3), (2, 5, 3), (3, 5)))
    want = (gelu(x @ both[0].T) * (x @ both[1].T)) @ down.T
    torch.testing.assert_close(network_works.geglu(x, both, down), want)


@pytest.mark.parametrize("at", range(T))
def test_an_output_depends_on_its_own_sequence_up_to_its_own_step(at):
    torch.manual_seed(0)
    x, *weights = doubles()
    (moved,) = torch.autograd.grad(NETWORK.reference(x, *weights)[1, at].square().sum(), x)
    assert moved[1, : at + 1].abs().amin((1,)).gt(0).all()
    assert not moved[1, at + 1 :].any() and not moved[[0, 2]].any()


# Inputs


def test_inputs_are_float32_of_the_networks_shapes():
    D, hidden = H // GROUPS, EXPANSION * H
    sizes = [
        (B, T, H),
        (GROUPS, D, D), (GROUPS, D), (H,),
        (GROUPS, D, 2 * D), (GROUPS, 2 * D), (H,),
        (2, hidden, H), (H, hidden),
        (OUTPUTS, H), (OUTPUTS,),
    ]  # fmt: skip
    inputs = NETWORK.inputs(SHAPE)
    assert [tuple(t.shape) for t in inputs] == sizes
    assert [tuple(t.shape) for t in network_works.weights(H)] == sizes[1:]
    assert {t.dtype for t in inputs} == {torch.float32}
    assert {t.device.type for t in inputs} == {device.name()}
    assert all(t.is_contiguous() for t in inputs)
    again = NETWORK.inputs(SHAPE)
    assert not any(torch.equal(*pair) for pair in zip(inputs, again, strict=True)), "random, every time"
    assert NETWORK.batched == (0,)


@pytest.mark.parametrize("width", [1, 2, 6, 127, 130])
def test_a_width_that_has_no_heads_is_refused(width):
    with pytest.raises(ValueError, match=f"width: {width} features cannot be split into 4 heads"):
        network_works.weights(width)
    with pytest.raises(ValueError, match="width"):
        NETWORK.inputs({**SHAPE, "width": width})


def test_no_layer_makes_its_features_vanish_or_grow():
    """Products keep the size of what they multiply, so that a check sees every layer in half precision."""
    torch.manual_seed(0)
    w_in, b_in, gain_in, w_gates, b_gates, gain, w_gate_up, w_down, w_out, b_out = network_works.weights(256)
    for weight, fan_in in ((w_in, 64), (w_gates, 64), (w_gate_up, 256), (w_down, 512), (w_out, 256)):
        assert weight.std().item() * fan_in**0.5 == pytest.approx(1, rel=0.05)
    for small in (b_in, b_gates, b_out, gain_in - 1, gain - 1):
        assert 0.05 < small.std() < 0.15 and abs(small.mean()) < 0.06


def test_results_have_a_usual_size_in_every_dtype():
    torch.manual_seed(0)
    inputs = NETWORK.inputs(LONG)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        result = NETWORK.reference(*(t.to(dtype) for t in inputs))
        assert result.shape == (16, 64, OUTPUTS) and result.dtype == dtype
        assert 0.5 < result.double().square().mean().sqrt() < 3


# Gradients


def test_every_input_has_a_gradient_and_no_part_of_a_weight_is_idle():
    torch.manual_seed(0)
    inputs = doubles()
    result = NETWORK.reference(*inputs)
    gradients = torch.autograd.grad(result, inputs, torch.randn_like(result))
    for name, tensor, gradient in zip(["x", *NAMES], inputs, gradients, strict=True):
        assert gradient.shape == tensor.shape and gradient.isfinite().all()
        assert gradient.ne(0).all(), f"the output does not depend on all of {name}"


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(NETWORK.reference, doubles({"batch": 2, "time": 3, "width": 4}))


@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
def test_a_weight_left_out_is_seen(at):
    """One for a gain, zero else; by the check of a sweep, in the dtype that allows the largest error."""
    torch.manual_seed(0)
    inputs = NETWORK.inputs(LONG)

    def without(*given: Tensor) -> Tensor:
        plain = torch.ones_like if NAMES[at].startswith("gain") else torch.zeros_like
        changed = [plain(t) if i == at + 1 else t for i, t in enumerate(given)]
        return network_works.network(*changed)

    error = Comparison(without, NETWORK.reference, "forward").complete(inputs)
    assert error > max(ALLOWED_ERROR.values())


def test_a_right_result_in_float32_is_far_from_the_allowed_error():
    torch.manual_seed(0)
    inputs = [t.requires_grad_() for t in NETWORK.inputs(LONG)]
    error = Comparison(NETWORK.reference, NETWORK.reference, "forward_backward").complete(inputs)
    assert error < ALLOWED_ERROR["float32"] / 100


@pytest.mark.parametrize("all_rows", [True, False])
def test_it_can_be_checked_row_by_row(all_rows):
    torch.manual_seed(0)
    inputs = [t.requires_grad_() for t in NETWORK.inputs({"batch": 200, "time": 4, "width": 8})]
    reference = NETWORK.reference
    comparison = Comparison(reference, reference, "forward_backward", NETWORK.batched)
    assert comparison.at_full_size(inputs, all_rows=all_rows) < 1e-5


# Bytes and operations


@pytest.mark.parametrize("width", [4, 8, 128])
def test_products_are_as_many_as_each_weight_has_numbers(width):
    numbers = {
        name: t.numel() for name, t in zip(NAMES, network_works.weights(width), strict=True) if name[0] == "w"
    }
    assert list(network_works.products(width).values()) == list(numbers.values())
    assert list(network_works.products(width)) == [
        "input heads",
        "gate heads",
        "gate and up",
        "down",
        "output head",
    ]


@pytest.mark.parametrize("width", [4, 8, 128])
def test_ends_are_what_each_layer_reads_and_writes(width):
    w_in, b_in, _, w_gates, b_gates, _, w_gate_up, w_down, w_out, b_out = network_works.weights(width)
    x = torch.randn(1, width, device=w_in.device)
    features = network_works.heads(x, w_in, b_in)
    inside = nn.functional.linear(x, w_gate_up[0]) * nn.functional.linear(x, w_gate_up[1])
    layers = {
        "input heads": (x, features),
        "gate heads": (features, network_works.heads(features, w_gates, b_gates)),
        "gate and up": (x, inside),
        "down": (inside, nn.functional.linear(inside, w_down)),
        "output head": (x, nn.functional.linear(x, w_out, b_out)),
    }
    found = {name: sum(t.numel() for t in pair) for name, pair in layers.items()}
    assert network_works.ends(width) == found
    assert list(network_works.ends(width)) == list(network_works.products(width)), "they are read together"


def test_rows_are_the_steps_of_all_sequences():
    assert network_works.rows(SHAPE) == NETWORK.inputs(SHAPE)[0].numel() // H == 15


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_inputs_result_and_gradients(shape):
    x, *weights = [t.requires_grad_() for t in NETWORK.inputs(shape)]
    y = NETWORK.reference(x, *weights)
    dy = torch.ones_like(y)
    gradients = torch.autograd.grad(y, (x, *weights), dy)
    forward = sum(t.nbytes for t in (x, *weights, y))
    backward = sum(t.nbytes for t in (x, *weights, dy, *gradients))
    found = [NETWORK.min_bytes(shape, 4, direction) for direction in DIRECTIONS]
    assert found == [forward, backward, forward + backward]
    halves = [NETWORK.min_bytes(shape, 2, direction) for direction in DIRECTIONS]
    assert [2 * each for each in halves] == found


@pytest.mark.parametrize("shape", [SHAPE, {**SHAPE, "batch": 1, "time": 1}, SHAPES[2]])
def test_operations_are_those_that_pytorch_counts_for_the_products(shape):
    """Heads of two features and more: what einsum does with one it does not call a product."""
    inputs = [t.requires_grad_() for t in NETWORK.inputs(shape)]
    with FlopCounterMode(display=False) as ahead:
        y = NETWORK.reference(*inputs)
    with FlopCounterMode(display=False) as back:
        torch.autograd.grad(y, inputs, torch.ones_like(y))
    forward, backward = ahead.get_total_flops(), back.get_total_flops()
    assert forward > 0
    found = [NETWORK.flops(shape, direction) for direction in DIRECTIONS]
    assert found == [forward, backward, forward + backward]


def test_what_is_checked_at_a_smaller_size_is_few_sequences_and_a_power_of_two_of_steps():
    assert set(NETWORK.sample) == {"batch", "time"}
    assert NETWORK.sample["batch"] <= 64
    assert NETWORK.sample["time"] <= 512 and NETWORK.sample["time"].bit_count() == 1
