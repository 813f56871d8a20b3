"""What recurrent layers move and compute, and that a check of one sees what became of early inputs."""

import pytest
import torch
from torch import Tensor

from labkit import device
from labkit.accuracy import Comparison
from labkit.recurrent_works import (
    EPS,
    LINEAR_RECURRENCE,
    LINEAR_RECURRENCE_FROM,
    MIN_GRU,
    MIN_GRU_FROM,
    RMS_NORM,
    RMS_RECURRENCE,
    RMS_RECURRENCE_FROM,
    linear_recurrence,
    min_gru,
    rms_norm,
    rms_recurrence,
)
from labkit.sweeps import ALLOWED_ERROR, Contender

B, T, H = 3, 5, 4
SHAPE = {"batch": B, "time": T, "width": H}
DIRECTIONS = ("forward", "backward", "forward_backward")
FULL, STATE, ROW = (B, T, H), (B, H), (H,)
WORKS = {
    "rms_norm": RMS_NORM,
    "linear": LINEAR_RECURRENCE,
    "gru": MIN_GRU,
    "rms": RMS_RECURRENCE,
    "linear from": LINEAR_RECURRENCE_FROM,
    "gru from": MIN_GRU_FROM,
    "rms from": RMS_RECURRENCE_FROM,
}
RECURRENT = [name for name in WORKS if name != "rms_norm"]
FROM_ZERO = ["linear", "gru", "rms"]
SIZES = {
    "rms_norm": [FULL, ROW],
    "linear": [FULL, FULL],
    "gru": [FULL, FULL],
    "rms": [FULL, FULL, ROW],
    "linear from": [FULL, FULL, STATE],
    "gru from": [FULL, FULL, STATE],
    "rms from": [FULL, FULL, ROW, STATE],
}
LONG = {"batch": 16, "time": 256, "width": 64}


def doubles(name: str, shape: dict[str, int] = SHAPE, grad: bool = False) -> list[Tensor]:
    return [t.double().requires_grad_(grad) for t in WORKS[name].inputs(shape)]


