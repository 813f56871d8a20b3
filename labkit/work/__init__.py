"""What layers compute: inputs, float64 reference, fewest bytes, operations. A family a file."""

from labkit.work.base import Shape, Work, per_element
from labkit.work.pointwise import affine, copy, gelu_mul, gelus, rms_norm, row_product, softmax
from labkit.work.products import gate_up, grouped, linear, linear_gelu, linear_relu, matmul, network
from labkit.work.recurrences import (
    gated_block,
    gru,
    gru_by_time,
    linear_recurrence,
    rms_recurrence,
    time_last,
)
