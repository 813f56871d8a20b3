"""A stand-in for torch.cuda where there is no GPU: streams that may race, and graphs to capture and replay.

Tensors lie on the CPU. Outside a capture an operation runs at once, and counts as work on the current stream.
Inside one it computes nothing: its output holds NaN, and a replay runs it on the very same tensors, in place.
Work on two streams that touches the same memory is a conflict unless a wait lies between.

Two things differ from torch.cuda: its ``graph`` waits for the whole device when a capture begins, which isn't
counted here, since it hides a wait that is missing; and what the host reads of a tensor is seen only as
``item``.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit import dispatch


class NotPermittedError(RuntimeError):
    """What CUDA refuses while a stream is capturing; ``compiling`` where that was the first call's."""

    def __init__(self, what: str, compiling: bool = False) -> None:
        super().__init__(f"CUDA error: operation not permitted when stream is capturing: {what}")
        self.compiling = compiling


@dataclass(frozen=True)
class _Point:
    """A piece of work: the how manieth of its stream."""

    stream: "Stream"
    number: int


@dataclass(frozen=True)
class Conflict:
    """Two streams touched the same memory, one of them wrote, and the later one did not wait."""

    earlier: "Stream"
    later: "Stream"


@dataclass
class _Memory:
    """Who used a tensor's memory last."""

    held: Tensor
    """Keeps the memory from being given to another tensor."""
    written: _Point | None = None
    read: list[_Point] = field(default_factory=list)


