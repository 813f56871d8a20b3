"""ops.differentiable: one operator, eager and compiled; ops.expect: a sentence for every wrong call."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported, below

import inspect

import pytest
import triton
import triton.language as tl
from torch.autograd import forward_ad

from labkit import device, ops


@triton.jit
def scale_kernel(x, w, y, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count) * tl.load(w + at % width, at < count)
    tl.store(y + at, value, at < count)


def scale(x, weight):
    """x * weight, as a kernel that a compiler cannot look into."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), 256),)](x, weight, y, x.numel(), x.shape[-1], BLOCK=256)
    return y


def scale_backward(dy, x, weight):
    return scale(dy, weight), (dy * x).sum(tuple(range(x.dim() - 1)))


operator = ops.differentiable("test_scale", scale, scale_backward)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def inputs(*shape):
    torch.manual_seed(0)
    made = torch.randn(shape, device=device.name()), torch.randn(shape[-1], device=device.name())
    return tuple(t.requires_grad_() for t in made)


def compiled(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def results(call, x, weight):
    """Output and gradients, with an upstream gradient that depends on the output."""
    y = call(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), 2 * y.detach())]


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.detach().T.contiguous().T.requires_grad_(),
    "strided": lambda t: torch.stack([t.detach()] * 2, -1)[..., 0].requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager_and_compiled_agree_with_pytorch(layout):
    x, weight = inputs(9, 33)
    x = LAYOUTS[layout](x)
    want = results(lambda x, weight: x * weight, x, weight)
    for call in (operator, compiled(operator), compiled(lambda x, weight: operator(x, weight))):
        for got, exact in zip(results(call, x, weight), want, strict=True):
            torch.testing.assert_close(got, exact)


def test_it_is_part_of_a_larger_compiled_graph():
    """fullgraph=True refuses anything that the compiler has to leave the graph for."""

    def layer(x, weight):
        return torch.relu(operator(x + 1, weight)) * 3

    x, weight = inputs(4, 16)
    for got, want in zip(results(compiled(layer), x, weight), results(layer, x, weight), strict=True):
        torch.testing.assert_close(got, want)


