"""Turn a forward and a backward into one differentiable operator."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from labkit import device

if device.interpreting():
    from labkit import interpreter

    interpreter.quicken()

Forward = Callable[..., Tensor]
Training = Callable[..., tuple[Tensor, ...]]
Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable(
    name: str,
    forward: Forward,
    backward: Backward,
    *,
    output: Forward | None = None,
    training: Training | None = None,
    kept: Training | None = None,
    result: bool = False,
) -> Forward:
    """One operator from ``forward(*tensors)`` and ``backward(upstream, *tensors)``.

    ``forward`` takes tensors and returns a new one of the first one's shape and dtype, contiguous, or of
    those of the empty tensor that ``output(*tensors)`` returns. A tensor annotated ``Tensor | None`` may be
    None, and be left out where that is its default; keyword-only parameters are not the operator's.
    ``backward`` takes the gradient of the output, of any strides, then the same tensors, and returns a new
    contiguous gradient for each of them. If it has a keyword-only ``wanted``, a tuple of a bool for each
    tensor, the gradients not wanted may be None. The gradients are differentiable once.

    What the backward needs beside the tensors is kept from the forward: where a gradient is needed,
    ``training(*tensors)`` runs in place of ``forward`` and returns the output and what to keep, all new
    tensors; ``backward(upstream, *tensors, *kept)`` gets them, and then they are freed. ``kept(*tensors)``
    returns a tuple of empty tensors like them. If the backward has a keyword-only ``spent``, it is told
    whether nobody will read the kept tensors again, so that it may overwrite them: eagerly, unless the graph
    is retained. With ``result`` it gets the output too, before what was kept; that is never spent.

    Called eagerly the operator is a plain autograd function, or the bare forward where nothing needs a
    gradient: a library operator costs the host several times as much. Triton launches on the current GPU:
    where there are several, that is the first tensor's for the time of the call. Under torch.compile it is
    a torch.library operator called ``labkit::name`` (``name_training`` where something is kept) that the
    compiler does not look into, so it also works with fullgraph=True and where kernels are interpreted.
    Both can be captured in a CUDA graph. Defining a name again replaces it, so a notebook cell may be run
    twice.
    """
    if (training is None) != (kept is None):
        raise TypeError(f"{name}: training= and kept= go together: kept says what training keeps")
    signature = inspect.signature(forward, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    count, required = len(parameters), sum(p.default is p.empty for p in parameters)
    gradients = _checked_gradients(name, [p.name for p in parameters], backward)
    eager = _autograd_function(forward, training, gradients, result)
    traced = _library_operator(name, parameters, forward, output or _like, training, kept, gradients, result)

    def whole(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """With None for those left out; too few or too many are for the forward to refuse."""
        return tensors + (None,) * (count - len(tensors)) if len(tensors) >= required else tensors

    def called(tensors: tuple[Tensor | None, ...]) -> Tensor:
        return eager(*whole(tensors)) if _differentiated(tensors) else forward(*tensors)

    def operator(*tensors: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            if forward_ad._current_level >= 0:  # the compiler would drop the tangents
                raise NotImplementedError(f"{name}: has no forward-mode derivative")
            return traced(*whole(tensors))
        if _several_gpus() and tensors and isinstance(tensors[0], Tensor) and tensors[0].is_cuda:
            with torch.cuda.device(tensors[0].device):
                return called(tensors)
        return called(tensors)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = forward.__doc__
    # sweeps notice when these are edited
    operator.made_of = (forward, backward, output, training, kept)  # type: ignore[attr-defined]
    operator.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return operator


@functools.cache
def _several_gpus() -> bool:
    """Whether a tensor's GPU may be another than the current one; with one GPU nothing is asked or set."""
    return torch.cuda.device_count() > 1