def resized(name: str, shape: dict[str, int]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The sizes of SIZES at another shape."""
    batch, time, width = shape["batch"], shape["time"], shape["width"]
    return {FULL: (batch, time, width), STATE: (batch, width), ROW: (width,)}


def solved(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """h_t = A_t (h0 + the sum of b_s / A_s up to t), A_t being the product of a up to t."""
    products = a.cumprod(1)
    first = 0 if h0 is None else h0[:, None]
    return products * (first + (b / products).cumsum(1))


def by_hand(a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None = None) -> Tensor:
    """Number after number, in Python's floats."""
    batch, time, width = a.shape
    w, states = weight.tolist(), []
    for row in range(batch):
        h = [0.0] * width if h0 is None else h0[row].tolist()
        states.append([])
        for t in range(time):
            u = [a[row, t, j].item() * h[j] + b[row, t, j].item() for j in range(width)]
            size = (sum(value * value for value in u) / width + EPS) ** 0.5
            h = [w[j] * u[j] / size for j in range(width)]
            states[-1].append(h)
    return torch.tensor(states, dtype=torch.float64, device=a.device).reshape(batch, time, width)


# Inputs


@pytest.mark.parametrize("name", WORKS)
def test_inputs_are_float32_of_the_layers_shapes(name):
    tensors = WORKS[name].inputs(SHAPE)
    assert [tuple(t.shape) for t in tensors] == SIZES[name]
    assert {t.dtype for t in tensors} == {torch.float32}
    assert {t.device.type for t in tensors} == {device.name()}
    assert all(t.is_contiguous() for t in tensors)
    again = WORKS[name].inputs(SHAPE)
    assert not any(torch.equal(*pair) for pair in zip(tensors, again, strict=True)), "random, every time"


@pytest.mark.parametrize("name", WORKS)
def test_batched_are_the_inputs_that_have_sequences(name):
    batched = tuple(i for i, size in enumerate(SIZES[name]) if size[0] == B)
    assert WORKS[name].batched == batched


@pytest.mark.parametrize("name", RECURRENT)
def test_gates_lie_between_zero_and_one_and_some_keep_a_state_for_hundreds_of_steps(name):
    torch.manual_seed(0)
    gates = WORKS[name].inputs(LONG)[0].double()
    kept = 1 - gates if "gru" in name else gates
    assert kept.min() >= 0 and kept.max() <= 1
    whole = kept.prod(1)  # (B, H): what is left of a first state
    assert 0.02 < (whole > 0.1).double().mean() < 0.15
    assert (whole < 1e-6).double().mean() > 0.5, "and most do not"
    assert 0.05 < (kept < 0.2).double().mean() < 0.3


@pytest.mark.parametrize("name", ["rms_norm", "rms", "rms from"])
def test_weights_lie_around_one(name):
    torch.manual_seed(0)
    weight = WORKS[name].inputs({"batch": 1, "time": 1, "width": 1000})[SIZES[name].index(ROW)]
    assert abs(weight.mean() - 1) < 0.01 and 0.09 < weight.std() < 0.11


def test_rows_of_the_norm_differ_in_size():
    torch.manual_seed(0)
    x, weight = RMS_NORM.inputs(LONG)
    sizes = x.square().mean(-1).sqrt()
    assert sizes.max() > 5 and sizes.min() < 0.2
    assert 0.9 < rms_norm(x, weight).square().mean().sqrt() < 1.1


@pytest.mark.parametrize("name", RECURRENT)
def test_states_have_size_one_in_the_lanes_that_remember_and_in_those_that_do_not(name):
    """No lane hides another one from a check, and half precision holds them all."""
    torch.manual_seed(0)
    inputs = doubles(name, {**LONG, "time": 1024})
    states = WORKS[name].reference(*inputs)
    assert states.abs().max() < 20
    kept = (1 - inputs[0] if "gru" in name else inputs[0]).mean(1)
    order = kept.flatten().argsort()
    lanes = states.square().mean(1).flatten()[order]
    slices = [part.mean().item() ** 0.5 for part in lanes.chunk(8)]
    assert all(0.4 < size < 2.5 for size in slices), slices


# References


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("sizes", [(3, 5, 4), (3, 1, 4), (3, 0, 4), (1, 1, 1), (0, 2, 3), (0, 0, 3)])
def test_the_result_has_the_shape_and_dtype_of_the_sequences(name, sizes):
    shape = dict(zip(SHAPE, sizes, strict=True))
    inputs = WORKS[name].inputs(shape)
    assert [tuple(t.shape) for t in inputs] == [resized(name, shape)[size] for size in SIZES[name]]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        result = WORKS[name].reference(*(t.to(dtype) for t in inputs))
        assert result.shape == sizes and result.dtype == dtype
        assert result.device == inputs[0].device and result.isfinite().all()


def test_the_norm_is_its_formula():
    torch.manual_seed(0)
    x, weight = doubles("rms_norm")
    want = x / (x.square().sum(2, keepdim=True) / H + EPS).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight), want)
    small = x * 1e-4  # where EPS shows
    want = small / (small.square().sum(2, keepdim=True) / H + 1e-6).sqrt() * weight
    torch.testing.assert_close(rms_norm(small, weight), want)
    assert not rms_norm(torch.zeros_like(x), weight).any()


@pytest.mark.parametrize("time", [1, 2, 5, 12])
def test_the_linear_recurrence_is_its_closed_form(time):
    torch.manual_seed(0)
    a, b, h0 = doubles("linear from", {**SHAPE, "time": time})
    a = 0.1 + 0.9 * a  # the closed form divides by products of gates
    torch.testing.assert_close(linear_recurrence(a, b), solved(a, b))
    torch.testing.assert_close(linear_recurrence(a, b, h0), solved(a, b, h0))


@pytest.mark.parametrize("time", [1, 2, 5, 12])
def test_the_gated_unit_is_the_linear_recurrence_of_its_gates(time):
    torch.manual_seed(0)
    z, candidate, h0 = doubles("gru from", {**SHAPE, "time": time})
    z = 0.9 * z
    torch.testing.assert_close(min_gru(z, candidate), solved(1 - z, z * candidate))
    torch.testing.assert_close(min_gru(z, candidate, h0), solved(1 - z, z * candidate, h0))


