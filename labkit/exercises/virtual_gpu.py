"""A pretend GPU in virtual time: as asynchronous as a real one, the same on every machine.

Host and device have a time each, in virtual microseconds. A launch costs the host a little and is queued;
the device works off its queue while the host goes on. It models large layers, whose device time is longer
than a launch: the device is what a benchmark of them should find, and what a careless one misses.
Reading the clock does not wait for the device, the first call of a layer compiles it, drawing random numbers
is work for the device too, and now and then a call takes longer than usual.
"""

from dataclasses import dataclass
from typing import Literal

Event = Literal["clock", "synchronize", "draw", "call", "compile"]


@dataclass(frozen=True)
class Entry:
    """One thing that the host did, with both times after it."""

    event: Event
    host_us: float
    device_us: float
    """When the device will have worked off its queue."""
    shape: tuple[int, int] | None = None

    @property
    def pending(self) -> bool:
        """Whether the device still has work."""
        return self.device_us > self.host_us


@dataclass(frozen=True)
class Drawn:
    """A tensor of the pretend GPU: a shape without values."""

    batch: int
    width: int


class Gpu:
    """A device with its own speeds; ``log`` is what the host did with it, in order."""

    def __init__(
        self,
        name: str,
        *,
        launch_us: float = 6.0,
        synchronize_us: float = 10.0,
        compile_us: float = 40_000.0,
        draw_us_per_element: float = 1e-3,
        hiccup_every: int = 23,
    ) -> None:
        self.name = name
        self.log: list[Entry] = []
        self._launch_us, self._synchronize_us, self._compile_us = launch_us, synchronize_us, compile_us
        self._draw_us_per_element, self._hiccup_every = draw_us_per_element, hiccup_every
        self._host = self._device = 1000.0  # a clock has been running before anybody looks at it
        self._calls = 0

    def clock_us(self) -> float:
        """What the host's clock shows, in microseconds. It doesn't wait for the device."""
        self._host += 0.05
        self._note("clock")
        return self._host

    def synchronize(self) -> None:
        """Wait until the device has worked off its queue."""
        self._host = max(self._host, self._device) + self._synchronize_us
        self._note("synchronize")

    def randn(self, batch: int, width: int) -> Drawn:
        """Launch the drawing of a tensor of normal random numbers."""
        self._launch(batch * width * self._draw_us_per_element)
        self._note("draw", (batch, width))
        return Drawn(batch, width)

    def _call(self, device_us: float, first: bool, x: Drawn) -> None:
        if first:
            self._host += self._compile_us
            self._note("compile", (x.batch, x.width))
        self._calls += 1
        hiccup = 1.4 if self._calls % self._hiccup_every == 0 else 1.0
        self._launch(device_us * hiccup)
        self._note("call", (x.batch, x.width))

    def _launch(self, device_us: float) -> None:
        self._host += self._launch_us
        self._device = max(self._device, self._host) + device_us

    def _note(self, event: Event, shape: tuple[int, int] | None = None) -> None:
        self.log.append(Entry(event, self._host, self._device, shape))


class Layer:
    """A layer on a pretend GPU; calling it launches one kernel, and compiles it the first time."""

    def __init__(self, gpu: Gpu, ns_per_element: float) -> None:
        self._gpu, self._ns_per_element = gpu, ns_per_element
        self._compiled = False

    def device_us(self, batch: int, width: int) -> float:
        """What a call takes on the device, hiccups apart, in microseconds."""
        return batch * width * self._ns_per_element / 1000

    def __call__(self, x: Drawn) -> Drawn:
        """Launch the layer; TypeError for an ``x`` that `Gpu.randn` did not draw."""
        if not isinstance(x, Drawn):
            raise TypeError(f"layer(x) takes what gpu.randn drew, not {type(x).__name__}")
        self._gpu._call(self.device_us(x.batch, x.width), not self._compiled, x)
        self._compiled = True
        return x
