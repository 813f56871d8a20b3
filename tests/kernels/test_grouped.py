"""Grouped Linears: right on every shape, gradients, compiling."""

import math

import operators as op
import pytest
import torch
from grouped import examine, grouped, in_columns, plain
from operators import bf16, drawn, fp16, fp32, gradients
from peak import peak_bytes

from labkit.kernels import grouped_linear
from labkit.measure import correctness, launch_counts

# --- right on every shape -----------------------------------------------------------------------------


CASES = {
    "packed": dict(sizes=(5, 16), layouts=correctness.LAYOUTS, dtypes=correctness.DTYPES),
    "alone": dict(sizes=(3, 20), layouts=correctness.LAYOUTS, dtypes=correctness.DTYPES),
    "wide, in squares": dict(sizes=(2, 70), layouts=correctness.LAYOUTS, dtypes=(fp32, bf16)),
    "packed, any rows": dict(sizes=(5, 16), leading=((1,), (), (0,), (2, 33), (3, 1), (2, 0), (2, 3, 5))),
    "any rows": dict(sizes=(3, 20), leading=((1,), (), (0,), (2, 33), (3, 1), (2, 0), (2, 3, 5))),
    "packed, no bias": dict(sizes=(5, 16, 16, False), leading=((37,), (0,)), dtypes=(fp16,)),
    "no bias": dict(sizes=(3, 20, 24, False), leading=((37,), (0,)), dtypes=(fp16,)),
    "wide, no bias": dict(sizes=(2, 70, 70, False), dtypes=(fp16,)),
    "no features in": dict(sizes=(3, 0, 4), leading=((5,), (2, 5))),
    "no features out": dict(sizes=(3, 4, 0), leading=((5,), (2, 5))),
    "no groups": dict(sizes=(0, 4, 5), leading=((5,), (2, 5))),
} | {str(sizes): dict(sizes=sizes, dtypes=(fp32, bf16)) for sizes in [
    (3, 1), (3, 5), (3, 32), (2, 64), (5, 16, 32), (3, 50, 20), (1, 5, 70), (2, 70, 5), (1, 16),
]}  # fmt: skip
"""33 rows are a tile and one row, wherever they end; 5 groups are a pack and one."""


@pytest.mark.parametrize("case", CASES)
def test_every_size_is_right(case):
    options = dict(CASES[case])
    examine(grouped(*options.pop("sizes")), *options.pop("leading", ((33,),)), **options)


@pytest.mark.parametrize(("groups", "d_in", "d_out"), [(4, 16, 16), (2, 20, 24), (1, 64, 64), (1, 400, 20)])
def test_sums_are_of_float32_and_rounded_once(groups, d_in, d_out):
    """Deep products, many rows, many parts: a sum or a part of one in 16 bits is further off."""
    tensors = drawn(grouped(groups, d_in, d_out), 600, dtype=fp16)
    upstream = torch.randn(600, groups * d_out).to(tensors[0])
    wants = gradients(plain, [t.double() for t in tensors], upstream.double())
    for got, want in zip(gradients(grouped_linear, tensors, upstream), wants, strict=True):
        assert correctness.relative_error(got, want) <= 1.02 * correctness.relative_error(want.half(), want)


# --- gradients, torch.compile -------------------------------------------------------------------------


@op.INTERPRETED
def test_gradients_need_no_other_inputs_and_launch_no_other_kernels():
    tensors = x, weight, bias = drawn(grouped(3, 20), 37)
    both, sums = [x, weight], ["backward_kernel", "sum_kernel"]
    for leaf, kept, kernels in ((x, [weight], ["forward_kernel"]), (weight, both, sums), (bias, both, sums)):
        leaf.requires_grad_()
        y, saved = op.saved_by(grouped_linear, tensors)
        upstream = torch.randn_like(y)
        made = launch_counts.count(lambda y=y, leaf=leaf, up=upstream: torch.autograd.grad(y, leaf, up))
        leaf.requires_grad_(False)
        assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in kept}
        assert [launch.name for launch in made if launch.programs] == kernels


@op.INTERPRETED
@pytest.mark.parametrize("width", [20, 70])
def test_gradients_without_that_of_x_take_no_product_with_the_weight(width):
    x, weight, bias = drawn(grouped(3, width), 37)
    y = grouped_linear(x, weight.requires_grad_(), bias.requires_grad_())
    upstream = torch.randn_like(y)
    made = launch_counts.count(lambda: torch.autograd.grad(y, (weight, bias), upstream))
    back, _ = [launch for launch in made if launch.programs]
    squares = math.ceil(width / 64)
    assert back.bytes_read == 4 * squares * (x.numel() + y.numel())
    assert back.bytes_written == 4 * back.programs // (3 * squares**2) * (weight.numel() + bias.numel())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("columns", [False, True])
def test_a_compiled_layer_is_one_operator_for_any_number_of_rows_in_any_strides(columns):
    layer = op.compiled(lambda *given: torch.tanh(grouped_linear(*given)), dynamic=True)
    for rows in (5, 35):
        x, *weights = drawn(grouped(3, 20, 24), 2, rows)
        tensors = [in_columns(x) if columns else x, *weights]
        got = gradients(layer, tensors)
        want = gradients(lambda *given: torch.tanh(grouped_linear(*given)), tensors)
        op.all_close(got, want)  # dY may come in other strides, and db is added in their order
        assert got[0].stride() == want[0].stride()
    assert op.library_calls(grouped_linear, *tensors) == [["grouped_linear_forward"]]


# --- on a GPU -----------------------------------------------------------------------------------------


@op.GPU
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("width", [16, 20, 50, 64, 300])
def test_both_directions_can_be_captured_in_a_graph(width, columns):
    x, *weights = drawn(grouped(4, width), 2, 128, dtype=bf16)
    assert op.equal(*op.captured(grouped_linear, [in_columns(x) if columns else x, *weights]))


@op.GPU
@pytest.mark.parametrize(
    ("dtype", "width", "columns"),
    [
        *((bf16, width, False) for width in (16, 32, 50, 64, 100, 128, 256, 300)),
        *((bf16, width, True) for width in (16, 64, 100, 200)),
        *((fp32, width, False) for width in (16, 64, 100)),
        (fp16, 64, False),
    ],
    ids=str,
)
def test_large_inputs_are_right_and_the_same_from_run_to_run(dtype, width, columns):
    """A race shows once in a while, and where all of the GPU is at work."""
    x, *weights = drawn(grouped(48, width), 8, 512, dtype=dtype)
    tensors = [in_columns(x) if columns else x, *weights]
    first = gradients(grouped_linear, tensors)
    wants = gradients(plain, [t.double() for t in tensors], 2 * first[0].double())
    for got, want in zip(first, wants, strict=True):
        assert correctness.relative_error(got, want) < correctness.TOLERANCE[dtype]
    for _ in range(10):
        assert op.equal(gradients(grouped_linear, tensors), first)


@op.GPU
@pytest.mark.parametrize("columns", [False, True])
def test_the_forward_takes_no_memory_but_the_result(columns):
    x, *weights = drawn(grouped(16, 64), 8, 512, dtype=bf16)
    x = in_columns(x) if columns else x
    assert peak_bytes(lambda: grouped_linear(x, *weights)) == x.nbytes
