"""The noise gauge, with a driver that says what a test has it say."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from labkit.measure import noise

ME, ALICE, BOB = os.getpid(), 7001, 7002


class Driver:
    """NVML as far as the gauge asks it. What it has no answer to is not supported."""

    NVML_ERROR_NOT_FOUND = 6

    class NVMLError(Exception):
        def __init__(self, value):
            self.value = value

    def __init__(self, *, processes=None, worked=None, reasons=(0,)):
        self.processes, self.worked = processes, worked
        self.reasons = list(reasons)
        """One after another; the last one stays."""
        self.since = []

    def answer(self, found):
        if isinstance(found, int | None):
            raise self.NVMLError(found if found is not None else 3)
        return found

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError(6)
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        assert handle == "handle"
        found = self.answer(self.processes)
        if found and isinstance(found[0], list):  # one after another; the last one stays
            found = found.pop(0) if len(found) > 1 else found[0]
        return [SimpleNamespace(pid=pid) for pid in found]

    def nvmlDeviceGetProcessUtilization(self, handle, since):  # noqa: N802
        self.since.append(since)
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in self.answer(self.worked).items()]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        found = self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]
        return found if found is not None else self.answer(None)


@pytest.fixture
def found(monkeypatch):
    """What the gauge finds, with a driver that says so."""

    def finding(driver):
        monkeypatch.setattr("labkit.gpu.uuid", lambda: "GPU-1")
        monkeypatch.setattr(noise, "nvml", lambda: driver)
        gauge = noise.GpuWatch()
        gauge.look()
        return gauge.finish()

    return finding


WORKED = "another process worked on the GPU"
THERE = "other processes on the GPU, at work or not"
POWER = "clocks held down by power limit"
HIDDEN = [{"processes": processes} for processes in (None, [], [1234, 5678])]
"""What is seen in a container that hides who is who."""
DRIVERS = [
    ({"processes": [ME], "worked": {ME: 90}}, ""),
    ({"processes": [ME, ALICE], "worked": {ME: 90, ALICE: 0}}, ""),
    ({"processes": [ME, ALICE], "worked": 6}, ""),  # nothing of late
    ({"processes": [ME, ALICE], "worked": 0}, ""),  # the same, as the package says it
    ({"processes": [ME, ALICE, BOB], "worked": {ALICE: 3, BOB: 50}}, WORKED),
    ({"processes": [ME], "worked": {ME: 90, ALICE: 3}}, WORKED),  # it ended meanwhile
    ({"processes": [ME]}, ""),
    ({"processes": [ME, ALICE]}, THERE),
    ({"processes": [[ME], [ME, ALICE]]}, THERE),  # it came meanwhile
    ({"processes": [[ME, ALICE], [ME]]}, THERE),  # it went
    *(({**who, "worked": {1234: 90}}, "") for who in HIDDEN),  # this one, by another name
    *(({**who, "worked": {1234: 90, 5678: 3}}, WORKED) for who in HIDDEN),
    *(({**who, "worked": 6}, "") for who in HIDDEN),
    *((who, "") for who in HIDDEN),
    ({"processes": [ME], "reasons": [0x1 | 0x2 | 0x100]}, ""),  # idle, or set so by somebody
    ({"processes": [ME], "reasons": [0x20, 0x40, 0x0]}, "clocks held down by temperature"),
    ({"processes": [ME], "reasons": [0x0, 0x4, 0x0]}, POWER),  # in between
    ({"processes": [ME], "reasons": [0, 0, 0x88]}, "clocks held down by hardware slowdown and power supply"),
    ({"processes": [ME, ALICE], "worked": {ALICE: 1}, "reasons": [4]}, f"{WORKED}; {POWER}"),
    ({"processes": [ME], "reasons": [None]}, ""),
]


@pytest.mark.parametrize(("answers", "words"), DRIVERS, ids=range(len(DRIVERS)))
def test_what_others_and_clocks_do_is_noise_as_far_as_the_driver_tells(found, answers, words):
    driver, before = Driver(**answers), time.time_ns() // 1000
    assert found(driver) == words
    assert before <= driver.since[0] <= time.time_ns() // 1000, "of work since the region began"


def test_a_machine_without_a_driver_has_no_library(monkeypatch):
    package = SimpleNamespace(nvmlInit=lambda: None)
    for module in (SimpleNamespace(nvmlInit=lambda: 1 // 0), None, package):  # no driver, no package, both
        noise.nvml.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert noise.nvml() is (package if module is package else None)
    noise.nvml.cache_clear()


def test_no_driver_a_slice_or_no_gpu_tells_nothing(found, monkeypatch):
    assert found(None) == ""
    assert found(Driver(processes=[ME, ALICE], reasons=[4])) == f"{THERE}; {POWER}"
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "GPU-of-a-slice")
    assert noise.GpuWatch().finish() == ""
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "")
    monkeypatch.setattr(noise, "nvml", lambda: pytest.fail("a simulated GPU has no driver"))
    assert noise.GpuWatch().finish() == ""


def test_a_spread_is_wide_by_the_measure_of_its_clock():
    said = {
        ("graph", 100.0, 10.0): "", ("graph", 100.0, 10.1): "spread above 10%", ("graph", 1.4, 0.4): "",
        ("events", 20.0, 5.9): "", ("events", 20.0, 6.1): "spread above 30%",
        ("host", 100.0, 31.0): "spread above 30%",
    }  # fmt: skip
    assert {given: noise.wide_spread(*given) for given in said} == said


@pytest.fixture
def paced(monkeypatch):
    """A pace in virtual time, and how many seconds its piece of work takes: the first of a list."""
    now, each = [0.0], [1.0]

    def repeat(work, number, repeat):
        now[0] += repeat * each[0] if repeat == 3 else 0.0
        return [each[0]] * repeat

    monkeypatch.setattr(noise, "timeit", SimpleNamespace(repeat=repeat))
    monkeypatch.setattr(noise, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return noise.HostSpeed(), each


def test_a_pace_is_slow_beside_the_best_so_far(paced):
    pace, each = paced
    said = []
    for each[0] in (1.0, 1.25, 1.35, 1.0, 0.5, 1.0, 0.6):
        said.append(pace.slowed())
    assert said == [False, False, True, False, False, True, False]


def test_a_clock_that_fell_for_good_is_the_pace_after_a_while(paced):
    pace, each = paced
    assert not pace.slowed()
    each[0] = 1.5
    said = [pace.slowed() for _ in range(60)]
    assert said[0] and not said[-1] and said == sorted(said, reverse=True)
    assert 60 < 4.5 * sum(said) <= 130, "for a minute or two"
    each[0] = 1.0
    assert not pace.slowed()
    each[0] = 1.5
    assert pace.slowed()
