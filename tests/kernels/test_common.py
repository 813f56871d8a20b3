"""What the kernels' files share; operators are tried by way of the affine layer, and of a small one here."""

import contextlib
import functools
import threading

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad

from labkit import codegen, device
from labkit.kernels import affine, common
from labkit.works import AFFINE

GPU = pytest.mark.skipif(not device.has_gpu(), reason="a CUDA graph needs a GPU")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a tensor on another GPU needs a second one")
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(call, **options):
    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


WRAPS = pytest.mark.parametrize("wrap", [lambda call: call, compiled], ids=["eager", "compiled"])


def inputs(rows=6, width=33, where=None):
    torch.manual_seed(0)
    shapes = ((rows, width), (width,), (width,))
    return [torch.randn(shape, device=where or device.name()).requires_grad_() for shape in shapes]


def detached(tensors):
    return [t.detach() for t in tensors]


def results(call, tensors):
    """Output and gradients, with an upstream gradient that depends on the output."""
    y = call(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, 2 * y.detach())]


def assert_like_pytorch(call, tensors, reference=AFFINE.reference):
    for got, want in zip(results(call, tensors), results(reference, tensors), strict=True):
        torch.testing.assert_close(got, want)


# --- eager and compiled -------------------------------------------------------------------------------


@WRAPS
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_values_and_gradients(wrap, layout):
    x, *rest = inputs()
    x = {"contiguous": x, "transposed": x.T.contiguous().T, "strided": torch.stack([x, x], -1)[..., 0]}[
        layout
    ]
    assert_like_pytorch(wrap(affine), [x.detach().requires_grad_(), *rest])


def test_it_is_part_of_a_larger_compiled_graph():
    """fullgraph=True refuses anything that the compiler has to leave the graph for."""
    layer = lambda call: lambda x, weight, bias: torch.relu(call(x * 2, weight, bias)) * 3  # noqa: E731
    assert_like_pytorch(compiled(layer(affine)), inputs(), layer(AFFINE.reference))


def graphs_of(call, *tensors):
    """Names of the library operators in what the compiler makes of a call, a list for each graph."""
    found = []

    def record(graph, example_inputs):
        parts = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        found.append([str(n.target) for part in parts for n in part.graph.nodes if "labkit" in str(n.target)])
        return graph.forward

    torch.compile(call, backend=record)(*tensors)
    return found


def test_the_compiler_sees_one_graph_with_operators_that_it_does_not_look_into():
    tensors = inputs()
    names = [["labkit.affine_forward.default", "labkit.affine_backward.default"]]
    assert graphs_of(affine, *tensors) == names
    assert graphs_of(affine, *detached(tensors)) == [names[0][:1]], "without a gradient no backward"


def test_sizes_may_be_dynamic():
    call = compiled(affine, dynamic=True)
    for rows in (5, 6, 9):
        assert_like_pytorch(call, inputs(rows))


def test_one_compiled_call_takes_turns_with_and_without_gradients():
    call, tensors = compiled(affine), inputs()
    for _ in range(2):
        assert_like_pytorch(call, tensors)
        with torch.no_grad():
            assert not call(*tensors).requires_grad


