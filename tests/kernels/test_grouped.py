"""Grouped Linears: right on every shape, gradients, compiling, wrong calls, the module."""

import copy
import itertools
import math

import pytest
import torch
from grouped import (
    assert_close,
    assert_right,
    bf16,
    compiled,
    drawn,
    equal,
    examine,
    fp16,
    fp32,
    gradients,
    grouped,
    in_columns,
    plain,
)
from torch import nn
from torch.nn import functional

from labkit import checks, counts, device, memory
from labkit.kernels import GroupedLinear, grouped_linear

pytestmark = pytest.mark.usefixtures("cache")
INTERPRETED = pytest.mark.skipif(device.has_gpu(), reason="a GPU's accesses cannot be watched")
GPU = pytest.mark.skipif(
    not device.has_gpu(), reason="CUDA graphs, memory statistics and races exist on a GPU only"
)


# --- right on every shape -----------------------------------------------------------------------------


CASES = {
    "packed": dict(sizes=(5, 16), layouts=checks.LAYOUTS, dtypes=checks.DTYPES),
    "alone": dict(sizes=(3, 20), layouts=checks.LAYOUTS, dtypes=checks.DTYPES),
    "wide, in squares": dict(sizes=(2, 70), layouts=checks.LAYOUTS, dtypes=(fp32, bf16)),
    "packed, any rows": dict(sizes=(5, 16), leading=((1,), (), (0,), (2, 33), (3, 1), (2, 0), (2, 3, 5))),
    "any rows": dict(sizes=(3, 20), leading=((1,), (), (0,), (2, 33), (3, 1), (2, 0), (2, 3, 5))),
    "packed, no bias": dict(sizes=(5, 16, 16, False), leading=((37,), (0,)), dtypes=(fp16,)),
    "no bias": dict(sizes=(3, 20, 24, False), leading=((37,), (0,)), dtypes=(fp16,)),
    "wide, no bias": dict(sizes=(2, 70, 70, False), dtypes=(fp16,)),
    "no features in": dict(sizes=(3, 0, 4), leading=((5,), (2, 5))),
    "no features out": dict(sizes=(3, 4, 0), leading=((5,), (2, 5))),
    "no groups": dict(sizes=(0, 4, 5), leading=((5,), (2, 5))),
} | {str(sizes): dict(sizes=sizes, dtypes=(fp32, bf16)) for sizes in [
    (3, 1), (3, 5), (3, 24), (3, 32), (2, 50), (2, 64), (5, 16, 32), (4, 32, 16), (3, 20, 50), (3, 50, 20),
    (1, 5, 70), (2, 70, 5), (1, 16), (1, 24, 16),
]}  # fmt: skip
"""33 rows are a tile and one row, wherever they end; 5 groups are a pack and one."""


@pytest.mark.parametrize("case", CASES)
def test_every_size_is_right(case):
    options = dict(CASES[case])
    examine(grouped(*options.pop("sizes")), *options.pop("leading", ((33,),)), **options)


@pytest.mark.parametrize(("groups", "d_in", "d_out"), [(4, 16, 16), (2, 20, 24), (1, 64, 64), (1, 400, 20)])
def test_sums_are_of_float32_and_rounded_once(groups, d_in, d_out):
    """Deep products, many rows, many parts: a sum or a part of one in 16 bits is further off."""
    tensors = drawn(grouped(groups, d_in, d_out), 600, dtype=fp16)
    upstream = torch.randn(600, groups * d_out).to(tensors[0])
    wants = gradients(plain, [t.double() for t in tensors], upstream.double())
    for got, want in zip(gradients(grouped_linear, tensors, upstream), wants, strict=True):
        assert checks.relative_error(got, want) <= 1.02 * checks.relative_error(want.half(), want)


# --- gradients ----------------------------------------------------------------------------------------