def _differentiated(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether autograd must hear of this call; in forward mode it must, so that it can refuse."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _checked_gradients(name: str, names: list[str], backward: Backward) -> Backward:
    """``backward`` told what is wanted, if it takes that, and held to it: no gradient missing, none more."""
    asked = {"wanted", "spent"} & inspect.signature(backward).parameters.keys()

    def gradients(
        *tensors: Tensor | None, wanted: Sequence[bool], spent: bool = False
    ) -> tuple[Tensor | None, ...]:
        told = {"wanted": tuple(wanted), "spent": spent}
        made = backward(*tensors, **{word: told[word] for word in asked})
        if len(made) != len(names):
            raise RuntimeError(f"{name}: the backward returned {len(made)} gradients for {len(names)} inputs")
        for which, needed, gradient in zip(names, wanted, made, strict=True):
            if needed and gradient is None:
                raise RuntimeError(f"{name}: the backward returned no gradient for {which}")
        return tuple(gradient if needed else None for needed, gradient in zip(wanted, made, strict=True))

    return gradients


def _autograd_function(
    forward: Forward, training: Training | None, gradients: Backward, result: bool
) -> Forward:
    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor | None) -> Tensor:
            output, *kept = training(*tensors) if training else (forward(*tensors),)
            ctx.save_for_backward(*tensors, *([output] if result else []), *kept)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
            spent = not torch._C._autograd._get_current_graph_task_keep_graph()
            return gradients(upstream, *ctx.saved_tensors, wanted=ctx.needs_input_grad, spent=spent)

    return Operator.apply


def _library_operator(
    name: str,
    parameters: list[inspect.Parameter],
    forward: Forward,
    output: Forward,
    training: Training | None,
    kept: Training | None,
    gradients: Backward,
    result: bool,
) -> Forward:
    inputs = ", ".join(f"{_schema_type(p)} {p.name}" for p in parameters)

    def define(suffix: str, call: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(f"labkit::{name}{suffix}", call, mutates_args=(), schema=schema)
        made.register_fake(fake)
        return made

    def backward(upstream: Tensor, *rest: Any) -> list[Tensor | None]:
        *tensors, kept, wanted = rest
        made = gradients(upstream, *tensors, *kept, wanted=wanted)
        return [gradient for gradient, needed in zip(made, wanted, strict=True) if needed]

    def backward_fake(upstream: Tensor, *rest: Any) -> list[Tensor]:
        *tensors, _, wanted = rest
        return [_like(tensor) for tensor, needed in zip(tensors, wanted, strict=True) if needed]

    forward_op = define("", forward, f"({inputs}) -> Tensor", output)
    backward_schema = f"(Tensor upstream, {inputs}, Tensor[] kept, bool[] wanted) -> Tensor[]"
    backward_op = define("_backward", backward, backward_schema, backward_fake)

    def save(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor | list[Tensor]) -> None:
        first, *kept = output if training else [output]
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*inputs, *([first] if result else []), *kept)

    def differentiate(ctx: Any, upstream: Any) -> tuple[Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, list(ctx.needs_input_grad)
        tensors, kept = saved[: len(wanted)], list(saved[len(wanted) :])
        made = iter(backward_op(upstream[0] if training else upstream, *tensors, kept, wanted))
        return tuple(next(made) if needed else None for needed in wanted)

    if training is None or kept is None:
        forward_op.register_autograd(differentiate, setup_context=save)
        return forward_op

    training_op = define(
        "_training",
        lambda *tensors: list(training(*tensors)),
        f"({inputs}) -> Tensor[]",
        lambda *tensors: [output(*tensors), *kept(*tensors)],
    )
    training_op.register_autograd(differentiate, setup_context=save)

    def chosen(*tensors: Tensor | None) -> Tensor:
        """An inference graph holds nothing for a backward."""
        return training_op(*tensors)[0] if _differentiated(tensors) else forward_op(*tensors)

    return chosen


def _schema_type(parameter: inspect.Parameter) -> str:
    return "Tensor?" if type(None) in get_args(parameter.annotation) else "Tensor"


def _like(tensor: Tensor, *_: Tensor | None) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def contiguous(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: tensors of any strides reach ``call`` contiguous, copied only where they are not."""

    @functools.wraps(call)
    def with_copies(*arguments: Any, **options: Any) -> Any:
        return call(*(a.contiguous() if isinstance(a, Tensor) else a for a in arguments), **options)

    return with_copies


def autocast(first: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as nn.Linear takes them: inside torch.autocast for the first one's device, in its dtype.

    Outside they are returned as they are; None, whole numbers and float64 (which `expect` refuses) always
    are. Gradients come back in the dtype that a tensor had. nn.Linear casts a weight once in a region of
    autocast, this at each call.
    """
    kind = first.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):  # others may not have it
        return first, *others
    return tuple(_cast(tensor, torch.get_autocast_dtype(kind)) for tensor in (first, *others))


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


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
            device.own_workspaces()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = call(*tensors)
            captured[key] = graph, output
        graph, output = captured[key]
        graph.replay()
        return output

    return replay
