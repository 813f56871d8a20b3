"""The noise gauge, with a driver that says what a test has it say."""

import itertools
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from labkit import device, noise

ME, ALICE, BOB = os.getpid(), 7001, 7002
GIB = 2**30


class Driver:
    """NVML as far as the gauge asks it. What it has no answer to is not supported."""

    NVML_ERROR_NOT_FOUND = 6

    class NVMLError(Exception):
        def __init__(self, value):
            self.value = value

    def __init__(self, *, processes=None, worked=None, reasons=(0,), used=None):
        self.processes, self.worked, self.used = processes, worked, used
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
        return [SimpleNamespace(pid=pid) for pid in self.answer(self.processes)]

    def nvmlDeviceGetProcessUtilization(self, handle, since):  # noqa: N802
        self.since.append(since)
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in self.answer(self.worked).items()]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        return self.reasons.pop(0) if len(self.reasons) > 1 else self.answer(tuple(self.reasons))[0]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return self.answer(SimpleNamespace(used=self.used) if self.used is not None else None)


@pytest.fixture
def found(monkeypatch):
    """What the gauge finds, with a driver that says so."""

    def finding(driver):
        monkeypatch.setattr(device, "uuid", lambda: "GPU-1")
        monkeypatch.setattr(noise, "library", lambda: driver)
        gauge = noise.Gauge()
        gauge.look()
        return gauge.finding()

    return finding


@pytest.mark.parametrize(
    ("processes", "worked", "words"),
    [
        ([ME], {ME: 90}, ""),
        ([ME, ALICE], {ME: 90}, ""),
        ([ME, ALICE], {ME: 90, ALICE: 0}, ""),
        ([ME, ALICE], 6, ""),  # nothing of late
        ([ME, ALICE], 0, ""),  # the same, as the package says it
        ([ME, ALICE], {ME: 90, ALICE: 3}, "another process worked on the GPU"),
        ([ME, ALICE, BOB], {ALICE: 3, BOB: 50}, "another process worked on the GPU"),
        ([ME], {ME: 90, ALICE: 3}, "another process worked on the GPU"),  # it ended meanwhile
        ([ME], None, ""),
        ([ME, ALICE], None, "other processes on the GPU, at work or not"),
    ],
)
def test_another_process_is_noise_when_it_worked_or_nobody_knows(found, processes, worked, words):
    assert found(Driver(processes=processes, worked=worked)) == words


@pytest.mark.parametrize(
    ("worked", "used", "words"),
    [
        ({1234: 90}, 40 * GIB, ""),  # the one that worked is this process, by its other name
        ({1234: 90, 5678: 3}, 1 * GIB, "another process worked on the GPU"),
        (6, 1 * GIB, ""),
        (6, 3 * GIB, "others hold memory of the GPU, at work or not"),
        (None, 3 * GIB, "others hold memory of the GPU, at work or not"),
        (None, None, ""),
    ],
)
@pytest.mark.parametrize("processes", [None, [], [1234, 5678]])
def test_in_a_container_that_hides_who_is_who(found, processes, worked, used, words):
    assert found(Driver(processes=processes, worked=worked, used=used)) == words


def test_memory_of_our_own_is_not_others(found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30 * GIB)
    assert found(Driver(used=31 * GIB)) == ""
    assert found(Driver(used=33 * GIB)) == "others hold memory of the GPU, at work or not"


def test_a_process_that_came_or_went_meanwhile_was_there(found):
    driver = Driver(processes=[ME])
    driver.nvmlDeviceGetComputeRunningProcesses = lambda _, seen=[[ME, ALICE], [ME]]: [
        SimpleNamespace(pid=pid) for pid in seen.pop()
    ]
    assert found(driver) == "other processes on the GPU, at work or not"


@pytest.fixture
def watched(monkeypatch):
    """A gauge, and a driver that keeps a record of who works when; a clock ticks each time it is asked."""
    ticks = itertools.count(1)
    monkeypatch.setattr(noise, "time", SimpleNamespace(time_ns=lambda: next(ticks) * 1000))
    driver = Driver(processes=[ME, ALICE])
    driver.work = lambda pid: worked.append((pid, next(ticks)))
    driver.nvmlDeviceGetProcessUtilization = lambda _, since: [
        SimpleNamespace(pid=pid, smUtil=90) for pid, at in worked if at > since
    ]
    worked = []
    monkeypatch.setattr(device, "uuid", lambda: "GPU-1")
    monkeypatch.setattr(noise, "library", lambda: driver)
    return noise.Gauge(), driver


