"""What this machine is: the device and the versions that a measurement belongs to."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch
import triton

from labkit import gpu
from labkit.measure import noise


@dataclass(frozen=True)
class MachineInfo:
    """The device and the versions that a measurement belongs to."""

    device: str
    driver: str
    torch: str
    triton: str
    memory_bytes: int

    @property
    def slug(self) -> str:
        """The device's name as a folder."""
        return slug(self.device)


def slug(device_name: str) -> str:
    """A device's name as a folder: "NVIDIA H200" is nvidia-h200."""
    return "-".join(re.findall(r"[a-z0-9]+", device_name.lower()))


@cache
def identity() -> MachineInfo:
    """This machine; without a GPU the device is "CPU, interpreted" and its memory 0."""
    versions = torch.__version__, triton.__version__
    if not gpu.available():
        return MachineInfo("CPU, interpreted", "", *versions, 0)
    card, nvml = torch.cuda.get_device_properties(0), noise.nvml()
    driver = nvml.nvmlSystemGetDriverVersion() if nvml else "unknown"
    return MachineInfo(card.name, driver, *versions, card.total_memory)


def row_columns() -> dict[str, Any]:
    """The columns of a row that say where and when it was measured."""
    versions = {name: getattr(identity(), name) for name in ("device", "driver", "torch", "triton")}
    return versions | {"date": datetime.now(UTC).isoformat(timespec="seconds"), "card": gpu.card()}
