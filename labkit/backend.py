"""GPU or interpreter: decided once, at the first ``import labkit``, before Triton is imported.

Triton reads TRITON_INTERPRET when it is imported and when a kernel is defined. Where kernels cannot run on a
GPU this module sets the variable, and keeps the reason. It asks the driver through NVML and starts no CUDA,
so a process that is forked afterwards can still use the GPU. It needs the standard library only: whoever
imports a kernel imports this.
"""

import ctypes
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

OLDEST_CAPABILITY = (8, 0)
"""The lowest compute capability that Triton generates code for."""
INTERPRET = "TRITON_INTERPRET"
NO_DRIVER = "no NVIDIA driver answers here"

reason = ""
"""Why kernels are interpreted, the end of a sentence; empty where they run on a GPU."""


class GpuInfo(NamedTuple):
    """A GPU as the driver lists it."""

    name: str
    uuid: str
    capability: tuple[int, int]


class NvidiaDriver(NamedTuple):
    """What NVIDIA's driver says; ``cuda`` is the newest CUDA that it supports, as 13000 for 13.0."""

    gpus: tuple[GpuInfo, ...]
    cuda: int


class TorchBuild(NamedTuple):
    """The version of the installed torch, and the CUDA version that it was built for, None without."""

    version: str
    cuda: str | None


def decide() -> None:
    """Set TRITON_INTERPRET where kernels cannot run on a GPU, unless it is set."""
    global reason
    given = os.environ.get(INTERPRET)
    if given and not interpreting():
        return
    reason = why_interpreted(driver(), installed_torch(), os.environ)
    if given:  # by the user, or by labkit in a process that started this one
        reason = reason or f"{INTERPRET}={given} is set"
    elif reason:
        if "triton" in sys.modules:
            warnings.warn(
                f"Kernels cannot run here: {reason}, and triton was imported before labkit, too early to be "
                "interpreted. Restart the kernel and run `import labkit` before what imports triton.",
                RuntimeWarning,
                stacklevel=3,
            )
        os.environ[INTERPRET] = "1"


def interpreting() -> bool:
    """Whether TRITON_INTERPRET makes Triton interpret kernels instead of compiling them."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "yes", "on", "y")


def sentence() -> str:
    """How kernels run in this process, in one sentence."""
    return f"Kernels are interpreted: {reason}." if reason else "Kernels are compiled and run on the GPU."


def why_interpreted(
    driver: NvidiaDriver | None, torch: TorchBuild | None, environment: Mapping[str, str]
) -> str:
    """Why kernels have to be interpreted, the end of a sentence; empty where a GPU can run them."""
    if driver is None or not driver.gpus:
        return NO_DRIVER
    visible = visible_gpus(driver.gpus, environment)
    if not visible:
        return f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']!r} hides every GPU"
    if visible[0].capability < OLDEST_CAPABILITY:
        needed, has = (".".join(map(str, each)) for each in (OLDEST_CAPABILITY, visible[0].capability))
        return f"Triton needs compute capability {needed}, and {visible[0].name} has {has}"
    if torch is None:
        return ""
    if torch.cuda is None:
        return f"there is a GPU, but torch {torch.version} is a CPU build: a CUDA build of torch would use it"
    if driver.cuda // 1000 < int(torch.cuda.split(".")[0]):
        newest = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
        return (
            f"the driver supports CUDA up to {newest} and torch {torch.version} was built for {torch.cuda}: "
            "a newer driver, or a torch built for an older CUDA, would use the GPU"
        )
    return ""


def visible_gpus(gpus: tuple[GpuInfo, ...], environment: Mapping[str, str]) -> list[GpuInfo]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to a program, by number or by the start of their UUID.

    CUDA numbers the fastest first; the higher capability stands for the faster one here. Of a MIG slice the
    driver does not tell its GPU; the first one stands for it.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.capability, reverse=True)
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return ordered
    entries = filter(None, map(str.strip, environment["CUDA_VISIBLE_DEVICES"].split(",")))
    return [
        gpu
        for entry in entries
        for number, gpu in enumerate(ordered)
        if entry == str(number) or gpu.uuid.startswith(entry) or entry.startswith("MIG-")
    ]


def driver() -> NvidiaDriver | None:
    """What NVML says; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    try:
        count, cuda = ctypes.c_uint(), ctypes.c_int()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        return NvidiaDriver(tuple(_gpu(nvml, index) for index in range(count.value)), cuda.value)
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> GpuInfo:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid)))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return GpuInfo(name.value.decode(), uuid.value.decode(), (major.value, minor.value))


def installed_torch() -> TorchBuild | None:
    """How torch was built, by its file of versions: importing it takes seconds. None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^']*)'", text, re.MULTILINE))
    return TorchBuild(found["__version__"], found.get("cuda"))