@pytest.mark.parametrize("when", ["before", "meanwhile", "after", "before and after"])
def test_what_others_do_while_the_gauge_looks_away_is_no_noise(watched, when):
    gauge, driver = watched
    driver.work(ME)
    if "before" in when:
        driver.work(ALICE)
    with gauge.away():
        driver.work(ME)
        if when == "meanwhile":
            driver.work(ALICE)
    driver.work(ME)
    if "after" in when:
        driver.work(ALICE)
    assert gauge.finding() == ("" if when == "meanwhile" else "another process worked on the GPU")


def test_a_process_that_was_there_while_the_gauge_looked_away_is_no_noise(monkeypatch):
    driver = Driver(processes=[ME])
    monkeypatch.setattr(device, "uuid", lambda: "GPU-1")
    monkeypatch.setattr(noise, "library", lambda: driver)
    gauge = noise.Gauge()
    with gauge.away():
        driver.processes = [ME, ALICE]
        noise.Gauge()
        driver.processes = [ME]
    assert gauge.finding() == ""


def test_work_is_asked_for_since_the_region_began(found):
    driver = Driver(processes=[ME], worked={})
    before = time.time_ns() // 1000
    found(driver)
    assert before <= driver.since[0] <= time.time_ns() // 1000


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        ([0x0], ""),
        ([0x1 | 0x2 | 0x100], ""),  # idle, or set so by somebody
        ([0x4], "clocks held down by power limit"),
        ([0x20, 0x40, 0x0], "clocks held down by temperature"),
        ([0x0, 0x4, 0x0], "clocks held down by power limit"),  # in between
        ([0x0, 0x0, 0x88], "clocks held down by hardware slowdown and power supply"),
    ],
)
def test_clocks_that_are_held_down_are_noise(found, reasons, words):
    assert found(Driver(processes=[ME], reasons=reasons)) == words


def test_two_disturbances_are_both_told(found):
    driver = Driver(processes=[ME, ALICE], worked={ALICE: 1}, reasons=[4])
    assert found(driver) == "another process worked on the GPU; clocks held down by power limit"


def test_what_a_driver_does_not_answer_is_no_noise(found):
    driver = Driver()
    driver.reasons = [None]
    driver.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: driver.answer(None)
    assert found(driver) == ""


def test_without_nvml_or_for_a_slice_of_a_gpu_nothing_is_seen(monkeypatch, found):
    assert found(None) == ""
    driver = Driver(processes=[ME, ALICE], reasons=[4])
    assert found(driver) != ""
    monkeypatch.setattr(device, "uuid", lambda: "GPU-of-a-slice")
    assert noise.Gauge().finding() == ""
    monkeypatch.setattr(device, "uuid", lambda: "")
    monkeypatch.setattr(noise, "library", lambda: pytest.fail("a simulated GPU has no driver"))
    assert noise.Gauge().finding() == ""


def test_a_machine_without_a_driver_has_no_library(monkeypatch):
    noise.library.cache_clear()

    def no_driver():
        raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=no_driver))
    assert noise.library() is None
    noise.library.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # no package
    assert noise.library() is None
    noise.library.cache_clear()
    package = SimpleNamespace(nvmlInit=lambda: None)
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert noise.library() is package
    noise.library.cache_clear()


@pytest.mark.parametrize(
    ("clock", "median", "spread", "words"),
    [
        ("graph", 100.0, 10.0, ""),
        ("graph", 100.0, 10.1, "spread above 10%"),
        ("graph", 1.4, 0.4, ""),
        ("events", 20.0, 5.9, ""),
        ("events", 20.0, 6.1, "spread above 30%"),
        ("host", 100.0, 31.0, "spread above 30%"),
    ],
)
def test_a_spread_is_wide_by_the_measure_of_its_clock(clock, median, spread, words):
    assert noise.spread(clock, median, spread) == words


@pytest.fixture
def paced(monkeypatch):
    """A pace in virtual time, and how many seconds its piece of work takes: the first of a list."""
    now, each = [0.0], [1.0]
    pace = noise.Pace(lambda: now[0])

    def took():
        now[0] += each[0]
        return each[0]

    monkeypatch.setattr(pace, "_took", took)
    return pace, each


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


def test_a_pace_is_of_work_that_takes_time():
    pace = noise.Pace()
    assert 0 < pace._took() < 1
    assert isinstance(pace.slowed(), bool)
