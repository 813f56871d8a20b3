"""The three clocks for a GPU call; every sweep uses them.

- ``host``: wall time per call as Python sees it; many calls, one synchronisation at the end.
- ``events``: device events around each call; idle gaps between its kernels count.
- ``graph``: one captured graph of many calls, replayed; device time without launches.

Cache states:

- ``cold``: calls cycle through input copies that together exceed twice the L2, keeping one output per copy.
  If a graph holds fewer calls than copies, the L2 is flushed before each replay.
- ``warm``: all calls use one set of inputs.

Contenders are interleaved in shuffled order. A timing is the median of the samples with the 20th and 80th
percentile. With the host clock, which everything else on the machine disturbs, there are seven rounds of
samples, and the timing is that of the round with the least median. What disturbed a timing is noted:
clocks that were held down, which NVIDIA's management library says between samples, and a wide spread.
"""

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch

from labkit import gpu

Clock = Literal["host", "events", "graph"]
Cache = Literal["cold", "warm"]

ROUNDS: dict[Clock, int] = {"host": 7, "events": 1, "graph": 1}
SAMPLE_US = 1000.0
"""A sample lasts about this long or longer, so that starting the clock is a small part of it."""
MIN_SAMPLES, MAX_SAMPLES = 5, 40
"""Bounds of a round's samples of one contender."""
BUDGET_US = 150_000.0
"""Device time that a contender's samples may take beyond the first MIN_SAMPLES of each round."""
MAX_CALLS = 2000
"""Upper bound of calls per sample, rounded up to whole cycles through the inputs, so that a call that takes
no time still ends."""
WARMUPS = 3
EVENT_CALLS = 8
"""Calls per sample with the events clock; each call is between its own pair of events."""

THROTTLE_BITS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20 | 0x40: "temperature",
    0x80: "power supply",
}
"""NVML's reasons for lower clocks, but for those that are no disturbance: idle, or set so by somebody."""
MAX_RELATIVE_SPREAD = {"graph": 0.10, "events": 0.30, "host": 0.30}
"""p80 - p20 over the median, by clock: on a quiet H200 1 of 100 rows by the graph clock is above, none by
events, and by the host clock 1 of 10, where Python itself was disturbed."""
CLOCK_RESOLUTION_US = 0.5
"""A narrower spread is that of the clock itself."""


