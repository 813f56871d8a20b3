"""The finished kernels of the course, forward and backward: float32, float16 and bfloat16, any strides.

    from labkit.kernels import affine

They need torch and triton only, and work under torch.compile, autocast and CUDA graphs, on any GPU of
several, and interpreted on a CPU. An import patches nothing: ``labkit.interpreter.patch()`` makes the
interpreter about twice as fast, and Triton 3.9's refuses some kernels without it ("mask has unsupported
dtype").
"""

from labkit.kernels.affine import affine, gelu_mul
from labkit.kernels.graphs import GraphedStep
from labkit.kernels.grouped import grouped_linear
from labkit.kernels.gru import gru
from labkit.kernels.linear import matmul
from labkit.kernels.mlp import fused_gate_up, geglu_mlp
from labkit.kernels.recurrence import linear_recurrence, min_gru
from labkit.kernels.rms_norm import rms_norm
from labkit.kernels.rms_recurrence import rms_recurrence

__all__ = [
    "GraphedStep",
    "affine",
    "fused_gate_up",
    "geglu_mlp",
    "gelu_mul",
    "grouped_linear",
    "gru",
    "linear_recurrence",
    "matmul",
    "min_gru",
    "rms_norm",
    "rms_recurrence",
]
