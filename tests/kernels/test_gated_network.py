"""labkit.kernels.gated_network: two recurrences in a loop, and the layers around it, in one kernel each."""

import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from launches import ROOM, recorded
from products import assert_close, bf16, fp16, fp32, gpu
from recurring import (
    GPU,
    INTERPRETED,
    LARGE,
    all_close,
    assert_compiles,
    assert_rounded_once,
    equal,
    gradients,
    meta,
    moved,
    offsets,
    weight_of,
)
from torch.nn import functional

from labkit import checks, codegen, counts, device
from labkit import network_works as work
from labkit.kernels import gated_cell, gated_heads, gated_network, mlp_outputs
from labkit.kernels.common import Gpu
from labkit.kernels.rms_recurrence import rms_recurrence_plan

pytestmark = pytest.mark.usefixtures("cache")
KERNELS = ("cell_kernel", "cell_grad_kernel", "gates_kernel", "outputs_kernel")
FAR = 2**31 + 40
"""More rows than 32 bits count."""


class Case(NamedTuple):
    """A function, the same in plain PyTorch, inputs for some sizes, and usual sizes."""

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[tuple[int, ...]], tuple[torch.Tensor, ...]]
    sizes: tuple[int, ...]

    def __repr__(self):
        return self.name


def scaled(*shape):
    return torch.randn(shape) * max(shape[-1], 1) ** -0.5


def cell_of(shape):
    """Gates for states of this shape, and a gain, some of which are zero: there r does not tell u."""
    return torch.randn(*shape[:-1], 2 * shape[-1]), weight_of(shape[-1])


def heads_of(sizes):
    """x of so many rows, for groups of a width, and the weights."""
    rows, groups, width = sizes
    biases = torch.randn(groups, width), torch.randn(groups, 2 * width)
    first, second = scaled(groups, width, width), scaled(groups, 2 * width, width).mT.contiguous()
    x, gain = torch.randn(rows, groups * width), 1 + 0.1 * torch.randn(groups * width)
    return x, first, biases[0], gain, second, biases[1]


def mlp_of(sizes):
    """States of so many rows and a width, and the weights of an MLP so wide inside with so many outputs."""
    rows, width, inner, outputs = sizes
    matrices = scaled(2, inner, width), scaled(width, inner), scaled(outputs, width)
    return torch.randn(rows, width), *matrices, torch.randn(outputs)


def plain_heads(x, w_in, b_in, gain, w_gates, b_gates):
    normed = functional.rms_norm(work.heads(x, w_in, b_in), gain.shape, gain, 1e-6)
    return work.heads(normed, w_gates, b_gates)


def plain_outputs(states, w_gate_up, w_down, w_out, b_out):
    return functional.linear(states + work.geglu(states, w_gate_up, w_down), w_out, b_out)


def cell(groups):
    call, reference = (partial(function, groups=groups) for function in (gated_cell, work.cell))
    return Case("gated_cell", call, reference, cell_of, (2, 3, 20))


CELL = cell(4)
HEADS = Case("gated_heads", gated_heads, plain_heads, heads_of, (40, 4, 8))
OUTPUTS = Case("mlp_outputs", mlp_outputs, plain_outputs, mlp_of, (70, 32, 64, 32))
LAYERS = {HEADS: "gates_kernel", OUTPUTS: "outputs_kernel"}
every_function = pytest.mark.parametrize("case", [CELL, *LAYERS], ids=repr)
every_layer = pytest.mark.parametrize("case", LAYERS, ids=repr)


def drawn(case, *sizes, dtype=fp32, grad=False):
    torch.manual_seed(0)
    made = case.inputs(sizes or case.sizes)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in made]


def exact(case, tensors, upstream=None):
    return gradients(case.reference, [t.double() for t in tensors], upstream)


def examine(case, *sizes, layouts=("contiguous",), dtypes=checks.DTYPES, training=True):
    """Into NaN between fences, twice. With ``training`` the cell's gradients, too; for them its backward
    reads both states rounded at each step. The layers' one kernel has none; it rounds between products."""
    whole = case.name == CELL.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        options = dict(
            dtypes=dtypes, gradients=whole and training, roundings=8 if whole else 4, name=case.name
        )
        checks.check(case.call, case.reference, case.inputs, shapes=sizes, **options)


