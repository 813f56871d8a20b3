"""A stand-in for torch.cuda on the CPU: streams that may race, and graphs to capture and replay.

Outside a capture an operation runs at once, and counts as work on the current stream. Inside one it computes
nothing: its output holds NaN, and a replay runs it on the very same tensors, in place. Work on two streams
that touches the same memory is a conflict unless a wait lies between. Interpreted Triton kernels are captured
and replayed, too, but take no part in conflicts.

One thing differs from torch.cuda: its ``graph`` waits for the whole device when a capture begins. Here it
does not, since that would hide a wait that is missing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit import dispatch_mode

Known = dict["Stream", int]
"""How many pieces of each stream's work are known to be done."""
ASK_THE_DEVICE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
"""Operations that return a number to Python: it waits until the device has computed it."""
COPY_TO_THE_HOST = {"cpu", "numpy", "tolist", "__array__", "__repr__"}
"""Methods that wait in the same way, and are no operations where the tensor lies on the CPU."""


class NotPermittedError(RuntimeError):
    """What CUDA refuses while a stream is capturing."""


class Machine(dispatch_mode.Mode):
    """The device. While it is active PyTorch works on its streams; ``cuda`` stands for torch.cuda."""

    def __init__(self) -> None:
        super().__init__()
        self.conflicts: list[tuple[Stream, Stream]] = []
        """Streams that touched the same memory, one of them writing; the second did not wait."""
        self.captures = self.replays = 0
        self.capturing: CUDAGraph | None = None
        self.host: Known = {}
        """What the host has waited for: whatever is issued next comes after it."""
        self.streams: list[Stream] = []
        self.default = self.current = Stream(self)
        self.cuda = Cuda(self)
        self._used: dict[int, tuple[Tensor, list[tuple[Stream, int, bool]]]] = {}
        """By memory: a tensor that keeps it from being given away, and its uses (stream, number, whether it
        wrote) since the last write."""

    def __enter__(self) -> "Machine":
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def launched(*args: Any, **options: Any) -> None:
            if self.capturing is None:
                with self.unseen():
                    return run(*args, **options)
            args, options = _by_memory((args, options))
            self.capturing.operations.append(partial(run, *args, **options))

        self._others = ExitStack()
        self._others.enter_context(_HostReads(self))
        self._others.enter_context(patch.object(InterpretedFunction, "run", launched))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._others.close()

    def not_while_capturing(self, what: str) -> None:
        """`NotPermittedError` during a capture, which fails by it even if it is caught."""
        if self.capturing is not None:
            error = NotPermittedError(f"CUDA error: operation not permitted when stream is capturing: {what}")
            self.capturing.failed = self.capturing.failed or error
            raise error

    def unwaited(self) -> int:
        """Pieces of other streams' work that the default stream would not wait for."""
        known = _most(self.default.known, self.host, {self.default: self.default.issued})
        return sum(stream.issued - known.get(stream, 0) for stream in self.streams)

    def late(self) -> str:
        """Which stream goes on without waiting for another one's work, "current" or "side"; "" for none."""
        if not (self.conflicts or self.unwaited()):
            return ""
        return "current" if all(later is self.default for _, later in self.conflicts) else "side"

    def unseen(self) -> Any:
        """A context whose operations nobody sees: for those who look at values."""
        return _disable_current_modes()

    def on(self, stream: "Stream | None") -> Any:
        """A context in which ``stream`` is the current one; None changes nothing."""
        return stream or nullcontext()

    def work(self, written: list[Any], read: list[Any]) -> None:
        """Note a piece of work on the current stream, and what it conflicts with."""
        stream = self.current
        stream.issued += 1
        stream.known = _most(stream.known, self.host)
        writes = {_memory(each) for each in written if isinstance(each, Tensor)}
        touched = {_memory(each): each for each in (*written, *read) if isinstance(each, Tensor)}
        for place, tensor in touched.items():
            _, uses = self._used.setdefault(place, (tensor, []))
            for earlier, number, wrote in uses:
                if (wrote or place in writes) and not stream.follows(earlier, number):
                    self.conflicts.append((earlier, stream))
            if place in writes:
                uses.clear()
            uses.append((stream, stream.issued, place in writes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASK_THE_DEVICE:
            self.not_while_capturing("Python asked for a number that the device has not computed")
            self.current.synchronize()
        if self.capturing is not None:
            return self.capturing.record(func, args, kwargs)
        made = func(*args, **kwargs)
        if not _starts_nothing(func):
            self.work(_overwritten(func, args, kwargs) or tree_leaves(made), tree_leaves((args, kwargs)))
        return made


class _HostReads(TorchFunctionMode):
    """Refuses in a capture what copies a tensor to the host. (``x.to(y.device)`` names no host.)"""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        texts = [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
        if name in COPY_TO_THE_HOST or (name == "to" and "cpu" in texts):
            self._machine.not_while_capturing(f"Python asked for a tensor's values, by {name}")
        return func(*args, **kwargs)


class Stream:
    """Work in order; no order beside other streams' but for waits."""

    def __init__(self, machine: Machine, device: Any = None, priority: int = 0) -> None:
        self._machine = machine
        self.issued = 0
        self.known: Known = {}
        """What of the other streams' work lies before what is issued next."""
        self._before: list[Stream] = []
        machine.streams.append(self)

    def follows(self, stream: "Stream", number: int) -> bool:
        """Whether what is issued next comes after a piece of a stream's work."""
        return stream is self or self.known.get(stream, 0) >= number

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Mark what the stream has to do by now."""
        event = event or Event(self._machine)
        event.known = _most(self.known, self._machine.host, {self: self.issued})
        return event

    def wait_event(self, event: "Event") -> None:
        """Let what follows wait for what an event marks."""
        self.known = _most(self.known, event.known)

    def wait_stream(self, stream: "Stream") -> None:
        """Let what follows wait for all that the other stream has to do by now."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self.record_event().synchronize()

    def __enter__(self) -> "Stream":
        self._before.append(self._machine.current)
        self._machine.current = self
        return self

    def __exit__(self, *error: Any) -> None:
        self._machine.current = self._before.pop()


class Event:
    """A mark in a stream."""

    def __init__(self, machine: Machine, enable_timing: bool = False, blocking: bool = False) -> None:
        self._machine = machine
        self.known: Known = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark what a stream has to do by now, the current one if none is given."""
        (stream or self._machine.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Let what follows in a stream wait for the mark."""
        (stream or self._machine.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self._machine.not_while_capturing("the host waited for the device")
        self._machine.host = _most(self._machine.host, self.known)


class CUDAGraph:
    """Operations with the tensors that they were captured on."""

    def __init__(self, machine: Machine, keep_graph: bool = False) -> None:
        self._machine = machine
        self.operations: list[Callable[[], Any]] = []
        self.captured = False
        self.failed: NotPermittedError | None = None

    def pool(self) -> tuple[int, int]:
        """A name for the graph's memory, to share it with another capture."""
        return (0, id(self))

    def reset(self) -> None:
        """Forget what was captured."""
        self.operations, self.captured, self.failed = [], False, None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Capture what follows on the current stream."""
        self._machine.not_while_capturing("a capture began inside another")
        if self.captured:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        if self._machine.current is self._machine.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.reset()
        self._machine.capturing = self

    def capture_end(self) -> None:
        """End the capture; the error that it failed by, even if that was caught meanwhile."""
        self._machine.capturing = None
        if self.failed is not None:
            raise self.failed
        self.captured = True
        self._machine.captures += 1

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Remember an operation in place of running it; what it would return, without its values."""
        written = _overwritten(func, args, kwargs)
        if written:
            made: Any = written[0] if len(func._schema.returns) <= 1 else tuple(written)
        else:
            made = func(*args, **kwargs)
            if _starts_nothing(func):
                return made
        fresh = [] if written else [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        args, kwargs, fresh = _by_memory((args, kwargs, fresh))
        with self._machine.unseen():
            for tensor in fresh:
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        self.operations.append(partial(self._again, func, args, kwargs, fresh, written or fresh))
        return made

    def _again(self, func: Any, args: Any, kwargs: Any, fresh: list[Tensor], written: list[Tensor]) -> None:
        again = func(*args, **kwargs)
        for old, new in zip(fresh, tree_leaves(again) if fresh else (), strict=True):
            old.copy_(new)
        self._machine.work(written, tree_leaves((args, kwargs)))

    def replay(self) -> None:
        """Run the operations on the current stream, on the tensors that they were captured on."""
        self._machine.not_while_capturing("a graph was replayed inside a capture")
        if not self.captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._machine.replays += 1
        with torch.inference_mode(), self._machine.unseen():
            for operation in self.operations:
                operation()


class Cuda:
    """What an answer gets for torch.cuda."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.Stream, self.Event = partial(Stream, machine), partial(Event, machine)
        self.CUDAGraph = partial(CUDAGraph, machine)
        self.stream = machine.on

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that work goes to."""
        return self._machine.current

    def default_stream(self, device: Any = None) -> Stream:
        """The stream that is current where nobody chose one."""
        return self._machine.default

    def graph_pool_handle(self) -> tuple[int, int]:
        """A name for memory that captures may share."""
        return (0, 1)

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams."""
        for stream in self._machine.streams:
            stream.synchronize()

    @contextmanager
    def graph(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **options: Any
    ) -> Iterator[None]:
        """A context whose work is captured, on a stream of its own if none is given."""
        with self._machine.on(stream or Stream(self._machine)):
            cuda_graph.capture_begin(pool)
            try:
                yield
            except BaseException:
                self._machine.capturing = None
                raise
            cuda_graph.capture_end()


class Compiled:
    """A function that is compiled when it is first called, which no capture allows; it counts its calls."""

    def __init__(self, machine: Machine, function: Callable[[Tensor], Tensor]) -> None:
        self._machine, self.function = machine, function
        self.calls = 0
        self.on_a_side_stream = False
        """Whether it ever ran, and was not captured, on another stream than the default one."""
        self.captured: Tensor | None = None
        """Its result in the last capture, which a replay computes anew."""

    def __call__(self, x: Tensor) -> Tensor:
        machine = self._machine
        if not self.calls:
            machine.not_while_capturing("call compiles its kernels when it is first called")
        y = self.function(x)
        self.calls += 1
        if machine.capturing is not None:
            self.captured = _by_memory(y)
        self.on_a_side_stream |= machine.capturing is None and machine.current is not machine.default
        return y


def _by_memory(values: Any) -> Any:
    """The same with tensors that stay at their memory: those given may be made to refer to other memory."""
    with _disable_current_modes():
        return tree_map_only(Tensor, torch.Tensor.detach, values)


def _most(*known: Known) -> Known:
    """The most that any of these knows of each stream."""
    return {stream: max(each.get(stream, 0) for each in known) for each in known for stream in each}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _starts_nothing(func: Any) -> bool:
    """Whether an operation is a view or an allocation."""
    aliases = [value.alias_info for value in func._schema.returns]
    view = any(alias is not None and not alias.is_write for alias in aliases)
    return view or func._schema.name.split("::")[1].startswith(("empty", "new_empty"))


def _overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among an operation's arguments that it writes to."""
    given = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor)]
