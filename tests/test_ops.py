"""ops.differentiable: one operator, eager and compiled; ops.expect: a sentence for every wrong call."""

import contextlib
import functools
import gc
import inspect
import weakref

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

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


class OnGpu1(Tensor):
    """A tensor that says that it is on the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


@pytest.mark.parametrize("several", [True, False])
def test_where_there_are_several_gpus_the_first_tensors_is_made_the_current_one(monkeypatch, several):
    chosen = []

    def kept(x: Tensor) -> Tensor:
        return torch.tensor(len(chosen))

    @contextlib.contextmanager
    def guard(where):
        chosen.append(where)
        yield
        chosen.pop()

    call = ops.differentiable("test_guarded", kept, lambda dy, x: (dy,))
    monkeypatch.setattr(ops, "_several_gpus", lambda: several)
    monkeypatch.setattr(torch.cuda, "device", guard)
    assert call(torch.zeros(1).as_subclass(OnGpu1)).item() == several
    assert call(torch.zeros(1)).item() == 0, "the CPU is no GPU to choose"
    assert not chosen


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a tensor on another GPU needs a second one")
def test_it_runs_on_a_gpu_that_is_not_the_current_one():
    x, weight = (t.detach().to("cuda:1").requires_grad_() for t in inputs(4, 5))
    y = operator(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), y)
    assert y.device == dx.device == dweight.device == x.device and torch.cuda.current_device() == 0
    assert torch.equal(y, x * weight) and torch.allclose(dx, x * weight**2)


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


def test_forward_mode_is_refused_when_compiled_too():
    """The compiler would drop the tangents and return the plain output."""
    x, weight = (t.detach() for t in inputs(3, 5))
    call = compiled(operator)
    call(x, weight)
    with forward_ad.dual_level(), pytest.raises(RuntimeError):
        call(forward_ad.make_dual(x, torch.ones_like(x)), weight)
    call(x, weight)


# an output of another shape, kept tensors, a tensor that may be None, gradients only where wanted


class Linear:
    """relu(x @ weight.T + bias) as an operator, keeping z = x @ weight.T + bias; says what ran."""

    def __init__(self, name: str) -> None:
        self.ran: list = []
        self.kept: list[weakref.ref] = []
        self.call = ops.differentiable(
            name, self.forward, self.backward, output=self.output, training=self.training, kept=self.z_like
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """relu(x @ weight.T + bias)"""
        self.ran.append("forward")
        return self.z(x, weight, bias).relu_()

    def training(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.ran.append("training")
        z = self.z(x, weight, bias)
        self.kept.append(weakref.ref(z))
        return torch.relu(z), z

    def backward(self, dy, x, weight, bias, z, *, wanted):
        self.ran.append(wanted)
        dz = dy * (z > 0)
        return (
            dz @ weight if wanted[0] else None,
            dz.T @ x if wanted[1] else None,
            dz.sum(0) if wanted[2] else None,
        )

    def output(self, x, weight, bias):
        return x.new_empty(x.shape[0], weight.shape[0])

    def z_like(self, *tensors):
        return (self.output(*tensors),)

    @staticmethod
    def z(x, weight, bias):
        return x @ weight.T if bias is None else x @ weight.T + bias

    def forget(self) -> None:
        self.ran.clear()
        self.kept.clear()


linear = Linear("test_linear")
WRAPS = {"eager": lambda call: call, "compiled": compiled}


@pytest.fixture(params=WRAPS)
def linear_call(request):
    linear.forget()
    return WRAPS[request.param](linear.call)


def linear_inputs(*needed: bool, rows: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, 7), (3, 7), (3,))
    return [
        torch.randn(s, device=device.name()).requires_grad_(n) for s, n in zip(shapes, needed, strict=True)
    ]


def check_linear(call, tensors):
    """Output and all gradients, for an upstream gradient that `sum` has expanded, are PyTorch's."""
    needed = [t for t in tensors if t is not None and t.requires_grad]
    y, want = call(*tensors), torch.relu(Linear.z(*tensors, *[None] * (3 - len(tensors))))
    torch.testing.assert_close(y, want)
    for got, exact in zip(
        torch.autograd.grad(y.sum(), needed), torch.autograd.grad(want.sum(), needed), strict=True
    ):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(
    "needed", [(True, True, True), (False, True, True), (True, False, False), (False, False, True)], ids=str
)
def test_gradients_are_computed_only_where_wanted(linear_call, needed):
    check_linear(linear_call, linear_inputs(*needed))
    assert linear.ran == ["training", needed]


