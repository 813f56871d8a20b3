"""Turn a forward and a backward into one differentiable operator."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

Forward = Callable[..., Tensor]
Backward = Callable[..., tuple[Tensor, ...]]


def differentiable(name: str, forward: Forward, backward: Backward) -> Forward:
    """One operator from ``forward(*tensors)`` and ``backward(upstream, *tensors)``.

    ``forward`` takes tensors and returns a new tensor of the first one's shape and dtype; ``backward``
    takes the gradient of that output, then the same tensors, and returns a new gradient for each of them.
    The gradients are differentiable once.

    Called eagerly the operator is a plain autograd function, or the bare forward where nothing needs a
    gradient: a library operator costs the host several times as much. Under torch.compile it is a
    torch.library operator called ``labkit::name`` that the compiler does not look into, so it also works
    with fullgraph=True and where kernels are interpreted. Both can be captured in a CUDA graph. Defining a
    name again replaces it, so a notebook cell may be run twice.
    """
    traced = _library_operator(name, forward, backward)
    eager = _autograd_function(forward, backward)

    def operator(*tensors: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return traced(*tensors)
        return eager(*tensors) if _differentiated(tensors) else forward(*tensors)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = forward.__doc__
    operator.made_of = (forward, backward)  # type: ignore[attr-defined]  # sweeps notice when these are edited
    operator.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return operator


def _differentiated(tensors: tuple[Tensor, ...]) -> bool:
    """Whether autograd must hear of this call; in forward mode it must, so that it can refuse."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _autograd_function(forward: Forward, backward: Backward) -> Forward:
    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, ...]:
            return backward(upstream, *ctx.saved_tensors)

    return Operator.apply


def _library_operator(name: str, forward: Forward, backward: Backward) -> Forward:
    names = list(inspect.signature(forward).parameters)
    inputs = ", ".join(f"Tensor {n}" for n in names)
    forward_op = torch.library.custom_op(
        f"labkit::{name}", forward, mutates_args=(), schema=f"({inputs}) -> Tensor"
    )
    backward_op = torch.library.custom_op(
        f"labkit::{name}_backward",
        lambda upstream, *tensors: list(backward(upstream, *tensors)),
        mutates_args=(),
        schema=f"(Tensor upstream, {inputs}) -> Tensor[]",  # a tuple of one would be a tensor
    )

    @forward_op.register_fake
    def _(*tensors: Tensor) -> Tensor:
        return _like(tensors[0])

    @backward_op.register_fake
    def _(upstream: Tensor, *tensors: Tensor) -> list[Tensor]:
        return [_like(tensor) for tensor in tensors]

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, upstream: Tensor) -> Any:
        return tuple(backward_op(upstream, *ctx.saved_tensors))

    forward_op.register_autograd(differentiate, setup_context=save)
    return forward_op


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def contiguous(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: tensors of any strides reach ``call`` contiguous, copied only where they are not."""

    @functools.wraps(call)
    def with_copies(*arguments: Any, **options: Any) -> Any:
        return call(*(a.contiguous() if isinstance(a, Tensor) else a for a in arguments), **options)

    return with_copies


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the course's operators compute in; sums are always in float32."""


def expect(name: str, tensor: Tensor, shape: tuple[Any, ...], like: Tensor | None = None) -> None:
    """Raise a ValueError that names the argument unless it is what an operator was written for.

    ``shape`` holds a number for a fixed size, None for any, and may begin with ``...`` for any leading
    dimensions. With ``like``, device and dtype must be the same as that tensor's; inside autocast the
    dtypes may differ, because every kernel computes in float32.
    """
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
    if not enough or any(want is not None and want != size for want, size in zip(fixed, sizes, strict=True)):
        wanted = ", ".join("..." if s is ... else "any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name}: has shape {tuple(tensor.shape)}, should be ({wanted})")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: has dtype {tensor.dtype}, should be float32, float16 or bfloat16")
    if like is None:
        return
    if tensor.device != like.device:
        raise ValueError(f"{name}: is on {tensor.device}, should be on {like.device} like the first argument")
    if tensor.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type):
        raise ValueError(f"{name}: has dtype {tensor.dtype}, should be {like.dtype} like the first argument")


def replayed(call: Forward) -> Forward:
    """The same call as the replay of a CUDA graph, captured anew for inputs elsewhere or of other shapes.

    The output is the graph's own tensor: the next call with these inputs overwrites it.
    """
    captured: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def replay(*tensors: Tensor) -> Tensor:
        key = tuple((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if key not in captured:
            call(*tensors)  # what is compiled at first use is compiled outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = call(*tensors)
            captured[key] = graph, output
        graph, output = captured[key]
        graph.replay()
        return output

    return replay
