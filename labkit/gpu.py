"""The device that the course runs on, its lock, and what its driver says.

Whether kernels are interpreted is decided in `labkit.backend`. One process of the machine measures on a GPU
at a time: each GPU has a file, which all users of the machine may write. A process locks it for a point of a
measurement: the check, the warm-up and the timing of all contenders at one size. The operating system unlocks
it when the process ends, however it ends. Those who wait get it in no particular order.
"""

import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pynvml
import torch
from filelock import FileLock, Timeout

from labkit import backend

LOCK_FOLDER = Path("/tmp/labkit-locks")
"""Where the processes meet. Not the temporary folder of Python, which a user or a job may have for itself.
Nor /tmp itself, whose files are protected from all but their owner, by the kernel and by filelock."""
SILENT_S = 1.0
"""Seconds that a process waits for the lock before it says so."""
POLL_S = 0.05


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


def memory() -> int:
    """Size of the device's memory in bytes; 0 without a GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory) if available() else 0


# ---- the lock ----------------------------------------------------------------------------------------------


@contextmanager
def locked() -> Iterator[None]:
    """The GPU to oneself, among the processes of the machine that ask for it.

    A process that has it may ask again: the lock ends with the first of its contexts. Without a GPU there is
    no lock. Where the file cannot be written a warning says so, and the process goes on without the lock.
    """
    held: AbstractContextManager[Any] = nullcontext()
    if name := uuid():
        try:
            file = _file_lock(LOCK_FOLDER / f"labkit-{name}.lock")
            try:
                held = file.acquire(timeout=SILENT_S, poll_interval=POLL_S)
            except Timeout:
                print("Waiting for the GPU: another process measures on it.", file=sys.stderr, flush=True)
                held = file.acquire(poll_interval=POLL_S)
        except OSError as problem:
            unlocked = f"The GPU is not locked ({problem}): while others measure on it, figures may be off."
            warnings.warn(unlocked, stacklevel=3)
    with held:
        yield


@cache
def _file_lock(path: Path) -> FileLock:
    """One lock for all who ask in this process: it counts how often it is held."""
    path.parent.mkdir(exist_ok=True)
    with suppress(PermissionError):  # another user's, who has done it
        path.parent.chmod(0o777)  # whatever the umask
    return FileLock(path, mode=0o666, thread_local=False)  # the mode holds whatever the umask


# ---- the driver --------------------------------------------------------------------------------------------


@cache
def nvml() -> Any:
    """NVIDIA's management library as a module, started; None without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def throttle_bits() -> int:
    """Why clocks are held down now, as NVML's bits; 0 where it cannot say.

    It cannot without a driver, and of a slice of a GPU.
    """
    library, name = nvml(), uuid()
    if library is None or not name:
        return 0
    try:
        return int(library.nvmlDeviceGetCurrentClocksThrottleReasons(library.nvmlDeviceGetHandleByUUID(name)))
    except pynvml.NVMLError:
        return 0