@pytest.mark.parametrize("rest", [(None,), ()], ids=["None", "left out"])
def test_a_tensor_may_be_none_or_left_out(linear_call, rest):
    x, weight, _ = linear_inputs(True, True, True)
    check_linear(linear_call, (x, weight, *rest))
    assert linear.ran == ["training", (True, True, False)]
    x, weight = x.detach(), weight.detach()
    assert not linear_call(x, weight, *rest).requires_grad
    assert linear.ran[2:] == ["forward"]


def test_a_tensor_may_be_none_without_a_default():
    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        return 2 * x if residual is None else 2 * x + residual

    op = ops.differentiable("test_residual", forward, lambda dy, x, residual: (2 * dy, dy.clone()))
    x, residual = (t.requires_grad_() for t in torch.ones(2, 3))
    for call in (op, compiled(op)):
        for tensors, needed in (((x, None), (x,)), ((x, residual), (x, residual))):
            grads = torch.autograd.grad(call(*tensors).sum(), needed)
            assert [grad.tolist() for grad in grads] == [[2.0] * 3, [1.0] * 3][: len(needed)]
        with pytest.raises((TypeError, RuntimeError), match="residual"):
            call(x)


def test_the_schema_says_what_may_be_none():
    assert "(Tensor x, Tensor weight, Tensor? bias)" in str(torch.ops.labkit.test_linear.default._schema)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_backward_that_is_not_told_computes_all(wrap):
    seen = []

    def backward(dy, x, weight):
        seen.append("all")
        return dy * weight, (dy * x).sum(0)

    op = ops.differentiable("test_untold", lambda x, weight: x * weight, backward)
    x, weight = inputs(3, 5)
    y = wrap(op)(x.detach(), weight)
    (dweight,) = torch.autograd.grad(y.sum(), weight)
    torch.testing.assert_close(dweight, x.detach().sum(0))
    assert seen == ["all"]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda dy, x, w: (dy * w,), "test_wrong: the backward returned 1 gradients for 2 inputs"),
        (lambda dy, x, w: (dy * w, None), "test_wrong: the backward returned no gradient for w"),
    ],
)
def test_a_missing_gradient_is_an_error_that_names_it(wrap, wrong, sentence):
    op = ops.differentiable("test_wrong", lambda x, w: x * w, wrong)
    x, w = (t.requires_grad_() for t in torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=sentence):
        wrap(op)(x, w).sum().backward()


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode, None], ids=str)
def test_without_gradients_nothing_is_kept(linear_call, off):
    tensors = linear_inputs(*[off is not None] * 3)
    with off() if off else torch.enable_grad():
        y = linear_call(*tensors)
    torch.testing.assert_close(y, torch.relu(Linear.z(*tensors)).detach())
    assert linear.ran == ["forward"]
    assert not linear.kept


