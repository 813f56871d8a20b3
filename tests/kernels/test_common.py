"""What the kernels' files share; operators are tried by way of the affine layer, and of a small one here."""

import ast
import contextlib
import functools
import math
from pathlib import Path

import cases
import operators as op
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad
from triton.runtime.interpreter import InterpreterError

from labkit import gpu, interpreter
from labkit.kernels import affine, calls, common, rms_norm

pytestmark = pytest.mark.usefixtures("fresh_compiler")
AFFINE = cases.AFFINE
WRAPS = pytest.mark.parametrize("wrap", [lambda call: call, op.compiled], ids=["eager", "compiled"])


def assert_right(call, *shape, where=None):
    tensors = [t.to(where or gpu.device()) for t in op.drawn(AFFINE, *shape)]
    op.all_close(op.gradients(call, tensors), op.exact(AFFINE, tensors))


# --- eager and compiled -------------------------------------------------------------------------------


@WRAPS
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_layouts_of_a_compiled_call(wrap, layout):
    x, *rest = op.drawn(AFFINE)
    x = x.T.contiguous().T if layout == "transposed" else torch.stack([x, x], -1)[..., 0]
    op.all_close(op.gradients(wrap(affine), [x, *rest]), op.exact(AFFINE, [x, *rest]))


def test_the_compiler_sees_one_graph_with_operators_that_it_does_not_look_into():
    tensors, names = op.drawn(AFFINE, grad=True), ["affine_forward", "affine_backward"]
    assert op.library_calls(affine, *tensors) == [names]
    assert op.library_calls(affine, *(t.detach() for t in tensors)) == [names[:1]], "no gradient, no backward"


def test_one_compiled_call_takes_any_number_of_rows_and_turns_with_and_without_gradients():
    call = op.compiled(affine, dynamic=True)
    for rows in (5, 6, 9):
        assert_right(call, rows, 33)
        with torch.no_grad():
            assert not call(*op.drawn(AFFINE, rows, 33, grad=True)).requires_grad


def test_a_number_that_is_new_to_a_compiled_call_registers_no_operator_while_it_is_traced():
    x, weight = op.drawn(cases.RMS_NORM)
    before = dir(torch.ops.labkit)
    call = op.compiled(lambda x, weight: rms_norm(x, weight, eps=0.0123))
    op.assert_close(call(x, weight), rms_norm(x, weight, eps=0.0123))
    assert dir(torch.ops.labkit) == before


@pytest.mark.parametrize("name", ["affine_forward", "affine_backward"])
def test_launching_functions_pass_the_checks_of_a_library_operator(name):
    x, weight, bias = op.drawn(AFFINE, 4, 5)
    x = x.T.contiguous().T
    tensors = (x, weight, bias) if name == "affine_forward" else (x.clone(), x, weight)
    torch.library.opcheck(getattr(torch.ops.labkit, name).default, tensors)


@WRAPS
def test_an_operator_that_is_defined_again_replaces_the_first(wrap):
    """As a notebook's cell does that is run twice."""
    for factor in (2.0, 5.0):

        def kernels_test_again(x: Tensor, times: float) -> Tensor:
            return factor * times * x  # noqa: B023

        op = calls.operator(fake=lambda x, times: torch.empty_like(x))(kernels_test_again)
        assert wrap(lambda x, op=op: op(x, 3.0))(torch.ones(2)).tolist() == [3 * factor] * 2
        assert op.__name__ == "kernels_test_again"


# --- gradients ----------------------------------------------------------------------------------------


@WRAPS
def test_a_second_derivative_is_refused_not_dropped(wrap):
    x, weight, bias = op.drawn(AFFINE, grad=True)
    y = wrap(affine)(x, weight, bias)
    with pytest.raises(RuntimeError, match=r"create_graph=True|double backward"):
        # of y.sum() the upstream gradient requires none, and what was saved does
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(dx.sum() + weight.sum(), weight)


@pytest.mark.parametrize(
    "transform",
    [
        lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
        lambda call, x: torch.func.jvp(call, (x,), (x,)),
    ],
    ids=["grad", "jvp"],
)
def test_torch_func_is_refused_in_a_sentence(transform):
    x, weight, bias = op.drawn(AFFINE)
    with pytest.raises(NotImplementedError, match=r"^labkit's kernels (have no|do not work)"):
        transform(lambda x: affine(x, weight, bias), x)


@WRAPS
def test_forward_mode_is_refused_and_changes_nothing_afterwards(wrap):
    """The compiler would drop the tangents and return the plain output."""
    x, weight, bias = op.drawn(AFFINE)
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

    call = calls.operator(fake=lambda x: torch.empty(1))(kernels_test_guarded)
    monkeypatch.setattr(calls, "_several_gpus", lambda: several)
    monkeypatch.setattr(torch.cuda, "device", guard)
    call(torch.zeros(1).as_subclass(OnGpu1))
    call(torch.zeros(1))
    assert seen == [[torch.device("cuda", 1)] * several, []] and not chosen