@dataclass(frozen=True)
class TimedCall:
    """A call to be timed: ``call(*inputs)``.

    With ``setup``, each set of inputs first passes through ``setup(*inputs)`` outside the timed region and
    ``call`` receives what it returns; a backward pass is set up by its forward pass this way.
    """

    call: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    setup: Callable[..., tuple[Any, ...]] | None = None


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median of ``runs`` samples, the 20th and the 80th percentile."""

    clock: Clock
    cache: Cache
    median_us: float
    p20_us: float
    p80_us: float
    runs: int
    note: str = ""
    noise: str = ""
    """What disturbed it, see `disturbance`; empty for a quiet one."""


@dataclass(frozen=True)
class NotTimed:
    """A contender that could not be measured, and why."""

    note: str


def timed_call(call: Callable[..., Any], inputs: tuple[Any, ...], direction: str) -> TimedCall:
    """What is timed of a call: its forward pass, its backward pass alone, or both ("forward_backward").

    A forward pass alone is of inputs that ask for no gradient; only there may some be numbers.
    """
    if direction == "forward":
        return TimedCall(
            call, tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in inputs)
        )

    # The upstream gradient is an input, too: a cold run rotates it with the others.
    def forward(*given: Any) -> tuple[Any, ...]:
        return call(*given[:-1]), given[:-1], given[-1]

    leaves = tuple(each.detach().requires_grad_() for each in inputs)
    given = (*leaves, torch.randn_like(call(*leaves)))
    if direction == "forward_backward":
        return TimedCall(lambda *tensors: torch.autograd.grad(*forward(*tensors)), given)
    # Its forward pass runs outside of what is timed, once for each set of inputs.
    return TimedCall(partial(torch.autograd.grad, retain_graph=True), given, setup=forward)


def measure(
    calls: Mapping[str, TimedCall], *, clock: Clock = "graph", cache: Cache = "cold"
) -> dict[str, Timing | NotTimed]:
    """Time several calls in one interleaved run; whoever calls this has the GPU to itself.

    A call that fails, or does not fit the memory, becomes a NotTimed; the others go on. A call that cannot be
    captured is timed with the events clock, and ``note`` says so. What disturbed the samples is in ``noise``.

    Raises RuntimeError without a GPU, and ValueError for an unknown clock or cache state.
    """
    check_names(clock, cache)
    if not gpu.available():
        raise RuntimeError(
            "Nothing is timed here: without a GPU Triton interprets the kernels in Python, "
            "and those seconds say nothing about a GPU."
        )
    not_timed: dict[str, Timing | NotTimed] = {}

    @contextmanager
    def keep_error(name: str) -> Iterator[None]:
        """Keep an error as the reason why this contender has no timing."""
        try:
            yield
        except Exception as error:
            not_timed[name] = NotTimed(describe(error))

    samplers: dict[str, _Sampler] = {}
    shuffle, throttled, timer = random.Random(0).shuffle, 0, DeviceTimer()
    for name, timed_call in calls.items():
        with keep_error(name):
            samplers[name] = _Sampler(timer, timed_call, clock, cache)
    counts = {name: sampler.sample_count() for name, sampler in samplers.items()}
    for round_ in range(ROUNDS[clock]):
        for number in range(max(counts.values(), default=0)):
            names = [name for name, count in counts.items() if number < count and name not in not_timed]
            shuffle(names)
            for name in names:
                with keep_error(name):
                    samplers[name].take_sample(round_)
            throttled |= gpu.throttle_bits()
    return {name: not_timed.get(name) or samplers[name].timing(throttled) for name in calls}


def check_names(clock: str, cache: str) -> None:
    """Raise a ValueError unless there is such a clock and such a cache state."""
    if clock not in get_args(Clock):
        raise ValueError(f"clock: {clock!r} is none of {', '.join(get_args(Clock))}")
    if cache not in get_args(Cache):
        raise ValueError(f"cache: {cache!r} is none of {', '.join(get_args(Cache))}")


class _Sampler:
    """Takes samples of one call, each in microseconds per call."""

    def __init__(self, timer: "DeviceTimer", timed_call: TimedCall, clock: Clock, cache: Cache) -> None:
        """Warm the call up, find out how many calls fill a sample, and capture them for the graph clock."""
        self.timer, self.timed_call, self.clock, self.cache = timer, timed_call, clock, cache
        self.note, self.called = "", 0
        self.rounds_us: list[list[float]] = [[] for _ in range(ROUNDS[clock])]
        with timer.side_stream():
            self.inputs = rotating_inputs(timed_call, timer.l2_bytes() if cache == "cold" else 0)
            self.outputs: list[Any] = [None] * len(self.inputs)
            self._call(WARMUPS)
        timer.synchronize()
        call_us = self._estimate_call_us()
        self.calls = self._calls_per_sample(call_us)
        self.sample_us = self.calls * call_us
        if clock == "graph":
            try:
                self._capture()
                calls = self._calls_per_sample(self.sample_us / self.calls)
                if self.sample_us < SAMPLE_US and calls > self.calls:  # in a graph they take less time
                    self.calls = calls
                    self._capture()
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                # A row has a note of a clock that was not asked for: its time is left out.
                self.clock = "events"
                self.note = f"timed with events, a graph cannot hold it: {describe(error)}"
        if self.clock == "events":
            self.sample_us = EVENT_CALLS * call_us

    def _estimate_call_us(self) -> float:
        """Microseconds per call, from enough calls that starting the clock hardly counts, at most 1024."""
        timed_us = self.timer.host_us if self.clock == "host" else self.timer.device_us
        with self.timer.side_stream():
            for calls in (1, 4, 16, 64, 256):
                took_us = timed_us(partial(self._call, calls))
                if took_us > SAMPLE_US / 4:
                    return took_us / calls
            return timed_us(partial(self._call, 1024)) / 1024

    def _calls_per_sample(self, call_us: float) -> int:
        """How many calls fill a sample: one, or whole cycles through the sets of inputs."""
        calls = math.ceil(SAMPLE_US / max(call_us, SAMPLE_US / MAX_CALLS))
        return calls if calls == 1 else len(self.inputs) * math.ceil(calls / len(self.inputs))

    def _capture(self) -> None:
        self.replay = self.timer.capture(partial(self._call, self.calls))
        self.replay()
        self.sample_us = self.timer.device_us(self.replay, queued=True)

    def _call(self, count: int) -> None:
        """Call ``count`` times with the sets of inputs in turn, keeping one output per set."""
        # With events each call is timed alone, so outputs are stored on self to keep as many alive as in the
        # other clocks.
        outputs = self.outputs if self.clock == "events" else [None] * len(self.inputs)
        for _ in range(count):
            index = self.called % len(self.inputs)
            outputs[index] = None  # this call may write where the last one with these inputs did
            outputs[index] = self.timed_call.call(*self.inputs[index])
            self.called += 1

    def sample_count(self) -> int:
        """How many samples of a round fit the budget."""
        of_round = BUDGET_US / len(self.rounds_us) / max(self.sample_us, 1.0)
        return int(min(MAX_SAMPLES, max(MIN_SAMPLES, of_round)))

    def take_sample(self, round_: int) -> None:
        """Take a sample of a round; with events it is one for each of several calls."""
        if self.clock == "graph":
            # A graph of one slow call replays the same set of inputs each time, so the L2 has to be flushed.
            flush = self.calls < len(self.inputs)
            samples_us = [self.timer.device_us(self.replay, queued=True, flush=flush) / self.calls]
        else:
            with self.timer.side_stream():  # autograd launches a backward pass on the stream of its forward
                if self.clock == "events":
                    call = partial(self._call, 1)
                    samples_us = [self.timer.device_us(call) for _ in range(EVENT_CALLS)]
                else:
                    samples_us = [self.timer.host_us(partial(self._call, self.calls)) / self.calls]
        self.rounds_us[round_] += samples_us

    def timing(self, throttled: int) -> Timing:
        """The median of the round with the least one, and what disturbed it."""
        best = min(self.rounds_us, key=lambda round_us: float(np.median(round_us)))
        p20, median, p80 = (float(us) for us in np.percentile(best, (20, 50, 80)))
        disturbed = disturbance(throttled, self.clock, median, p80 - p20)
        return Timing(self.clock, self.cache, median, p20, p80, len(best), self.note, disturbed)


class DeviceTimer:
    """Times and captures work on the GPU. Tests replace it by a simulated one."""

    l2_bytes = staticmethod(gpu.l2_bytes)
    synchronize = staticmethod(torch.cuda.synchronize)

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.failed: list[torch.cuda.CUDAGraph] = []

    def host_us(self, run: Callable[[], None]) -> float:
        """Wall time of ``run`` until the device is done, in microseconds."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6

    def device_us(self, run: Callable[[], None], *, queued: bool = False, flush: bool = False) -> float:
        """Device time between events around ``run``, in microseconds.

        ``queued``: first keep the device busy for 0.1 ms, so that launch time is not measured.
        ``flush``: first fill the L2 with other data.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if flush:
            torch.zeros(2 * self.l2_bytes(), dtype=torch.uint8, device="cuda")
        if queued:
            torch.cuda._sleep(200_000)  # cycles, about 0.1 ms
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of ``run`` in a graph; the result replays it."""
        graph = torch.cuda.CUDAGraph()
        outer = torch.cuda.current_stream()
        # The capture uses the stream's cuBLAS workspace. graphs.release_cublas_workspaces would drop all
        # workspaces, also those that the caller's graphs use.
        # Captures share one memory pool, because their outputs are never read again.
        # thread_local: what another thread of the process does does not end the capture.
        options: Any = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                with torch.cuda.graph(graph, **options):
                    run()
            if any("The CUDA Graph is empty" in str(one.message) for one in given):
                raise RuntimeError("nothing was captured: the call does no work on the current stream")
        except BaseException:
            # PyTorch leaves a failed capture's stream current and its pool recording: use neither again.
            torch.cuda.set_stream(outer)
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self.failed.append(graph)  # the allocator still holds a pointer to it
            raise
        return graph.replay

    def side_stream(self) -> Any:
        """The stream that captures use.

        Warm-ups run on it, too, because autograd launches a backward pass on the stream of its forward pass.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)


# ---- the cold cache ----------------------------------------------------------------------------------------


def rotating_inputs(timed_call: TimedCall, l2_bytes: int) -> list[tuple[Any, ...]]:
    """Sets of inputs that together exceed twice ``l2_bytes``: those of the call, and clones of them.

    With ``setup`` each set is what ``setup`` returns for it. The clones keep dtype, strides and
    ``requires_grad``; inputs that are no tensors are shared.
    """
    tensors = [_stored(t) for t in timed_call.inputs if isinstance(t, torch.Tensor)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    count = 2 * l2_bytes // size + 1 if size else 1
    inputs = timed_call.inputs
    sets = [inputs, *(tuple(_clone(value) for value in inputs) for _ in range(count - 1))]
    return [timed_call.setup(*values) for values in sets] if timed_call.setup else sets


def _clone(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    stored = _stored(value)
    copy = torch.empty_strided(stored.size(), stored.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(stored).expand_as(value).requires_grad_(value.requires_grad)


def _stored(value: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that is in memory: one element along each repeated dimension."""
    stored = value.detach()
    for dimension, stride in enumerate(value.stride()):
        if stride == 0 and value.size(dimension):
            stored = stored.narrow(dimension, 0, 1)
    return stored


# ---- what is noted of a timing -----------------------------------------------------------------------------


def disturbance(bits: int, clock: str, median_us: float, spread_us: float) -> str:
    """What disturbed a timing, from all bits that were seen meanwhile and p80 - p20; empty if nothing did."""
    held = [reason for bit, reason in THROTTLE_BITS.items() if bits & bit]
    limit = MAX_RELATIVE_SPREAD[clock]
    found = [f"slowed down by {' and '.join(held)}"] * bool(held)
    found += [f"spread above {limit:.0%}"] * (spread_us > max(limit * median_us, CLOCK_RESOLUTION_US))
    return "; ".join(found)


def describe(error: BaseException) -> str:
    """An error in one line, for the note of a row without a time."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}"[:200]