SOME = [subset for subset in itertools.product((True, False), repeat=3) if any(subset)]


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("needed", SOME, ids=str)
@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_of_some_inputs_only(needed, compile_it):
    call = compiled(grouped_linear) if compile_it else grouped_linear
    for columns in (False,) if compile_it else (False, True):
        tensors = drawn(grouped(5, 16), 2, 35)
        wants = gradients(plain, tensors)[1:]
        tensors[0] = in_columns(tensors[0]) if columns else tensors[0]
        for tensor, needs in zip(tensors, needed, strict=True):
            tensor.requires_grad_(needs)
        y = call(*tensors)
        y.backward(2 * y.detach())
        for tensor, needs, want in zip(tensors, needed, wants, strict=True):
            assert (tensor.grad is not None) is needs
            if needs:
                assert_close(tensor.grad, want)


@INTERPRETED
@pytest.mark.parametrize("width", [20, 70])
def test_gradients_without_that_of_x_take_no_product_with_the_weight(width):
    x, weight, bias = drawn(grouped(3, width), 37)
    y = grouped_linear(x, weight.requires_grad_(), bias.requires_grad_())
    upstream = torch.randn_like(y)
    made = counts.count(lambda: torch.autograd.grad(y, (weight, bias), upstream)).launches
    kernels = [launch for launch in made if launch.programs]
    assert [launch.name for launch in kernels] == ["backward_kernel", "sum_kernel"]
    squares = math.ceil(width / 64)
    assert kernels[0].bytes_read == 4 * squares * (x.numel() + y.numel())
    assert kernels[0].bytes_written == 4 * kernels[0].programs // (3 * squares**2) * weight.numel()


def test_kept_is_what_the_gradients_need_and_nothing_else():
    tensors, saved = drawn(grouped(3, 20), 37), []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    x, weight, bias = tensors
    for leaf, kept in ((x, [weight]), (weight, [x, weight]), (bias, [x, weight])):
        saved.clear()
        leaf.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            grouped_linear(*tensors)
        leaf.requires_grad_(False)
        assert set(saved) == {t.data_ptr() for t in kept}
    with torch.no_grad():
        assert grouped_linear(x.requires_grad_(), weight, bias).grad_fn is None


@INTERPRETED
def test_the_gradient_of_x_alone_is_one_forward():
    x, weight, bias = drawn(grouped(3, 20), 37)
    y = grouped_linear(x.requires_grad_(), weight, bias)
    upstream = torch.randn_like(y)
    made = counts.count(lambda: torch.autograd.grad(y, x, upstream))
    assert [launch.name for launch in made.launches] == ["forward_kernel"]


def test_more_than_a_first_derivative_is_refused():
    tensors = drawn(grouped(3, 20), 4, grad=True)
    y = grouped_linear(*tensors).square().sum()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y, tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: grouped_linear(x, *tensors[1:]).sum())(tensors[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: grouped_linear(x, *tensors[1:]), (tensors[0],), (tensors[0],))


# --- the same bits, inside torch.compile, inside autocast ---------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("leading", "columns", "bias"),
    [((2, 35), True, True), ((2, 35), False, False), ((6,), False, True), ((0, 5), True, False)],
    ids=str,
)
def test_torch_compile_takes_it_whole(leading, columns, bias):
    x, *weights = drawn(grouped(3, 20, 24, bias), *leading)
    tensors = [in_columns(x) if columns else x, *weights]

    def layer(x, *weights):
        return torch.tanh(grouped_linear(x * 2, *weights))

    want, got = gradients(layer, tensors), gradients(compiled(layer), tensors)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other.double())
    assert got[0].stride() == want[0].stride()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("columns", [False, True])
