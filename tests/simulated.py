"""A device in virtual time: what the clocks need of a GPU, for tests on machines without one."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from labkit import gpu
from labkit.measure import clocks, copies, tape

L2_BYTES = 4096


class Gpu:
    """Takes the place of `clocks.DeviceTimer`: ``monkeypatch.setattr(clocks, "DeviceTimer", lambda: gpu)``.

    A call under test is ``gpu.launch(host_us, device_us)``. Host and device each have a time in virtual
    microseconds; a launch is queued when the host has made it, and the device works off its queue.
    Starting a clock costs ``start_us``, which the clock counts, as a real one does.
    """

    def __init__(self, l2_bytes: int = L2_BYTES, start_us: float = 0.0) -> None:
        self._l2_bytes, self.start_us = l2_bytes, start_us
        self.host = self.device = 0.0
        self.captured: list[float] | None = None
        self.log: list[str] = []
        """What the clocks did, in order: synchronize, host, device, queued, flush, capture, replay."""

    def l2_bytes(self) -> int:
        return self._l2_bytes

    def launch(self, host_us: float, device_us: float) -> None:
        self.host += host_us
        if self.captured is None:
            self.device = max(self.device, self.host) + device_us
        else:
            self.captured.append(device_us)

    def wait(self) -> None:
        """What a call does that a graph cannot hold."""
        if self.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.host = max(self.host, self.device)

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.host = max(self.host, self.device)

    def host_us(self, run: Callable[[], None]) -> float:
        self.log.append("host")
        self.host = started = max(self.host, self.device)
        run()
        self.host = max(self.host, self.device) + self.start_us
        return self.host - started

    def device_us(self, run: Callable[[], None], *, queued: bool = False, flush: bool = False) -> float:
        self.log += ["queued" if queued else "device", *(["flush"] if flush else [])]
        self.host = max(self.host, self.device)
        self.device = started = self.host + (1e5 if queued else 0.0)
        run()
        return max(self.device - started, 0.0) + self.start_us

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.log.append("capture")
        self.captured = kernels = []
        try:
            run()
        finally:
            self.captured = None

        def replay() -> None:
            self.log.append(f"replay {len(kernels)}")
            self.launch(20.0, sum(kernels))

        return replay

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self.log.append("side stream")
        yield


def out_of_memory(*_: Any) -> Any:
    """A call that does not fit."""
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")


def ticking(gpu: Gpu, *times_us: float) -> Callable[..., None]:
    """A call whose device time goes through ``times_us`` again and again."""
    turn = itertools.cycle(times_us)
    return lambda *_: gpu.launch(0.0, next(turn))


HERE = {"device": "Simulated", "driver": "570.1", "torch": "2.13.0", "triton": "3.7.1"}


def install(put: Callable[[object, str, Any], None]) -> Gpu:
    """Make this machine one in virtual time whose faster copy moves 10 bytes a microsecond.

    ``put`` is ``monkeypatch.setattr``, or ``setattr`` in a notebook.
    """
    simulated = Gpu(l2_bytes=0)
    put(gpu, "available", lambda: True)
    put(gpu, "device", lambda: "cpu")
    put(gpu, "uuid", lambda: "")
    put(gpu, "synchronize", lambda: None)
    put(tape, "here", lambda: HERE)
    put(clocks, "DeviceTimer", lambda: simulated)
    put(copies, "COPIES", {"slow": _copy(simulated, 2.0), "fast": _copy(simulated, 1.0)})
    return simulated


def _copy(gpu: Gpu, factor: float) -> Callable[..., None]:
    return lambda source, target: gpu.launch(1.0, factor * 2 * source.nbytes / 10)
