"""A step of a model as the replay of a CUDA graph: warmed up, captured and replayed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

DEVICE_TYPE = "cuda"
"""Type of the device that inputs lie on. (Tests put another in its place, where there is no GPU.)"""


def release_cublas_workspaces() -> None:
    """Before the capture of a CUDA graph: cuBLAS then takes its workspace from the graph's own memory.

    A replay writes where the capture did. A workspace from before the capture is everybody's: torch.compile
    gives it back before it captures or tunes, PyTorch when another graph ends, and the replay would write to
    memory that by then is another tensor's (PyTorch issue 193402). For the same reason other graphs, captured
    without this call, may not be replayed after it.
    """
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()


def graphed_callable(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same call as the replay of a CUDA graph, captured anew for inputs elsewhere or of other shapes.

    The output is the graph's own tensor: the next call with these inputs overwrites it.
    """
    captured: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def replay(*tensors: Tensor) -> Tensor:
        key = tuple((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if key not in captured:
            call(*tensors)  # what is compiled at first use is compiled outside the capture
            release_cublas_workspaces()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = call(*tensors)
            captured[key] = graph, output
        graph, output = captured[key]
        graph.replay()
        return output

    return replay


def state_tensors(one: Any) -> list[Tensor]:
    """What a step may change in a module or an optimizer, by place."""
    if isinstance(one, nn.Module):
        return [*one.parameters(), *one.buffers()]
    return [
        t for held in (*one.state.values(), *one.param_groups) for t in held.values() if isinstance(t, Tensor)
    ]


@contextmanager
def preserve_state(kept: Sequence[Any]) -> Iterator[None]:
    """State, gradients and random numbers are afterwards as before, each tensor where it lay.

    ``kept`` are modules, optimizers and gradient scalers. ValueError for an optimizer without state whose
    state does not begin at zero: it has to take a step before.
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
    """A step as the replay of a CUDA graph: one for each combination of shapes, the ``max_graphs`` used last.

    A call copies its inputs to where the captured kernels read, and replays. Before a capture ``call`` runs
    three times, without a trace in what ``keep`` names. What Python decides in it (train or eval, a learning
    rate that is no tensor) stays as it was captured.

    The graphs of a GPU share one pool of memory, which grows to what they need one after the other: capture
    the largest shape first, and the others fit in its memory.

    Calls may come from several streams: one on another stream than the last waits for all that the last
    call's stream has to do by then, so neither inputs nor results that are still read are written over. They
    may not come from several threads at once: a result belongs to its caller until the next call only, so
    threads need a lock around the call and all that they do with its result.

    Args:
        call: takes tensors, returns a tensor, or a tuple or list of them.
        keep: modules, optimizers and gradient scalers that ``call`` changes.
        most: graphs kept.

    Returns (when called):
        What ``call`` returns, without gradients; the next call writes over it.

    Raises:
        ValueError: naming the input, for one that is no tensor, on no GPU or on another than the first one,
            of another dtype than in the first call, or that requires a gradient; naming ``call`` where it
            returns something else than tensors, ``max_graphs`` below 1, and ``keep`` as ``preserve_state`` does.

    The rules of a capture: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, call: Callable[..., Any], keep: Sequence[Any] = (), max_graphs: int = 4) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs: is {max_graphs}, should be at least 1")
        self.call, self.keep, self.max_graphs = call, tuple(keep), max_graphs
        self.graphs: dict[tuple[Any, ...], tuple[Any, list[Tensor], Any]] = {}
        """Graph, inputs and outputs by what a call was like, the one used last at the end."""
        self.dtypes: list[torch.dtype] | None = None
        self.pools: dict[int, Any] = {}
        self.sides: dict[int, Any] = {}
        """By GPU: the graphs' memory, and the stream of warm-ups and captures."""
        self.stream: Any = None
        self.last: tuple[int, int] | None = None
        """The stream of the last call, and its GPU and address: to compare these costs next to nothing."""
        self.failed: list[Any] = []

    def __call__(self, *inputs: Tensor) -> Any:
        cast = torch.is_autocast_enabled(DEVICE_TYPE) and torch.get_autocast_dtype(DEVICE_TYPE)
        grad = torch.is_grad_enabled()
        try:
            gpu = inputs[0].get_device() if inputs else torch.cuda.current_device()
            key = gpu, cast, grad, *[(t.shape, t.dtype, t.device, grad and t.requires_grad) for t in inputs]
        except AttributeError:  # not a tensor, which is said below
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
        """Have the current stream wait for that of the last call: graphs, inputs and results are the same.

        No event is recorded after each replay: it would cost every call a microsecond of the host's time, and
        not say when the last result has been read.
        """
        stream = torch.cuda.current_stream(gpu)
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream, self.last = stream, (gpu, torch._C._cuda_getCurrentRawStream(gpu))

    def _capture(self, gpu: int, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor], Any]:
        """A new graph, its inputs and its outputs; the current GPU is the inputs'."""
        while len(self.graphs) >= self.max_graphs:
            del self.graphs[next(iter(self.graphs))]
        ended = all(key[0] != gpu for key in self.graphs)  # a pool ends with its last graph
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
            finally:  # after an error, too: state is put back on the outer stream
                outer.wait_stream(side)
        torch.clear_autocast_cache()  # weights cast before would not be cast again by a replay
        release_cublas_workspaces()  # cuBLAS takes its next one from the pool
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pools[gpu], stream=side):
                outputs = self.call(*statics)
        except BaseException:  # PyTorch leaves a failed capture's stream current, and its pool recording
            torch.cuda.set_stream(outer)
            self.failed.append(graph)
            del self.sides[gpu], self.pools[gpu]
            raise
        torch.clear_autocast_cache()
        self.dtypes = [t.dtype for t in inputs]
        return graph, statics, _detached(outputs)


def _detached(outputs: Any) -> Any:
    """The tensors that a step returns, as a replay can give them."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, (tuple, list)) and all(isinstance(t, Tensor) for t in outputs):
        return tuple(t.detach() for t in outputs)
    raise ValueError("call: returns something else than a tensor, or a tuple or list of tensors")
