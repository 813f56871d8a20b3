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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from labkit import gpu
from labkit.measure import noise
from labkit.measure.cold_cache import Job, rotation
from labkit.measure.lock import GAUGE, SECTION, StoppedError, gpu_turn, turn

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


class CannotTimeError(RuntimeError):
    """There is no GPU to time here; Triton's interpreter is Python and its seconds mean nothing."""

    def __init__(self) -> None:
        super().__init__(
            "Nothing is timed here: without a GPU Triton interprets the kernels in Python, "
            "and those seconds say nothing about a GPU. launch_counts.count(call) counts instead."
        )


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

    @classmethod
    def of(cls, samples_us: Sequence[float], clock: Clock, cache: Cache) -> "Timing":
        """Summarise samples, each in microseconds per call."""
        p20, median, p80 = (float(v) for v in np.percentile(samples_us, (20, 50, 80)))
        return cls(clock, cache, median, p20, p80, len(samples_us))

    @property
    def spread_us(self) -> float:
        """p80 - p20: a difference between two medians that is inside the larger spread is a tie."""
        return self.p80_us - self.p20_us


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
        return noise.pace.slowed()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of ``run`` in a graph; the result replays it."""
        graph = torch.cuda.CUDAGraph()
        outer = torch.cuda.current_stream()
        # Its workspace of cuBLAS stays that of the stream: to drop all of them (gpu.own_workspaces) for a
        # graph that lives so shortly would leave the caller's graphs without theirs.
        # Captures share one pool: their outputs are never read again, and one pool holds the largest only.
        try:
            # thread_local: what another cell does meanwhile, in the main thread, does not end the capture.
            with (
                _told_if_empty() as empty,
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ),
            ):
                run()
            if empty:
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


@contextmanager
def _told_if_empty() -> Iterator[list[str]]:
    """PyTorch's warning that a graph is empty, in a list; it gives it for a capture that failed, too."""
    empty: list[str] = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            yield empty
        finally:
            others = [one for one in given if "The CUDA Graph is empty" not in str(one.message)]
            empty += [str(one.message) for one in given if one not in others]
    for one in others:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def measure(
    jobs: Mapping[str, Job],
    *,
    clock: Clock = "graph",
    cache: Cache = "cold",
    budget_s: float = 0.15,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Timing | Gap]:
    """Time several calls in one interleaved run.

    ``budget_s`` is the device time in seconds that a contender's samples may take beyond the first
    MIN_SAMPLES. A job that fails, or does not fit the memory, becomes a Gap and leaves the others alone.
    A job that cannot be captured falls back to the events clock and says so in ``note``. The jobs are warmed
    up first; then the process waits for its turn on the GPU (:func:`gpu_turn`) and keeps it until the last
    sample. What disturbed the samples is in ``noise``.

    Raises CannotTimeError without a GPU, StoppedError soon after ``stop()`` turns true, and ValueError
    for an unknown clock or cache state.
    """
    expect(clock, cache)
    if not gpu.available():
        raise CannotTimeError
    with turn(stop), gpu.full_float32():
        return _Run(Cuda(), clock, cache, budget_s, random.Random(seed), stop).of(jobs)


def expect(clock: str, cache: str) -> None:
    """Raise a ValueError unless there is such a clock and such a cache state."""
    if clock not in ("host", "events", "graph"):
        raise ValueError(f"clock: {clock!r} is none of host, events, graph")
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache: {cache!r} is neither cold nor warm")