@pytest.mark.parametrize(("grad", "operation"), [(True, "test_linear_training"), (False, "test_linear")])
def test_a_compiled_graph_holds_kept_tensors_only_for_a_backward(grad, operation):
    graphs = []

    def record(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    with torch.set_grad_enabled(grad):
        torch.compile(linear.call, backend=record, fullgraph=True)(*linear_inputs(True, True, True))
    targets = [str(node.target) for node in graphs[0].graph.nodes if "labkit" in str(node.target)]
    assert targets == [f"labkit.{operation}.default"]


def test_one_compiled_call_takes_turns_with_and_without_gradients():
    linear.forget()
    call, tensors = compiled(linear.call), linear_inputs(True, True, True)
    for _ in range(2):
        check_linear(call, tensors)
        with torch.no_grad():
            call(*tensors)
    assert [what for what in linear.ran if isinstance(what, str)] == ["training", "forward"] * 2


def test_kept_tensors_live_until_the_backward_is_over(linear_call):
    gc.collect()
    gc.disable()  # they must go by themselves, not when a cycle is found
    try:
        tensors = linear_inputs(True, True, True)
        y = linear_call(*tensors)
        assert [kept() is not None for kept in linear.kept] == [True]
        y.sum().backward()
        assert [kept() is not None for kept in linear.kept] == [False]
        y = linear_call(*tensors)
        assert linear.kept[1]() is not None
        del y
        assert linear.kept[1]() is None, "or until the output is gone"
    finally:
        gc.enable()


def test_each_tensor_is_saved_once(linear_call):
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_call(*linear_inputs(True, True, True))
    assert sorted(saved) == [(3,), (3, 7), (5, 3), (5, 7)]


def test_kept_tensors_get_no_gradient_of_their_own():
    """Zeros in their place would cost memory and a launch each."""
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made.append(function.overloadpacket._qualified_op_name)
            return function(*args, **(kwargs or {}))

    tensors = linear_inputs(True, True, True)
    y = compiled(linear.call)(*tensors)
    upstream = torch.ones_like(y)
    with Watch():
        torch.autograd.grad(y, tensors, upstream)
    assert made == ["labkit::test_linear_backward"]


def test_sizes_may_be_dynamic():
    call = torch.compile(linear.call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 6, 9):
        check_linear(call, linear_inputs(True, True, True, rows=rows))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "None"])
@pytest.mark.parametrize("operation", ["test_linear", "test_linear_training", "test_linear_backward"])
def test_all_parts_pass_the_checks_of_a_library_operator(operation, bias):
    needed = operation.endswith("training")
    tensors = linear_inputs(needed, needed, needed)
    if not bias:
        tensors[2] = None
    if operation.endswith("backward"):
        wanted = [False, True, bias]
        upstream, z = torch.randn(2, 5, 3, device=device.name())
        tensors = (upstream, *tensors, [z.clone()], wanted)
    torch.library.opcheck(getattr(torch.ops.labkit, operation).default, tuple(tensors))


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_second_derivative_through_kept_tensors_is_refused(wrap):
    tensors = linear_inputs(True, True, True)
    with pytest.raises(RuntimeError):
        dx, *_ = torch.autograd.grad(wrap(linear.call)(*tensors).square().sum(), tensors, create_graph=True)
        torch.autograd.grad(dx.sum(), tensors)


# whether the kept tensors are spent


def spent_operator(name):
    """x * x * factor, which keeps x * factor and overwrites it where it may; what its backward was told."""
    told = []

    def training(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return x * x * factor, x * factor

    def backward(dy, x, factor, kept, *, spent):
        told.append(spent)
        dx = (kept if spent else kept.clone()).mul_(2 * dy)
        return dx, (dy * x * x).sum(0)

    def like(x, factor):
        return (torch.empty_like(x),)

    op = ops.differentiable(name, lambda x, factor: x * x * factor, backward, training=training, kept=like)
    return op, told


def test_the_backward_hears_that_kept_tensors_are_spent_unless_the_graph_is_retained():
    op, told = spent_operator("test_spent")
    x, factor = inputs(3, 5)
    want = torch.autograd.grad((x * x * factor).sum(), (x, factor))
    y = op(x, factor)
    for retain in (True, True, False):
        got = torch.autograd.grad(y.sum(), (x, factor), retain_graph=retain)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
    assert told == [False, False, True]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), (x, factor))
    op(x, factor).sum().backward()
    assert told[3:] == [True]


def test_create_graph_retains_too():
    op, told = spent_operator("test_spent_create")
    x, factor = inputs(3, 5)
    y = op(x, factor)
    first, _ = torch.autograd.grad(y.sum(), (x, factor), create_graph=True)
    again, _ = torch.autograd.grad(y.sum(), (x, factor))
    torch.testing.assert_close(again, first)
    assert told == [False, True]


def test_a_compiled_backward_never_takes_kept_tensors_for_spent():
    """The compiler may have saved them for something else, and an operator must not write its inputs."""
    op, told = spent_operator("test_spent_compiled")
    x, factor = inputs(3, 5)
    want = torch.autograd.grad((x * x * factor).sum(), (x, factor))
    y = compiled(op)(x, factor)
    for retain in (True, False):
        got = torch.autograd.grad(y.sum(), (x, factor), retain_graph=retain)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
    assert told == [False, False]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("words", [(), ("wanted",), ("spent",), ("wanted", "spent")], ids=str)
