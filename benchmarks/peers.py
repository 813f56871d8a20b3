"""Contenders from other packages, imported when they are called: pip install -e '.[peers]'."""

import torch
from torch import Tensor
from torch.nn.functional import pad

EPS = 1e-6
"""What is added to the mean square."""
SCAN_STEPS = 2048
"""Steps that accelerated-scan's kernel takes at a time."""


def liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """weight x / sqrt(mean of x² over H + EPS) by Liger's kernel.

    x (..., H), weight (H,), H at most 65536, not float64; the result: (..., H). All is computed in float32
    and rounded once, at the end, to x's dtype. Liger would write dx over the upstream gradient, which
    others may still read. Here it may not: dx has memory of its own, which Liger fills with zeros first, so
    its backward pass writes one tensor more.
    """
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

    offset, casting_mode, in_place = 0.0, "gemma", False  # "llama", the default, rounds before the weight
    result: Tensor = LigerRMSNormFunction.apply(x, weight, EPS, offset, casting_mode, in_place)
    return result


def fla_recurrence(log_a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t by flash-linear-attention's fused_recurrent_hgrn, which goes step after step.

    log_a and b (B, T, H); the states: (B, T, H), summed in float32 and in b's dtype. The kernel is made for
    the gated network HGRN, whose gate is a logarithm (logsigmoid) from the start, and so it is here. The
    kernel's gradients are float32: for other dtypes PyTorch casts them, a pass each. Triton tunes the kernel
    once for each H and dtypes, with the B and T of the first call, and keeps the outcome on disk.
    """
    from fla.ops.hgrn import fused_recurrent_hgrn  # type: ignore[import-not-found]

    states: Tensor = fused_recurrent_hgrn(b, log_a)[0]
    return states


def accelerated_scan(a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t by accelerated-scan's Triton kernel, an associative scan.

    a and b (B, T, H), H at most 65535, fewer than 2**31 elements; the states: (B, T, H). The kernel wants the
    steps side by side in memory, (B, H, T): the transposes there and back are part of the call, backward that
    of the upstream gradient; the gradients of a and b are transposed views. It scans 2048 steps at a time, in
    the dtype of its inputs, so it is for float32.

    For T that is no multiple of 2048 its backward pass reads past the end of the states. So where gradients
    are taken such sequences are padded to one, and the call pays for that too; elsewhere T may be anything.
    """
    from accelerated_scan.scalar import scan  # type: ignore[import-not-found]

    steps = b.shape[1]
    differentiable = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    spare = -steps % SCAN_STEPS if differentiable else 0
    states: Tensor = scan(_time_last(a, spare), _time_last(b, spare))
    return states[..., :steps].transpose(1, 2).contiguous()


def _time_last(x: Tensor, spare: int) -> Tensor:
    """(B, T, H) as (B, H, T + spare), contiguous; zeros in the spare steps."""
    lanes = x.transpose(1, 2)
    return (pad(lanes, (0, spare)) if spare else lanes).contiguous()
