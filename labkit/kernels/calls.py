"""What a call of a kernel has to satisfy, and how PyTorch sees it: checks, autocast, operators, autograd."""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from triton.runtime.interpreter import InterpreterError

from labkit import backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that all kernels take. They compute and sum in float32."""
INTERPRETED = backend.interpreting()
"""Whether Triton's interpreter runs the kernels, on tensors on the CPU."""
MAKE_FX = torch._C._TorchDispatchModeKey.PROXY
"""The mode that is active while make_fx traces."""


# ---- arguments ---------------------------------------------------------------------------------------------


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[Any, ...], like: Tensor | None = None, or_float32: bool = False
) -> None:
    """Raise a ValueError that names the argument unless a kernel can take this tensor.

    Args:
        name: the argument's name, with which the message begins.
        tensor: what was given.
        shape: a number for a fixed size, None for any size; ``...`` in front stands for any leading
            dimensions.
        like: the tensor whose device and dtype this one has to share. Inside torch.autocast the dtypes may
            differ, because ``autocast`` or ``promote`` casts all tensors to one.
        or_float32: whether float32 will do, too, whatever the dtype of ``like`` is.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: is a {type(tensor).__name__}, should be a tensor")
    tracing = torch.compiler.is_dynamo_compiling()  # when is_neg cannot be asked
    if not tracing and tensor.is_neg():
        raise ValueError(f"{name}: is a lazy negative, should be a dense tensor: call resolve_neg()")
    alike = like is not None and tensor.dtype is like.dtype and tensor.device == like.device
    if alike and tensor.layout is torch.strided and tensor.shape == shape:
        return  # the usual call, checked in a fraction of a microsecond
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"{name}: is sparse or nested, should be a dense tensor")
    fixed = shape[1:] if shape[:1] == (...,) else shape
    enough = tensor.dim() >= len(fixed) if fixed != shape else tensor.dim() == len(fixed)
    sizes = tensor.shape[tensor.dim() - len(fixed) :] if enough else ()
    for want, size in zip(fixed, sizes, strict=False):  # all(...) of a generator takes twice as long
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
    taken = tensor.dtype == like.dtype or (or_float32 and tensor.dtype == torch.float32)
    if not taken and not _autocasting(like.device):
        also = " or float32" if or_float32 and like.dtype != torch.float32 else ""
        raise ValueError(
            f"{name}: has dtype {tensor.dtype}, should be {like.dtype} like the first argument{also}"
        )


def check_sequences(first: str, a: Tensor, second: str, b: Tensor, h0: Tensor | None) -> None:
    """Raise a ValueError that names the argument unless a and b are (B, T, H) and h0 is (B, H) or None."""
    check_tensor(first, a, (None, None, None))
    check_tensor(second, b, tuple(a.shape), like=a)
    if a.shape[1] * a.shape[2] >= 2**31 - 32:  # offsets are 32-bit, of steps up to 24 ahead, too
        raise ValueError(f"{first}: a sequence of {a.shape[1]} x {a.shape[2]} has 2**31 numbers or nearly so")
    if h0 is not None:
        check_tensor("h0", h0, (a.shape[0], a.shape[2]), like=a)


def check_eps(eps: float) -> None:
    """Raise a ValueError unless eps is a number that can be added to a mean square."""
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < math.inf:
        raise ValueError(f"eps: is {eps!r}, should be a finite number, 0 or more")


def autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Cast the tensors to autocast's dtype, as nn.Linear does, inside torch.autocast for the first's device.

    That is for products, as PyTorch's own; ``promote`` is for recurrences and norms. Outside of autocast the
    tensors are returned as they are, and so are always None, integers and float64 (which ``check_tensor``
    refuses). Gradients have the dtype that a tensor had before. nn.Linear casts a weight once in a region of
    autocast, this function at each call.
    """
    if not _autocasting(first.device):
        return first, *others
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(_cast(tensor, dtype) for tensor in (first, *others))