@pytest.mark.parametrize("name", ["affine_forward", "affine_backward"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_launching_functions_pass_the_checks_of_a_library_operator(name, layout):
    x, weight, bias = detached(inputs(4, 5))
    x = x if layout == "contiguous" else x.T.contiguous().T
    tensors = (x, weight, bias) if name == "affine_forward" else (x.clone(), x, weight)
    torch.library.opcheck(getattr(torch.ops.labkit, name).default, tensors)


def test_eagerly_no_library_operator_is_called(monkeypatch):
    """It costs the host several times as much as the function."""
    called = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        results(affine, inputs())
    assert called and not [name for name in called if "labkit" in name]


@WRAPS
def test_an_operator_that_is_defined_again_replaces_the_first(wrap):
    """As a notebook's cell does that is run twice."""
    for factor in (2.0, 5.0):

        def kernels_test_again(x: Tensor, times: float) -> Tensor:
            return factor * times * x  # noqa: B023

        op = common.operator(fake=lambda x, times: torch.empty_like(x))(kernels_test_again)
        assert wrap(lambda x, op=op: op(x, 3.0))(torch.ones(2)).tolist() == [3 * factor] * 2
        assert op.__name__ == "kernels_test_again"


# --- gradients ----------------------------------------------------------------------------------------


def test_without_gradients_nothing_is_saved():
    def pack(tensor):
        raise AssertionError("saved")

    tensors = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert not affine(*detached(tensors)).requires_grad
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                assert not affine(*tensors).requires_grad


def test_one_input_that_needs_a_gradient_is_enough_and_only_what_the_backward_needs_is_saved():
    x, weight, bias = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        assert affine(x.detach(), weight.detach(), bias).requires_grad
    assert saved == [x.shape, weight.shape]
    assert common.needs_grad(None, x.detach(), bias) and not common.needs_grad(None, x.detach())


@WRAPS
def test_a_second_derivative_is_refused_not_dropped(wrap):
    x, weight, bias = inputs()
    y = wrap(affine)(x, weight, bias)
    with pytest.raises(RuntimeError, match=r"create_graph=True|double backward"):
        # of y.sum() the upstream gradient requires none, and what was saved does
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(dx.sum() + weight.sum(), weight)


def test_a_gradient_that_nobody_wrote_is_refused_not_dropped():
    x, weight, _ = inputs()
    with pytest.raises(RuntimeError, match=r"^step has no backward: call it under torch\.no_grad"):
        common.no_gradient("step", x.detach(), None, weight)
    common.no_gradient("step", x.detach(), None)
    with torch.no_grad():
        common.no_gradient("step", x, weight)


x0, w0, b0 = detached(inputs())
FUNCTIONALS = {
    "grad": lambda: torch.func.grad(lambda x: affine(x, w0, b0).sum())(x0),
    "vmap": lambda: torch.func.vmap(lambda x: affine(x, w0, b0))(x0[None]),
    "jvp": lambda: torch.func.jvp(lambda x: affine(x, w0, b0), (x0,), (x0,)),
    "no_gradient": lambda: torch.func.grad(lambda x: common.no_gradient("step", x) or x.sum())(x0),
}


@pytest.mark.parametrize("which", FUNCTIONALS)
def test_torch_func_is_refused_in_a_sentence(which):
    with pytest.raises(NotImplementedError, match=r"^labkit's kernels (have no|do not work)"):
        FUNCTIONALS[which]()


@WRAPS
def test_forward_mode_is_refused_and_changes_nothing_afterwards(wrap):
    """The compiler would drop the tangents and return the plain output."""
    x, weight, bias = detached(inputs())
    call = wrap(affine)
    want = call(x, weight, bias)
    with forward_ad.dual_level(), pytest.raises(RuntimeError):
        call(forward_ad.make_dual(x, torch.ones_like(x)), weight, bias)
    assert torch.equal(call(x, weight, bias), want)


# --- GPUs ---------------------------------------------------------------------------------------------


class OnGpu1(Tensor):
    """A tensor that says that it is on the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


@pytest.mark.parametrize("several", [True, False])
def test_where_there_are_several_gpus_the_first_tensors_is_the_current_one(monkeypatch, several):
    chosen, seen = [], []

    @contextlib.contextmanager
    def guard(where):
        chosen.append(where)
        yield
        chosen.pop()

    def kernels_test_guarded(x: Tensor) -> Tensor:
        seen.append(list(chosen))
        return torch.zeros(1)

    call = common.operator(fake=lambda x: torch.empty(1))(kernels_test_guarded)
    monkeypatch.setattr(common, "_several_gpus", lambda: several)
    monkeypatch.setattr(torch.cuda, "device", guard)
    call(torch.zeros(1).as_subclass(OnGpu1))
    call(torch.zeros(1))
    assert seen == [[torch.device("cuda", 1)] * several, []] and not chosen


@TWO
@WRAPS
def test_it_runs_on_a_gpu_that_is_not_the_current_one(wrap):
    assert_like_pytorch(wrap(affine), inputs(where="cuda:1"))
    assert torch.cuda.current_device() == 0


@TWO
def test_two_threads_use_two_gpus():
    failed = []

    def work(where):
        try:
            for rows in range(1, 60):
                assert_like_pytorch(affine, inputs(rows, 161, where))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(f"cuda:{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@GPU
@pytest.mark.parametrize("width", [160, 161])
def test_forward_and_backward_can_be_captured(width):
    x, weight, bias = inputs(64, width)
    call = functools.partial(results, affine, (x, weight, bias))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    for got, want in zip(captured, results(AFFINE.reference, (x, weight, bias)), strict=True):
        torch.testing.assert_close(got, want)


def test_what_a_plan_knows_is_of_the_tensors_own_gpu(monkeypatch):
    class Card:
        def __init__(self, number):
            self.multi_processor_count, self.shared_memory_per_block_optin = 100 + number, 1000 * number
            self.major = 8 + number

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: Card(where.index))
    ask = common.gpu_of.__wrapped__
    assert ask(torch.device("cuda", 0)) == common.Gpu(100, 0, tile_copies=False)
    assert ask(torch.device("cuda", 1)) == common.Gpu(101, 1000, tile_copies=True)
    assert ask(torch.device("cpu")) == common.Gpu(4, 0, tile_copies=True)


# --- arguments ----------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("dtype", common.DTYPES)
def test_what_fits_passes(shape, like, dtype):
    common.check_tensor(
        "x", X.to(device.name(), dtype), shape, None if like is None else like.to(device.name(), dtype)
    )


THREE = "should be float32, float16 or bfloat16"
WRONG = {
    "rank": (torch.zeros(3, 8), (8,), X, "has shape (3, 8), should be (8)"),
    "rank too low": (torch.zeros(()), (8,), X, "has shape (), should be (8)"),
    "rank below leading": (torch.zeros(3), (..., 4, 3), X, "has shape (3,), should be (..., 4, 3)"),
    "size": (torch.zeros(9), (8,), X, "has shape (9,), should be (8)"),
    "last size": (torch.zeros(4, 9), (..., 8), X, "has shape (4, 9), should be (..., 8)"),
    "size beside any": (torch.zeros(4, 9), (None, 8), X, "has shape (4, 9), should be (any, 8)"),
    "double": (torch.zeros(8).double(), (8,), None, f"has dtype torch.float64, {THREE}"),
    "whole numbers": (torch.zeros(8).long(), (8,), X, f"has dtype torch.int64, {THREE}"),
    "mixed dtypes": (
        torch.zeros(8).half(),
        (8,),
        X,
        "has dtype torch.float16, should be torch.float32 like the first argument",
    ),
    "mixed devices": (
        torch.zeros(8, device="meta"),
        (8,),
        X,
        "is on meta, should be on cpu like the first argument",
    ),
    "dtypes on meta": (
        torch.zeros(8, device="meta").half(),
        (8,),
        X.to("meta"),
        "has dtype torch.float16, should be torch.float32 like the first argument",
    ),
    "nothing": (None, (8,), X, "is a NoneType, should be a tensor"),
}


def test_a_tensor_on_the_cpu_is_refused_where_kernels_are_compiled(monkeypatch):
    x = torch.zeros(8)
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"^x: is on the CPU, should be on the GPU"):
        common.check_tensor("x", x, (8,))
    monkeypatch.setattr(common, "INTERPRETED", True)
    common.check_tensor("x", x, (8,))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named_with_what_it_should_be(case):
    tensor, shape, like, sentence = WRONG[case]
    with pytest.raises(ValueError) as caught:
        common.check_tensor("weight", tensor, shape, like)
    assert str(caught.value) == f"weight: {sentence}"


def test_inside_autocast_dtypes_may_differ_and_nothing_else():
    half = torch.zeros(8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        common.check_tensor("weight", half, (8,), like=X)
        for wrong, shape in ((half.to("meta"), (8,)), (half.double(), (8,)), (half, (9,))):
            with pytest.raises(ValueError, match=r"^weight: "):
                common.check_tensor("weight", wrong, shape, like=X)
    with pytest.raises(ValueError, match="has dtype"):
        common.check_tensor("weight", half, (8,), like=X)


def test_autocast_casts_what_linear_casts():
    x, weight, double, whole = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3).double(), torch.arange(3)
    tensors = (x, weight, None, double, whole, x.half())
    assert all(got is given for got, given in zip(common.autocast(*tensors), tensors, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        cast = common.autocast(*tensors)
        assert cast[2] is None and cast[3] is double and cast[4] is whole
        assert [cast[i].dtype for i in (0, 1, 5)] == [torch.bfloat16] * 3
        with torch.autocast("cpu", enabled=False):
            assert common.autocast(x)[0] is x
        meta = x.to("meta")
        assert common.autocast(meta)[0] is meta, "autocast knows nothing of this device"


# --- inside kernels -----------------------------------------------------------------------------------


@triton.jit
def far_kernel(out, stride):
    tl.store(out + tl.arange(0, 4), common.far(tl.arange(0, 4), stride))
    tl.store(out + 4, common.far(3, stride))


@triton.jit
def multiply_kernel(a, b, total, y, ADD: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]  # (16, 16)
    added = tl.load(total + at) if ADD else None
    tl.store(y + at, common.multiply(tl.load(a + at), tl.load(b + at), added))


def test_far_counts_in_64_bits():
    out = torch.zeros(5, dtype=torch.int64, device=device.name())
    far_kernel[(1,)](out, 2**30)
    assert out.tolist() == [0, 2**30, 2**31, 3 * 2**30, 3 * 2**30]


@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize("add", [True, False])
def test_a_product_is_exact_in_float32(dtype, add):
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16, device=device.name()).to(dtype)
    total, y = torch.randn(2, 16, 16, device=device.name())
    multiply_kernel[(1,)](a, b, total, y, ADD=add)
    want = a.double() @ b.double() + (total.double() if add else 0)
    assert (y - want).abs().max() < 1e-5, "TF32 or a total in 16 bits is off by more"


def test_a_product_of_float32_keeps_its_precision_where_it_is_compiled(cache):
    """The interpreter has no TF32 to fall into."""
    pointers = dict.fromkeys(("a", "b", "total", "y"), "*fp32:16")
    assert "inputPrecision = tf32x3" in codegen.compile(multiply_kernel, pointers, ADD=True).ttir