class _Run:
    """One interleaved measurement of several jobs."""

    def __init__(
        self,
        cuda: Cuda,
        clock: Clock,
        cache: Cache,
        budget_s: float,
        shuffle: random.Random,
        stop: Callable[[], bool],
    ) -> None:
        self.cuda, self.clock, self.cache, self.budget_s = cuda, clock, cache, budget_s
        self.shuffle, self.stop, self.patience_s = shuffle, stop, PATIENCE * budget_s

    def of(self, jobs: Mapping[str, Job]) -> dict[str, Timing | Gap]:
        outcome: dict[str, Timing | Gap] = {}
        samplers: dict[str, _Sampler] = {}
        for name, job in jobs.items():
            self._check_stop()
            try:
                samplers[name] = _Sampler(self.cuda, job, self.clock, self.cache)
            except Exception as error:  # becomes the note of this contender's gap
                outcome[name] = Gap(describe(error))
        with gpu_turn(self.stop):
            outcome |= self._begin(samplers)
            outcome |= self._interleave({name: s for name, s in samplers.items() if name not in outcome})
        return {name: outcome[name] for name in jobs}

    def _begin(self, samplers: dict[str, "_Sampler"]) -> dict[str, Timing | Gap]:
        """How many calls make a sample; the gaps of those that fail."""
        failed: dict[str, Timing | Gap] = {}
        for name, sampler in samplers.items():
            self._check_stop()
            try:
                sampler.begin()
            except StoppedError:  # while it waited for a cell: no gap of this contender
                raise
            except Exception as error:  # becomes the note of this contender's gap
                failed[name] = Gap(describe(error))
        return failed

    def _interleave(self, samplers: dict[str, "_Sampler"]) -> dict[str, Timing | Gap]:
        gauge = noise.Gauge()
        token = GAUGE.set(gauge)
        try:
            samples, failed = self._sampled(samplers, gauge)
        finally:
            GAUGE.reset(token)
        disturbed = gauge.finding()
        done = {name: s for name, s in samplers.items() if name not in failed}
        return failed | {name: s.timing(samples[name], self.cache, disturbed) for name, s in done.items()}

    def _sampled(
        self, samplers: dict[str, "_Sampler"], gauge: noise.Gauge
    ) -> tuple[dict[str, list[float]], dict[str, Timing | Gap]]:
        """The samples of each, and the gaps of those that failed meanwhile."""
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        failed: dict[str, Timing | Gap] = {}
        wanted = {name: sampler.samples(self.budget_s) for name, sampler in samplers.items()}
        for round_ in range(max(wanted.values(), default=0)):
            names = [name for name, count in wanted.items() if round_ < count and name not in failed]
            self.shuffle.shuffle(names)
            for name in names:
                self._check_stop()
                try:
                    samples[name] += self._quiet(samplers[name])
                except StoppedError:
                    raise
                except Exception as error:  # becomes the note of this contender's gap
                    failed[name] = Gap(describe(error))
            gauge.look()
        return samples, failed

    def _quiet(self, sampler: "_Sampler") -> list[float]:
        """A sample, and no longer one that was slowed down than patience allows."""
        while True:
            taken = sampler.take()
            if sampler.slowed:
                self.patience_s -= sampler.took_s
            if not sampler.slowed or self.patience_s < 0:
                sampler.kept_slowed += sampler.slowed
                return taken
            self._check_stop()

    def _check_stop(self) -> None:
        if self.stop():
            raise StoppedError("stopped before the measurement was complete")


