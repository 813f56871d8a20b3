"""Time on a simulated GPU: what waits, what is queued, and what a benchmark has to keep apart."""

from contextlib import suppress

import pytest

from labkit.exercises.simulated_layers import BenchmarkGpu, BenchmarkLayer, KernelSequence


@pytest.fixture
def gpu():
    return BenchmarkGpu(launch_us=5.0, wait_us=8.0, slow_every=4, slow_early=(2,), compile_us=1000.0)


def compiled_layer(gpu):
    """A layer of 100 us at 1 x 1000 that has been compiled, on an idle device; and its input."""
    layer, x = BenchmarkLayer(gpu, 100.0, 1, 1000), gpu.randn(1, 1000)
    layer(x)
    gpu.synchronize()
    return layer, x


def test_reading_the_clock_does_not_wait_for_the_device_and_synchronizing_does(gpu):
    layer, x = compiled_layer(gpu)
    start = gpu.clock_us()
    layer(x)
    layer(x)
    assert gpu.clock_us() - start == pytest.approx(2 * 5, abs=0.1)
    assert gpu.log[-1].pending
    gpu.synchronize()
    assert gpu.clock_us() - start == pytest.approx(5 + 140 + 100 + 8, abs=0.1)
    assert not gpu.log[-1].pending
    assert [entry.event for entry in gpu.log[:4]] == ["draw", "compile", "call", "synchronize"]


def test_the_first_call_compiles_a_layer_and_some_calls_are_slow(gpu):
    layer, x = BenchmarkLayer(gpu, 100.0, 1, 1000), gpu.randn(1, 1000)
    times = []
    for _ in range(8):
        start = gpu.clock_us()
        layer(x)
        gpu.synchronize()
        times.append(gpu.clock_us() - start)
    assert times[0] > 1000
    assert [time > 130 for time in times[1:]] == [True, False, True, False, False, False, True]


def test_a_replay_costs_the_host_little_however_much_was_captured():
    call = KernelSequence(kernels=3, kernel_us=2.0, launch_us=5.0)
    cuda, graph = call.gpu.cuda, call.gpu.cuda.CUDAGraph()
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    call()
    with cuda.graph(graph):
        for _ in range(100):
            call()
    graph.replay()
    cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    cuda.synchronize()
    assert start.elapsed_time(end) == pytest.approx((8 + 100 * 6) / 1000, abs=0.002)


def test_a_capture_that_waited_fails_though_the_answer_caught_the_exception():
    cuda = KernelSequence(kernels=1, kernel_us=2.0, launch_us=5.0).gpu.cuda
    graph = cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="the host waited"), cuda.graph(graph), suppress(RuntimeError):
        cuda.synchronize()