def test_the_number_of_rows_may_be_dynamic(columns):
    layer = compiled(grouped_linear, dynamic=True)
    for rows in (5, 35):
        x, *weights = drawn(grouped(3, 20, 24), 2, rows)
        tensors = [in_columns(x) if columns else x, *weights]
        want = gradients(grouped_linear, tensors)
        for one, other in zip(gradients(layer, tensors), want, strict=True):
            assert_close(one, other.double())  # dY may come in other strides, and db is added in their order


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("columns", [False, True])
def test_a_compiled_graph_is_one_operator(columns):
    graphs = []

    def record(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    x, *weights = drawn(grouped(3, 20), 2, 35)
    torch.compile(grouped_linear, backend=record, fullgraph=True)(in_columns(x) if columns else x, *weights)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if "labkit" in str(node.target)]
    assert called == ["labkit.grouped_linear_forward.default"]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_autocast_computes_in_half_and_gives_gradients_in_float32(columns, dtype):
    x, *weights = drawn(grouped(3, 20, 24), 2, 35)
    tensors = [t.requires_grad_() for t in (in_columns(x) if columns else x, *weights)]
    with torch.autocast(device.name(), dtype=dtype):
        y = grouped_linear(*tensors)
        assert torch.equal(y, grouped_linear(tensors[0].to(dtype), *weights))
        with pytest.raises(ValueError, match=r"^x: has dtype torch.float64"):
            grouped_linear(x.double(), *weights)
        with torch.autocast(device.name(), enabled=False):
            assert grouped_linear(*tensors).dtype is fp32
    wants = gradients(plain, [t.detach().to(dtype).double() for t in tensors])
    assert_close(y, wants[0], dtype)
    for gradient, want in zip(torch.autograd.grad(y, tensors, 2 * y.detach()), wants[1:], strict=True):
        assert gradient.dtype is fp32
        assert not checks.diagnose(gradient, want, 2 * checks.TOLERANCE[dtype])


# --- wrong calls --------------------------------------------------------------------------------------

X, WEIGHT, BIAS = torch.ones(4, 6), torch.ones(2, 3, 5), torch.ones(2, 5)
OF_X, OF_WEIGHT, OF_BIAS = r"x: has shape .*, 6\)$", r"weight: has shape .*any\)$", r"bias: .*\(2, 5\)$"
WRONG = {
    "a scalar": (OF_X, torch.tensor(1.0), WEIGHT, BIAS),
    "the features of one group": (OF_X, torch.ones(4, 2, 3), WEIGHT, BIAS),
    "one weight": (OF_WEIGHT, X, torch.ones(3, 5), BIAS),
    "one bias for all": (OF_BIAS, X, WEIGHT, torch.ones(1, 5)),
    "a flat bias": (OF_BIAS, X, WEIGHT, torch.ones(10)),
    "a bias of d_in": (OF_BIAS, X, WEIGHT, torch.ones(2, 3)),
    "double precision": ("weight: has dtype", X.double(), WEIGHT.double(), BIAS.double()),
    "x in half": ("x: has dtype", X.half(), WEIGHT, BIAS),
    "a bias in bf16": ("bias: has dtype", X, WEIGHT, BIAS.bfloat16()),
    "x elsewhere": ("x: is on", X.to("meta"), WEIGHT, BIAS),
    "a bias elsewhere": ("bias: is on", X, WEIGHT, BIAS.to("meta")),
}


def placed(*tensors):
    return [t if t is None or t.device.type == "meta" else t.to(device.name()) for t in tensors]


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_is_named(call):
    message, *tensors = WRONG[call]
    with pytest.raises(ValueError, match=rf"^{message}"):
        grouped_linear(*placed(*tensors))


# --- the module -------------------------------------------------------------------------------------------


def linears(groups=3, d_in=20, d_out=24, **options):
    torch.manual_seed(0)
    return Usual(groups, d_in, d_out, **options)


class Usual(nn.ModuleList):
    """What it stands for: a list of linear layers, with a forward."""

    def __init__(self, groups, d_in, d_out, **options):
        super().__init__(nn.Linear(d_in, d_out, **options) for _ in range(groups))

    def forward(self, x):
        return torch.cat([layer(one) for layer, one in zip(self, x.chunk(len(self), -1), strict=True)], -1)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(37,), (2, 5), ()], ids=str)