# --- all three ----------------------------------------------------------------------------------------


@every_function
def test_every_layout_and_dtype_is_right(case):
    for training in (True, False) if case is CELL else (False,):
        examine(case, case.sizes, layouts=checks.LAYOUTS, training=training)


@every_function
def test_autocast_computes_in_half_and_gives_gradients_in_float32(case):
    tensors = drawn(case, grad=True)
    for dtype in (bf16, fp16):
        rounded = [t.detach().to(dtype) for t in tensors]
        with torch.autocast(device.name(), dtype=dtype):
            y, mixed = case.call(*tensors), case.call(tensors[0].to(dtype), *tensors[1:])
        want, *wants = gradients(case.call, rounded)
        assert y.dtype is dtype and torch.equal(y, want) and torch.equal(mixed, want)
        assert equal(torch.autograd.grad(y, tensors, 2 * y.detach()), [g.float() for g in wants])
        with torch.autocast(device.name(), dtype=dtype), torch.no_grad():
            assert torch.equal(case.call(*tensors), case.call(*rounded))


@every_function
@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_takes_it_whole(case):
    def layer(first, *rest):
        return torch.tanh(case.call(0.5 * first, *rest))

    assert_compiles(layer, drawn(case))
    halves = drawn(case, dtype=bf16)
    with torch.no_grad():
        one, other = torch.compile(layer, fullgraph=True, backend="aot_eager")(*halves), layer(*halves)
    assert torch.equal(one, other)


@every_function
def test_gradients_of_some_inputs_with_an_expanded_upstream(case):
    tensors = drawn(case)
    like, everything = case.reference(*tensors), range(len(tensors))
    row = torch.randn(like.shape[-1], device=like.device)
    wants = exact(case, tensors, row.double().expand_as(like))[1:]
    for needed in ((), (0,), (1,), everything):
        given = [t.clone().requires_grad_(n in needed) for n, t in enumerate(tensors)]
        y = case.call(*given)
        assert y.requires_grad is bool(needed)
        if needed:
            y.backward(row.expand_as(y))
        for n, (tensor, want) in enumerate(zip(given, wants, strict=True)):
            assert (tensor.grad is not None) is (n in needed)
            if tensor.grad is not None:
                assert_close(tensor.grad, want)


@every_function
def test_what_has_no_derivative_is_refused(case):
    tensors = drawn(case, grad=True)
    y = case.call(*tensors)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y, tensors, torch.ones_like(y), create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(case.call)(*(t.detach().to(bf16)[None] for t in tensors))


@every_function
def test_nan_stays_in_its_row(case):
    tensors = drawn(case, dtype=bf16)
    want, at = case.call(*tensors), 1 if case is CELL else 5
    tensors[0][at, ..., 3] = math.nan
    got = case.call(*tensors)
    others = torch.arange(len(got), device=got.device) != at
    assert torch.equal(got[others], want[others]) and got[at].isnan().all()


@every_function
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU or none")
def test_a_second_gpu_is_made_current(case):
    tensors = [t.to("cuda:1") for t in drawn(case)]
    all_close(gradients(case.call, tensors), exact(case, tensors))
    halves = [t.to(bf16) for t in tensors]
    assert checks.relative_error(case.call(*halves), case.reference(*(t.double() for t in halves))) < 0.02
    assert torch.cuda.current_device() == 0


