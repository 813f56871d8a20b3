"""What this machine is: the device and the versions that a measurement belongs to."""

import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import triton

from labkit import gpu


@dataclass(frozen=True)
class Identity:
    """The device and the versions that a measurement belongs to."""

    device: str
    driver: str
    torch: str
    triton: str
    capability: tuple[int, int] | None
    memory_bytes: int
    l2_bytes: int
    multiprocessors: int

    @property
    def slug(self) -> str:
        """The device's name as a folder: "NVIDIA H200" is nvidia-h200."""
        return slug(self.device)


def slug(device_name: str) -> str:
    """A device's name as a folder."""
    return "-".join(re.findall(r"[a-z0-9]+", device_name.lower()))


@cache
def identity() -> Identity:
    """This machine; without a GPU the device is "CPU, interpreted" and the sizes are 0."""
    if not gpu.available():
        return Identity("CPU, interpreted", "", torch.__version__, _triton_version(), None, 0, 0, 0)
    card = torch.cuda.get_device_properties(0)
    return Identity(
        card.name,
        _driver(),
        torch.__version__,
        _triton_version(),
        (card.major, card.minor),
        card.total_memory,
        card.L2_cache_size,
        card.multi_processor_count,
    )


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # a build of Triton without package metadata
        return str(triton.__version__)


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # a container without nvidia-smi: the figure goes unstamped
        return "unknown"


def stamp() -> dict[str, Any]:
    """The columns of a row that say where and when it was measured."""
    here = identity()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "device": here.device,
        "driver": here.driver,
        "torch": here.torch,
        "triton": here.triton,
        "date": now,
        "card": gpu.card(),
    }