def test_what_a_plan_knows_is_of_the_tensors_own_gpu(monkeypatch):
    class Card:
        def __init__(self, number):
            self.multi_processor_count, self.shared_memory_per_block_optin = 100 + number, 1000 * number
            self.major = 8 + number

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: Card(where.index))
    ask = common.device_limits.__wrapped__
    assert ask(torch.device("cuda", 0)) == common.DeviceLimits(100, 0, has_tma=False)
    assert ask(torch.device("cuda", 1)) == common.DeviceLimits(101, 1000, has_tma=True)
    assert ask(torch.device("cpu")) == common.DeviceLimits(4, 0, has_tma=True)


# --- arguments ----------------------------------------------------------------------------------------

X = torch.zeros(2, 3, 8)


KIND = "float32, float16 or bfloat16"
WRONG = {
    "rank": (torch.zeros(3, 8), (8,), "(3, 8), should be (8)"),
    "rank too low": (torch.zeros(()), (8,), "(), should be (8)"),
    "rank below leading": (torch.zeros(3), (..., 4, 3), "(3,), should be (..., 4, 3)"),
    "size": (torch.zeros(9), (8,), "(9,), should be (8)"),
    "last size": (torch.zeros(4, 9), (..., 8), "(4, 9), should be (..., 8)"),
    "size beside any": (torch.zeros(4, 9), (None, 8), "(4, 9), should be (any, 8)"),
    "double": (torch.zeros(8).double(), (8,), KIND),
    "whole numbers": (torch.zeros(8).long(), (8,), KIND),
    "mixed dtypes": (torch.zeros(8).half(), (8,), "torch.float16, should be torch.float32"),
    "mixed devices": (torch.zeros(8, device="meta"), (8,), "on meta, should be on cpu"),
    "nothing": (None, (8,), "NoneType, should be a tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named_with_what_it_should_be(case):
    tensor, shape, words = WRONG[case]
    with pytest.raises(ValueError) as caught:
        calls.check_tensor("weight", tensor, shape, like=X)
    assert str(caught.value).startswith("weight: ") and words in str(caught.value)


def test_a_tensor_on_the_cpu_is_refused_where_kernels_are_compiled(monkeypatch):
    for interpreted in (True, False):
        monkeypatch.setattr(calls, "INTERPRETED", interpreted)
        refused = pytest.raises(ValueError, match=r"^x: is on the CPU, should be on the GPU")
        with contextlib.nullcontext() if interpreted else refused:
            calls.check_tensor("x", torch.zeros(8), (8,))


@op.INTERPRETED
def test_a_kernel_that_the_interpreter_refuses_says_what_to_call_first(monkeypatch):
    def refuses():
        raise InterpreterError("mask has unsupported dtype")

    monkeypatch.setattr(interpreter, "patch", functools.cache(lambda: None))
    with pytest.raises(RuntimeError, match=r"^call labkit\.interpreter\.patch\(\) first"):
        calls._explained(refuses)()
    interpreter.patch()
    with pytest.raises(InterpreterError, match="mask"):
        calls._explained(refuses)()


def test_inside_autocast_dtypes_may_differ_and_nothing_else():
    half = torch.zeros(8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        calls.check_tensor("weight", half, (8,), like=X)
        for wrong, shape in ((half.to("meta"), (8,)), (half.double(), (8,)), (half, (9,))):
            with pytest.raises(ValueError, match=r"^weight: "):
                calls.check_tensor("weight", wrong, shape, like=X)


def test_autocast_casts_what_linear_casts():
    x, weight, double, whole = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3).double(), torch.arange(3)
    tensors = (x, weight, None, double, whole, x.half())
    assert all(got is given for got, given in zip(calls.autocast(*tensors), tensors, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        cast = calls.autocast(*tensors)
        assert cast[2] is None and cast[3] is double and cast[4] is whole
        assert [cast[i].dtype for i in (0, 1, 5)] == [torch.bfloat16] * 3
        with torch.autocast("cpu", enabled=False):
            assert calls.autocast(x)[0] is x
        meta = x.to("meta")
        assert calls.autocast(meta)[0] is meta, "autocast knows nothing of this device"


def test_promote_casts_to_the_widest_and_nothing_down():
    full, half, brain = (torch.randn(4).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    meta = half.to("meta")
    for tensors in ((half, None, full), (full, half, None), (brain, full)):
        assert all(got is given for got, given in zip(calls.promote(*tensors), tensors, strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            for got, given in zip(calls.promote(*tensors), tensors, strict=True):
                assert got is None if given is None else torch.equal(got, given.float())
    with torch.autocast("cpu", torch.bfloat16):
        for alike in ((full, None, full), (half, half), (brain,)):
            assert all(got is given for got, given in zip(calls.promote(*alike), alike, strict=True))
        widest = calls.promote(half, brain)
        assert [one.dtype for one in widest] == [torch.float32] * 2, "neither holds the other's numbers"
        assert calls.promote(meta, full)[0] is meta, "autocast knows nothing of this device"


def test_float32_may_stand_beside_half_where_it_is_taken():
    half = X.half()
    calls.check_tensor("weight", torch.zeros(8), (8,), like=half, or_float32=True)
    calls.check_tensor("weight", torch.zeros(8).half(), (8,), like=half, or_float32=True)
    for weight, like, should in (
        (torch.zeros(8).bfloat16(), half, r"torch\.float16 like the first argument or float32"),
        (torch.zeros(8).half(), X, r"torch\.float32 like the first argument$"),
    ):
        with pytest.raises(ValueError, match=rf"^weight: has dtype \S+, should be {should}"):
            calls.check_tensor("weight", weight, (8,), like=like, or_float32=True)


# --- inside kernels -----------------------------------------------------------------------------------


@triton.jit
def far_kernel(out, stride):
    tl.store(out + tl.arange(0, 4), common.offset64(tl.arange(0, 4), stride))
    tl.store(out + 4, common.offset64(3, stride))


@triton.jit
def multiply_kernel(a, b, total, y, ADD: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]  # (16, 16)
    added = tl.load(total + at) if ADD else None
    tl.store(y + at, common.dot(tl.load(a + at), tl.load(b + at), added))


def test_far_counts_in_64_bits():
    out = torch.zeros(5, dtype=torch.int64, device=gpu.device())
    far_kernel[(1,)](out, 2**30)
    assert out.tolist() == [0, 2**30, 2**31, 3 * 2**30, 3 * 2**30]


@triton.jit
def count_kernel(out, size, TILE: tl.constexpr):
    tl.store(out, common.count_tiles(size, TILE))


def test_tiles_of_nearly_two_to_the_31_rows_are_counted_in_32_bits():
    """tl.cdiv adds TILE - 1 first, and would find fewer than none."""
    out = torch.zeros(1, dtype=torch.int64, device=gpu.device())
    for size, tiles in (
        (1, 1),
        (128, 1),
        (129, 2),
        (2**31 - 1, 2**24),
        (2**31, 2**24),
        (2**31 + 1, 2**24 + 1),
    ):
        count_kernel[(1,)](out, size, TILE=128)
        assert out.item() == tiles, size


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("add", [True, False])
def test_a_product_is_exact_in_float32(dtype, add):
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16, device=gpu.device()).to(dtype)
    total, y = torch.randn(2, 16, 16, device=gpu.device())
    multiply_kernel[(1,)](a, b, total, y, ADD=add)
    want = a.double() @ b.double() + (total.double() if add else 0)
    assert (y - want).abs().max() < 1e-5, "TF32 or a total in 16 bits is off by more"


@triton.jit
def tanh_kernel(x, y, N, FAST: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + at, common.tanh(tl.load(x + at, at < N, other=0.0), FAST), at < N)


def of_every_size():
    """From 1e-8 to 20, many around the bounds of formulas, both signs."""
    sizes = [torch.logspace(-8, math.log10(20), 20001, dtype=torch.float64)]
    sizes += [
        bound * torch.linspace(0.9, 1.1, 2001, dtype=torch.float64) for bound in (math.log(3) / 2, 2**-7)
    ]
    x = torch.cat(sizes).float().to(gpu.device())
    return torch.cat([x, -x])


@pytest.mark.parametrize(("fast", "most"), [(False, 7e-7), (True, 2**-10)])
def test_tanh_is_off_by_little_of_itself_however_small(fast, most):
    """What is claimed, and with a GPU's one instruction, about 2**-11, twice as much.

    By 2 sigmoid(2 x) - 1 it would be off by 1e-3 at 1e-4, and by 0.1 at 1e-6.
    """
    x = of_every_size()
    y = torch.empty_like(x)
    tanh_kernel[(math.ceil(len(x) / 1024),)](x, y, len(x), FAST=fast)
    want = x.double().tanh()
    assert ((y - want) / want).abs().max() <= most


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tanh_at_the_ends():
    x = torch.tensor([0.0, 1e-40, -1e-30, 50.0, -100.0, math.inf, -math.inf, math.nan], device=gpu.device())
    y = torch.empty_like(x)
    tanh_kernel[(1,)](x, y, len(x), FAST=False)
    torch.testing.assert_close(y, x.tanh(), rtol=1e-6, atol=1e-39, equal_nan=True)


def test_no_function_of_a_kernel_has_a_text_as_default():
    """Triton 3.6 takes one for a tensor where a kernel calls the function without it."""
    for file in sorted(Path(common.__file__).parent.glob("*.py")):
        functions = [f for f in ast.walk(ast.parse(file.read_text())) if isinstance(f, ast.FunctionDef)]
        for one in functions:
            if any("triton.jit" in ast.unparse(decorator) for decorator in one.decorator_list):
                texts = [
                    d for d in one.args.defaults if isinstance(d, ast.Constant) and isinstance(d.value, str)
                ]
                assert not texts, (file.name, one.name)
