import pytest

from labkit.exercises.virtual_gpu import Gpu, Layer


@pytest.fixture
def gpu():
    return Gpu("a device", launch_us=5.0, synchronize_us=8.0, compile_us=1000.0, hiccup_every=4)


def warm(gpu, ns=100.0):
    """A layer of 100 us at 1 x 1000 that has been compiled, on an idle device."""
    layer, x = Layer(gpu, ns), gpu.randn(1, 1000)
    layer(x)
    gpu.synchronize()
    return layer, x


def test_reading_the_clock_does_not_wait_for_the_device_and_synchronizing_does(gpu):
    layer, x = warm(gpu)
    start = gpu.clock_us()
    layer(x)
    layer(x)
    assert gpu.clock_us() - start == pytest.approx(2 * 5, abs=0.1)
    assert gpu.log[-1].pending
    gpu.synchronize()
    assert gpu.clock_us() - start == pytest.approx(5 + 2 * 100 + 8, abs=0.1)
    assert not gpu.log[-1].pending
    events = [(entry.event, entry.shape) for entry in gpu.log]
    shape = (1, 1000)
    assert events[:4] == [("draw", shape), ("compile", shape), ("call", shape), ("synchronize", None)]
    start = gpu.clock_us()
    gpu.randn(1000, 1000)
    gpu.synchronize()
    assert gpu.clock_us() - start > 1000, "drawing takes time on the device"


def test_the_first_call_of_each_layer_compiles_it(gpu):
    _, x = warm(gpu)
    other, before = Layer(gpu, 1.0), gpu.clock_us()
    other(x)
    first = gpu.clock_us()
    other(x)
    assert first - before > 1000 > gpu.clock_us() - first
    assert [entry.event for entry in gpu.log].count("compile") == 2


def test_one_call_in_a_while_is_slow(gpu):
    layer, x = warm(gpu)

    def once():
        start = gpu.clock_us()
        layer(x)
        gpu.synchronize()
        return gpu.clock_us() - start

    times = [once() for _ in range(8)]
    assert [time > 130 for time in times] == [False, False, True, False, False, False, True, False]


def test_a_layer_takes_only_what_the_device_drew(gpu):
    with pytest.raises(TypeError, match=r"^layer\(x\) takes what gpu.randn drew, not list$"):
        Layer(gpu, 1.0)([1.0])
    assert gpu.log == []


def test_a_loop_that_waits_for_the_clock_comes_to_an_end(gpu):
    before = gpu.clock_us()
    assert any(gpu.clock_us() - before > 10 for _ in range(1000))