def promote(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Cast the tensors to the widest of their dtypes inside torch.autocast for the first's device.

    So nothing is cast down, which recurrences would not survive: a gate of 0.9995 forgets within thousands of
    steps, and rounded to bfloat16 it is 1 and never does. Outside of autocast the tensors are returned as
    they are. Gradients have the dtype that a tensor had before.
    """
    if not _autocasting(first.device) or all(t is None or t.dtype is first.dtype for t in others):
        return first, *others
    # The widest of several is float32: of float16 and bfloat16 neither holds the other's numbers.
    return tuple(_cast(tensor, torch.float32) for tensor in (first, *others))


def _autocasting(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


# ---- operators ---------------------------------------------------------------------------------------------


def operator(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that makes the torch.library operator ``labkit::<name>`` of a function that launches kernels.

    An eager call runs the function itself, with the GPU of its first tensor as the current one, because
    Triton launches on the current GPU. The call is the operator where somebody looks on: under torch.compile,
    which does not look into an operator (so fullgraph=True works, also where kernels are interpreted), under
    make_fx, and for meta and fake tensors, which have no memory that a kernel could read. The operator is
    registered when the function is defined, never while the compiler traces.

    Args:
        fake: takes the same arguments and returns empty tensors of the outputs' shapes, strides and dtypes.

    The function's annotations are the operator's schema. It allocates all its outputs, and returns an empty
    tensor in the place of one that is not wanted.
    """

    def decorate(launch: Callable[..., Any]) -> Callable[..., Any]:
        there = _explained(launch) if INTERPRETED else launch

        def launch_there(*arguments: Any) -> Any:
            if _several_gpus() and arguments[0].is_cuda:
                with torch.cuda.device(arguments[0].device):
                    return there(*arguments)
            return there(*arguments)  # small calls are bound by the host: no further layer of Python

        @functools.wraps(launch)
        def call(*arguments: Any) -> Any:
            return registered(*arguments) if is_traced(arguments[0]) else launch_there(*arguments)

        schema = torch.library.infer_schema(launch, mutates_args=())
        name = f"labkit::{launch.__name__}"
        registered = torch.library.custom_op(name, launch_there, mutates_args=(), schema=schema)
        registered.register_fake(fake)
        return call

    return decorate


def _explained(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose error says what helps where an interpreter that is not patched refuses a kernel."""

    def explained(*arguments: Any) -> Any:
        try:
            return launch(*arguments)
        except InterpreterError as error:
            interpreter: Any = sys.modules.get("labkit.interpreter")  # whose import would bring NumPy
            if interpreter is not None and interpreter.patch.cache_info().currsize:
                raise
            raise RuntimeError(
                "call labkit.interpreter.patch() first: Triton's interpreter refuses the kernel without it"
            ) from error

    return explained


def is_traced(tensor: Tensor) -> bool:
    """Whether a call with this tensor is the operator's: it is traced, or the tensor has no memory."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return True
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(MAKE_FX) is not None


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd has to record a call with these tensors.

    Raises NotImplementedError under torch.func and forward-mode differentiation, which the kernels lack.
    """
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
    """Decorator for the backward of an autograd.Function: a second derivative raises a RuntimeError.

    torch's decorator of this name looks at the upstream gradient only, and silently drops the second
    derivative with respect to tensors that were saved.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch.compile refuses it itself
            raise RuntimeError("labkit's kernels are differentiable once: create_graph=True asks for more")
        return backward(ctx, *gradients)

    return checked


def differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], kept: Callable[..., Any]
) -> Any:
    """An autograd.Function, once differentiable, of an operator whose backward is an operator, too.

    Args:
        forward: takes the inputs; returns the output, or a list of it and of what else the backward needs.
        backward: takes the upstream gradient, the kept tensors and the inputs that are numbers; returns the
            gradients of the first inputs. The others have none: numbers, or a state that is left out.
        kept: takes the inputs and what ``forward`` returned; returns the tensors, or None, that are kept.
    """

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            made = forward(*inputs)
            outputs = (made,) if isinstance(made, Tensor) else made
            ctx.save_for_backward(*kept(*inputs, *outputs))
            ctx.numbers = [one for one in inputs if isinstance(one, (int, float))]
            return outputs[0]

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            gradients = backward(dy, *ctx.saved_tensors, *ctx.numbers)
            return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))

    return Recorded


def retains_graph() -> bool:
    """Whether the backward that is running was called with retain_graph=True."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


@functools.cache
def _several_gpus() -> bool:
    """Whether an operator has to make its tensors' GPU the current one."""
    return torch.cuda.device_count() > 1
