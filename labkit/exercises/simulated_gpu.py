"""A simulated GPU: as asynchronous as a real one, on the CPU, and the same on every machine.

Time: host and device have a time each, in simulated microseconds. A launch costs the host some time and is
queued; the device works off its queue while the host goes on. Reading a clock does not wait for the device.

Streams: an operation of PyTorch runs at once, and counts as work on the current stream. Work on two streams
that touches the same memory is a conflict unless a wait lies between. Interpreted Triton kernels are captured
and replayed, too, but take no part in conflicts. In time all streams are one queue.

Graphs: in a capture nothing is computed. An operation's output holds NaN, and a replay runs the operation on
the very same tensors, in place.

One thing differs from torch.cuda: its ``graph`` waits for the whole device when a capture begins. Here that
takes its time, but orders no streams, since that would hide a wait that is missing.
"""

import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit import interpreter
from labkit.measure.launch_counts import starts_work

WAIT_US, COMPILE_US, CAPTURE_US, UPLOAD_US, REPLAY_US = 2.0, 40_000.0, 900.0, 400.0, 8.0
"""What these cost the host; a wait beside the device's work, a capture beside its launches."""
ASK_THE_DEVICE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
"""Operations that return a number to Python: it waits until the device has computed it."""
COPY_TO_THE_HOST = {"cpu", "numpy", "tolist", "__array__", "__repr__"}
"""Methods that wait in the same way, and are no operations where the tensor lies on the CPU."""


class LogEntry(NamedTuple):
    """One thing that happened on a simulated GPU.

    ``event`` is "clock" or "event" (the host and the device make a time stamp), "synchronize", "compile",
    "draw" (of random numbers), "call" (of a layer), "captured" (such a call in a capture), "upload" or
    "replay".
    """

    event: str
    us: float
    """The time stamp; the host's time for everything else."""
    pending: bool
    """Whether the device still had work."""


def count(part: list[LogEntry], event: str) -> int:
    """How many events of a kind a part of the log has."""
    return sum(entry.event == event for entry in part)


