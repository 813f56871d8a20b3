"""Bias, RMSNorm and GELU in one pass: right both ways, in float32, its plan, what the compiler makes."""

import importlib
import re

import launches as launches_of
import pytest
import torch
from launches import ROOM
from torch.nn import functional

from labkit import checks, codegen, device
from labkit.kernels import norm_gelu
from labkit.kernels.common import Gpu

pytestmark = pytest.mark.usefixtures("cache")
module = importlib.import_module("labkit.kernels.norm_gelu")  # the package's attribute is the function
KERNELS = ("norm_gelu_kernel", "norm_gelu_grad_kernel", "sum_kernel")
LARGE = pytest.mark.large
TWO_GPUS = pytest.mark.skipif(
    not device.has_gpu() or torch.cuda.device_count() < 2, reason="there is no second GPU here"
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
FAR = 2**31 + 40
"""More rows than 32 bits count."""


def reference(z, bias, gain):
    return functional.gelu(functional.rms_norm(z + bias, gain.shape, gain, 1e-6), approximate="tanh")


def vectors(shape):
    return torch.randn(shape), 0.3 * torch.randn(shape[-1:]), 1 + 0.1 * torch.randn(shape[-1:])


def inputs(*shape, dtype=fp32, where=None, grad=False):
    torch.manual_seed(0)
    return [t.to(where or device.name(), dtype).requires_grad_(grad) for t in vectors(shape)]


@pytest.fixture
def multiprocessors(monkeypatch):
    """Makes the GPU one of so many: the number of programs that share the rows."""
    return lambda count: monkeypatch.setattr(module, "gpu_of", lambda where: Gpu(count, 0, True))


# --- right --------------------------------------------------------------------------------------------


def test_it_and_its_gradients_are_right_in_every_dtype_and_layout():
    """Float64, gradients of a correlated upstream, outputs of NaN between fences, equal bits twice."""
    shapes = ((33, 64), (2, 3, 20), (1, 7), (1, 1), (19,), (0, 8), (4, 0), (70, 256))
    assert checks.check(norm_gelu, reference, vectors, shapes=shapes)


@pytest.mark.parametrize(
    ("rows", "width", "places"), [(300, 1000, 1), (300, 1000, 132), (300, 24, 4), (7, 40, 132)]
)
def test_sums_over_however_many_programs_and_rows_are_those_of_float32(multiprocessors, rows, width, places):
    """Rounded once: a sum, or a part of one, in 16 bits is further off than float16 rounds."""
    multiprocessors(places)
    z, bias, gain = inputs(rows, width, dtype=fp16, grad=True)
    exact = [t.detach().double().requires_grad_() for t in (z, bias, gain)]
    y, want = norm_gelu(z, bias, gain), reference(*exact)
    upstream = (2 * want).detach().to(fp16)
    got = (y, *torch.autograd.grad(y, (z, bias, gain), upstream))
    wants = (want, *torch.autograd.grad(want, exact, upstream.double()))
    for one, other in zip(got, wants, strict=True):
        assert checks.relative_error(one, other) < 2.6e-4


@LARGE
def test_rows_beyond_2_to_the_31_elements():
    width = 64
    z = torch.empty(2**31 // width + 5, width, dtype=fp16, device="cuda").normal_().requires_grad_()
    _, bias, gain = inputs(1, width, dtype=fp16)
    y = norm_gelu(z, bias, gain)
    upstream = torch.zeros_like(y)
    upstream[-9:] = 1
    (dz,) = torch.autograd.grad(y, z, upstream)
    exact = z.detach()[-9:].double().requires_grad_()
    want = reference(exact, bias.double(), gain.double())
    assert not checks.diagnose(y[-9:].detach(), want.detach(), checks.TOLERANCE[fp16])
    assert not checks.diagnose(dz[-9:], torch.autograd.grad(want.sum(), exact)[0], checks.TOLERANCE[fp16])
    assert not dz[:-9].any()


@LARGE
def test_more_than_2_to_the_31_rows():
    z = torch.empty(2**31 + 40, 1, dtype=fp16, device="cuda").normal_()
    bias, gain = torch.zeros(1, dtype=fp16, device="cuda"), torch.ones(1, dtype=fp16, device="cuda")
    y = norm_gelu(z, bias, gain)
    for part in (slice(0, 100), slice(2**31 - 50, None)):
        want = reference(z[part].double(), bias.double(), gain.double())
        assert not checks.diagnose(y[part], want, checks.TOLERANCE[fp16])


@TWO_GPUS
def test_tensors_on_a_gpu_that_is_not_the_current_one():
    tensors = inputs(33, 64, where="cuda:1", grad=True)
    y = norm_gelu(*tensors)
    gradients = torch.autograd.grad(y, tensors, 2 * y.detach())
    assert all(t.device == torch.device("cuda:1") for t in (y, *gradients))
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = reference(*exact)
    wants = torch.autograd.grad(want, exact, 2 * y.detach().double())
    for one, other in zip((y.detach(), *gradients), (want.detach(), *wants), strict=True):
        assert not checks.diagnose(one, other, checks.TOLERANCE[fp32])


# --- with PyTorch -------------------------------------------------------------------------------------


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_tensors_own():
    tensors = inputs(5, 20, grad=True)
    with torch.autocast(device.name(), bf16):
        y = norm_gelu(*tensors)
    assert y.dtype is bf16
    gradients = torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert [g.dtype for g in gradients] == [fp32] * 3


def test_it_compiles_whole_with_its_gradients(fresh_compiler):
    tensors = inputs(5, 20, grad=True)
    compiled = torch.compile(lambda *t: norm_gelu(*t) * 2, fullgraph=True, backend="aot_eager")
    y, want = compiled(*tensors), norm_gelu(*tensors) * 2
    assert torch.equal(y, want)
    pairs = zip(*(torch.autograd.grad(one, tensors, want.detach()) for one in (y, want)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_second_derivative_and_torch_func_are_refused_in_a_sentence():
    tensors = inputs(5, 20, grad=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(norm_gelu(*tensors).sum(), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda z: norm_gelu(z, *tensors[1:]).sum())(tensors[0])


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("bias", (torch.ones(2, 3), torch.ones(4), torch.ones(4))),
        ("gain", (torch.ones(2, 3), torch.ones(3), torch.ones(1, 3))),
        ("bias", (torch.ones(2, 3), torch.ones(1), torch.ones(3))),
        ("bias", (torch.ones(2, 3), torch.ones(3, dtype=bf16), torch.ones(3))),
        ("z", (torch.ones(2, 3, dtype=torch.int32), torch.ones(3), torch.ones(3))),
        ("z", (torch.ones(()), torch.ones(3), torch.ones(3))),
        ("z", (torch.ones(1, device="meta").expand(1, 2**20 + 1), torch.ones(3), torch.ones(3))),
    ],
    ids=["bias", "gain", "one bias", "dtype", "integers", "a number", "too wide"],
)
def test_a_wrong_call_names_the_argument(name, tensors):
    with pytest.raises(ValueError, match=f"^{name}:"):
        norm_gelu(*(t if t.is_meta else t.to(device.name()) for t in tensors))


# --- plan, and what the compiler makes of it ----------------------------------------------------------


def test_a_program_takes_few_rows_until_each_multiprocessor_has_one():
    rows = [module.tile_of(Gpu(100, 0, True), R, 256)["BM"] for R in (1, 100, 101, 400, 801, 10**6)]
    assert rows == [1, 1, 2, 4, 8, 8]
    assert module.tile_of(Gpu(100, 0, True), 10**6, 5000) == dict(W=5000, BM=1, BW=8192)


@pytest.fixture(scope="module")
def compiled(cache):
    """By target: each launch of a forward and a backward, and the kernel that was compiled for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gpu_of", lambda where: Gpu(132, 0, True))
        launches = launches_of.recorded(module, KERNELS, patch)
        for rows, width, dtype in ((256, 256, bf16), (1, 100, fp32), (FAR, 1, bf16)):
            z = torch.empty(rows, width, dtype=dtype, device="meta")
            module.norm_gelu_backward(module.norm_gelu_forward(z, z[0], z[0]), z, z[0], z[0])
    requests = [
        codegen.request(made.kernel, made.arguments, target=target, **made.options)
        for target in ROOM
        for made in launches
    ]
    kernels = iter(codegen.compile_many(requests))
    return {target: [(made, next(kernels)) for made in launches] for target in ROOM}


@pytest.mark.skipif(device.has_gpu(), reason="kernels are compiled for other GPUs where there is none")
@pytest.mark.parametrize("target", ROOM)
def test_every_kernel_compiles_for_every_target_without_a_spill(compiled, target):
    assert {launch.title for launch, _ in compiled[target]} == set(KERNELS)
    for launch, code in compiled[target]:
        assert code.shared_bytes <= ROOM[target] * 1024 and code.spills == 0, (launch.title, launch.W)
        if launch.title == "sum_kernel":
            assert launch.parts.dtype is fp32
        else:
            assert re.search(r"arith\.muli .*: (tensor<\w+x)?i64", code.ttir), "elements beyond 2**31"
            assert bool(re.search(r"arith\.cmpi slt, .*xi64", code.ttir)) == (launch.R == FAR), "rows"
        if launch.W == 256:  # the sum over a program's rows takes 4 columns a thread
            assert code.widest_load >= 64, launch.title