def test_it_is_a_list_of_linear_layers(leading, bias):
    layers, x = linears(bias=bias).to(device.name()), torch.randn(*leading, 60, device=device.name())
    made = GroupedLinear.from_linears(layers)
    assert_close(made(x), layers.double()(x.double()))


@pytest.mark.parametrize("bias", [True, False])
def test_its_state_is_that_of_the_list_and_comes_back(bias):
    layers = linears(bias=bias)
    made, other = GroupedLinear.from_linears(layers), GroupedLinear(3, 20, 24, bias=bias)
    state = made.state_dict()
    same(state, layers.state_dict())
    assert [name for name, _ in made.named_parameters()] == ["weight", "bias"][: 1 + bias]
    names = list(state)
    other.load_state_dict(state, strict=True)
    assert list(state) == names, "somebody else's dictionary"
    for one in (other, copy.deepcopy(made)):
        same(one.state_dict(), state)
    assert torch.equal(other.weight, made.weight) and other.weight.is_contiguous()
    with torch.no_grad():  # a state shares memory with the weights, as every state_dict does
        made.weight.fill_(7.0)
    assert all((value == 7).all() for name, value in state.items() if name.endswith("weight"))


def inside(block):
    """A larger model with two of these blocks, at two depths."""
    model = nn.Module()
    model.first, model.last = block(3, 20, 24), nn.Linear(72, 60)
    model.layers = nn.ModuleList([nn.ModuleDict({"mix": block(2, 5, 7)})])
    return model


def test_weights_find_their_way_inside_a_larger_model():
    usual, ours, again = inside(Usual), inside(GroupedLinear), inside(Usual)
    ours.load_state_dict(usual.state_dict(), strict=True)
    again.load_state_dict(ours.state_dict(), strict=True)
    same(ours.state_dict(), usual.state_dict())
    same(again.state_dict(), usual.state_dict())
    assert torch.equal(ours.layers[0]["mix"].weight[1], usual.layers[0]["mix"][1].weight.T)