def test_a_backward_is_told_what_it_has_words_for(wrap, words):
    told = []

    def plain(dy, x, w):
        return dy * w, dy * x

    def backward(dy, x, w, **given):
        told.append(set(given))
        return plain(dy, x, w)

    takes = {
        (): lambda dy, x, w: backward(dy, x, w),
        ("wanted",): lambda dy, x, w, *, wanted: backward(dy, x, w, wanted=wanted),
        ("spent",): lambda dy, x, w, *, spent: backward(dy, x, w, spent=spent),
        ("wanted", "spent"): lambda dy, x, w, *, wanted, spent: backward(
            dy, x, w, wanted=wanted, spent=spent
        ),
    }
    op = ops.differentiable("test_told", lambda x, w: x * w, takes[words])
    x, w = torch.randn(2, 3).unbind()
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    got = torch.autograd.grad(wrap(op)(*leaves).sum(), leaves)
    assert [g.tolist() for g in got] == [w.tolist(), x.tolist()]
    assert told == [set(words)]


def test_training_and_kept_go_together():
    with pytest.raises(TypeError, match="test_half: training= and kept= go together"):
        ops.differentiable("test_half", linear.forward, linear.backward, training=linear.training)


def test_edits_of_all_parts_are_noticed():
    assert set(linear.call.made_of) == {
        linear.forward,
        linear.backward,
        linear.training,
        linear.output,
        linear.z_like,
    }
    assert linear.call.__doc__ == linear.forward.__doc__
    assert inspect.signature(linear.call) == inspect.signature(linear.forward)


def test_keyword_only_parameters_are_not_the_operators():
    """One operator for each activation: the kernels are specialised by its name."""

    def forward(x: Tensor, *, activation: str) -> Tensor:
        return getattr(torch, activation)(x)

    def backward(dy: Tensor, x: Tensor, *, activation: str) -> tuple[Tensor]:
        return (dy * (x > 0 if activation == "relu" else 1 - torch.tanh(x) ** 2),)

    made = {
        name: ops.differentiable(
            f"test_{name}", *(functools.partial(f, activation=name) for f in (forward, backward))
        )
        for name in ("relu", "tanh")
    }
    x = torch.randn(9, requires_grad=True)
    for name, op in made.items():
        want = getattr(torch, name)(x)
        for call in (op, compiled(op)):
            torch.testing.assert_close(call(x), want)
            got, exact = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (call(x), want))
            torch.testing.assert_close(got, exact)


# the output, for the backward