@pytest.mark.parametrize("time", [0, 1, 2, 5, 12])
def test_the_recurrence_with_a_norm_is_its_formula(time):
    torch.manual_seed(0)
    a, b, weight, h0 = doubles("rms from", {**SHAPE, "time": time})
    torch.testing.assert_close(rms_recurrence(a, b, weight), by_hand(a, b, weight))
    torch.testing.assert_close(rms_recurrence(a, b, weight, h0), by_hand(a, b, weight, h0))


def test_by_numbers_that_one_can_follow():
    a, b = (torch.tensor(row, dtype=torch.float64).view(1, 3, 1) for row in ([9, 0.5, 2], [4, 1, -5]))
    assert linear_recurrence(a, b).flatten().tolist() == [4, 3, 1]
    assert linear_recurrence(a, b, torch.ones(1, 1).double()).flatten().tolist() == [13, 7.5, 10]
    z, candidate = (torch.tensor(row, dtype=torch.float64).view(1, 3, 1) for row in ([0.5, 0, 1], [4, 7, -5]))
    assert min_gru(z, candidate).flatten().tolist() == [2, 2, -5]
    u = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    got = rms_recurrence(torch.zeros_like(u), u, torch.tensor([1.0, -2.0]).double(), eps=0)
    torch.testing.assert_close(got, torch.tensor([[[3.0, -8.0]]]).double() / 12.5**0.5)


def test_without_gates_the_recurrences_are_no_recurrences():
    torch.manual_seed(0)
    a, b, weight, h0 = doubles("rms from")
    torch.testing.assert_close(linear_recurrence(0 * a, b, h0), b)
    torch.testing.assert_close(min_gru(0 * a + 1, b, h0), b)
    torch.testing.assert_close(rms_recurrence(0 * a, b, weight, h0), rms_norm(b, weight))
    kept = h0[:, None].expand(B, T, H)
    torch.testing.assert_close(linear_recurrence(0 * a + 1, 0 * b, h0), kept)
    torch.testing.assert_close(min_gru(0 * a, b, h0), kept)


