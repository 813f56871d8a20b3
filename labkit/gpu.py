"""The device that the course runs on. Whether kernels are interpreted is decided in `labkit.backend`."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from labkit import backend


@cache
def device() -> str:
    """The torch device of this session: ``"cuda"``, or ``"cpu"`` where kernels are interpreted."""
    return "cpu" if backend.interpreting() or not torch.cuda.is_available() else "cuda"


def available() -> bool:
    """Whether kernels run, and can be timed, on a GPU here."""
    return device() == "cuda"


def uuid() -> str:
    """What names the physical GPU for every process and container of the machine; empty without one."""
    return _uuid() if available() else ""


@cache
def _uuid() -> str:
    if not torch.cuda.is_available():  # a simulated one
        return ""
    card: Any = torch.cuda.get_device_properties(0)  # its type lacks the field
    return f"GPU-{card.uuid}"


def card() -> str:
    """The physical GPU in a row of measurements: the beginning of its UUID's hash, empty without one."""
    return hashlib.sha256(uuid().encode()).hexdigest()[:8] if uuid() else ""


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal random float32 values on the device of this session."""
    return torch.randn(shape, device=device()) * scale


@contextmanager
def full_float32() -> Iterator[None]:
    """TF32 off for matmuls and convolutions, whatever the user, the environment or a container chose.

    RuntimeError under NVIDIA_TF32_OVERRIDE=1, which goes over PyTorch's head.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        raise RuntimeError("NVIDIA_TF32_OVERRIDE=1 makes every float32 matmul TF32: unset it to measure.")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def synchronize() -> None:
    """Wait until the device has finished everything that was launched."""
    if available():
        torch.cuda.synchronize()


@cache
def l2_bytes() -> int:
    """Size of the device's last-level cache in bytes; 0 without a GPU."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size) if available() else 0
