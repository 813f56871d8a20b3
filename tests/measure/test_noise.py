"""What disturbed a timing, with a driver that says what a test has it say."""

from types import SimpleNamespace

import pynvml
import pytest

from labkit.measure import noise


def refuse(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def driver(handle=lambda uuid: uuid, reasons=lambda gpu: 0x4):
    return SimpleNamespace(
        nvmlDeviceGetHandleByUUID=handle, nvmlDeviceGetCurrentClocksThrottleReasons=reasons
    )


def test_why_clocks_are_held_down_is_the_drivers_word_where_it_has_one(monkeypatch):
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "GPU-1")
    for library, bits in [
        (None, 0),
        (driver(), 0x4),
        (driver(handle=refuse), 0),
        (driver(reasons=refuse), 0),
    ]:
        monkeypatch.setattr(noise, "nvml", lambda library=library: library)
        assert noise.throttle_bits() == bits
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "")
    monkeypatch.setattr(noise, "nvml", driver)
    assert noise.throttle_bits() == 0, "a simulated GPU has no driver"


@pytest.mark.parametrize("starts", [True, False])
def test_a_machine_without_a_driver_has_no_library(monkeypatch, starts):
    monkeypatch.setattr(pynvml, "nvmlInit", (lambda: None) if starts else refuse)
    noise.nvml.cache_clear()
    assert noise.nvml() is (pynvml if starts else None)
    noise.nvml.cache_clear()


def test_a_disturbance_is_named_by_the_measure_of_its_clock():
    said = {
        (0, "graph", 100.0, 10.0): "", (0, "graph", 100.0, 10.1): "spread above 10%",
        (0, "graph", 1.4, 0.4): "",
        (0, "events", 20.0, 5.9): "", (0, "events", 20.0, 6.1): "spread above 30%",
        (0, "host", 100.0, 31.0): "spread above 30%",
        (0x1 | 0x2 | 0x100, "graph", 9.0, 0.0): "",  # idle, or set so by somebody
        (0x20, "graph", 9.0, 0.0): "slowed down by temperature",
        (0x88, "graph", 9.0, 0.0): "slowed down by hardware slowdown and power supply",
        (0x4, "host", 100.0, 31.0): "slowed down by power limit; spread above 30%",
    }  # fmt: skip
    assert {given: noise.disturbance(*given) for given in said} == said
