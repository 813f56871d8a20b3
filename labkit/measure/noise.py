"""What else went on while something was timed: other processes on the GPU, clocks held down, a wide spread.

The first two are asked of NVIDIA's management library (NVML, through nvidia-ml-py) before, during and after
a timed region, never inside a sample. Where there is none, only the spread is left to go by. What slows the
host down is seen by a piece of work that always takes as long (:class:`HostSpeed`).
"""

import math
import os
import time
import timeit
from functools import cache
from typing import Any

from labkit import gpu

REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "clocks of another GPU",
    0x20 | 0x40: "temperature",
    0x80: "power supply",
}
"""NVML's reasons for lower clocks, but for those that are no disturbance: idle, or set so by somebody."""
MAX_RELATIVE_SPREAD = {"graph": 0.10, "events": 0.30, "host": 0.30}
"""p80 - p20 over the median, by clock: on a quiet H200 1 of 100 rows by the graph clock is above, none by
events, and by the host clock 1 of 10, where Python itself was disturbed."""
HOST_SLOWDOWN = 1.3
"""So many times as long as at its best takes work on a core that is shared: on a virtual machine beside an
H200 it was 1.5 to 1.8, for seconds, with eager steps at 1.5 to 2.2; in its quiet moments 0.9 to 1.1."""
HOST_PROBE = "for number in range(1500): number * number"
"""About 0.1 ms of Python."""
CLOCK_RESOLUTION_US = 0.5
"""A narrower spread is that of the clock itself."""


def wide_spread(clock: str, median_us: float, spread_us: float) -> str:
    """A note when p80 - p20 of a timing is too wide for its clock; empty when it is not."""
    limit = MAX_RELATIVE_SPREAD[clock]
    return f"spread above {limit:.0%}" if spread_us > max(limit * median_us, CLOCK_RESOLUTION_US) else ""


@cache
def nvml() -> Any:
    """NVML as a module, started; None without it."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver: all the same
        return None
    return pynvml


class HostSpeed:
    """How long a fixed piece of Python takes in this thread, beside the quickest that it took before.

    A core's other hardware thread or another virtual machine on it change the pace for seconds, so that all
    samples of a measurement may agree and be wrong. What lasts longer is no disturbance, as when a laptop's
    clock falls after its first seconds: the best is that of the last minute or two. A host that has been slow
    from the beginning is not found out.
    """

    def __init__(self) -> None:
        self._since_s = -math.inf
        """When the present minute began."""
        self._best_s, self._before_s = math.inf, math.inf
        """The best of the present minute, and of the last one in which it was asked."""

    def slowed(self) -> bool:
        """Whether the host is slower now; the first answer takes 0.2 s, the others 0.2 ms."""
        now = time.monotonic()
        if math.isinf(self._best_s):
            self._best_s, self._since_s = min(timeit.repeat(HOST_PROBE, number=1, repeat=2000)), now
        elif now - self._since_s > 60:
            self._best_s, self._before_s, self._since_s = math.inf, self._best_s, now
        took_s = min(timeit.repeat(HOST_PROBE, number=1, repeat=3))
        self._best_s = min(self._best_s, took_s)
        return took_s > HOST_SLOWDOWN * min(self._best_s, self._before_s)


host_speed = HostSpeed()
"""That of this process."""


class GpuWatch:
    """Watches the GPU from when it is made until `finish`; without NVML it sees nothing."""

    def __init__(self) -> None:
        self._nvml = nvml() if gpu.uuid() else None
        self._gpu = self._ask("nvmlDeviceGetHandleByUUID", gpu.uuid())
        if self._gpu is None:  # a slice of a GPU has no such handle
            self._nvml = None
        self._began_us = time.time_ns() // 1000
        self._running = self._processes()
        self._reasons = 0
        self.look()

    def _ask(self, function: str, *given: Any) -> Any:
        """NVML's answer; None where this driver or this GPU has none."""
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, function)(*given)
        except self._nvml.NVMLError:
            return None

    def _processes(self) -> set[int]:
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", self._gpu)
        return {process.pid for process in found or ()}

    def look(self) -> None:
        """See whether the clocks are held down now."""
        self._reasons |= self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._gpu) or 0

    def finish(self) -> str:
        """What disturbed what was timed since; empty when nothing did."""
        self.look()
        self._running |= self._processes()
        held = dict.fromkeys(name for bit, name in REASONS.items() if self._reasons & bit)
        clocks = f"clocks held down by {' and '.join(held)}" if held else ""
        return "; ".join(filter(None, [self._others(), clocks]))

    def _others(self) -> str:
        """Other processes that worked; where the driver does not say who worked, those that are there.

        In a container pids may be of another namespace, or missing: then one of those that worked was this
        process.
        """
        working, visible = self._working(), os.getpid() in self._running
        if working is None:
            several = visible and len(self._running) > 1
            return "other processes on the GPU, at work or not" if several else ""
        others = working - {os.getpid()} if visible else list(working)[1:]
        return "another process worked on the GPU" if others else ""

    def _working(self) -> set[int] | None:
        """Processes that worked since it began to watch; None where the driver keeps no such record."""
        if self._nvml is None:
            return None
        try:
            seen = self._nvml.nvmlDeviceGetProcessUtilization(self._gpu, self._began_us)
        except self._nvml.NVMLError as error:
            # Nothing of late; the package makes an error of an empty success, too.
            return set() if error.value in (0, self._nvml.NVML_ERROR_NOT_FOUND) else None
        return {each.pid for each in seen if each.smUtil > 0}
