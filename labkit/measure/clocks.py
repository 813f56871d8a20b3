"""Three clocks for a call on the GPU, and nothing else times anything in this course.

- ``host``: wall time per call as Python sees it; many calls, one synchronisation at the end.
- ``events``: device events around each call; idle gaps between its kernels count.
- ``graph``: one captured graph of many calls, replayed; device time without launches.

Cache ``cold``: the calls rotate through copies of their inputs (and keep as many outputs alive) that
together exceed twice the L2; before a graph of a single slow call the L2 is flushed. ``warm``: one set of
inputs. Contenders are interleaved in shuffled order; a timing is the median of the samples with the 20th
and 80th percentile. By the host's clock a sample of a moment when something slowed the host down is taken
again.
"""

import math
import random
import re
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
from labkit.measure import noise
from labkit.measure.cold_cache import Job, rotation
from labkit.measure.lock import RUN_SECTION, StoppedError, gpu_lock, raise_if_stopped, thread_lock

Clock = Literal["host", "events", "graph"]
Cache = Literal["cold", "warm"]

SAMPLE_US = 1000.0
"""A sample lasts about this long or longer, so that starting the clock is a small part of it."""
MIN_SAMPLES, MAX_SAMPLES = 5, 40
MAX_CALLS = 2000
"""Calls per sample, but for one call of each set of inputs: a call that does nothing ends somewhere."""
WARMUPS = 3
LONG_US = 2e5
"""A sample that lasts longer does not keep a notebook's cells waiting."""
EVENT_CALLS = 8
"""Calls per sample and contender of the events clock, each between events of its own."""
PATIENCE = 10.0
"""Samples are taken again for so many times a contender's budget, all together."""
NO_GPU = re.compile(
    "not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|dummy base class|requires CUDA", re.IGNORECASE
)
"""What PyTorch says where there is no GPU, in builds with CUDA and without."""


class CannotTimeError(RuntimeError):
    """There is no GPU to time here; Triton's interpreter is Python and its seconds mean nothing."""


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
    """What disturbed it, see labkit.measure.noise; empty for a quiet one."""


@dataclass(frozen=True)
class Gap:
    """A contender that could not be measured, and why."""

    note: str


class Cuda:
    """What the clocks need of a device. Tests put a simulated one in its place."""

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
        """Device time between events around ``run``; ``queued`` lets the host get ahead of the device.

        With ``flush`` the L2 holds other data when ``run`` begins.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if flush:
            torch.zeros(2 * self.l2_bytes(), dtype=torch.uint8, device="cuda")
        if queued:
            torch.cuda._sleep(200_000)  # about 0.1 ms: the launch of ``run`` is over before the clock starts
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def slowed(self) -> bool:
        """Whether something slows the host down at present."""
        return noise.host_speed.slowed()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of ``run`` in a graph; the result replays it."""
        graph = torch.cuda.CUDAGraph()
        outer = torch.cuda.current_stream()
        # Its workspace of cuBLAS stays that of the stream: to drop all of them
        # (graphs.release_cublas_workspaces) for a graph that lives so shortly would leave the caller's graphs
        # without theirs.
        # Captures share one pool: their outputs are never read again, and one pool holds the largest only.
        # thread_local: what another cell does meanwhile, in the main thread, does not end the capture.
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
        """Warm-ups run where the capture will: autograd launches a backward pass on its forward's stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)


def measure(
    jobs: Mapping[str, Job],
    *,
    clock: Clock = "graph",
    cache: Cache = "cold",
    budget_s: float = 0.15,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Timing | Gap]:
    """Time several calls in one interleaved run.

    ``budget_s`` is the device time in seconds that a contender's samples may take beyond the first
    MIN_SAMPLES. A job that fails, or does not fit the memory, becomes a Gap and leaves the others alone.
    A job that cannot be captured falls back to the events clock and says so in ``note``. The jobs are warmed
    up first; then the process waits for the GPU's lock (`lock.gpu_lock`) and keeps it until the last
    sample. What disturbed the samples is in ``noise``.

    Raises CannotTimeError without a GPU, StoppedError soon after ``stop()`` turns true, and ValueError
    for an unknown clock or cache state.
    """
    check_names(clock, cache)
    if not gpu.available():
        raise CannotTimeError(
            "Nothing is timed here: without a GPU Triton interprets the kernels in Python, "
            "and those seconds say nothing about a GPU. launch_counts.count(call) counts instead."
        )
    gaps: dict[str, Timing | Gap] = {}

    @contextmanager
    def gap_on_error(name: str) -> Iterator[None]:
        """An error becomes the note of this contender's gap."""
        raise_if_stopped(stop)
        try:
            yield
        except StoppedError:
            raise
        except Exception as error:
            gaps[name] = Gap(describe(error))

    samplers: dict[str, _Sampler] = {}
    shuffle, patience_s = random.Random(0).shuffle, PATIENCE * budget_s
    with thread_lock(stop), gpu.full_float32():
        cuda = Cuda()
        for name, job in jobs.items():
            with gap_on_error(name):
                samplers[name] = _Sampler(cuda, job, clock, cache)
        with gpu_lock(stop):
            for name, sampler in samplers.items():
                with gap_on_error(name):
                    sampler.prepare()
            counts = {name: s.sample_count(budget_s) for name, s in samplers.items() if name not in gaps}
            watch = noise.GpuWatch()
            for round_ in range(max(counts.values(), default=0)):
                names = [name for name, count in counts.items() if round_ < count and name not in gaps]
                shuffle(names)
                for name in names:
                    with gap_on_error(name):
                        while lost_s := samplers[name].sample(keep_slowed=patience_s < 0):
                            patience_s -= lost_s
                            raise_if_stopped(stop)
                watch.look()
            disturbance = watch.finish()
    return {name: gaps.get(name) or samplers[name].timing(cache, disturbance) for name in jobs}


