"""Profiles from a trace with torch.profiler's field names."""

import itertools
import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import labkit
from labkit.measure import clocks, cold_cache, lock, profiles

TRACE = Path(__file__).parents[1] / "data" / "chrome_trace.json"
"""Made by hand: a product, a sum, a Triton kernel on another stream, and a graph of two nodes."""


@pytest.fixture
def traced():
    return profiles.from_trace(json.loads(TRACE.read_text())["traceEvents"])


def test_a_trace_tells_kernels_launches_gaps_and_operations(traced):
    add = "elementwise_kernel<128, 4, CUDAFunctor_add>"
    names = ["elementwise_kernel<128, 4, MulFunctor>", add, "affine", "affine", "Memcpy DtoD"]
    assert [kernel.name for kernel in traced.kernels] == names
    first = traced.kernels[0]
    assert (first.start_us, first.duration_us) == (10.5, 20.0)
    assert first.full_name.startswith("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_")
    assert (traced.gaps, traced.span_us, traced.busy_us) == ([2.0, 0.0, 10.0, 2.0], 106.0, 92.0)
    assert traced.launches == 4, "five things ran; the graph started two"
    nothing = profiles.from_trace([])
    assert (nothing.launches, nothing.gaps, nothing.span_us, nothing.busy_us) == (0, [], 0.0, 0.0)
    assert nothing.kernels == []


def refused():
    raise AssertionError("this call should not run")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which every call runs the trace; the calls of the profiler, with their warm-up runs."""
    traced = []

    def trace(call, warmup):
        traced.append((call, warmup))
        return json.loads(TRACE.read_text())["traceEvents"]

    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    monkeypatch.setattr(profiles, "_trace", trace)
    return traced


def of_three(monkeypatch, order, *three):
    """The kernels of the one that is shown when these are taken in this order."""
    left = [three[number] for number in order]
    monkeypatch.setattr(profiles, "_trace", lambda call, warmup: left.pop(0))
    monkeypatch.setattr(profiles, "from_trace", lambda events: events)
    return profiles.profile(refused).kernels


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_three_profiles_the_undisturbed_one_of_the_usual_kernels_is_shown(gpu, monkeypatch, order):
    """Kernels took longer, or came late: not even if two of three were disturbed."""
    usual, fewer, more = ran("a", "b"), ran("b"), ran("a", "b", "c")
    long, late = ran("a", "b", us=9.0), ran("a", "b", every=5000.0)
    for one, other in ((long, long), (late, late), (long, late), (long, fewer), (long, more)):
        assert of_three(monkeypatch, order, one, usual, other) == usual.kernels
    assert of_three(monkeypatch, order, fewer, usual, more) == more.kernels, "no two alike"


def test_a_call_is_warmed_up_once_and_profiled_three_times(gpu, traced):
    assert profiles.profile(refused, warmup=5) == traced
    assert gpu == [(refused, 5), (refused, 0), (refused, 0)]


def ran(*names, us=1.5, every=10.0):
    kernels = [
        profiles.KernelEvent(profiles.shorten(name), name, every * i, us) for i, name in enumerate(names)
    ]
    return profiles.Profile(kernels, len(kernels))


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
def test_one_call_is_traced_after_those_that_warm_up_while_the_gpu_is_locked(monkeypatch):
    held = []

    @contextmanager
    def gpu_lock():
        held.append(True)
        yield
        held.pop()

    monkeypatch.setattr(lock, "gpu_lock", gpu_lock)
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "1")
    seen = []

    def call():
        seen.append((bool(held), os.environ["TEARDOWN_CUPTI"]))
        for _ in seen:
            torch.ones(3).sigmoid()

    events = profiles._trace(call, warmup=2)
    assert seen == [(False, "0")] * 2 + [(True, "1")] * 2, "the profiler drops one and keeps one"
    assert [event["name"] for event in events].count("aten::sigmoid") == 4
    assert "DISABLE_CUPTI_LAZY_REINIT" not in os.environ, "it leaves afterwards"


@pytest.mark.skipif(not labkit.gpu.available(), reason="The profiler watches launches on a GPU only.")
def test_launches_cost_the_host_no_more_after_a_profile():
    x = torch.randn(256, 160, device="cuda")

    def call():
        for _ in range(50):
            x.add(1)

    def host_us():
        """The least of several: others may share the host's cores for seconds."""
        jobs = {"call": cold_cache.TimedCall(call)}
        return min(clocks.measure(jobs, clock="host", cache="warm")["call"].median_us for _ in range(5))

    before, profile = host_us(), profiles.profile(call)
    assert len(profile.kernels) == profile.launches == 50
    assert all(kernel.duration_us > 0 for kernel in profile.kernels)
    assert host_us() < 1.2 * before
