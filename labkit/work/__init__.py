"""What layers compute: inputs, float64 reference, fewest bytes, operations. One operation a file."""

from labkit.work.affine import affine
from labkit.work.base import Shape, Work
from labkit.work.copy import copy
from labkit.work.gate_up import gate_up
from labkit.work.gated_block import gated_block
from labkit.work.gelu_mul import gelu_mul
from labkit.work.gelus import gelus
from labkit.work.grouped import grouped
from labkit.work.gru import gru
from labkit.work.gru_by_time import gru_by_time
from labkit.work.linear import linear
from labkit.work.linear_gelu import linear_gelu
from labkit.work.linear_recurrence import linear_recurrence
from labkit.work.matmul import matmul
from labkit.work.network import network
from labkit.work.rms_norm import rms_norm
from labkit.work.rms_recurrence import rms_recurrence
from labkit.work.row_product import row_product
from labkit.work.softmax import softmax
from labkit.work.time_last import time_last

__all__ = [
    "Shape",
    "Work",
    "affine",
    "copy",
    "gate_up",
    "gated_block",
    "gelu_mul",
    "gelus",
    "grouped",
    "gru",
    "gru_by_time",
    "linear",
    "linear_gelu",
    "linear_recurrence",
    "matmul",
    "network",
    "rms_norm",
    "rms_recurrence",
    "row_product",
    "softmax",
    "time_last",
]