def check_names(clock: str, cache: str) -> None:
    """Raise a ValueError unless there is such a clock and such a cache state."""
    if clock not in get_args(Clock):
        raise ValueError(f"clock: {clock!r} is none of {', '.join(get_args(Clock))}")
    if cache not in get_args(Cache):
        raise ValueError(f"cache: {cache!r} is none of {', '.join(get_args(Cache))}")


class _Sampler:
    """Takes samples of one job, each in microseconds per call."""

    def __init__(self, cuda: Cuda, job: Job, clock: Clock, cache: Cache) -> None:
        """Set up the job's inputs and warm it up."""
        self.cuda, self.job, self.clock, self.note = cuda, job, clock, ""
        self.samples_us: list[float] = []
        self.slowed = 0
        """How many samples are of moments when the host was slowed down."""
        self.called = 0
        with cuda.side_stream():
            self.sets = rotation(job, cuda.l2_bytes() if cache == "cold" else 0)
            self.outputs: list[Any] = [None] * len(self.sets)
            self._call(WARMUPS)
        cuda.synchronize()

    def prepare(self) -> None:
        """Find out how many calls fill a sample, and capture them for the graph clock."""
        timed = self.cuda.host_us if self.clock == "host" else self.cuda.device_us
        with self.cuda.side_stream():
            for calls in (1, 4, 16, 64, 256, 1024):
                took_us = timed(partial(self._call, calls))
                if took_us > SAMPLE_US / 4:  # long enough to tell the calls from starting the clock
                    break
        once_us = took_us / calls
        self.calls = self._calls_of(once_us)
        self.sample_us = self.calls * once_us
        if self.clock == "graph":
            try:
                self._capture()
                calls = self._calls_of(self.sample_us / self.calls)
                if self.sample_us < SAMPLE_US and calls > self.calls:  # in a graph they take less time
                    self.calls = calls
                    self._capture()
            except (torch.cuda.OutOfMemoryError, StoppedError):
                raise
            except Exception as error:
                self.clock = "events"
                self.note = f"timed with events, a graph cannot hold it: {describe(error)}"
        if self.clock == "events":  # asked for, or because a graph cannot hold the call
            self.sample_us = EVENT_CALLS * once_us

    def _calls_of(self, once_us: float) -> int:
        """How many calls fill a sample, each set of inputs taking part equally often."""
        calls = math.ceil(SAMPLE_US / max(once_us, SAMPLE_US / MAX_CALLS))
        return calls if calls == 1 else len(self.sets) * math.ceil(calls / len(self.sets))

    def _capture(self) -> None:
        self.replay = RUN_SECTION.get()(lambda: self.cuda.capture(lambda: self._call(self.calls)))
        self.replay()
        self.sample_us = self.cuda.device_us(self.replay, queued=True)

    def _call(self, count: int) -> None:
        """Call ``count`` times over the rotating sets, with as many outputs alive as there are sets."""
        # The events clock calls once at a time: its outputs outlive the call, to keep as many alive.
        kept = self.outputs if self.clock == "events" else [None] * len(self.sets)
        for _ in range(count):
            index = self.called % len(self.sets)
            kept[index] = None  # this call may write where the last one with these inputs did
            kept[index] = self.job.call(*self.sets[index])
            self.called += 1

    def sample_count(self, budget_s: float) -> int:
        """How many samples fit the budget."""
        return int(min(MAX_SAMPLES, max(MIN_SAMPLES, budget_s * 1e6 / max(self.sample_us, 1.0))))

    def sample(self, *, keep_slowed: bool) -> float:
        """Take a sample. When the host was slowed down it is dropped, unless ``keep_slowed``.

        Returns the seconds that a dropped sample took, and 0 when it is kept.
        """
        # What a cell does meanwhile is nothing beside a long sample, and nobody waits that long for a button.
        is_short = self.sample_us < LONG_US
        samples_us, slowed = RUN_SECTION.get()(self._sample) if is_short else self._sample()
        if slowed and not keep_slowed:
            return self.calls * samples_us[0] / 1e6
        self.samples_us += samples_us
        self.slowed += slowed
        return 0.0

    def _sample(self) -> tuple[list[float], bool]:
        if self.clock == "graph":
            # A graph of one slow call replays the same set of inputs each time: nothing rotates.
            flush = self.calls < len(self.sets)
            return [self.cuda.device_us(self.replay, queued=True, flush=flush) / self.calls], False
        with self.cuda.side_stream():  # where its forward pass ran: autograd launches a backward there
            if self.clock == "events":
                return [self.cuda.device_us(lambda: self._call(1)) for _ in range(EVENT_CALLS)], False
            sample_us = self.cuda.host_us(lambda: self._call(self.calls)) / self.calls
        return [sample_us], self.cuda.slowed()  # asked by the thread that called, on the core that it was on

    def timing(self, cache: Cache, disturbance: str) -> Timing:
        """The median of the samples, and what disturbed them."""
        p20, median, p80 = (float(us) for us in np.percentile(self.samples_us, (20, 50, 80)))
        slowed = "the host was slowed down" if 5 * self.slowed > len(self.samples_us) else ""
        wide = noise.wide_spread(self.clock, median, p80 - p20)
        found = "; ".join(filter(None, [disturbance, slowed, wide]))
        return Timing(self.clock, cache, median, p20, p80, len(self.samples_us), self.note, found)


def describe(error: BaseException) -> str:
    """An error in one line, for the note of a gap."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    if not gpu.available() and NO_GPU.search(first):
        return "needs a GPU"
    return f"{type(error).__name__}: {first}"[:200]