def test_eps_is_added_to_the_mean_square():
    torch.manual_seed(0)
    a, b, weight = doubles("rms", {**SHAPE, "time": 1})
    for eps in (0.0, 0.5):
        want = weight * b / (b.square().mean(-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(rms_recurrence(a, b, weight, eps=eps), want)
    zeros = torch.zeros(B, T, H, dtype=torch.float64, device=a.device, requires_grad=True)
    states = rms_recurrence(zeros, zeros, weight)
    assert not states.any()
    (gradient,) = torch.autograd.grad(states.sum(), zeros)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", FROM_ZERO)
def test_the_first_state_is_zero_where_left_out(name):
    torch.manual_seed(0)
    *inputs, h0 = doubles(f"{name} from")
    reference = WORKS[name].reference
    assert torch.equal(reference(*inputs), reference(*inputs, torch.zeros_like(h0)))
    assert not torch.allclose(reference(*inputs)[:, 0], reference(*inputs, h0)[:, 0])


@pytest.mark.parametrize("name", FROM_ZERO)
@pytest.mark.parametrize("at", [0, 1, 3, T])
def test_a_sequence_goes_on_from_the_state_that_its_first_part_left(name, at):
    torch.manual_seed(0)
    *inputs, h0 = doubles(f"{name} from")
    reference = WORKS[name].reference

    def part(steps: slice, state: Tensor) -> Tensor:
        return reference(*(t[:, steps] if t.ndim == 3 else t for t in inputs), state)

    first = part(slice(0, at), h0)
    rest = part(slice(at, T), first[:, -1] if at else h0)
    torch.testing.assert_close(torch.cat([first, rest], 1), reference(*inputs, h0))


@pytest.mark.parametrize("function", [linear_recurrence, min_gru])
def test_sequences_of_different_lengths_are_an_error(function):
    with pytest.raises(ValueError):
        function(torch.ones(2, 3, 4), torch.ones(2, 2, 4))
    with pytest.raises(ValueError):
        rms_recurrence(torch.ones(2, 3, 4), torch.ones(2, 2, 4), torch.ones(4))


# Gradients


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("time", [1, 4])
def test_gradients_are_those_of_finite_differences(name, time):
    torch.manual_seed(0)
    inputs = doubles(name, {"batch": 2, "time": time, "width": 3}, grad=True)
    assert torch.autograd.gradcheck(WORKS[name].reference, inputs)


def test_gradients_of_the_linear_recurrence_run_backwards_in_time():
    """The gradient of the state is a linear recurrence too: of the gates of the next step, from the end."""
    torch.manual_seed(0)
    a, b, h0 = doubles("linear from", grad=True)
    h = linear_recurrence(a, b, h0)
    upstream = torch.randn_like(h)
    da, db, dh0 = torch.autograd.grad(h, (a, b, h0), upstream)
    following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
    state = linear_recurrence(following.flip(1), upstream.flip(1)).flip(1)
    before = torch.cat([h0[:, None], h[:, :-1]], 1)
    torch.testing.assert_close(db, state)
    torch.testing.assert_close(da, state * before)
    torch.testing.assert_close(dh0, a[:, 0] * state[:, 0])


@pytest.mark.parametrize("name", WORKS)
def test_without_steps_every_input_has_a_gradient(name):
    """Of zeros where it is not empty: backward passes of T = 0 are no special case."""
    inputs = doubles(name, {**SHAPE, "time": 0}, grad=True)
    result = WORKS[name].reference(*inputs)
    gradients = torch.autograd.grad(result, inputs, torch.ones_like(result))
    assert [g.shape for g in gradients] == [t.shape for t in inputs]
    assert not any(g.any() for g in gradients)


# Bytes and operations


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("rms_norm", 2 * 60 + 4, 3 * 60 + 2 * 4),
        ("linear", 3 * 60, 5 * 60),
        ("gru", 3 * 60, 5 * 60),
        ("rms", 3 * 60 + 4, 6 * 60 + 2 * 4),
        ("linear from", 3 * 60 + 12, 5 * 60 + 2 * 12),
        ("gru from", 3 * 60 + 12, 5 * 60 + 2 * 12),
        ("rms from", 3 * 60 + 4 + 12, 6 * 60 + 2 * (4 + 12)),
    ],
)
def test_bytes_by_hand(name, forward, backward):
    """3 sequences of 5 steps of 4 features: 60 elements; a weight of 4, a first state of 12."""
    for itemsize in (2, 4):
        found = [WORKS[name].min_bytes(SHAPE, itemsize, direction) for direction in DIRECTIONS]
        assert found == [itemsize * n for n in (forward, backward, forward + backward)]


@pytest.mark.parametrize("name", WORKS)
def test_forward_bytes_are_those_of_inputs_and_result(name):
    inputs = WORKS[name].inputs(SHAPE)
    result = WORKS[name].reference(*inputs)
    assert WORKS[name].min_bytes(SHAPE, 4, "forward") == sum(t.nbytes for t in (*inputs, result))


@pytest.mark.parametrize("name", WORKS)
def test_backward_bytes_are_those_of_what_it_reads_and_the_gradients(name):
    """dy and the gradient of each input; x of the norm, h and a gate else, and b below a norm."""
    inputs = WORKS[name].inputs(SHAPE)
    read = {"rms_norm": 1, "rms": 3, "rms from": 3}.get(name, 2)
    small = sum(t.numel() for t in inputs if t.shape != FULL)
    elements = (1 + read) * B * T * H + small + sum(t.numel() for t in inputs)
    assert WORKS[name].min_bytes(SHAPE, 4, "backward") == 4 * elements


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [("rms_norm", 4, 9), ("linear", 2, 3), ("gru", 4, 6), ("rms", 6, 14)],
)
def test_operations_are_so_many_for_each_element(name, forward, backward):
    works = [WORKS[name], WORKS.get(f"{name} from", WORKS[name])]
    for work in works:
        found = [work.flops(SHAPE, direction) for direction in DIRECTIONS]
        assert found == [60 * n for n in (forward, backward, forward + backward)]