class Exponential:
    """weight * exp(x) + bias as an operator whose backward starts from the output; says what that gets.

    ``keeps``: exp(x) is kept too, and overwritten where it may be.
    """

    def __init__(self, name: str, *, keeps: bool) -> None:
        self.name, self.keeps = name, keeps
        self.got: list[tuple[Tensor, ...]] = []
        """What comes after the tensors, for each backward."""
        self.spent: list[bool] = []
        more = dict(training=self.training, kept=lambda x, *_: (torch.empty_like(x),)) if keeps else {}
        self.call = ops.differentiable(name, ops.contiguous(self.forward), self.backward, result=True, **more)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = weight * torch.exp(x)
        return y if bias is None else y + bias

    def training(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ops.contiguous(self.forward)(x, weight, bias), torch.exp(x)

    def backward(self, dy, x, weight, bias, *rest, spent):
        self.got.append(rest)
        self.spent.append(spent)
        y, *kept = rest
        dx = dy.contiguous() * (y if bias is None else y - bias)
        grown = (kept[0] if spent else kept[0].clone()) if kept else torch.exp(x)
        return dx, grown.mul_(dy).sum(0), None if bias is None else dy.sum(0)

    def forget(self) -> None:
        self.got.clear()
        self.spent.clear()


EXPONENTIALS = {
    "nothing kept": Exponential("test_exponential", keeps=False),
    "kept": Exponential("test_exponential_kept", keeps=True),
}
WRAPPED = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


@pytest.fixture(params=EXPONENTIALS)
def op(request):
    EXPONENTIALS[request.param].forget()
    return EXPONENTIALS[request.param]


def storage(tensor: Tensor) -> StorageWeakRef:
    """Tells whether the tensor's memory is free."""
    return StorageWeakRef(tensor.untyped_storage())


def exponential_inputs(*needed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((5, 7), (7,), (7,))[: len(needed)]
    return [
        torch.randn(s, device=device.name()).requires_grad_(n) for s, n in zip(shapes, needed, strict=True)
    ]


@WRAPPED
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biased", [True, False, None], ids=["bias", "None", "left out"])
def test_the_backward_gets_the_output_before_what_was_kept(wrap, op, layout, biased):
    x, weight, bias = exponential_inputs(True, True, True)
    tensors = (LAYOUTS[layout](x), weight, *{True: (bias,), False: (None,), None: ()}[biased])
    y, want, needed = wrap(op.call)(*tensors), op.forward(*tensors), [t for t in tensors if t is not None]
    torch.testing.assert_close(y, want)
    upstream = 2 * want.detach()
    pairs = (torch.autograd.grad(each, needed, upstream) for each in (y, want))
    for got, exact in zip(*pairs, strict=True):
        torch.testing.assert_close(got, exact)
    ((output, *kept),) = op.got
    assert torch.equal(output, y) and output.is_contiguous() and len(kept) == op.keeps
    assert output.data_ptr() == y.data_ptr(), "the output itself, not a copy"


@WRAPPED
@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True)], ids=str
)
def test_one_gradient_is_enough_for_the_output_to_be_kept(wrap, op, needed):
    tensors = exponential_inputs(*needed)
    y = wrap(op.call)(*tensors)
    (wanted,) = (t for t in tensors if t.requires_grad)
    got, exact = (torch.autograd.grad(each.sum(), wanted) for each in (y, op.forward(*tensors)))
    torch.testing.assert_close(got, exact)
    assert op.got[0][0].data_ptr() == y.data_ptr()


@WRAPPED
@pytest.mark.parametrize("keeps", [False, True], ids=["nothing kept", "kept"])
def test_without_result_the_backward_gets_what_was_kept_alone(wrap, keeps):
    got = []

    def backward(dy, x, *kept):
        got.append(kept)
        return (dy * torch.exp(x),)

    def training(x: Tensor) -> tuple[Tensor, ...]:
        return torch.exp(x), x + 1

    more = dict(training=training, kept=lambda x: (torch.empty_like(x),)) if keeps else {}
    op = ops.differentiable(f"test_no_result_{keeps}", lambda x: torch.exp(x), backward, **more)
    x = torch.randn(3, 5, requires_grad=True)
    y = wrap(op)(x)
    memory, total = storage(y), y.sum()
    del y
    assert memory.expired(), "nobody needs the output"
    assert torch.equal(torch.autograd.grad(total, x)[0], torch.exp(x))
    ((*kept,),) = got
    assert [t.tolist() for t in kept] == [(x + 1).tolist()] * keeps


@WRAPPED
def test_an_output_for_the_backward_lives_until_that_is_over(wrap, op):
    tensors = exponential_inputs(True, True, True)
    gc.collect()
    gc.disable()  # it must go by itself, not when a cycle is found
    try:
        call = wrap(op.call)
        y = call(*tensors)
        memory, total = storage(y), y.sum()
        del y
        assert not memory.expired()
        total.backward()
        op.forget()
        assert memory.expired()
        y = call(*tensors)
        memory = storage(y)
        del y
        assert memory.expired(), "or until nobody can ask for it"
    finally:
        gc.enable()


@WRAPPED
def test_the_output_is_saved_once_beside_the_tensors(wrap, op):
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        wrap(op.call)(*exponential_inputs(True, True, True))
    assert sorted(saved) == [(5, 7)] * (2 + op.keeps) + [(7,)] * 2


@WRAPPED
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode, None], ids=str)
def test_without_gradients_no_output_is_saved(wrap, op, off):
    def pack(tensor):
        raise AssertionError("saved")

    tensors = exponential_inputs(*[off is not None] * 3)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, off() if off else torch.enable_grad():
        y = wrap(op.call)(*tensors)
    assert not y.requires_grad
    memory = storage(y)
    del y
    assert memory.expired()


