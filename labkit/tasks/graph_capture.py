"""Lesson 5, exercise "capture": a call as a graph that gives right results for new inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit.graph_api import CUDAGraph, Machine, NotPermittedError, Stream
from labkit.tasks import Evidence, Wrong, some
from labkit.tasks.graph_capture_hints import HINTS

CASES = (
    ((4, 6), 3, torch.float32),
    ((5, 8), 8, torch.bfloat16),
    ((2, 3, 16), 16, torch.float32),
)
"""Shape of x, width of the result, dtype."""
TURNS = 4
"""New values that each graph is replayed for."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
ON_A_GPU = 1e-3

Graphed = Callable[[Any, Callable[[Tensor], Tensor], Tensor], Callable[[Tensor], Tensor]]


def check(graphed: Graphed) -> Evidence:
    """Have ``graphed(cuda, call, x)`` capture on a pretend device, and replay; `Wrong` if anything is off."""
    torch.manual_seed(0)
    runs = [_Run(graphed, *case) for case in CASES]
    for run in runs:
        run.check()
    where = "with a stand-in for torch.cuda on the CPU: no GPU was used"
    passed = TURNS * len(runs)
    if torch.cuda.is_available():
        passed += refuse_values(graphed, torch.cuda, "cuda")
        where = f"with a stand-in for torch.cuda on the CPU, and on {torch.cuda.get_device_name()}"
    return Evidence(_evidence(runs, where), passed)


def refuse_values(graphed: Graphed, cuda: Any, device: str) -> int:
    """`Wrong` unless the values are right with this ``cuda`` too; else how many results were looked at."""
    weight, x = (torch.randn(64, 64, device=device) for _ in range(2))
    before = x.clone()
    replay = graphed(cuda, lambda x: _layer(x, weight), x)
    kept = []
    for _ in range(TURNS):
        new = torch.randn(64, 64, device=device)
        kept.append((replay(new), _layer(new, weight)))
    right = (torch.allclose(got, want, rtol=ON_A_GPU, atol=ON_A_GPU) for got, want in kept)
    if not all(right) or not torch.equal(x, before):
        raise _wrong("on-a-gpu", f"With torch.cuda on a GPU, x or one of {TURNS} results is not what it was.")
    return len(kept)


@dataclass
class _Called:
    """One call of what is captured."""

    graph: CUDAGraph | None
    """The graph that was being captured; None where the call ran at once."""
    stream: Stream
    x: Tensor
    y: Tensor
    gave: Tensor
    """A copy of what came out."""


@dataclass
class _Call:
    """What the answer captures: a few operations, compiled when it is first called."""

    machine: Machine
    weight: Tensor
    calls: list[_Called] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        graph = self.machine.capturing
        if graph is not None and not self.calls:
            raise self.machine.refuse("call compiles its kernels when it is first called", compiling=True)
        y = _layer(x, self.weight)
        with self.machine.unseen():
            self.calls.append(
                _Called(graph, self.machine.current, x.detach(), y.detach(), y.detach().clone())
            )
        return y

    @property
    def captured(self) -> _Called | None:
        """The last call in a capture."""
        return next((call for call in reversed(self.calls) if call.graph is not None), None)

    @property
    def at_once(self) -> list[_Called]:
        """The calls outside a capture."""
        return [call for call in self.calls if call.graph is None]


