"""Contenders from other packages, imported when they are called: pip install -e '.[peers]'."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.workloads.recurrent import EPS

SCAN_STEPS = 2048
"""Steps that accelerated-scan's kernel takes at a time."""


class MissingError(RuntimeError):
    """The package behind a contender is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed: pip install -e '.[peers]'")


def liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """weight x / sqrt(mean of x² over H + EPS) by Liger's kernel.

    x (..., H), weight (H,), H at most 65536, not float64; the result: (..., H). All is computed in float32
    and rounded once, at the end, to x's dtype. Liger would write dx over the upstream gradient, which
    others may still read. Here it may not: dx has memory of its own, which Liger fills with zeros first, so
    its backward pass writes one tensor more.

    Raises MissingError without liger-kernel.
    """
    rms_norm = _module("liger_kernel.ops.rms_norm", "liger-kernel")
    offset, casting_mode, in_place = 0.0, "gemma", False  # "llama", the default, rounds before the weight
    result: Tensor = rms_norm.LigerRMSNormFunction.apply(x, weight, EPS, offset, casting_mode, in_place)
    return result


def fla_recurrence(log_a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t by flash-linear-attention's fused_recurrent_hgrn, which goes step after step.

    log_a and b (B, T, H); the states: (B, T, H), summed in float32 and in b's dtype. The kernel is made for
    the gated network HGRN, whose gate is a logarithm (logsigmoid) from the start, and so it is here. The
    kernel's gradients are float32: for other dtypes PyTorch casts them, a pass each. Triton tunes the kernel
    once for each H and dtypes, with the B and T of the first call, and keeps the outcome on disk.

    Raises MissingError without fla-core.
    """
    hgrn = _module("fla.ops.hgrn", "fla-core")
    states: Tensor = hgrn.fused_recurrent_hgrn(b, log_a)[0]
    return states


def fla_chunked_recurrence(log_a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t by flash-linear-attention's chunk_hgrn.

    One kernel works on chunks of 128 steps side by side, and a second carries the state from chunk to chunk.

    log_a and b (B, T, H), B at most 65535; the states: (B, T, H), in b's dtype. Gradients
    and tuning are as in fla_recurrence. Between the kernels the states, and log_a summed over each chunk,
    pass through memory in float32. On an H200 fla-core 0.6.0 was right at 256 steps, and off by 1% in a
    gradient at 300 and by 4% in the states at 2048.

    Raises MissingError without fla-core.
    """
    hgrn = _module("fla.ops.hgrn", "fla-core")
    states: Tensor = hgrn.chunk_hgrn(b, log_a)[0]
    return states


def accelerated_scan(a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t by accelerated-scan's Triton kernel, an associative scan.

    a and b (B, T, H), H at most 65535, fewer than 2**31 elements; the states: (B, T, H). The kernel wants the
    steps side by side in memory, (B, H, T): the transposes there and back are part of the call, backward that
    of the upstream gradient; the gradients of a and b are transposed views. It scans 2048 steps at a time, in
    the dtype of its inputs, so it is for float32.

    For T that is no multiple of 2048 its backward pass reads past the end of the states. So where gradients
    are taken such sequences are padded to one, and the call pays for that too; elsewhere T may be anything.

    Raises MissingError without accelerated-scan.
    """
    scalar = _module("accelerated_scan.scalar", "accelerated-scan")
    steps = b.shape[1]
    differentiable = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    spare = -steps % SCAN_STEPS if differentiable else 0
    states: Tensor = scalar.scan(_time_last(a, spare), _time_last(b, spare))
    return states[..., :steps].transpose(1, 2).contiguous()


def _time_last(x: Tensor, spare: int) -> Tensor:
    """(B, T, H) as (B, H, T + spare), contiguous; zeros in the spare steps."""
    lanes = x.transpose(1, 2)
    return (pad(lanes, (0, spare)) if spare else lanes).contiguous()


def _module(name: str, package: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.split(".")[0]:  # else it is installed, and lacks a package that it needs
            raise MissingError(package) from error
        raise
