"""Calls as replays of CUDA graphs: a model's step, warmed up and captured once for each shape."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

DEVICE_TYPE = "cuda"
"""The type of device that inputs have to be on. Tests without a GPU replace it."""


def release_cublas_workspaces() -> None:
    """Call it before the capture of a CUDA graph, so that cuBLAS takes a workspace from the graph's memory.

    A replay writes to the workspace that the capture used. One from before the capture is shared:
    torch.compile frees it before it captures or tunes, and PyTorch when another graph is deleted. Then the
    replay would write to memory that belongs to another tensor (PyTorch issue 193402). For the same reason,
    graphs that were captured without this call may not be replayed after it.
    """
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()


def state_tensors(one: Any) -> list[Tensor]:
    """The tensors of a module or an optimizer that a step may change."""
    if isinstance(one, nn.Module):
        return [*one.parameters(), *one.buffers()]
    return [
        t for held in (*one.state.values(), *one.param_groups) for t in held.values() if isinstance(t, Tensor)
    ]


@contextmanager
def preserve_state(kept: Sequence[Any]) -> Iterator[None]:
    """Restore afterwards, in place, what the block changes in modules, optimizers and gradient scalers.

    That is their state, the gradients of the modules' parameters, and the state of random number generators.
    Raises ValueError for an optimizer that has no state yet, unless its state begins at zero, as Adam's.
    """
    scalers = [(one, one.state_dict()) for one in kept if isinstance(one, torch.amp.GradScaler)]
    others = [one for one in kept if not isinstance(one, torch.amp.GradScaler)]
    for one in others:
        begins_at_zero = isinstance(one, (nn.Module, torch.optim.Adam))  # AdamW is one, too
        if not begins_at_zero and not one.state:
            raise ValueError(f"keep: {type(one).__name__} has no state yet, let it take a step before")
    before = {id(t): (t, t.detach().clone()) for one in others for t in state_tensors(one)}
    parameters = [p for one in others if isinstance(one, nn.Module) for p in one.parameters()]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        with torch.no_grad():
            for tensor in (t for one in others for t in state_tensors(one)):
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)][1])
                else:
                    tensor.zero_()
            for parameter, grad, value in gradients:
                parameter.grad = None if grad is None or value is None else grad.copy_(value)
        for scaler, state in scalers:
            scaler.load_state_dict(state)


class GraphedStep:
    """A step as the replay of a CUDA graph, with one graph for each combination of the inputs' shapes.

    A call copies its inputs to the addresses that the captured kernels read, and replays. Before a capture
    ``call`` runs three times; what it changes in ``keep`` is restored. What Python decides in it, as train or
    eval, or a learning rate that is no tensor, stays as it was captured.

    All graphs of a GPU share one memory pool. Capture the largest shape first, and the others fit into it.

    Calls may come from several streams. A call on another stream than the last one waits for all work that
    the last call's stream has by then, so that no input or result is overwritten while it is read. Calls may
    not come from several threads at once: a result is valid until the next call only, so threads need a lock
    around the call and their use of its result.

    Args:
        call: takes tensors, returns a tensor, or a tuple or list of tensors.
        keep: modules, optimizers and gradient scalers that ``call`` changes.
        max_graphs: the number of graphs that are kept; those used last.

    Returns (when called):
        What ``call`` returns, without gradients. The next call overwrites it.

    Raises:
        ValueError: for an input that is no tensor, is not on a GPU or not on the first one's, has another
            dtype than in the first call, or requires a gradient; for a ``call`` that returns something else
            than tensors; for ``max_graphs`` below 1; for ``keep`` as ``preserve_state`` does.

    The rules of a capture: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, call: Callable[..., Any], keep: Sequence[Any] = (), max_graphs: int = 4) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs: is {max_graphs}, should be at least 1")
        self.call, self.keep, self.max_graphs = call, tuple(keep), max_graphs
        self.graphs: dict[tuple[Any, ...], tuple[Any, list[Tensor], Any]] = {}
        """Graph, inputs and outputs by GPU, autocast, grad mode and inputs; the one used last at the end."""
        self.dtypes: list[torch.dtype] | None = None
        self.pools: dict[int, Any] = {}
        self.sides: dict[int, Any] = {}
        """By GPU, the graphs' memory pool, and the stream of warm-ups and captures."""
        self.stream: Any = None
        self.last: tuple[int, int] | None = None
        """The stream of the last call, and its GPU and address, which are faster to compare."""
        self.failed: list[Any] = []

    def __call__(self, *inputs: Tensor) -> Any:
        cast = torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE)
        grad = torch.is_grad_enabled()
        try:
            gpu = inputs[0].get_device() if inputs else torch.cuda.current_device()
            key = gpu, cast, grad, *[(t.shape, t.dtype, t.device, grad and t.requires_grad) for t in inputs]
        except AttributeError:  # an input is no tensor, for which _check_inputs has a message
            self._check_inputs(inputs)
            raise
        found = self.graphs.pop(key, None)
        if found is None:
            self._check_inputs(inputs)
        if self.last != (gpu, torch._C._cuda_getCurrentRawStream(gpu)):
            self._wait_for_last_call(gpu)
        if found is None:
            with torch.cuda.device(gpu):
                found = self._capture(gpu, inputs)
        self.graphs[key] = graph, statics, outputs = found
        for static, given in zip(statics, inputs, strict=True):
            if static is not given:
                static.copy_(given)
        graph.replay()
        return outputs

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        for i, t in enumerate(inputs):
            if not isinstance(t, Tensor):
                raise ValueError(f"input {i}: is of type {type(t).__name__}, should be a tensor")
        known = self.dtypes or [t.dtype for t in inputs]
        if len(inputs) != len(known):
            raise ValueError(f"inputs: {len(inputs)}, should be {len(known)} as in the first call")
        for i, (t, dtype) in enumerate(zip(inputs, known, strict=True)):
            if t.device.type != DEVICE_TYPE:
                raise ValueError(f"input {i}: is on {t.device}, should be on a GPU")
            if t.device != inputs[0].device:
                raise ValueError(f"input {i}: is on {t.device}, should be on {inputs[0].device} as input 0")
            if t.dtype != dtype:
                raise ValueError(f"input {i}: is {t.dtype}, should be {dtype} as in the first call")
            if t.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"input {i}: requires a gradient, and a replay gives none")

    def _wait_for_last_call(self, gpu: int) -> None:
        """Make the current stream wait for the last call's: both use the same memory.

        An event after each replay would cost every call a microsecond of the host's time, and not tell when
        its result has been read.
        """
        stream = torch.cuda.current_stream(gpu)
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream, self.last = stream, (gpu, torch._C._cuda_getCurrentRawStream(gpu))

    def _capture(self, gpu: int, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor], Any]:
        """Capture a graph on the inputs' GPU, which is current; returns it, its inputs and its outputs."""
        while len(self.graphs) >= self.max_graphs:
            del self.graphs[next(iter(self.graphs))]
        ended = all(key[0] != gpu for key in self.graphs)  # a pool is freed with its last graph
        if ended or gpu not in self.pools:
            self.pools[gpu] = torch.cuda.graph_pool_handle()
        if gpu not in self.sides:
            self.sides[gpu] = torch.cuda.Stream()
        side, outer = self.sides[gpu], torch.cuda.current_stream()
        with torch.inference_mode(False):
            statics = [t.detach().clone() for t in inputs]
        with preserve_state(self.keep):
            side.wait_stream(outer)
            try:
                with torch.cuda.stream(side):
                    for _ in range(3):
                        _detached(self.call(*statics))
            finally:  # state is restored on the outer stream, after an error, too
                outer.wait_stream(side)
        torch.clear_autocast_cache()  # else replays would use weights that were cast before the capture
        release_cublas_workspaces()  # cuBLAS takes its next one from the pool
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pools[gpu], stream=side):
                outputs = self.call(*statics)
        except BaseException:  # after a failed capture its stream is current, and its pool still recording
            torch.cuda.set_stream(outer)
            self.failed.append(graph)
            del self.sides[gpu], self.pools[gpu]
            raise
        torch.clear_autocast_cache()
        self.dtypes = [t.dtype for t in inputs]
        return graph, statics, _detached(outputs)


def _detached(outputs: Any) -> Any:
    """The tensors that a step returns, without gradients."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, (tuple, list)) and all(isinstance(t, Tensor) for t in outputs):
        return tuple(t.detach() for t in outputs)
    raise ValueError("call: returns something else than a tensor, or a tuple or list of tensors")