def _layer(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * torch.tanh(x @ weight)


class _Run:
    """One capture and its replays, by the caller's x on a pretend device."""

    def __init__(self, graphed: Graphed, shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
        self._graphed, self._shape, self._dtype = graphed, shape, dtype
        self.machine = Machine()
        self.call = _Call(self.machine, torch.randn(shape[-1], width).to(dtype))
        self._x = self._drawn()
        self._kept: list[tuple[Tensor, Tensor]] = []

    def check(self) -> None:
        """`Wrong` for the first thing that is off."""
        with self.machine:
            self._x.copy_(self._drawn())  # on the current stream, like all that the caller does
            replay = self._done("graphed", lambda: self._graphed(self.machine.cuda, self.call, self._x))
            if not callable(replay):
                kind = type(replay).__name__
                raise _wrong("nothing-returned", f"graphed returned {kind}, not a function.")
            lazy = self.call.captured is None
            for turn in range(TURNS):
                self._turn(replay, first=lazy and not turn)
                self._x.copy_(self._drawn())  # the caller has other uses for x
        self._refuse_changed_results()

    def _drawn(self) -> Tensor:
        with self.machine.unseen():
            return torch.randn(self._shape).to(self._dtype)

    def _copied(self, tensor: Tensor) -> Tensor:
        with self.machine.unseen():
            return tensor.detach().clone()

    def _done(self, name: str, call: Callable[[], Any]) -> Any:
        """What a call of the answer returns; `Wrong` for what it did to x and to the streams."""
        before = self._copied(self._x)
        try:
            result = call()
        except NotPermittedError as error:
            reason = "no-warm-up" if error.compiling else "not-in-capture"
            raise _wrong(reason, f"{error}.") from None
        with self.machine.unseen():
            if not torch.equal(self._x, before):
                raise _wrong("writes-x", f"After {name} the caller's x holds other values than before.")
        self._refuse_streams(name)
        return result

    def _refuse_streams(self, name: str) -> None:
        machine, default = self.machine, self.machine.default
        captured, at_once = self.call.captured, self.call.at_once
        if machine.captures and captured is None:
            raise _wrong("empty-graph", "A graph was captured, and call is not in it.")
        if captured is not None and all(call.stream is default for call in at_once):
            calls = some(len(at_once), "call")
            raise _wrong("current-stream", f"The warm-up, {calls}, ran on the current stream.")
        if machine.conflicts:
            after = machine.conflicts[0].later is default
            late, early = ("the current", "another") if after else ("another", "the current")
            what = f"{late} stream used memory that {early} one was still at work on, and did not wait for it"
            raise _wrong("no-wait-after" if after else "no-wait-before", f"In {name} {what}.")
        if unwaited := machine.unwaited():
            work = some(unwaited, "operation")
            what = f"the current stream did not wait for {work} on another one"
            raise _wrong("no-wait-after", f"When {name} came to its end, {what}.")

    def _turn(self, replay: Callable[[Tensor], Tensor], first: bool) -> None:
        """One new x, and the result; the ``first`` one may capture, if nothing was captured before."""
        machine, captured = self.machine, self.call.captured
        new = self._drawn()
        given = self._copied(new)
        captures, replays, at_once = machine.captures, machine.replays, len(self.call.at_once)
        last = [] if captured is None else [self._copied(each) for each in (captured.x, captured.y)]
        got = self._done("replay", lambda: replay(new))
        if not first and machine.captures > captures:
            raise _wrong("captured-anew", "replay captured a graph, although there was one.")
        if not first and (calls := len(self.call.at_once) - at_once):
            raise _wrong("calls-again", f"In one replay call itself ran {some(calls, 'time')}.")
        if machine.replays == replays and not first:
            raise _wrong("not-replayed", "replay came to its end, and no graph was replayed.")
        if machine.replays > replays + 1:
            times = some(machine.replays - replays, "time")
            raise _wrong("replayed-twice", f"For one new x the graph was replayed {times}.")
        if not isinstance(got, Tensor):
            raise _wrong("not-a-tensor", f"replay returned {type(got).__name__}, not a tensor.")
        said = got.detach().clone()  # the caller looks at it, on the current stream
        self._refuse_streams("the use of the result")
        with machine.unseen():
            if not torch.equal(new, given):
                raise _wrong("writes-new", "After replay the tensor `new` holds other values than before.")
            if not self._near(said, self._want(new)):
                raise self._off(new, got, said, last)
        self._kept.append((got, said))

    def _want(self, x: Tensor) -> Tensor:
        return _layer(x, self.call.weight)

    def _near(self, got: Tensor, want: Tensor) -> bool:
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        tolerance = TOLERANCE[self._dtype]
        return torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)

    def _off(self, new: Tensor, got: Tensor, said: Tensor, last: list[Tensor]) -> Wrong:
        """What explains a wrong result. ``last``: the graph's input and output before this replay."""
        captured, at_once = self.call.captured, self.call.at_once
        if any(_shared(got, call.y) for call in at_once):
            return _wrong("warm-up-result", "What came back lies in the memory of a warm-up's result.")
        if captured is None or captured.graph is None or not last:
            return _wrong("wrong-values", "The result is not what call gives for the new x.")
        if self._near(captured.y, self._want(new)):
            if self._near(said, last[1]):
                return _wrong(
                    "early-result", "The graph gave the right result, the answer the one before it."
                )
            if any(self._near(said, call.gave) for call in at_once):
                return _wrong("warm-up-result", "The graph's result was right, a warm-up's came back.")
            return _wrong("wrong-values", "The graph gave the right result, but another came back.")
        if captured.graph.writes(captured.x):
            return _wrong("copy-captured", "The replay itself wrote old values to the graph's input.")
        if self._near(captured.x, new):
            return _wrong("copied-late", "The graph's input holds the new x, its result is an older one's.")
        if torch.equal(captured.x, last[0]):
            observed = "The graph's input still holds what it held before: the new x never reached it."
            return _wrong("stale-input", observed)
        return _wrong("wrong-values", "The graph's input holds neither the new x nor the one before.")

    def _refuse_changed_results(self) -> None:
        for got, said in self._kept:
            if not torch.equal(got, said):
                captured = self.call.captured
                own = captured is not None and _shared(got, captured.y)
                reason = "own-output" if own else "one-result"
                raise _wrong(reason, "A later replay changed a result that had been handed out.")


def _shared(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _wrong(reason: str, observed: str) -> Wrong:
    return Wrong(reason, observed, HINTS[reason])


def _evidence(runs: list[_Run], where: str) -> str:
    """What was seen, and where."""
    call = runs[0].call
    assert call.captured is not None and call.captured.graph is not None, "else it would have been refused"
    operations = some(call.captured.graph.operations, "operation")
    return (
        f"{TURNS * len(runs)} replays of {len(runs)} graphs gave what call gives for the new x; x and "
        f"earlier results stayed as they were. A graph holds {operations}, and Python launches it as one. "
        f"Before that call ran {some(len(call.at_once), 'time')} to warm up. Checked {where}."
    )