class Machine(dispatch.Mode):
    """The pretend device. While it is active PyTorch works on its streams; ``cuda`` stands for torch.cuda."""

    def __init__(self) -> None:
        super().__init__()
        self.conflicts: list[Conflict] = []
        self.captures = self.replays = 0
        self.capturing: CUDAGraph | None = None
        """The graph that is being captured."""
        self.host: dict[Stream, int] = {}
        """How much of each stream's work the host has waited for: whatever is issued next comes after it."""
        self._memory: dict[int, _Memory] = {}
        self._watching = True
        self.streams: list[Stream] = []
        self.default = self.current = Stream(self)
        self.cuda = Cuda(self)

    def refuse(self, what: str, compiling: bool = False) -> NotPermittedError:
        """The error for something that a capture doesn't allow; the capture has failed by it."""
        error = NotPermittedError(what, compiling)
        if self.capturing is not None and self.capturing.failed is None:
            self.capturing.failed = error
        return error

    def not_while_capturing(self, what: str) -> None:
        """`NotPermittedError` during a capture."""
        if self.capturing is not None:
            raise self.refuse(what)

    def unwaited(self) -> int:
        """Pieces of other streams' work that the default stream would not wait for."""
        known = _later(self.default.seen, self.host, {self.default: self.default.issued})
        return sum(stream.issued - known.get(stream, 0) for stream in self.streams)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Meanwhile operations run as if there were no device: for those who look at values."""
        before, self._watching = self._watching, False
        try:
            yield
        finally:
            self._watching = before

    @contextmanager
    def on(self, stream: "Stream | None") -> Iterator[None]:
        """Meanwhile ``stream`` is the current one; None changes nothing."""
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._watching:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.not_while_capturing("Python asked for a number that the device has not computed")
            self.current.synchronize()
        if self.capturing is not None:
            return self.capturing.record(func, args, kwargs)
        made = func(*args, **kwargs)
        if not _starts_nothing(func):
            self._work(_overwritten(func, args, kwargs) or tree_leaves(made), tree_leaves((args, kwargs)))
        return made

    def _work(self, written: list[Any], read: list[Any]) -> None:
        """Note a piece of work on the current stream, and what it conflicts with."""
        stream = self.current
        stream.issued += 1
        stream.seen = _later(stream.seen, self.host)
        now = _Point(stream, stream.issued)
        places = {_place(tensor) for tensor in written if isinstance(tensor, Tensor)}
        for tensor in (each for each in (*written, *read) if isinstance(each, Tensor)):
            memory = self._memory.setdefault(_place(tensor), _Memory(tensor))
            writes = _place(tensor) in places
            earlier = [memory.written, *(memory.read if writes else ())]
            for point in earlier:
                if point is not None and not stream.follows(point):
                    self.conflicts.append(Conflict(point.stream, stream))
            if writes:
                memory.written, memory.read = now, []
            else:
                memory.read.append(now)


class Stream:
    """Work in order; beside other streams there is none, but for waits."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.issued = 0
        self.seen: dict[Stream, int] = {}
        """How much of the other streams' work lies before what is issued next."""
        self._outer: list[Any] = []
        machine.streams.append(self)

    def follows(self, point: _Point) -> bool:
        """Whether what is issued next waits for a piece of work."""
        return point.stream is self or self.seen.get(point.stream, 0) >= point.number

    def wait_stream(self, stream: "Stream") -> None:
        """Let what follows wait for all that the other stream has to do by now."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: "Event") -> None:
        """Let what follows wait for what an event marks."""
        self.seen = _later(self.seen, event.seen)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Mark what the stream has to do by now."""
        event = event or Event(self._machine)
        event.seen = _later(self.seen, self._machine.host, {self: self.issued})
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self._machine.not_while_capturing("the host waited for the device")
        self._machine.host = self.record_event().seen

    def __enter__(self) -> "Stream":
        self._outer.append(self._machine.on(self))
        self._outer[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._outer.pop().__exit__(*error)


class Event:
    """A mark in a stream."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark what a stream has to do by now, the current one if none is given."""
        (stream or self._machine.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Let what follows in a stream wait for the mark."""
        (stream or self._machine.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self._machine.not_while_capturing("the host waited for the device")
        self._machine.host = _later(self._machine.host, self.seen)


class CUDAGraph:
    """Operations with the tensors that they were captured on."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._operations: list[tuple[Any, Any, Any, list[Any]]] | None = None
        """Each with its arguments, and with what it fills; nothing there if it writes to an argument."""
        self.failed: NotPermittedError | None = None

    @property
    def operations(self) -> int:
        """How many operations a replay runs."""
        return len(self._operations or ())

    def writes(self, tensor: Tensor) -> bool:
        """Whether a replay itself writes to a tensor's memory."""
        found = (
            each
            for func, args, kwargs, made in self._operations or ()
            for each in _overwritten(func, args, kwargs) or made
        )
        return any(isinstance(each, Tensor) and _place(each) == _place(tensor) for each in found)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Capture what follows on the current stream."""
        self._machine.not_while_capturing("a capture began inside another")
        if self._operations is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new "
                "instance."
            )
        if self._machine.current is self._machine.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._operations, self.failed = [], None
        self._machine.capturing = self

    def capture_end(self) -> None:
        """End the capture; the error that it failed by, even if that was caught meanwhile."""
        self._machine.capturing = None
        if self.failed is not None:
            self._operations = None
            raise self.failed
        self._machine.captures += 1

    def abandon(self) -> None:
        """End a capture that an exception left."""
        self._machine.capturing = self._operations = None

    def reset(self) -> None:
        """Forget what was captured."""
        self._operations = None

    def pool(self) -> tuple[int, int]:
        """A name for the graph's memory, to share it with another capture."""
        return (0, id(self))

    def replay(self) -> None:
        """Run the operations on the current stream, on the tensors that they were captured on."""
        self._machine.not_while_capturing("a graph was replayed inside a capture")
        if self._operations is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._machine.replays += 1
        with torch.inference_mode():
            for func, args, kwargs, made in self._operations:
                again = func(*args, **kwargs)
                for old, new in zip(made, tree_leaves(again) if made else (), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(new)

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Remember an operation in place of running it; what it would return, without its values."""
        assert self._operations is not None, "only while it captures"
        written = _overwritten(func, args, kwargs)
        if written:
            made: Any = written[0] if len(func._schema.returns) <= 1 else tuple(written)
        else:
            made = func(*args, **kwargs)
            if _starts_nothing(func):
                return made
            for tensor in (each for each in tree_leaves(made) if isinstance(each, Tensor)):
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        # By their memory: the tensors themselves may be made to refer to another one later.
        args, kwargs, kept = tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs, made))
        self._operations.append((func, args, kwargs, [] if written else tree_leaves(kept)))
        return made


# In the class below these names are torch.cuda's own.
_Stream: TypeAlias = Stream
_Event: TypeAlias = Event
_Graph: TypeAlias = CUDAGraph


class Cuda:
    """What an answer gets for torch.cuda."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def Stream(self, device: Any = None, priority: int = 0) -> _Stream:  # noqa: N802
        """A new stream."""
        return Stream(self._machine)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> _Event:  # noqa: N802
        """A new event."""
        return Event(self._machine)

    def CUDAGraph(self, keep_graph: bool = False) -> _Graph:  # noqa: N802
        """A graph without anything in it."""
        return CUDAGraph(self._machine)

    def current_stream(self, device: Any = None) -> _Stream:
        """The stream that work goes to."""
        return self._machine.current

    def default_stream(self, device: Any = None) -> _Stream:
        """The stream that is current where nobody chose one."""
        return self._machine.default

    def is_current_stream_capturing(self) -> bool:
        """Whether what is done now is captured."""
        return self._machine.capturing is not None

    def graph_pool_handle(self) -> tuple[int, int]:
        """A name for memory that captures may share."""
        return (0, 1)

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams."""
        for stream in self._machine.streams:
            stream.synchronize()

    def stream(self, stream: _Stream | None) -> Any:
        """A context in which a stream is the current one."""
        return self._machine.on(stream)

    @contextmanager
    def graph(
        self,
        cuda_graph: _Graph,
        pool: Any = None,
        stream: _Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """A context whose work is captured, on a stream of its own if none is given."""
        with self._machine.on(stream or Stream(self._machine)):
            cuda_graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            except BaseException:
                cuda_graph.abandon()
                raise
            cuda_graph.capture_end()


def _later(*known: dict[Stream, int]) -> dict[Stream, int]:
    """The most that any of these knows of each stream."""
    return {stream: max(each.get(stream, 0) for each in known) for each in known for stream in each}


def _place(tensor: Tensor) -> int:
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
