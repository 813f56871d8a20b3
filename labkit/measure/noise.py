"""What disturbed a timing: clocks that were held down, and a wide spread.

The first is asked of NVIDIA's management library (NVML, through nvidia-ml-py), between samples and never
inside one. Where there is no driver, only the spread is left to go by.
"""

from functools import cache
from typing import Any

import pynvml

from labkit import gpu

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


@cache
def nvml() -> Any:
    """NVML as a module, started; None without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def throttle_bits() -> int:
    """Why clocks are held down now, as bits of `THROTTLE_BITS` and others; 0 where NVML cannot say.

    It cannot without a driver, and of a slice of a GPU.
    """
    library, uuid = nvml(), gpu.uuid()
    if library is None or not uuid:
        return 0
    try:
        return int(library.nvmlDeviceGetCurrentClocksThrottleReasons(library.nvmlDeviceGetHandleByUUID(uuid)))
    except pynvml.NVMLError:
        return 0


def disturbance(bits: int, clock: str, median_us: float, spread_us: float) -> str:
    """What disturbed a timing, from all bits that were seen meanwhile and p80 - p20; empty if nothing did."""
    held = [reason for bit, reason in THROTTLE_BITS.items() if bits & bit]
    limit = MAX_RELATIVE_SPREAD[clock]
    found = [f"slowed down by {' and '.join(held)}"] * bool(held)
    found += [f"spread above {limit:.0%}"] * (spread_us > max(limit * median_us, CLOCK_RESOLUTION_US))
    return "; ".join(found)
