"""What the tests of products and their epilogues share: inputs, float64 results, other GPUs, launches."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launches import ROOM, Launch, Recorder
from torch import Tensor
from torch.nn import functional

from labkit import checks, codegen, counts, device
from labkit.kernels import geglu, linear
from labkit.kernels.common import Gpu
from labkit.mlp_works import gate_up
from labkit.mlp_works import geglu as mlp

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = {linear: ("linear_kernel", "dz_kernel"), geglu: ("gate_up_kernel", "gated_kernel")}
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}
Inputs = Callable[[tuple[int, ...]], tuple[Tensor, ...]]


def scaled(*shape: int) -> Tensor:
    return torch.randn(shape) * max(shape[-1], 1) ** -0.5


def with_weight(out: int) -> Inputs:
    return lambda shape: (torch.randn(shape), scaled(out, shape[-1]))


def with_bias(out: int) -> Inputs:
    return lambda shape: (*with_weight(out)(shape), torch.randn(out))


def with_gate_up(hidden: int) -> Inputs:
    return lambda shape: (torch.randn(shape), scaled(2, hidden, shape[-1]))


def with_mlp(hidden: int) -> Inputs:
    return lambda shape: (*with_gate_up(hidden)(shape), scaled(shape[-1], hidden))


def drawn(make: Inputs, *shape: int, dtype: torch.dtype = fp32, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in make(shape)]


def linear_of(activation: str) -> Callable[..., Tensor]:
    def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear.linear_act(x, weight, bias, activation)

    return linear_act


def plain_linear(activation: str) -> Callable[..., Tensor]:
    return lambda *tensors: ACTIVATIONS[activation](functional.linear(*tensors))


CALLS: dict[str, tuple[Inputs, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "matmul": (with_weight(40), linear.matmul, functional.linear),
    "linear_act": (with_bias(40), linear.linear_act, plain_linear("gelu_tanh")),
    "geglu_mlp": (with_mlp(40), geglu.geglu_mlp, mlp),
}
"""By name: inputs, ours, the same in plain PyTorch."""


def examine(
    call: Any, reference: Any, make: Inputs, *shapes: Any, layouts: Any = None, **options: Any
) -> None:
    """checks.check, in some layouts only: all of them are the business of few tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {n: checks.LAYOUTS[n] for n in layouts or ("contiguous",)})
        checks.check(call, reference, make, shapes=shapes, **options)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype = fp32, roundings: int = 1) -> None:
    assert got.dtype is dtype and got.shape == want.shape, (got.dtype, got.shape, want.shape)
    problem = checks.diagnose(got.detach(), want.detach(), roundings * checks.TOLERANCE[dtype])
    assert not problem, problem


def assert_rounded_once(got: Tensor, want: Tensor) -> None:
    """Little more than what rounding the float64 result to this dtype costs."""
    least = checks.relative_error(want.to(got.dtype), want)
    truncated = got.dtype is bf16 and not device.has_gpu()  # as the interpreter rounds to bfloat16
    error, most = checks.relative_error(got, want), (2.4 if truncated else 1.2) * least + 1e-6
    assert error < most, (error, most)


def results(call: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Output, and gradients for an upstream gradient of twice the output."""
    y = call(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, 2 * y.detach())]


def expected(plain: Any, tensors: list[Tensor]) -> list[Tensor]:
    return results(plain, [t.detach().double().requires_grad_() for t in tensors])


def assert_same_results(call: Any, plain: Any, tensors: list[Tensor]) -> None:
    for got, want in zip(results(call, tensors), expected(plain, tensors), strict=True):
        assert_close(got, want)


def saved_by(call: Any, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output, and the tensors saved beside the inputs."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = call(*tensors)
    given = {t.data_ptr() for t in tensors}
    return y, [t for t in saved if t.data_ptr() not in given]


def kept_is_right(rows: int, width: int, hidden: int, dtype: torch.dtype = fp32) -> None:
    """Gate, up and their product, each in its own place and nothing anywhere else."""
    fences = checks.Fences()
    x, w_gate_up = drawn(with_gate_up(hidden), rows, width, dtype=dtype)
    with fences:
        got, kept = geglu.fused_gate_up(*(fences.place(t, "contiguous") for t in (x, w_gate_up)), keep=True)
    assert kept is not None and kept.shape == (rows, 2, hidden)
    for side, weight in enumerate(w_gate_up):
        assert_close(kept[:, side], x.double() @ weight.double().T, dtype)
    assert_close(got, gate_up(x.double(), w_gate_up.double()), dtype)
    assert fences.broken() == 0


def kernels_of(call: Any, *tensors: Tensor) -> list[Any]:
    """The launches of Triton kernels in a call, between fences, so that strays hit nothing else."""
    fences = checks.Fences()
    placed = [fences.place(tensor, "contiguous") for tensor in tensors]
    with fences:
        made = counts.count(lambda: call(*placed)).launches
    return [launch for launch in made if launch.programs]


# --- other GPUs, and launches that are recorded instead of made


def gpu(target: str, multiprocessors: int = 132) -> Gpu:
    return Gpu(multiprocessors, ROOM[target] * 1024, int(target.removeprefix("sm_")) >= 90)


def pretend(patch: pytest.MonkeyPatch, its: Gpu) -> None:
    """Let the host's part believe that tensors are on this GPU."""
    patch.setattr(linear, "gpu_of", lambda device: its)


def recorded(patch: pytest.MonkeyPatch) -> list[Launch]:
    """The list that fills with the launches of these kernels while ``patch`` lasts."""
    made: list[Launch] = []
    for module, names in KERNELS.items():
        for name in names:
            patch.setattr(module, name, Recorder(getattr(module, name), made))
    return made


def meta(*shape: int, dtype: torch.dtype = bf16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def tile_of(launch: Launch) -> tuple[int, ...]:
    return launch.BM, launch.BN, launch.BK, launch.num_warps, launch.num_stages


def launched(dtype: torch.dtype, sizes: tuple[int, int, int], training: bool) -> Iterator[tuple[Any, Any]]:
    """(function, inputs) of calls on meta tensors that reach every kernel; with ``training`` and backward."""
    M, H, K = sizes
    shapes = ((M, K), (H, K), (H,)), ((M, K), (2, H, K), (K, H))
    for call, its in zip((linear.linear_act, geglu.geglu_mlp), shapes, strict=True):
        tensors = [meta(*shape, dtype=dtype, grad=training) for shape in its]
        y = call(*tensors)
        if training:
            torch.autograd.grad(y.sum(), tensors)
        yield call, tensors


def requests(
    cases: dict[str, list[tuple[torch.dtype, tuple[int, int, int], bool]]],
) -> Iterator[tuple[str, torch.dtype, tuple[int, int, int], bool, Launch, codegen.Request]]:
    """What to compile for these (dtype, (rows, hidden, width), training) by target; each kernel once."""
    seen = set()
    for target, asked in cases.items():
        for dtype, sizes, training in asked:
            with pytest.MonkeyPatch.context() as patch:
                made = recorded(patch)
                pretend(patch, gpu(target))
                list(launched(dtype, sizes, training))
            for launch in made:
                one = codegen.request(launch.kernel, launch.arguments, target=target, **launch.options)
                if one.key not in seen:
                    seen.add(one.key)
                    yield target, dtype, sizes, training, launch, one


SOME = [subset for subset in itertools.product((True, False), repeat=3) if any(subset)]
"""Which of three inputs need a gradient."""
