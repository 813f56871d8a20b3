"""Lesson 1, exercise "benchmark": repair a benchmark that lies, on pretend devices in virtual time."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.pretend import Entry, Gpu, Layer
from labkit.tasks import Evidence, Wrong, some
from labkit.tasks.slips import Slip

TOLERANCE = 0.05
FEW_CALLS = 10

HINTS = {
    "not-a-number": (
        "What does the function return, and on every way through it?",
        "It returns the time of one call as a number, in microseconds.",
    ),
    "constant": (
        "The devices and layers differ, and so do their times. What is the result computed from?",
        "Every device and layer got the same answer: nothing that you measured is in it.",
        "Return a difference of two readings of gpu.clock_us(), over the number of calls.",
    ),
    "no-clock": (
        "Look at the clock: does it run along with this device?",
        "The device lives in virtual time. {what}",
        "Read gpu.clock_us() before and after the calls.",
    ),
    "no-call": (
        "What happens between the two readings of the clock?",
        "{what}",
        "Call layer(x) between the readings, many times.",
    ),
    "other-shape": (
        "Look at the tensor that the layer gets.",
        "{what}",
        "Draw it with gpu.randn(batch, width), from the arguments.",
    ),
    "draws-inside": (
        "Look at what stands between the two readings of the clock: what does the device work on there?",
        "{what} gpu.randn is a kernel too.",
        "Draw the input once, before the clock starts.",
    ),
    "first-call-inside": (
        "Is every call of the layer like the others? Print gpu.clock_us() after each of them.",
        "{what}",
        "Call the layer once before the clock starts.",
    ),
    "stopped-early": (
        "Look at the last reading of the clock: where is the device by then?",
        "A launch is queued, and Python goes on. {what}",
        "gpu.synchronize() waits for the device: call it after the loop, before you read the clock.",
    ),
    "started-early": (
        "Look at the first reading of the clock: what is the device still doing by then?",
        "Drawing and warming up are queued too. {what}",
        "Call gpu.synchronize() before the first reading.",
    ),
    "few-calls": (
        "Look at the number of calls. How far apart are the results if you measure twice?",
        "{what} A launch and a wait are in the time too, and now and then a call is slow.",
        "Time many calls between two readings, 50 say, so that these hardly count.",
    ),
    "waits-inside": (
        "Look into the loop: what happens on the device between the end of a call and the start of the next?",
        "{what} So each call's time holds a launch and a wait.",
        "Launch all calls, then wait once.",
    ),
    "wrong-unit": (
        "In which unit is the answer wanted, and in which does the clock read?",
        "{what}",
        "Both are microseconds: nothing to convert.",
    ),
    "wrong-divisor": (
        "How many calls lie between the two readings, and what do you divide by?",
        "{what}",
        "Divide by the number of calls that were timed; those of the warm-up don't count.",
    ),
    "one-device": (
        "Some devices come out right. Which number in your code is one device's own?",
        "{what} The devices differ in what a launch or a wait costs.",
        "Nothing has to be subtracted: with many calls between two readings, launch and wait don't count.",
    ),
    "inexact": (
        "Write down what lies between the two readings of the clock: anything but calls of the layer?",
        "{what} That's the time of something else than one call.",
        "Draw, warm up, synchronize, read the clock, many calls, synchronize, read the clock, divide.",
    ),
}
"""For each flaw: where to look, the cause (what the device's log shows in place of ``{what}``), the cure."""

SLIPS = (
    Slip(
        "another-gpu",
        r"torch\.cuda|CUDA",
        (
            "The device is a pretend one, and torch doesn't know it. What does gpu itself offer?",
            "gpu.synchronize() waits for it, gpu.clock_us() reads its clock, gpu.randn(batch, width) draws.",
        ),
    ),
    Slip(
        "unknown-attribute",
        "'Gpu' object has no attribute",
        (
            "gpu has randn, synchronize and clock_us.",
            "gpu.randn(batch, width) draws an input, gpu.synchronize() waits for the queue, gpu.clock_us() "
            "reads the clock in microseconds.",
        ),
    ),
    Slip(
        "not-a-layer-like-that",
        "'(Layer|Drawn)' object has no attribute",
        (
            "The layer can only be called, and its input only be handed to it.",
            "layer(x) is all, with x from gpu.randn(batch, width).",
        ),
    ),
    Slip(
        "not-drawn",
        r"^TypeError: layer\(x\)",
        (
            "The pretend device's layers take only what was drawn on that device.",
            "x = gpu.randn(batch, width)",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Count what stands in the parentheses: the scaffold's calls were right.",
            "time_us gets gpu, layer, batch and width; gpu.randn takes batch and width; layer takes x; "
            "the other two take nothing.",
        ),
    ),
    Slip(
        "clock-of-the-computer",
        "name '(time|datetime|timeit|perf_counter)' is not defined",
        (
            "Your computer's clock knows nothing of a device in virtual time.",
            "gpu.clock_us() is the clock that runs along with it.",
        ),
    ),
    Slip(
        "no-calls-to-divide-by",
        "ZeroDivisionError",
        (
            "Which number is zero there: how many calls were timed?",
            "Divide by the number of calls between the two readings, which has to be one or more.",
        ),
    ),
)


@dataclass(frozen=True)
class Measured:
    """What a benchmark said of one layer on one device, and what the host did meanwhile."""

    device: str
    batch: int
    width: int
    said: Any
    true_us: float
    log: list[Entry]

    @property
    def right(self) -> bool:
        return abs(self.said - self.true_us) <= TOLERANCE * self.true_us

    def __str__(self) -> str:
        return (
            f"On pretend {self.device}, at {self.batch} x {self.width}, your benchmark says "
            f"{self.said:.6g} us. A call really takes {self.true_us:.6g} us."
        )


def check(time_us: Callable[..., float]) -> Evidence:
    """Have ``time_us(gpu, layer, batch, width)`` measure layers on three devices; `Wrong` names the flaw."""
    runs = [run for device in range(3) for run in _on(time_us, device)]
    for run in runs:
        if (
            isinstance(run.said, bool)
            or not isinstance(run.said, (int, float))
            or not math.isfinite(run.said)
        ):
            raise _wrong("not-a-number", f"The function returned {run.said!r}.")
    # The right number from anywhere but the clock is no measurement.
    missed = next((run for run in runs if not run.right or not _regions(run.log)), None)
    if missed is not None:
        reason, what = _flaw(missed, runs)
        raise _wrong(reason, str(missed), what)
    worst = max(abs(run.said / run.true_us - 1) for run in runs)
    return Evidence(
        f"{len(runs)} measurements on 3 pretend devices, each within {worst:.1%} of the true device time.",
        len(runs),
    )


def _wrong(reason: str, observed: str, what: str = "") -> Wrong:
    return Wrong(reason, observed, tuple(hint.format(what=what) for hint in HINTS[reason]))


def _on(time_us: Callable[..., float], device: int) -> list[Measured]:
    """The layers as measured on one device."""
    speeds = (
        dict(launch_us=14.0, synchronize_us=20.0, hiccup_every=23),
        dict(launch_us=5.0, synchronize_us=7.0, hiccup_every=31),
        dict(launch_us=30.0, synchronize_us=25.0, compile_us=9000.0, hiccup_every=27),
    )
    runs = []
    for batch, width, ns in ((1024, 1024, 0.1), (4096, 2048, 0.05)):
        gpu = Gpu(f"device {'ABC'[device]}", **speeds[device])  # type: ignore[arg-type]
        layer = Layer(gpu, ns_per_element=ns * (1 + 0.3 * device))
        said = time_us(gpu, layer, batch, width)
        runs.append(Measured(gpu.name, batch, width, said, layer.device_us(batch, width), gpu.log))
    return runs


@dataclass(frozen=True)
class _Region:
    """What lies between two readings of the clock with calls between them."""

    start: Entry
    stop: Entry
    events: list[Entry]

    def count(self, event: str) -> int:
        return sum(entry.event == event for entry in self.events)


def _regions(log: list[Entry]) -> list[_Region]:
    reads = [place for place, entry in enumerate(log) if entry.event == "clock"]
    between = [_Region(log[a], log[b], log[a + 1 : b]) for a, b in itertools.pairwise(reads)]
    return [region for region in between if region.count("call")]


def _flaw(run: Measured, runs: list[Measured]) -> tuple[str, str]:
    """The name of the flaw that is left, and what the device's log says about it."""
    regions = _regions(run.log)
    if len({other.said for other in runs}) == 1:
        return "constant", ""
    if not regions:
        if any(entry.event == "call" for entry in run.log):
            return "no-clock", "No call of the layer lies between two readings of the device's clock."
        return "no-call", "The layer was never called."
    inside = [entry for region in regions for entry in region.events]
    return _flaw_inside(run, regions, inside) or _flaw_of_arithmetic(run, runs, regions)


def _flaw_inside(run: Measured, regions: list[_Region], inside: list[Entry]) -> tuple[str, str] | None:
    """What was timed besides the device's work on many calls; None when there is nothing."""
    calls = [entry for entry in inside if entry.event == "call"]
    if any(entry.shape != (run.batch, run.width) for entry in calls):
        return "other-shape", f"The layer was called with a tensor of shape {calls[0].shape}."
    if draws := sum(entry.event == "draw" for entry in inside):
        return "draws-inside", f"Random numbers were drawn {some(draws, 'time')} while the clock ran."
    if any(entry.event == "compile" for entry in inside):
        return "first-call-inside", "The first call compiles the layer, and it was timed."
    last, first = regions[-1].stop, regions[0].start
    if last.pending:
        late = last.device_us - last.host_us
        return "stopped-early", f"When the clock stopped, the device had {late:.0f} us of work left."
    if first.pending:
        early = first.device_us - first.host_us
        return "started-early", f"When the clock started, the device had {early:.0f} us of earlier work left."
    if len(calls) < FEW_CALLS:
        return "few-calls", f"The timed region holds {some(len(calls), 'call')}."
    waits = sum(entry.event == "synchronize" for entry in inside)
    if waits > len(calls) / 2:
        return "waits-inside", f"The host waited {waits} times in {len(calls)} calls."
    return None


_UNITS = {
    1e-6: "That is right in seconds.",
    1e-3: "That is right in milliseconds.",
    1e3: "That is a thousand times too much.",
    1e6: "That is a million times too much, as if the clock read in seconds.",
}


def _flaw_of_arithmetic(run: Measured, runs: list[Measured], regions: list[_Region]) -> tuple[str, str]:
    """What is wrong with the number, where the measurement itself is sound."""
    ratio = run.said / run.true_us
    for factor, words in _UNITS.items():
        if abs(ratio / factor - 1) <= 2 * TOLERANCE:
            return "wrong-unit", words
    calls = sum(region.count("call") for region in regions)
    elapsed = sum(region.stop.host_us - region.start.host_us for region in regions)
    if any(other.right for other in runs):
        return (
            "one-device",
            f"Right are only {sum(other.right for other in runs)} of {len(runs)} measurements.",
        )
    divisor = elapsed / run.said if run.said else 0.0
    if divisor > 0.5 and abs(divisor - round(divisor)) < 1e-3:
        return "wrong-divisor", f"{elapsed:.0f} us for {calls} calls were divided by {divisor:.0f}."
    return "inexact", f"Between the readings of the clock lie {calls} calls and {elapsed:.0f} us."