GATES, GAIN = torch.ones(2, 3, 16), torch.ones(8)
X, W, B, NORM, W2, B2 = (torch.ones(s) for s in ((5, 8), (2, 4, 4), (2, 4), (8,), (2, 4, 8), (2, 8)))
R, PAIR, DOWN, OUT, BIAS = (torch.ones(s) for s in ((5, 8), (2, 6, 8), (8, 6), (3, 8), (3,)))
NARROW = torch.ones(1, 9000), torch.ones(9000, 1, 1), torch.ones(9000, 1), torch.ones(9000)
LONG = torch.empty(1, 2**21, 2**10, device="meta"), torch.empty(2**9, device="meta")
WRONG = {
    "a gain of two dimensions": (gated_cell, "gain", "(any)", GATES, GAIN[None], 4),
    "no features": (gated_cell, "gain", "1 to 4096", GATES[..., :0], GAIN[:0], 1),
    "too many features": (gated_cell, "gain", "1 to 4096", torch.ones(1, 1, 8194), torch.ones(4097), 1),
    "groups that leave a rest": (gated_cell, "groups", "8 features", GATES, GAIN, 3),
    "no groups": (gated_cell, "groups", "8 features", GATES, GAIN, 0),
    "gates of two dimensions": (gated_cell, "gates", "(any, any, 16)", GATES[0], GAIN, 4),
    "gates of the state's width": (gated_cell, "gates", "(any, any, 16)", GATES[..., :8], GAIN, 4),
    "gates in half": (gated_cell, "gates", "torch.float32", GATES.half(), GAIN, 4),
    "gates elsewhere": (gated_cell, "gates", "cpu", GATES.to("meta"), GAIN, 4),
    "whole numbers": (gated_cell, "gain", "float16 or bfloat16", GATES.int(), GAIN.int(), 4),
    "too long a sequence": (gated_cell, "gates", "2**31", *LONG, 4),
    "x of another width": (gated_heads, "x", "(..., 8)", torch.ones(5, 9), W, B, NORM, W2, B2),
    "heads that are not square": (gated_heads, "w_in", "(2, 4, 4)", X, W2, B, NORM, W2, B2),
    "a matrix for all heads": (gated_heads, "w_in", "(any, any, any)", X, W[0], B, NORM, W2, B2),
    "a bias for all heads": (gated_heads, "b_in", "(2, 4)", X, W, B[0], NORM, W2, B2),
    "a gain a head": (gated_heads, "gain", "(8)", X, W, B, B, W2, B2),
    "gates without candidates": (gated_heads, "w_gates", "(2, 4, 8)", X, W, B, NORM, W, B2),
    "biases of gates only": (gated_heads, "b_gates", "(2, 8)", X, W, B, NORM, W2, B),
    "too wide a norm": (
        gated_heads, "gain", "1 to 8192", *NARROW, torch.ones(9000, 1, 2), torch.ones(9000, 2)
    ),
    "no heads": (gated_heads, "gain", "1 to 8192", X[:, :0], W[:0], B[:0], NORM[:0], W2[:0], B2[:0]),
    "x in double": (gated_heads, "x", "float16 or bfloat16", X.double(), W, B, NORM, W2, B2),
    "states that are a number": (mlp_outputs, "states", "(..., any)", R[0, 0], PAIR, DOWN, OUT, BIAS),
    "gate without up": (mlp_outputs, "w_gate_up", "(2, any, 8)", R, PAIR[0], DOWN, OUT, BIAS),
    "down, transposed": (mlp_outputs, "w_down", "(8, 6)", R, PAIR, DOWN.T, OUT, BIAS),
    "an output head of another width": (mlp_outputs, "w_out", "(any, 8)", R, PAIR, DOWN, DOWN.T[:, 1:], BIAS),
    "a bias of another length": (mlp_outputs, "b_out", "(3)", R, PAIR, DOWN, OUT, BIAS[1:]),
    "a bias in half": (mlp_outputs, "b_out", "torch.float32", R, PAIR, DOWN, OUT, BIAS.half()),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_names_the_argument_and_what_it_should_be(wrong):
    call, argument, wanted, *given = WRONG[wrong]
    given = [t.to(device.name()) if isinstance(t, torch.Tensor) and not t.is_meta else t for t in given]
    wanted = re.escape(wanted.replace("cpu", device.name()))
    with pytest.raises(ValueError, match=rf"^{argument}: .*{wanted}"):
        call(*given)


# --- the cell -----------------------------------------------------------------------------------------


TIMES = ((2, time, 8) for time in (1, 2, 5, 33))


@pytest.mark.parametrize(
    "shape", [*TIMES, (1, 2, 4), (3, 2, 36), (0, 3, 8), (2, 0, 8), (1, 2, 1028)], ids=str
)
def test_a_cell_of_any_shape_is_right(shape):
    examine(CELL, shape, dtypes=(fp32,))


@pytest.mark.parametrize(("groups", "width"), [(1, 5), (3, 33), (5, 5), (2, 64), (1, 1)])
def test_any_number_of_groups_is_right(groups, width):
    examine(cell(groups), (2, 3, width), dtypes=(fp32, bf16))


def test_float32_is_off_at_most_twice_as_far_as_eager():
    tensors = drawn(CELL, 4, 33, 100)
    found = gradients(CELL.call, tensors), gradients(CELL.reference, tensors), exact(CELL, tensors)
    for made, eager, want in zip(*found, strict=True):
        assert checks.relative_error(made, want) <= 2 * checks.relative_error(eager, want)


def in_reverse(dr, gates, gain, r, s, groups):
    """dgates and dgain in float64, from the states as they were stored, and so rounded."""
    logit, candidate = work.split(gates, groups)
    z, none = logit.sigmoid(), torch.zeros_like(r[:, :1])
    last_r, last_s = (torch.cat([none, states[:, :-1]], 1) for states in (r, s))
    u = (1 - z) * last_r + last_s + z * (candidate - last_s)
    scale = (u.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    unit, g, du, ds = u * scale, torch.zeros_like(u), torch.zeros_like(u), torch.zeros_like(u)
    carry = later = torch.zeros_like(u[:, 0])  # of r_t and of s_t, from step t + 1
    for t in reversed(range(dr.shape[1])):
        g[:, t] = dr[:, t] + carry
        wg = gain * g[:, t]
        du[:, t] = scale[:, t] * (wg - unit[:, t] * (wg * unit[:, t]).mean(-1, keepdim=True))
        ds[:, t] = du[:, t] + later
        carry, later = (1 - z[:, t]) * du[:, t], (1 - z[:, t]) * ds[:, t]
    pair = z * (1 - z) * (ds * (candidate - last_s) - du * last_r), z * ds
    by_head = torch.stack([one.unflatten(-1, (groups, -1)) for one in pair], -2)
    return by_head.flatten(-3), (g * unit).sum((0, 1))


def test_over_two_hundred_steps_half_precision_is_rounded_once():
    """A state, a carry or a part of the gain's gradient in 16 bits is off by several times as much."""
    gates, gain = drawn(CELL, 3, 200, 36, dtype=fp16)
    doubles = gates.double(), gain.double()
    r, *got = gradients(CELL.call, (gates, gain))
    again, s = gated_network.gated_cell_training(gates, gain, 4)
    logit, candidate = work.split(doubles[0], 4)
    assert torch.equal(again, r)
    assert_rounded_once(r, work.cell(*doubles, 4))
    assert_rounded_once(s, work.min_gru(logit.sigmoid(), candidate))
    wants = in_reverse(2 * r.double(), *doubles, r.double(), s.double(), 4)
    for one, want in zip(got, wants, strict=True):
        assert_rounded_once(one, want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gates_that_are_shut_or_open():
    """Logits near to, and beyond, what a sigmoid can tell from 0 and 1."""
    gates, gain = drawn(CELL, 2, 5, 8)
    for logit in (-20.0, 20.0, -200.0, 200.0):
        gates.unflatten(-1, (4, 2, -1))[..., 0, :] = logit
        made = gradients(CELL.call, (gates, gain))
        assert all(t.isfinite().all() for t in made)
        if logit > -200:  # there float32 has a gate of 0
            all_close(made, exact(CELL, (gates, gain)))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_number_of_groups_first_met_inside_a_whole_graph():
    assert_compiles(
        lambda gates, gain: gated_cell(gates, gain, 10) - gated_cell(gates, gain, 5), drawn(CELL, 2, 3, 20)
    )


def test_the_backward_keeps_both_states():
    tensors, saved = drawn(CELL, grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        r = CELL.call(*tensors)
    assert len(saved) == 4 and {t.data_ptr() for t in (*tensors, r)} < {t.data_ptr() for t in saved}


@INTERPRETED
@pytest.mark.parametrize("shape", [(2, 5, 36), (1, 1, 8), (3, 2, 20)], ids=str)
def test_every_number_is_read_and_written_once(shape):
    (B, _, H), N, tensors, made = shape, math.prod(shape), drawn(CELL, *shape, grad=True), []
    with torch.no_grad():
        (inference,) = counts.count(lambda: CELL.call(*tensors)).launches
    assert moved(inference) == (2 * N + B * H, N), "s is made for training only"
    (training,) = counts.count(lambda: made.append(CELL.call(*tensors))).launches
    upstream = torch.ones_like(made[0])
    back, total = counts.count(lambda: torch.autograd.grad(made[0], tensors, upstream)).launches
    assert moved(training) == (2 * N + B * H, 2 * N)
    assert moved(back) == (3 * N + 2 * (N - B * H) + B * H, 2 * N + B * H), "all but the last of both states"
    assert moved(total) == (B * H, H)


@INTERPRETED
def test_without_sequences_or_steps_no_kernel_is_launched():
    for shape in ((0, 3, 8), (2, 0, 8)):
        tensors = drawn(CELL, *shape)
        found = counts.count(lambda tensors=tensors: gradients(CELL.call, tensors)).launches
        assert not [launch.name for launch in found if launch.programs], "a GPU refuses an empty grid"


@GPU
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_two_thousand_steps_are_right(dtype):
    tensors = drawn(CELL, 16, 2048, 128, dtype=dtype)
    for got, want in zip(gradients(CELL.call, tensors), exact(CELL, tensors), strict=True):
        assert checks.relative_error(got, want) < {fp32: 1e-5, bf16: 2e-2}[dtype]


# --- the layers around it -----------------------------------------------------------------------------

SIZES = {
    HEADS: ((1, 4, 8), (33, 1, 5), (5, 3, 16), (7, 2, 64), (0, 4, 8), (3, 8, 1)),
    OUTPUTS: (
        *((1, 32, 64, 32), (65, 20, 40, 3), (3, 128, 96, 17), (64, 1, 1, 1)),
        *((5, 8, 0, 4), (5, 0, 8, 4), (0, 8, 8, 8), (5, 8, 8, 0)),
    ),
}


@pytest.mark.parametrize(
    ("case", "sizes"), [(case, one) for case, all_ in SIZES.items() for one in all_], ids=str
)
def test_layers_of_any_rows_and_widths_are_right(case, sizes):
    examine(case, sizes, dtypes=(bf16, fp16))


def test_deep_sums_of_halves_are_those_of_float32():
    """With roundings only where a product begins; a sum in 16 bits is off by several times as much."""

    def rounded(value):
        return value.to(fp16).double()

    given = drawn(HEADS, 40, 1, 128, dtype=fp16)
    x, w_in, b_in, gain, *second = (t.double() for t in given)
    normed = functional.rms_norm(work.heads(x, w_in, b_in), gain.shape, gain, 1e-6)
    assert checks.relative_error(gated_heads(*given), work.heads(rounded(normed), *second)) < 2.6e-4
    given = drawn(OUTPUTS, 40, 128, 4096, 96, dtype=fp16)
    states, w_gate_up, w_down, w_out, b_out = (t.double() for t in given)
    gate, up = (states @ weight.T for weight in w_gate_up)
    hidden = rounded(functional.gelu(gate, approximate="tanh") * up)
    want = functional.linear(rounded(states + hidden @ w_down.T), w_out, b_out)
    assert checks.relative_error(mlp_outputs(*given), want) < 2.6e-4


@pytest.mark.parametrize("aligned", [True, False])
def test_outputs_with_and_without_descriptors_are_the_same(aligned, monkeypatch):
    tensors = drawn(OUTPUTS, 70, 64, 72, 24, dtype=bf16)
    want = mlp_outputs(*tensors)
    if aligned:
        its = gated_network.gpu_of(tensors[0].device)
        lacks = Gpu(its.multiprocessors, its.shared_bytes, tile_copies=False)
        monkeypatch.setattr(gated_network, "gpu_of", lambda where: lacks)
    else:  # two bytes beside what a descriptor may begin at
        tensors = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t) for t in tensors]
        assert tensors[0].data_ptr() % 16 == 2
    assert checks.relative_error(mlp_outputs(*tensors), want) < 1e-6


@INTERPRETED
@every_layer
def test_one_kernel_without_gradients_in_half_precision(case):
    def names(tensors):
        return [launch.name for launch in counts.count(lambda: case.call(*tensors)).launches]

    tensors, kernel = drawn(case, dtype=bf16), LAYERS[case]
    assert names(tensors) == [kernel]
    assert kernel not in names(drawn(case))
    wide, many = {HEADS: ((3, 4, 64), (3, 16, 4)), OUTPUTS: ((3, 160, 16, 4), (3, 16, 16, 129))}[case]
    assert kernel not in names(drawn(case, *wide, dtype=bf16))
    assert kernel not in names(drawn(case, *many, dtype=bf16)), "tiles of heads are at least 16 wide"
    tensors[2].requires_grad_()
    assert kernel not in names(tensors)
    with torch.no_grad():
        assert names(tensors) == [kernel]


@INTERPRETED
def test_both_move_rows_once_and_weights_once_a_program(monkeypatch):
    monkeypatch.setattr(gated_network, "gpu_of", lambda where: Gpu(1, 0, True))
    for case, sizes, programs in ((HEADS, (139, 4, 8), 4), (OUTPUTS, (139, 32, 64, 24), 3)):
        tensors = drawn(case, *sizes, dtype=bf16)
        (launch,) = counts.count(lambda case=case, tensors=tensors: case.call(*tensors)).launches
        rows, *weights = (t.numel() for t in tensors)
        assert launch.programs == programs
        assert launch.bytes_read == 2 * (rows + programs * sum(weights))
        assert launch.bytes_written == 2 * 139 * (64 if case is HEADS else 24)


@LARGE
@every_layer
@pytest.mark.parametrize("rows", [2**31 - 1, FAR])
def test_more_rows_than_32_bits_count(case, rows):
    first, *rest = drawn(case, 1, *{HEADS: (1, 1), OUTPUTS: (1, 1, 1)}[case], dtype=fp16)
    first = torch.empty(rows, 1, dtype=fp16, device=first.device).normal_()
    got = case.call(first, *rest)
    for part in (slice(0, 100), slice(rows // 2, rows // 2 + 100), slice(rows - 100, None)):
        want = case.reference(first[part].double(), *(t.double() for t in rest))
        assert not checks.diagnose(got[part], want, 4 * checks.TOLERANCE[fp16])


@LARGE
def test_more_elements_than_32_bits_count():
    """Of the cell both ways: the first and the last sequence of many are as they are alone."""
    gates, gain = drawn(CELL, 1, 64, 128, dtype=bf16)
    many = gates.repeat(2**31 // gates.numel() + 3, 1, 1)
    r, dgates, _ = gradients(CELL.call, (many, gain))
    alone = gradients(CELL.call, (gates, gain))
    for got, want in zip((r, dgates), alone, strict=False):
        assert torch.equal(got[:1], want) and torch.equal(got[-1:], want)
    w = drawn(HEADS, 1, 4, 32, dtype=bf16)[1:]
    x = r.view(-1, 128)
    y = gated_heads(x, *w)
    assert y.numel() > 2**31 and torch.equal(y[-64:], gated_heads(x[-64:], *w))
    weights = drawn(OUTPUTS, 1, 128, 256, 128, dtype=bf16)[1:]
    x = many.view(-1, 128)
    y = mlp_outputs(x, *weights)
    assert y.numel() > 2**31 and torch.equal(y[-64:], mlp_outputs(x[-64:], *weights))


# --- plans, and what is compiled ----------------------------------------------------------------------


def launch_all(patch, its, *, width, dtype=bf16, batch=1024):
    """What is launched on such a GPU: the cell both ways, and the layers where they are one kernel."""
    made, asked = recorded(gated_network, KERNELS, patch), []
    patch.setattr(gated_network, "gpu_of", lambda where: asked.append(where) or its)
    patch.setattr(gated_network, "added", lambda parts, gain: torch.empty_like(gain))
    gates, gain = meta(batch, 64, 2 * width, dtype=dtype), meta(width, dtype=dtype)
    r = gated_cell(gates, gain, 4)
    torch.autograd.grad(r, (gates, gain), torch.empty_like(r))
    if width <= 128 and dtype is not fp32:
        with torch.no_grad():
            gated_heads(*(t.to("meta", dtype) for t in heads_of((batch, 4, width // 4))))
            mlp_outputs(*(t.to("meta", dtype) for t in mlp_of((batch, width, 2 * width, 32))))
    assert asked == [torch.device("meta")] * len(made), "the tensors' own"
    return made


def test_plans_ask_the_tensors_own_gpu(monkeypatch):
    first, back, heads, outputs = launch_all(monkeypatch, gpu("sm_90", 3), width=128)
    plans = [rms_recurrence_plan(1024, 128, 2, n, gpu("sm_90", 3)) for n in (2, 5)]
    assert [one.STAGES for one in (first, back)] == [plan["STAGES"] for plan in plans]
    assert heads.grid == (12,) and outputs.TMA and (outputs.BI, outputs.num_warps) == (64, 4)


@pytest.fixture(scope="module")
def variants(cache):
    """(launch, width, target) and the kernel as it was compiled for that."""
    asked = []
    for target in codegen.TARGETS:
        more = {"sm_90": [(32, bf16), (100, bf16), (128, fp32)], "sm_86": [(100, bf16), (4096, fp32)]}
        for width, dtype in [(128, bf16), (512, fp32), *more.get(target, ())]:
            with pytest.MonkeyPatch.context() as patch:
                made = launch_all(patch, gpu(target), width=width, dtype=dtype)
            asked += [(launch, width, target) for launch in made]
    codes = codegen.compile_many(
        codegen.request(launch.kernel, launch.arguments, target=target, **launch.options)
        for launch, _, target in asked
    )
    return [(*of, code) for of, code in zip(asked, codes, strict=True)]


@INTERPRETED
def test_every_kernel_compiles_for_every_target_and_fits(variants):
    seen = {(launch.title, target) for launch, _, target, _ in variants}
    assert seen == set(itertools.product(KERNELS, codegen.TARGETS))
    near = {"gain", "bias", "w_in", "b_in", "w_gates", "b_gates"}
    for launch, width, target, code in variants:
        assert code.shared_bytes <= ROOM[target] * 1024, (width, code)
        # where shared memory is small Triton 3.6 keeps a few registers too many
        few = 64 if launch.title == "outputs_kernel" and ROOM[target] < 128 else 0
        assert width > 512 or code.spills <= few, (width, code)
        found = offsets(code.ttir)
        assert found and all(bits == "i64" or name in near for name, bits in found), (code, found)
        assert not re.search(r"\b(atom|red)\.", code.ptx), "sums are added in a fixed order"


@INTERPRETED
def test_one_warp_adds_up_a_step_by_shuffles_and_loads_heads_in_wide_pieces(variants):
    """A head's logits, and its candidates, stand side by side: four numbers a lane at least."""
    for launch, width, _, code in variants:
        if width == 128 and launch.title.startswith("cell"):
            assert launch.num_warps == 1
            assert code.shuffles["bfly"] == (5 if launch.title == "cell_kernel" else 10), code
            widest = 64 if launch.gates.dtype is bf16 else 128
            assert max({**code.loads, **code.async_copies}) == widest, code


@INTERPRETED
def test_two_programs_of_the_outputs_fit_a_multiprocessor_of_an_h200(variants):
    (code,) = (c for one, *of, c in variants if (one.title, *of) == ("outputs_kernel", 128, "sm_90"))
    assert code.matrix.get("wgmma") and code.bulk_loads
    assert 2 * (code.shared_bytes + 1024) <= 228 * 1024 and 2 * 128 * code.registers <= 65536


@INTERPRETED
def test_rows_beyond_32_bits_are_counted_in_64(monkeypatch):
    """Where a row's number is made of a program's, and where it is compared with how many there are."""
    made = recorded(gated_network, KERNELS, monkeypatch)
    monkeypatch.setattr(gated_network, "gpu_of", lambda where: gpu("sm_90"))
    for case, sizes in ((HEADS, (1, 8)), (OUTPUTS, (8, 8, 8))):
        first, *rest = (t.to("meta", bf16) for t in case.inputs((1, *sizes)))
        case.call(first.expand(FAR, 8), *rest)
    requests = [codegen.request(one.kernel, one.arguments, target="sm_90", **one.options) for one in made]
    for launch, code in zip(made, codegen.compile_many(requests), strict=True):
        assert launch.R == FAR and not launch.arguments.get("TMA", launch.options.get("TMA", False))
        narrow = re.findall(r"arith\.muli ([^:]*): i32", code.ttir)
        assert all("%INNER" in factors for factors in narrow), (launch.title, narrow)
        assert re.search(r"arith\.cmpi slt, .*xi64", code.ttir)