@pytest.mark.parametrize("name", WORKS)
def test_without_steps_there_is_nothing_to_compute(name):
    assert WORKS[name].flops({**SHAPE, "time": 0}, "forward_backward") == 0


# What a sweep does with them


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("all_rows", [True, False])
def test_every_work_can_be_checked_row_by_row(name, all_rows):
    """A sequence is a row: what comes first in the inputs comes first in the result."""
    inputs = [t.requires_grad_() for t in WORKS[name].inputs({"batch": 200, "time": 6, "width": 5})]
    reference, batched = WORKS[name].reference, WORKS[name].batched
    comparison = Comparison(reference, reference, "forward_backward", batched)
    assert comparison.at_full_size(inputs, all_rows=all_rows) < 1e-5


@pytest.mark.parametrize("name", WORKS)
def test_a_right_result_in_float32_is_far_from_the_allowed_error(name):
    torch.manual_seed(0)
    inputs = [t.requires_grad_() for t in WORKS[name].inputs(LONG)]
    reference = WORKS[name].reference
    error = Comparison(reference, reference, "forward_backward").complete(inputs)
    assert error < ALLOWED_ERROR["float32"] / 100


@pytest.mark.parametrize("name", FROM_ZERO)
@pytest.mark.parametrize("steps", [32, 128])
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_state_lost_between_blocks_of_time_is_seen_at_the_sampled_size(name, steps, direction):
    """Also backward, where only the gradient's way from block to block is cut; in every dtype."""
    torch.manual_seed(0)
    work = WORKS[name]

    def forgetful(*inputs: Tensor) -> Tensor:
        parts, state = [], None
        for start in range(0, inputs[0].shape[1], steps):
            block = [t[:, start : start + steps] if t.ndim == 3 else t for t in inputs]
            parts.append(work.reference(*block, state))
            state = parts[-1][:, -1].detach() if direction != "forward" else None
        return torch.cat(parts, 1)

    capped = {axis: min(size, work.sample.get(axis, size)) for axis, size in {**LONG, "time": 4096}.items()}
    inputs = [t.requires_grad_(direction != "forward") for t in work.inputs(capped)]
    error = Comparison(forgetful, work.reference, direction).complete(inputs)
    assert error > 2 * max(ALLOWED_ERROR.values())


@pytest.mark.parametrize("name", FROM_ZERO)
def test_the_last_state_of_a_sample_depends_on_the_first_half_of_the_inputs(name):
    torch.manual_seed(0)
    work = WORKS[name]
    inputs = doubles(name, LONG)
    other = doubles(name, LONG)[1]
    changed = inputs[1].clone()
    changed[:, :128] = other[:, :128]
    last = work.reference(*inputs)[:, -1]
    moved = work.reference(inputs[0], changed, *inputs[2:])[:, -1] - last
    assert moved.norm() > 2 * max(ALLOWED_ERROR.values()) * last.norm()


@pytest.mark.parametrize("name", [name for name in WORKS if name.endswith("from")])
def test_a_first_state_left_out_is_seen(name):
    torch.manual_seed(0)
    work = WORKS[name]
    inputs = work.inputs(LONG)
    without = Comparison(lambda *given: work.reference(*given[:-1]), work.reference, "forward")
    assert without.complete(inputs) > 2 * max(ALLOWED_ERROR.values())


def test_what_is_checked_at_a_smaller_size_is_few_sequences_and_a_power_of_two_of_steps():
    for work in WORKS.values():
        assert set(work.sample) == {"batch", "time"}
        assert work.sample["batch"] <= 64
        assert work.sample["time"] <= 512 and work.sample["time"].bit_count() == 1


def test_contenders_of_works_that_differ_are_told_apart():
    """Else a sweep would go on with rows of another layer."""
    prints = {Contender("one", torch.mul, work).fingerprint() for work in WORKS.values()}
    assert len(prints) == len(WORKS)
