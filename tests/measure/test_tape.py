"""Where a row is measured: the device, the driver and the versions."""

from types import SimpleNamespace

import pytest
import torch
import triton

from labkit.measure import tape


def test_without_a_gpu_the_device_is_said_to_be_none(no_gpu):
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    assert tape.here() == {"device": "CPU, interpreted", "driver": "", **versions}


@pytest.mark.parametrize("driver", ["570.1", "unknown"])
def test_a_gpu_is_identified_by_its_properties_with_a_driver_or_without(monkeypatch, driver):
    card = SimpleNamespace(name="NVIDIA L4")
    nvml = SimpleNamespace(nvmlSystemGetDriverVersion=lambda: driver) if driver != "unknown" else None
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr("labkit.gpu.nvml", lambda: nvml)
    assert (tape.here()["device"], tape.here()["driver"]) == ("NVIDIA L4", driver)


def test_a_device_is_a_safe_name_of_a_folder():
    names = {
        "NVIDIA GeForce RTX 4090 (Laptop)": "nvidia-geforce-rtx-4090-laptop",
        "../../etc/passwd": "etc-passwd", "Tesla® A100 80GB\tPCIe\n": "tesla-a100-80gb-pcie",
    }  # fmt: skip
    assert [tape.folder_of(name) for name in names] == list(names.values())
