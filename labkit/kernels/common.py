"""What the kernels' files share: checks of arguments, autocast, the operator, what a GPU has room for."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad

from labkit import backend

if backend.interpreting():
    from labkit import interpreter

    interpreter.patch_interpreter()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels take; they compute and sum in float32."""
INTERPRETED = backend.interpreting()
"""Whether kernels are interpreted: then tensors may be on the CPU."""


# ---- arguments ---------------------------------------------------------------------------------------------


def check_tensor(name: str, tensor: Tensor, shape: tuple[Any, ...], like: Tensor | None = None) -> None:
    """Raise a ValueError that names the argument unless a kernel can take it.

    ``shape`` holds a number for a fixed size, None for any, and may begin with ``...`` for any leading
    dimensions. With ``like``, device and dtype must be the same as that tensor's; inside autocast the dtypes
    may differ, because ``autocast`` makes them one.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: is a {type(tensor).__name__}, should be a tensor")
    if (
        like is not None
        and tensor.dtype is like.dtype
        and tensor.shape == shape
        and tensor.device == like.device
    ):
        return  # the common case, at a fraction of a microsecond
    fixed = shape[1:] if shape[:1] == (...,) else shape
    enough = tensor.dim() >= len(fixed) if fixed != shape else tensor.dim() == len(fixed)
    sizes = tensor.shape[tensor.dim() - len(fixed) :] if enough else ()
    for want, size in zip(fixed, sizes, strict=False):  # a generator would take twice as long
        enough = enough and (want is None or want == size)
    if not enough:
        wanted = ", ".join("..." if s is ... else "any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name}: has shape {tuple(tensor.shape)}, should be ({wanted})")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: has dtype {tensor.dtype}, should be float32, float16 or bfloat16")
    if like is None:
        if tensor.device.type == "cpu" and not INTERPRETED:
            raise ValueError(f"{name}: is on the CPU, should be on the GPU that kernels are compiled for")
        return
    if tensor.device != like.device:
        raise ValueError(f"{name}: is on {tensor.device}, should be on {like.device} like the first argument")
    if tensor.dtype != like.dtype and not _autocasting(like.device):
        raise ValueError(f"{name}: has dtype {tensor.dtype}, should be {like.dtype} like the first argument")


def autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors as nn.Linear takes them: inside torch.autocast for the first one's device, in its dtype.

    Outside they are returned as they are; None, whole numbers and float64 (which ``check_tensor`` refuses)
    always are. Gradients come back in the dtype that a tensor had. nn.Linear casts a weight once in a region
    of autocast, this at each call.
    """
    if not _autocasting(first.device):
        return first, *others
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(_cast(tensor, dtype) for tensor in (first, *others))


def _autocasting(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


# ---- operators ---------------------------------------------------------------------------------------------


def operator(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a function that allocates outputs and launches kernels: ``labkit::its_name``.

    Called eagerly it is the function itself, on the GPU of its first tensor: Triton launches on the current
    one. Under torch.compile it is a torch.library operator, which the compiler does not look into, so that
    fullgraph=True works, and interpreted kernels do. ``fake`` takes the same arguments and returns empty
    tensors like the outputs. Outputs are new tensors; where one is not wanted, an empty one stands for it.
    Annotations of arguments and outputs are the operator's schema.
    """

    def decorate(launch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(launch)
        def call(*arguments: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(*arguments)
            if _several_gpus() and arguments[0].is_cuda:
                with torch.cuda.device(arguments[0].device):
                    return launch(*arguments)
            return launch(*arguments)  # one layer of Python: it counts where the host is the bottleneck

        schema = torch.library.infer_schema(launch, mutates_args=())
        name = f"labkit::{launch.__name__}"
        traced = torch.library.custom_op(name, call, mutates_args=(), schema=schema)
        traced.register_fake(fake)
        return call

    return decorate


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd has to hear of a call with these tensors; a sentence where it could not answer."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError("labkit's kernels have no forward-mode derivative (torch.func.jvp)")
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("labkit's kernels do not work under torch.func (grad, vmap, ...)")
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the backward of an autograd.Function: a second derivative is refused, not dropped.

    torch's decorator of this name asks only whether the upstream gradient requires one, not what was saved.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which refuses it by itself
            raise RuntimeError("labkit's kernels are differentiable once: create_graph=True asks for more")
        return backward(ctx, *gradients)

    return checked


def no_gradient(name: str, *tensors: Tensor | None) -> None:
    """Raise a RuntimeError where a gradient is asked of a function that has none, instead of dropping it."""
    if needs_grad(*tensors):
        raise RuntimeError(
            f"{name} has no backward: call it under torch.no_grad(), or with tensors that require no gradient"
        )


@functools.cache
def _several_gpus() -> bool:
    """With one GPU nothing is asked or set at a call."""
    return torch.cuda.device_count() > 1


# ---- the GPU -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """What tile sizes depend on."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that one block of threads may use; 0 where kernels are interpreted."""
    tile_copies: bool
    """Whether whole tiles are copied by the hardware (TMA, capability 9.0 and up); the interpreter knows
    them, too. Below, Triton takes the loads of a tensor descriptor apart, element by element."""


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """That of a tensor's device; where kernels are interpreted, one of four multiprocessors."""
    if device.type != "cuda":
        return Gpu(multiprocessors=4, shared_bytes=0, tile_copies=True)
    found: Any = torch.cuda.get_device_properties(device)  # its type lacks the fields
    return Gpu(found.multi_processor_count, found.shared_memory_per_block_optin, found.major >= 9)


def cdiv(count: int, size: int) -> int:
    """count / size, rounded up. triton.cdiv is a kernel's function too: from Python it takes 2 us."""
    return -(count // -size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is not less, 0 for 0; triton's takes 2 us, too."""
    return 1 << (count - 1).bit_length() if count else 0


def columns(width: int, itemsize: int) -> int:
    """Columns of a tile that holds rows of this width: at least four bytes for each lane of a warp."""
    return max(128 // itemsize, next_power_of_2(width))


@triton.constexpr_function
def interpreted():
    """Whether the interpreter runs the kernel: known when it is compiled, so it costs nothing."""
    return triton.knobs.runtime.interpret


@triton.jit
def far(index, stride):
    """index * stride in 64 bits, for tensors of 2**31 elements and more."""
    return tl.full([], 1, tl.int64) * index * stride


@triton.jit
def multiply(a, b, total=None):
    """The matrix product a @ b, added to ``total``: float32 in full precision on the matrix units."""
    if interpreted():  # whose own products of bfloat16 are wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="tf32x3")