@WRAPPED
def test_an_output_that_was_written_to_is_refused_not_wrong(wrap, op):
    tensors = exponential_inputs(True, True, True)
    y = wrap(op.call)(*tensors)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), tensors)


@WRAPPED
def test_a_retained_graph_keeps_the_output_and_no_backward_spends_it(wrap, op):
    tensors = exponential_inputs(True, True, True)
    want = op.forward(*tensors)
    y, exact = wrap(op.call)(*tensors), torch.autograd.grad(want.sum(), tensors)
    for retain in (True, True, False):
        got = torch.autograd.grad(y.sum(), tensors, retain_graph=retain)
        for one, other in zip(got, exact, strict=True):
            torch.testing.assert_close(one, other)
    assert op.spent == [False, False, wrap is not compiled]
    assert [output.data_ptr() for output, *_ in op.got] == [y.data_ptr()] * 3
    torch.testing.assert_close(y, want)  # what was spent is what was kept
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), tensors)


@WRAPPED
def test_a_second_derivative_through_the_output_is_refused(wrap, op):
    tensors = exponential_inputs(True, True, True)
    with pytest.raises(RuntimeError):
        y = wrap(op.call)(*tensors)
        dx, *_ = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        torch.autograd.grad(dx.sum(), tensors)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "None"])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_all_parts_that_save_or_take_the_output_pass_the_checks_of_a_library_operator(op, part, bias):
    x, weight, last = exponential_inputs(*[part == "forward"] * 3)
    tensors = x, weight, last if bias else None
    if part == "forward":
        checked = getattr(torch.ops.labkit, op.name + "_training" * op.keeps)
        torch.library.opcheck(checked.default, tensors)
    else:
        checked, y = getattr(torch.ops.labkit, f"{op.name}_backward"), op.forward(*tensors)
        rest = [y, torch.exp(x)] if op.keeps else [y]
        torch.library.opcheck(checked.default, (torch.cos(y), *tensors, rest, [True, False, bias]))


# autocast


def test_autocast_casts_what_linear_casts():
    x, weight, double, whole = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3).double(), torch.arange(3)
    tensors = (x, weight, None, double, whole, x.half())
    assert all(got is given for got, given in zip(ops.autocast(*tensors), tensors, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        cast = ops.autocast(*tensors)
        assert cast[2] is None and cast[3] is double and cast[4] is whole
        assert [cast[i].dtype for i in (0, 1, 5)] == [torch.bfloat16] * 3
        with torch.autocast("cpu", enabled=False):
            assert ops.autocast(x)[0] is x
        meta = x.to("meta")
        assert ops.autocast(meta)[0] is meta, "autocast knows nothing of this device"


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_layer_inside_autocast_computes_like_linear(wrap):
    def layer(x, weight, bias):
        return linear.call(*ops.autocast(x, weight, bias))

    tensors, call = [t.detach().cpu().requires_grad_() for t in linear_inputs(True, True, True)], wrap(layer)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = call(*tensors), torch.relu(torch.nn.functional.linear(*tensors))
    assert y.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(y, want)
    grads = torch.autograd.grad(y.sum(), tensors)
    for got, exact in zip(grads, torch.autograd.grad(want.sum(), tensors), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2)
    assert call(*tensors).dtype is torch.float32


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


@pytest.mark.skipif(not device.has_gpu(), reason="a CUDA graph needs a GPU")
def test_a_replay_does_without_the_workspaces_that_libraries_give_back():
    """torch.compile gives them back before it captures or tunes; few numbers from long sums use one."""
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 2**15), (2**15, 64)))
    y, want = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16), torch.mm(a, b)
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):  # whose workspace captures on this stream would use from now on
        torch.mm(a, b)
    replay = functools.partial(ops.replayed(lambda a, b: torch.mm(a, b, out=y)), a, b)
    replay()
    torch.cuda.synchronize()
    del other
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    elsewhere = torch.full((2**28,), 7, device="cuda", dtype=torch.int8)
    y.zero_()
    replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, want)
    assert bool((elsewhere == 7).all())