def test_the_compiled_operator_keeps_its_name():
    graphs = []

    def record(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(operator, backend=record, fullgraph=True)(*inputs(2, 3))
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets == ["labkit.test_scale.default"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_passes_the_checks_of_a_library_operator(layout):
    x, weight = inputs(4, 6)
    checked = ["test_schema", "test_faketensor", "test_autograd_registration"]
    torch.library.opcheck(
        torch.ops.labkit.test_scale.default, (LAYOUTS[layout](x), weight), test_utils=checked
    )


def test_each_call_of_the_eager_operator_is_one_forward_and_one_backward():
    seen = []

    def forward(x):
        seen.append("forward")
        return x * 2

    def backward(dy, x):
        seen.append("backward")
        return (dy * 2,)

    op = ops.differentiable("test_counting", forward, backward)
    x = torch.ones(3, requires_grad=True)
    op(x).sum().backward()
    assert seen == ["forward", "backward"]
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_backward_gets_the_upstream_gradient_and_the_same_tensors():
    seen = []

    def backward(*tensors):
        seen.extend(tensors)
        return tensors[0], tensors[0].sum(0)

    op = ops.differentiable("test_saving", lambda x, w: x * w, backward)
    x, weight = inputs(3, 5)
    op(x, weight).backward(torch.full((3, 5), 7.0, device=x.device))
    upstream, saved_x, saved_weight = seen
    assert (upstream == 7.0).all()
    assert saved_x is x and saved_weight is weight


def test_without_gradients_the_forward_runs_bare():
    x, weight = inputs(3, 5)
    assert operator(x, weight).requires_grad
    with torch.no_grad():
        assert not operator(x, weight).requires_grad
    assert not operator(x.detach(), weight.detach()).requires_grad
    assert operator(x.detach(), weight).requires_grad, "one input that needs a gradient is enough"


def test_forward_mode_is_refused_not_wrong():
    x, weight = inputs(3, 5)
    with forward_ad.dual_level(), pytest.raises(RuntimeError):
        operator(forward_ad.make_dual(x.detach(), torch.ones_like(x)), weight.detach())


@pytest.mark.parametrize("wrap", [lambda call: call, compiled], ids=["eager", "compiled"])
def test_a_second_derivative_is_refused_not_wrong(wrap):
    """Also where the backward is made of operations that could be differentiated again."""
    cube = ops.differentiable("test_cube", lambda x: x * x * x, lambda dy, x: (3 * dy * x * x,))
    x = torch.full((3,), 2.0, requires_grad=True)
    y = wrap(cube)(x)
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() == [12.0] * 3
    with pytest.raises(RuntimeError):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(first.sum(), x)


def test_defining_a_name_again_replaces_it():
    def define(factor):
        return ops.differentiable("test_again", lambda x: factor * x, lambda dy, x: (factor * dy,))

    x = torch.ones(2, requires_grad=True)
    for factor in (2.0, 5.0):
        op = define(factor)
        for call in (op, compiled(op)):
            y = call(x)
            assert y.tolist() == [factor] * 2
            assert torch.autograd.grad(y.sum(), x)[0].tolist() == [factor] * 2
        torch.compiler.reset()


def test_it_looks_like_the_forward_that_it_was_made_from():
    assert operator.__name__ == "test_scale"
    assert operator.__doc__ == scale.__doc__
    assert list(inspect.signature(operator).parameters) == ["x", "weight"]


def test_it_works_on_views_and_with_no_elements():
    x, weight = inputs(0, 8)
    y = operator(x, weight)
    assert y.shape == (0, 8)
    assert torch.autograd.grad(y.sum(), weight)[0].tolist() == [0.0] * 8


# contiguous


def test_contiguous_copies_only_where_it_must():
    seen = []

    @ops.contiguous
    def call(*arguments, **options):
        """What it does."""
        seen.append((arguments, options))

    x = torch.zeros(3, 4)
    call(x, x.T, 5, flag=True)
    (first, second, number), options = seen[0]
    assert first is x
    assert second.is_contiguous() and second.shape == (4, 3)
    assert (number, options) == (5, {"flag": True})
    assert (call.__name__, call.__doc__) == ("call", "What it does.")


# expect


X = torch.zeros(2, 3, 8)


@pytest.mark.parametrize(
    ("shape", "like"),
    [
        ((2, 3, 8), None),
        ((..., 8), X),
        ((..., None), None),
        ((None, None, 8), X),
        ((...,), X),
        ((2, 3, 8), X),
    ],
)
def test_what_is_expected_passes(shape, like):
    ops.expect("x", X, shape, like)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_three_dtypes_are_expected(dtype):
    ops.expect("x", X.to(dtype), (..., 8))


WRONG = {
    "rank": (torch.zeros(3, 8), (8,), X, "weight: has shape (3, 8), should be (8)"),
    "rank too low": (torch.zeros(()), (8,), X, "weight: has shape (), should be (8)"),
    "rank below leading": (torch.zeros(3), (..., 4, 3), X, "weight: has shape (3,), should be (..., 4, 3)"),
    "size": (torch.zeros(9), (8,), X, "weight: has shape (9,), should be (8)"),
    "last size": (torch.zeros(4, 9), (..., 8), X, "weight: has shape (4, 9), should be (..., 8)"),
    "size beside any": (torch.zeros(4, 9), (None, 8), X, "weight: has shape (4, 9), should be (any, 8)"),
    "dtype of nothing": (
        torch.zeros(8).double(),
        (8,),
        None,
        "weight: has dtype torch.float64, should be float32, float16 or bfloat16",
    ),
    "whole numbers": (
        torch.zeros(8, dtype=torch.int64),
        (8,),
        X,
        "weight: has dtype torch.int64, should be float32, float16 or bfloat16",
    ),
    "mixed dtypes": (
        torch.zeros(8).half(),
        (8,),
        X,
        "weight: has dtype torch.float16, should be torch.float32 like the first argument",
    ),
    "mixed devices": (
        torch.zeros(8, device="meta"),
        (8,),
        X,
        "weight: is on meta, should be on cpu like the first argument",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_names_the_argument_and_what_it_should_be(case):
    tensor, shape, like, sentence = WRONG[case]
    with pytest.raises(ValueError) as caught:
        ops.expect("weight", tensor, shape, like)
    assert str(caught.value) == sentence


def test_inside_autocast_dtypes_may_differ_and_nothing_else():
    half = torch.zeros(8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ops.expect("weight", half, (8,), like=X)
        with pytest.raises(ValueError, match="should be on cpu"):
            ops.expect("weight", half.to("meta"), (8,), like=X)
        with pytest.raises(ValueError, match="should be float32"):
            ops.expect("weight", half.double(), (8,), like=X)
        with pytest.raises(ValueError, match="has shape"):
            ops.expect("weight", half, (9,), like=X)
    with pytest.raises(ValueError, match="has dtype"):
        ops.expect("weight", half, (8,), like=X)