def test_a_state_that_does_not_fit_is_refused_by_name():
    state = linears().state_dict()
    for lost in ("0.weight", "1.bias"):
        rest = {name: value for name, value in state.items() if name != lost}
        with pytest.raises(
            RuntimeError, match=rf'Missing key\(s\) in state_dict: "{lost.partition(".")[2]}"'
        ):
            GroupedLinear(3, 20, 24).load_state_dict(rest)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*3.weight"):
        GroupedLinear(3, 20, 24).load_state_dict(linears(groups=4).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        GroupedLinear(3, 24, 20).load_state_dict(state)


UNLIKE = {
    "of two shapes": lambda: [nn.Linear(4, 5), nn.Linear(5, 4)],
    "one without a bias": lambda: [nn.Linear(4, 5), nn.Linear(4, 5, bias=False)],
    "of two dtypes": lambda: [nn.Linear(4, 5), nn.Linear(4, 5, dtype=bf16)],
    "on two devices": lambda: [nn.Linear(4, 5), nn.Linear(4, 5, device="meta")],
    "one frozen": lambda: [nn.Linear(4, 5), nn.Linear(4, 5).requires_grad_(False)],
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_layers_that_do_not_go_together_are_refused(kind):
    with pytest.raises(ValueError, match=r"^linears: should be of one shape, dtype and device.* 2 kinds"):
        GroupedLinear.from_linears(UNLIKE[kind]())
    for others in ([], [nn.Linear(4, 5), nn.Conv1d(4, 5, 1)]):
        with pytest.raises(ValueError, match=r"^linears: should be one or more nn.Linear$"):
            GroupedLinear.from_linears(others)


def test_layers_are_copied_with_their_dtype_and_stay_frozen_or_evaluated():
    layers = linears(dtype=bf16).eval()
    for layer in layers:
        layer.bias.requires_grad_(False)
    made = GroupedLinear.from_linears(layer for layer in layers)
    assert {p.dtype for p in made.parameters()} == {bf16} and not made.training
    assert made.weight.requires_grad and not made.bias.requires_grad
    before = made.weight.clone()
    with torch.no_grad():
        layers[0].weight.zero_()
    assert torch.equal(made.weight, before)


def test_it_is_drawn_as_linear_layers_are():
    torch.manual_seed(0)
    for parameter in GroupedLinear(7, 100, 30, dtype=fp16).parameters():
        assert parameter.dtype is fp16 and 0.09 < parameter.abs().max() <= 0.1 + 1e-4
        assert parameter.float().mean().abs() < 0.02


def losses(network, steps=8):
    torch.manual_seed(1)
    network = network.to(device.name())
    optimizer, curve = torch.optim.AdamW(network.parameters(), lr=3e-3), []
    for _ in range(steps):
        x = torch.randn(32, 60, device=device.name())
        loss = functional.mse_loss(network(x), torch.roll(x, 1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def test_training_follows_the_curve_of_the_list():
    usual = nn.Sequential(linears(), nn.GELU(), linears(3, 24, 20))
    ours = nn.Sequential(GroupedLinear(3, 20, 24), nn.GELU(), GroupedLinear(3, 24, 20))
    ours.load_state_dict(usual.state_dict())
    before = {name: value.clone() for name, value in usual.state_dict().items()}
    curves = losses(usual), losses(ours)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[1][-1] < 0.99 * curves[1][0], "a network that does not learn agrees with any other"
    for name, value in ours.state_dict().items():
        assert not torch.equal(value.cpu(), before[name]), f"{name} was not trained"


# --- on a GPU -----------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("width", [16, 20, 50, 64, 300])
def test_both_directions_can_be_captured_in_a_graph(width, columns):
    x, *weights = drawn(grouped(4, width), 2, 128, dtype=bf16)
    tensors = [in_columns(x) if columns else x, *weights]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(grouped_linear, tensors)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(grouped_linear, tensors)
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    assert equal(captured, gradients(grouped_linear, tensors))


@GPU
@pytest.mark.parametrize(
    ("dtype", "width", "columns"),
    [
        *((bf16, width, False) for width in (16, 32, 50, 64, 100, 128, 256, 300)),
        *((bf16, width, True) for width in (16, 64, 100)),
        *((fp32, width, False) for width in (16, 64, 100)),
        (fp16, 64, False),
    ],
    ids=str,
)
def test_large_inputs_are_right_and_the_same_from_run_to_run(dtype, width, columns):
    """A race shows once in a while, and where all of the GPU is at work."""
    x, *weights = drawn(grouped(48, width), 8, 512, dtype=dtype)
    tensors = [in_columns(x) if columns else x, *weights]
    first = gradients(grouped_linear, tensors)
    wants = gradients(plain, [t.double() for t in tensors], 2 * first[0].double())
    for got, want in zip(first, wants, strict=True):
        assert checks.relative_error(got, want) < checks.TOLERANCE[dtype]
    for _ in range(10):
        assert equal(gradients(grouped_linear, tensors), first)


@GPU
@pytest.mark.parametrize("columns", [False, True])
def test_the_forward_takes_no_memory_but_the_result(columns):
    x, *weights = drawn(grouped(16, 64), 8, 512, dtype=bf16)
    x = in_columns(x) if columns else x
    assert memory.peak_bytes(lambda: grouped_linear(x, *weights)) == x.nbytes


@GPU
def test_a_gpu_other_than_the_first_is_used():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    assert_right(grouped_linear, [t.to("cuda:1") for t in drawn(grouped(4, 64), 70)])