class SimulatedGpu(TorchDispatchMode):
    """The device. While it is active PyTorch works on its streams; ``cuda`` stands for torch.cuda."""

    def __init__(self, wait_us: float = WAIT_US, compile_us: float = COMPILE_US) -> None:
        super().__init__()
        self.wait_us, self.compile_us = wait_us, compile_us
        self.log: list[LogEntry] = []
        self.host_us = self.device_us = 1000.0  # a clock has been running before anybody looks at it
        self.conflicts: list[Stream] = []
        """Streams that touched memory that another one had used, one of them writing, without a wait."""
        self.captures = self.replays = self.issued = self.host_copies = 0
        """How many graphs were captured, replays run, pieces of work issued to all streams, and tensors
        copied to the host."""
        self.capturing: CUDAGraph | None = None
        self.host_waited: set[int] = set()
        """Numbers of the pieces of work that the host has waited for: what is issued next follows them."""
        self.streams: list[Stream] = []
        self.default = self.current = Stream(self)
        self.cuda = _cuda_of(self)
        self._uses: dict[int, tuple[Tensor, list[tuple[int, bool]]]] = {}
        """By memory: a tensor that keeps it from being given away, and its uses (number of the piece of
        work, whether it wrote) since the last write."""

    # ---- time ----------------------------------------------------------------------------------------------

    def note(self, event: str, us: float | None = None) -> None:
        """Append to the log."""
        pending = self.device_us > self.host_us
        self.log.append(LogEntry(event, self.host_us if us is None else us, pending))

    def launch(self, host_us: float, device_us: float) -> None:
        """Queue work that takes the host and the device so long; in a capture it is added to the graph."""
        self.host_us += host_us
        if self.capturing is None:
            self.device_us = max(self.device_us, self.host_us) + device_us
        else:
            self.capturing.device_us += device_us

    def clock_us(self) -> float:
        """What the host's clock shows, in microseconds. It doesn't wait for the device."""
        self.host_us += 0.05
        self.note("clock")
        return self.host_us

    def wait(self, pieces: set[int], until_us: float) -> None:
        """Let the host wait for pieces of work, which the device has done at a time in microseconds."""
        self.not_while_capturing("the host waited for the device")
        self.host_waited |= pieces
        self.host_us = max(self.host_us, until_us) + self.wait_us
        self.note("synchronize")

    def synchronize(self) -> None:
        """Wait until the device has worked off its queue."""
        self.wait(set(range(self.issued)), self.device_us)

    def timed(self) -> list[LogEntry]:
        """The log from the first time stamp to the last one, with both."""
        stamps = [i for i, entry in enumerate(self.log) if entry.event in ("clock", "event")]
        return self.log[stamps[0] : stamps[-1] + 1] if stamps else []

    @contextmanager
    def replaces_cuda(self, answer: Any) -> Iterator[None]:
        """Replace torch.cuda and the clocks of ``time``, also where the answer's module imported them."""
        clocks: dict[str, Any] = {}
        for name in ("perf_counter", "monotonic", "time"):
            clocks[name] = lambda: self.clock_us() / 1e6
            clocks[f"{name}_ns"] = lambda: round(self.clock_us() * 1e3)
        cuda = {name: new for name, new in vars(self.cuda).items() if not name.startswith("_")}
        module_names = getattr(inspect.unwrap(answer), "__globals__", {})
        with ExitStack() as stack:
            for module, names in ((torch.cuda, cuda), (time, clocks)):
                for name, new in names.items():
                    old = getattr(module, name)
                    imported = {alias: new for alias, value in module_names.items() if value is old}
                    stack.enter_context(patch.dict(module_names, imported))
                    stack.enter_context(patch.object(module, name, new))
            yield

    # ---- operations and streams ----------------------------------------------------------------------------

    def __enter__(self) -> "SimulatedGpu":
        self._patches = ExitStack()
        self._patches.enter_context(_HostReads(self))
        self._patches.enter_context(interpreter.watching(_Launches(self)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASK_THE_DEVICE:
            self.not_while_capturing("Python asked for a number that the device has not computed")
            self.current.synchronize()
        if self.capturing is not None:
            if torch.Tag.dynamic_output_shape in func.tags or _by_mask(func, args):
                self.not_while_capturing("the size of a result depends on numbers of the device")
            return self.capturing.record(func, args, kwargs)
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._uses.setdefault(_memory(each), (each, []))
        if starts_work(func):
            self.work(_overwritten(func, args, kwargs) or tree_leaves(result), tree_leaves((args, kwargs)))
        return result

    def work(self, written: list[Any], read: list[Any]) -> None:
        """Note a piece of work on the current stream, and what it conflicts with."""
        stream = self.current
        stream.before |= self.host_waited
        writes = {_memory(each) for each in written if isinstance(each, Tensor)}
        touched = {_memory(each): each for each in (*written, *read) if isinstance(each, Tensor)}
        for address, tensor in touched.items():
            _, uses = self._uses.setdefault(address, (tensor, []))
            if any((wrote or address in writes) and number not in stream.before for number, wrote in uses):
                self.conflicts.append(stream)
            if address in writes:
                uses.clear()
            uses.append((self.issued, address in writes))
        stream.before.add(self.issued)
        self.issued += 1

    def not_while_capturing(self, what: str) -> None:
        """RuntimeError during a capture, as CUDA has it; the capture fails by it even if it is caught."""
        if self.capturing is not None:
            error = RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
            self.capturing.failed = self.capturing.failed or error
            raise error

    def unwaited(self) -> int:
        """Pieces of other streams' work that the default stream would not wait for."""
        return self.issued - len(self.default.before | self.host_waited)

    def stream_without_wait(self) -> str:
        """Which stream goes on without waiting for another one's work: "current", "side" or "none"."""
        if not (self.conflicts or self.unwaited()):
            return "none"
        return "current" if all(stream is self.default for stream in self.conflicts) else "side"

    def memory(self) -> set[int]:
        """Addresses of all memory that operations have made or touched so far; none is given away."""
        return set(self._uses)

    def unobserved(self) -> Any:
        """A context whose operations do not count as work: for code that only looks at values."""
        return _disable_current_modes()


class _Launches(interpreter.Observer):
    """Captures launches of Triton's kernels where something is captured, and has them run elsewhere."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def launch(self, run: Callable[..., Any], kernel: Any, args: Any, options: dict[str, Any]) -> None:
        """Run a launch unobserved, or append it to the operations of the graph."""
        if self._gpu.capturing is None:
            with self._gpu.unobserved():
                run(*args, **options)
        else:
            args, options = detached((args, options))
            self._gpu.capturing.operations.append(partial(run, *args, **options))


class _HostReads(TorchFunctionMode):
    """Counts what copies a tensor to the host; a capture refuses it. (``x.to(y.device)`` names no host.)"""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        texts = [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
        if name in COPY_TO_THE_HOST or (name == "to" and "cpu" in texts):
            self._gpu.not_while_capturing(f"Python asked for a tensor's values, by {name}")
            self._gpu.host_copies += 1
        return func(*args, **kwargs)


# ---- torch.cuda --------------------------------------------------------------------------------------------


def _cuda_of(gpu: SimulatedGpu) -> ModuleType:
    """What an answer gets for torch.cuda."""

    @contextmanager
    def graph(
        cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any
    ) -> Iterator[None]:
        """A context whose work is captured, on a stream of its own if none is given."""
        with stream or Stream(gpu):
            cuda_graph.capture_begin()
            gpu.host_us = max(gpu.host_us, gpu.device_us) + gpu.wait_us
            try:
                yield
            except BaseException:
                gpu.capturing = None
                raise
            cuda_graph.capture_end()

    cuda = ModuleType("simulated torch.cuda")
    vars(cuda).update(
        Stream=partial(Stream, gpu),
        Event=partial(Event, gpu),
        CUDAGraph=partial(CUDAGraph, gpu),
        graph=graph,
        stream=lambda stream: stream or nullcontext(),
        current_stream=lambda device=None: gpu.current,
        default_stream=lambda device=None: gpu.default,
        synchronize=lambda device=None: gpu.synchronize(),
    )
    return cuda


class Stream:
    """Work in order; no order beside other streams' but for waits."""

    def __init__(self, gpu: SimulatedGpu, device: Any = None, priority: int = 0) -> None:
        self._gpu = gpu
        self.before: set[int] = set()
        """Numbers of the pieces of work that come before what is issued next, its own and other streams'."""
        self._outer: list[Stream] = []
        gpu.streams.append(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Mark what the stream has to do by now."""
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Let what follows wait for what an event marks."""
        self.before |= event.before

    def wait_stream(self, stream: "Stream") -> None:
        """Let what follows wait for all that the other stream has to do by now."""
        self.before |= stream.before

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self._gpu.wait(self.before, self._gpu.device_us)

    def __enter__(self) -> "Stream":
        self._outer.append(self._gpu.current)
        self._gpu.current = self
        return self

    def __exit__(self, *error: Any) -> None:
        self._gpu.current = self._outer.pop()


class Event:
    """A mark in a stream, and a time stamp that the device makes when it comes to it."""

    def __init__(self, gpu: SimulatedGpu, enable_timing: bool = False, blocking: bool = False) -> None:
        self._gpu, self._timing = gpu, enable_timing
        self.before: set[int] = set()
        self._us: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark what a stream has to do by now, the current one if none is given."""
        self.before = {*(stream or self._gpu.current).before}
        if self._gpu.capturing is None:  # a capture has no time stamps
            self._gpu.launch(1.0, 0.0)
            self._us = self._gpu.device_us
            self._gpu.note("event", self._us)

    def wait(self, stream: Stream | None = None) -> None:
        """Let what follows in a stream wait for the mark."""
        (stream or self._gpu.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self._gpu.wait(self.before, self._us or 0.0)

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds from this time stamp to another one."""
        if not (self._timing and later._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._us is None or later._us is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self._us, later._us) > self._gpu.host_us:
            raise RuntimeError("CUDA error: device not ready")
        return (later._us - self._us) / 1000


class CUDAGraph:
    """Operations with the tensors that they were captured on, and the device time of what was launched."""

    def __init__(self, gpu: SimulatedGpu, keep_graph: bool = False) -> None:
        self._gpu = gpu
        self.device_us = 0.0
        self.captured = self._uploaded = False

    def capture_begin(self) -> None:
        """Capture what follows on the current stream."""
        self._gpu.not_while_capturing("a capture began inside another")
        if self.captured:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        if self._gpu.current is self._gpu.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.operations: list[Callable[[], Any]] = []
        self.failed: RuntimeError | None = None
        self._gpu.capturing = self

    def capture_end(self) -> None:
        """End the capture; the error that it failed by, even if that was caught meanwhile."""
        self._gpu.capturing = None
        if self.failed is not None:
            raise self.failed
        self.captured = True
        self._gpu.captures += 1
        self._gpu.host_us += CAPTURE_US

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Remember an operation in place of running it; what it would return, without its values."""
        written = _overwritten(func, args, kwargs)
        if written:  # an operation on lists of tensors, as _foreach_add_, returns nothing
            returned = len(func._schema.returns)
            result: Any = (None, written[0])[returned] if returned <= 1 else tuple(written)
        else:
            result = func(*args, **kwargs)
            if not starts_work(func):
                return result
        fresh = [] if written else [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        args, kwargs, fresh = detached((args, kwargs, fresh))
        with self._gpu.unobserved():
            for tensor in fresh:
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)

        def run_again() -> None:
            again = func(*args, **kwargs)
            for old, new in zip(fresh, tree_leaves(again) if fresh else (), strict=True):
                old.copy_(new)
            self._gpu.work(written or fresh, tree_leaves((args, kwargs)))

        self.operations.append(run_again)
        return result

    def replay(self) -> None:
        """Run the operations on the current stream, on the tensors that they were captured on."""
        gpu = self._gpu
        gpu.not_while_capturing("a graph was replayed inside a capture")
        if not self.captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if not self._uploaded:
            gpu.host_us += UPLOAD_US
            gpu.note("upload")
        self._uploaded = True
        gpu.launch(REPLAY_US, self.device_us)
        gpu.note("replay")
        gpu.replays += 1
        with torch.inference_mode(), gpu.unobserved():
            for operation in self.operations:
                operation()


# ---- tensors -----------------------------------------------------------------------------------------------


def _by_mask(func: Any, args: Any) -> bool:
    """Whether an operation takes the elements of a tensor for which a mask is true."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in args[1])


def detached(values: Any) -> Any:
    """The same with tensors that stay at their memory: those given may be made to refer to other memory."""
    with _disable_current_modes():
        return tree_map_only(Tensor, torch.Tensor.detach, values)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among an operation's arguments that it writes to."""
    given = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor)]