class _Sampler:
    """Warms one job up, then yields samples of it in microseconds per call."""

    def __init__(self, cuda: Cuda, job: Job, clock: Clock, cache: Cache) -> None:
        self.cuda, self.job, self.clock, self.note = cuda, job, clock, ""
        self.turn = 0
        self.slowed, self.kept_slowed = False, 0
        self.took_s = 0.0
        """How long the last sample by the host's clock took, without the wait for its turn."""
        with cuda.side_stream():
            self.sets = rotation(job, cuda.l2_bytes() if cache == "cold" else 0)
            self.outputs: list[Any] = [None] * len(self.sets)
            self._calls(WARMUPS)
        cuda.synchronize()

    def begin(self) -> None:
        """Find out how many calls fill a sample, and capture them for the graph clock."""
        with self.cuda.side_stream():
            once_us = self._estimate()
        self.calls = self._fill(once_us)
        self.sample_us = self.calls * once_us
        if self.clock == "graph":
            self._capture()
        if self.clock == "events":  # asked for, or because a graph cannot hold the call
            self.sample_us = EVENT_CALLS * once_us

    def samples(self, budget_s: float) -> int:
        """How many samples fit the budget."""
        return int(min(MAX_SAMPLES, max(MIN_SAMPLES, budget_s * 1e6 / max(self.sample_us, 1.0))))

    def timing(self, samples_us: Sequence[float], cache: Cache, disturbed: str) -> Timing:
        """What its samples come to, and what there is to say against them."""
        timing = Timing.of(samples_us, self.clock, cache)
        wide = noise.spread(timing.clock, timing.median_us, timing.spread_us)
        slowed = "the host was slowed down" if 5 * self.kept_slowed > len(samples_us) else ""
        return replace(timing, note=self.note, noise="; ".join(filter(None, [disturbed, slowed, wide])))

    def take(self) -> list[float]:
        # What a cell does meanwhile is nothing beside a long sample, and nobody waits that long for a button.
        short = self.sample_us < LONG_US
        return list(SECTION.get()(self._take) if short else self._take())

    def _take(self) -> list[float]:
        if self.clock == "graph":
            # A graph of one slow call replays the same set of inputs each time: nothing rotates.
            flush = self.calls < len(self.sets)
            return [self.cuda.device_us(self.replay, queued=True, flush=flush) / self.calls]
        with self.cuda.side_stream():  # where its forward pass ran: autograd launches a backward there
            if self.clock == "events":
                return [self.cuda.device_us(lambda: self._calls(1)) for _ in range(EVENT_CALLS)]
            started = time.monotonic()
            taken = self.cuda.host_us(lambda: self._calls(self.calls)) / self.calls
        self.slowed = self.cuda.slowed()  # asked by the thread that called, on the core that it was on
        self.took_s = time.monotonic() - started
        return [taken]

    def _estimate(self) -> float:
        """Rough microseconds per call, launched one by one."""
        timed = self.cuda.host_us if self.clock == "host" else self.cuda.device_us
        for calls in (1, 4, 16, 64, 256, 1024):
            took = timed(partial(self._calls, calls))
            if took > SAMPLE_US / 4:  # long enough to tell the calls from starting the clock
                break
        return took / calls

    def _fill(self, once_us: float) -> int:
        """How many calls fill a sample, each set of inputs taking part equally often."""
        calls = math.ceil(SAMPLE_US / max(once_us, SAMPLE_US / MAX_CALLS))
        return calls if calls == 1 else len(self.sets) * math.ceil(calls / len(self.sets))

    def _calls(self, count: int) -> None:
        """Call ``count`` times over the rotating sets, with as many outputs alive as there are sets."""
        # The events clock calls once at a time: its outputs outlive the call, to keep as many alive.
        kept = self.outputs if self.clock == "events" else [None] * len(self.sets)
        for _ in range(count):
            index = self.turn % len(self.sets)
            kept[index] = None  # this call may write where the last one with these inputs did
            kept[index] = self.job.call(*self.sets[index])
            self.turn += 1

    def _capture(self) -> None:
        try:
            self._capture_calls()
            if self.sample_us < SAMPLE_US:  # launched one by one the calls took longer than in a graph
                calls = self._fill(self.sample_us / self.calls)
                if calls > self.calls:
                    self.calls = calls
                    self._capture_calls()
        except (torch.cuda.OutOfMemoryError, StoppedError):
            raise
        except Exception as error:
            self.clock, self.note = "events", f"timed with events, a graph cannot hold it: {describe(error)}"

    def _capture_calls(self) -> None:
        self.replay = SECTION.get()(lambda: self.cuda.capture(lambda: self._calls(self.calls)))
        self.replay()
        self.sample_us = self.cuda.device_us(self.replay, queued=True)


NO_GPU = re.compile(
    "not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|dummy base class|requires CUDA", re.IGNORECASE
)
"""What PyTorch says where there is no GPU, in builds with CUDA and without."""


def describe(error: BaseException) -> str:
    """An error in one line, for the note of a gap."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first = (str(error).strip().splitlines() or ["no message"])[0]
    if not gpu.available() and NO_GPU.search(first):
        return "needs a GPU"
    return f"{type(error).__name__}: {first}"[:200]
