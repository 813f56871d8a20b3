"""The device that the course runs on, and what is asked of it."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

import labkit


@pytest.fixture(autouse=True)
def fresh():
    """The answers are cached for a session; each test asks anew, and so do the tests after it."""
    forget()
    yield
    forget()


def forget():
    for answer in (labkit.gpu.device, labkit.gpu.l2_bytes):
        answer.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, and no interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("available", "interpret", "name"), [(True, None, "cuda"), (True, "1", "cpu"), (False, None, "cpu")]
)
def test_a_gpu_is_used_where_there_is_one_and_nothing_interprets(monkeypatch, available, interpret, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert (labkit.gpu.device(), labkit.gpu.available()) == (name, name == "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not available)
    assert labkit.gpu.device() == name, "it is looked up once"


def test_l2_is_the_devices_and_0_without_one(gpu, monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 50 * 2**20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert labkit.gpu.l2_bytes() == 50 * 2**20
    labkit.gpu.l2_bytes.cache_clear()
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    assert labkit.gpu.l2_bytes() == 0


def test_a_card_is_named_by_its_uuid_and_does_not_tell_it(monkeypatch):
    names = {}
    for uuid in ("GPU-1", "GPU-2", ""):
        monkeypatch.setattr("labkit.gpu.uuid", lambda uuid=uuid: uuid)
        names[uuid] = labkit.gpu.card()
    assert names[""] == "" and names["GPU-1"] != names["GPU-2"] and "GPU" not in names["GPU-1"]
    assert {len(names[uuid]) for uuid in ("GPU-1", "GPU-2")} == {8}


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
        monkeypatch.setattr(labkit.gpu, "nvml", lambda library=library: library)
        assert labkit.gpu.throttle_bits() == bits
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "")
    monkeypatch.setattr(labkit.gpu, "nvml", driver)
    assert labkit.gpu.throttle_bits() == 0, "a simulated GPU has no driver"


@pytest.mark.parametrize("starts", [True, False])
def test_a_machine_without_a_driver_has_no_library(monkeypatch, starts):
    monkeypatch.setattr(pynvml, "nvmlInit", (lambda: None) if starts else refuse)
    labkit.gpu.nvml.cache_clear()
    assert labkit.gpu.nvml() is (pynvml if starts else None)
    labkit.gpu.nvml.cache_clear()
