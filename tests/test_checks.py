"""checks.check: what it accepts, and what it refuses with which sentence. Most calls here are wrong."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from counting import calls_checked

from labkit import checks, device
from labkit.checks import Fences, check, diagnose

FLOAT32 = (torch.float32,)


def differentiable(forward, backward):
    """A function of tensors with a backward(dy, *tensors) of its own."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        def backward(ctx, dy):
            return backward(dy, *ctx.saved_tensors)

    return Function.apply


# x * w + b: the kernel with everything that can be left out of it


@triton.jit
def affine_kernel(x, w, b, y, rows, width, extra, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    at, inside = row[:, None] * width + column[None, :], (row < rows)[:, None]
    load, store = inside & (column < width)[None, :], inside & (column < width + extra)[None, :]
    scale = tl.load(w + column, column < width, 0.0).to(tl.float32)
    shift = tl.load(b + column, column < width, 0.0).to(tl.float32)
    value = tl.load(x + at, load, 0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(y + at, value, store)


def affine(x, w, b, *, extra=0, missing_columns=0, missing_rows=0, contiguous=True, cols=256):
    """Right as it is; each option breaks something."""
    if contiguous:
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    y, width = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    rows = x.numel() // width if width else 0
    grid = (triton.cdiv(rows, 32) - missing_rows, triton.cdiv(width, cols) - missing_columns)
    if min(grid) > 0:
        affine_kernel[grid](x, w, b, y, rows, width, extra, ROWS=32, COLS=cols)
    return y


def reference(x, w, b):
    return x * w + b


def vectors(shape):
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def one(shape):
    return (torch.randn(shape),)


def refused(call, wanted=reference, inputs=vectors, **options):
    """The sentence with which a wrong call is refused."""
    options = {"gradients": False, "dtypes": FLOAT32} | options
    with pytest.raises(AssertionError) as caught:
        check(call, wanted, inputs, name="it", **options)
    return str(caught.value)


# What is right


def test_a_right_kernel_passes_every_shape_dtype_and_layout():
    report = check(affine, reference, vectors, gradients=False)
    assert report.passed == sum(map(calls_checked, checks.SHAPES))
    assert 0 < report.worst_error < 1e-2


def layout_of(t):
    if not t.is_contiguous():
        return "transposed" if t.stride(-1) > t.stride(-2) else "strided"
    return "misaligned" if t.data_ptr() % 16 else "contiguous"


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(
    "shapes",
    [
        checks.SHAPES,
        [(3, 5)],
        [(2, 7, 20), (1, 1, 33), (2, 0, 8)],
        [(4, 6), (1, 6), (9,), (5, 3), (2, 2)],
        [(9,), (8, 8)],
    ],
    ids=str,
)
def test_every_dtype_meets_every_layout(monkeypatch, shapes, gpu):
    """A call that is wrong in one of each is refused, however few of the shapes have a layout."""
    monkeypatch.setattr(device, "has_gpu", lambda: gpu)
    monkeypatch.setattr(device, "name", lambda: "cpu")
    monkeypatch.setattr(device, "synchronize", lambda: None)
    for wrong in itertools.product(checks.DTYPES, checks.LAYOUTS):

        def call(x, wrong=wrong):
            tells = sum(size > 1 for size in x.shape) > 1
            return x * (3 if tells and (x.dtype, layout_of(x)) == wrong else 2)

        with pytest.raises(AssertionError, match=f"{wrong[1]} inputs: the output is wrong"):
            check(call, lambda x: x * 2, one, shapes=shapes, gradients=False)


def test_the_shapes_are_full_ragged_tall_one_element_and_empty():
    shapes = checks.SHAPES
    assert (1, 1) in shapes
    assert any(0 in shape for shape in shapes)
    assert any(shape[0] == 0 for shape in shapes) and any(shape[-1] == 0 for shape in shapes)
    assert any(math.prod(shape) % 64 == 0 for shape in shapes if 0 not in shape)
    assert any(shape[0] % 2 and shape[-1] % 2 and min(shape) > 32 for shape in shapes if len(shape) == 2)
    assert any(shape[0] >= 512 and len(shape) == 2 for shape in shapes)
    assert {len(shape) for shape in shapes} == {1, 2, 3}
    assert set(checks.DTYPES) == {torch.float32, torch.float16, torch.bfloat16}


def test_a_report_is_a_sentence_and_data_for_who_counts_checks():
    report = check(affine, reference, vectors, gradients=False, dtypes=FLOAT32, shapes=[(3, 5)])
    text = str(report)
    assert text.startswith(
        "affine is right: 4 checks against float64 (outputs; 1 shapes, 4 layouts, float32)"
    )
    assert "worst relative error" in text
    shown = report._repr_mimebundle_()
    assert shown["application/vnd.labkit.check+json"] == {"name": "affine", "passed": 4}
    assert text == shown["text/plain"]
    assert text in shown["text/html"]


def affine_gradients(dy, x, w, b):
    rows = tuple(range(x.dim() - 1))
    dw, db = dy.float() * x.float(), dy.float()
    return (
        dy * w,
        dw.sum(rows).to(w.dtype) if rows else dw.to(w.dtype),
        db.sum(rows).to(b.dtype) if rows else dy,
    )


def test_gradients_of_every_input_are_counted():
    operator = differentiable(affine, affine_gradients)
    report = check(operator, reference, vectors, shapes=[(37, 161), (19,), (0, 8)])
    assert report.passed == 4 * 3 * (4 + 3 + 4)
    assert "outputs and gradients" in str(report)


def test_a_scalar_output_may_be_right():
    report = check(lambda x: x.float().sum().to(x.dtype), torch.sum, one, shapes=[(3, 5)])
    assert report.passed == 3 * 4 * 2


def test_the_inputs_are_the_same_every_time():
    drawn = []

    def recording(x):
        drawn.append(x.detach().clone())
        return x * 2

    for _ in range(2):
        check(recording, lambda x: x * 2, one, shapes=[(3, 5)], dtypes=FLOAT32)
    assert all(
        torch.equal(a, b) for a, b in zip(drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :], strict=True)
    )


def test_inputs_come_contiguous_transposed_strided_and_misaligned():
    seen = []

    def recording(x):
        seen.append((x.is_contiguous(), x.stride(), x.data_ptr() % 16))
        return x * 2

    check(recording, lambda x: x * 2, one, shapes=[(32, 64)], dtypes=(torch.bfloat16,), gradients=False)
    assert [each[0] for each in seen[1:]] == [True, False, False, True]
    assert [each[1] for each in seen[1:]] == [(64, 1), (1, 32), (128, 2), (64, 1)]
    assert [each[2] == 0 for each in seen[1:]] == [True, True, True, False]


def test_the_upstream_gradient_is_twice_the_output_in_the_layout_of_the_inputs():
    seen = []

    def recording(dy, x):
        seen.append((dy, x))
        return (3 * dy,)

    operator = differentiable(lambda x: 3 * x, recording)
    check(operator, lambda x: 3 * x, one, shapes=[(32, 64)], dtypes=FLOAT32)
    for dy, x in seen:
        torch.testing.assert_close(dy, 6 * x)
    assert [dy.stride() for dy, _ in seen[1:]] == [(64, 1), (1, 32), (128, 2), (64, 1)]


# What each mistake is called


def broken(**options):
    return lambda x, w, b: affine(x, w, b, **options)


@pytest.mark.parametrize(("extra", "outside"), [(1, 1), (1000, 95)])
def test_a_missing_store_mask_breaks_a_fence(extra, outside):
    """Width 161 in a tile of 256: what is stored beyond the last row is nobody's."""
    sentence = refused(broken(extra=extra), shapes=[(1, 161)])
    assert "shape (1, 161), float32, contiguous inputs" in sentence
    assert f"stored outside its tensor, up to {outside} elements away" in sentence
    assert "A store lacks its mask" in sentence


def test_a_store_before_the_tensor_breaks_a_fence_too():
    def before(x):
        y = torch.empty_like(x)
        y.copy_(x)
        y.as_strided((1,), (1,), y.storage_offset() - 3).fill_(7.0)
        return y

    assert "up to 3 elements away" in refused(before, lambda x: x, one)


@triton.jit
def row_sum_kernel(x, y, rows, width, limit, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (column < limit)[None, :]
    value = tl.load(x + row[:, None] * width + column[None, :], mask, 0.0)
    tl.store(y + row, tl.sum(value.to(tl.float32), 1), row < rows)


def row_sum(x, masked):
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (triton.cdiv(y.numel(), 32),)
        row_sum_kernel[grid](x, y, y.numel(), width, width if masked else 1024, ROWS=32, COLS=256)
    return y


def test_a_missing_load_mask_brings_nan_in():
    narrow = [shape for shape in checks.SHAPES if shape[-1] <= 256]  # the kernel has one tile for a row
    check(lambda x: row_sum(x, True), lambda x: x.sum(-1), one, gradients=False, shapes=narrow)
    sentence = refused(lambda x: row_sum(x, False), lambda x: x.sum(-1), one, shapes=narrow)
    assert "shape (64, 128)" in sentence
    assert "nan instead of" in sentence
    assert "a load went past the end of its tensor (a missing mask)" in sentence


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ({"missing_columns": 1, "cols": 64}, "in the last 64 of 128 columns"),
        ({"missing_rows": 1}, "in the last 32 of 64 rows"),
    ],
)
def test_a_grid_that_is_too_small_leaves_nan_at_the_end(option, place):
    sentence = refused(broken(**option))
    assert f"NaN {place}: not written" in sentence
    assert "grid too small" in sentence


def test_ignored_strides_pass_contiguous_inputs_and_no_others():
    sentence = refused(broken(contiguous=False))
    assert "transposed inputs" in sentence
    assert "Scattered all over: look at the index arithmetic" in sentence
    assert (
        "The contiguous inputs of this shape passed, so the strides or the alignment are ignored." in sentence
    )


def test_ignored_alignment_is_refused():
    def aligned(x, w, b):
        """Reads x from the 16 bytes that it takes for granted, like a vector load would."""
        away = x.data_ptr() % 16 // x.element_size()
        x = x.contiguous()
        return x.as_strided(x.shape, x.stride(), x.storage_offset() - away) * w + b

    sentence = refused(aligned, gradients=False, dtypes=(torch.bfloat16,))
    assert "misaligned inputs" in sentence
    assert "nan instead of" in sentence
    assert "the strides or the alignment are ignored" in sentence


def test_a_missing_bias():
    sentence = refused(lambda x, w, b: x * w)
    assert "Off by the same amount in every row: a term per column (a bias) is missing" in sentence


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 128 / 127, 1 + 1e-4])
@pytest.mark.parametrize("seed", range(4))
def test_a_missing_factor(factor, seed):
    """Also one so small that elements close to zero pass with it."""

    def inputs(shape):
        return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)

    sentence = refused(lambda x: x * factor, lambda x: x, inputs)
    assert f"Every element is about {factor:.4g} times what it should be: a factor is missing" in sentence


def test_a_missing_factor_in_a_gradient():
    def halved(dy, x, w, b):
        dx, dw, db = affine_gradients(dy, x, w, b)
        return dx, dw / 2, db

    sentence = refused(differentiable(affine, halved), gradients=True)
    assert "the gradient of input 1 is wrong" in sentence
    assert "Every element is about 0.5 times what it should be" in sentence


def half_sum(x):
    total = torch.zeros(x.shape[1:], dtype=torch.float16, device=x.device)
    for row in x:
        total = total + row.half() * row.half()
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_in_half_precision(dtype):
    sentence = refused(half_sum, lambda x: (x * x).sum(0), one, dtypes=(dtype,), shapes=[(700, 96)])
    assert "the size of half-precision rounding; load, multiply and sum in float32" in sentence


def test_products_in_half_precision():
    sentence = refused(lambda x, w, b: (x.half() * w.half() + b.half()).to(x.dtype))
    assert "the size of half-precision rounding" in sentence
    assert "factor" not in sentence


def test_an_overflow_of_half_precision():
    def overflows(x):
        return ((300 * x.half()) * (300 * x.half())).to(x.dtype)

    sentence = refused(overflows, lambda x: 9e4 * x * x, one)
    assert "inf instead of" in sentence
    assert "Infinite: a half-precision value overflowed" in sentence


def test_an_output_that_was_never_written():
    sentence = refused(lambda x, w, b: torch.empty_like(x))
    assert "8192 of 8192 elements" in sentence
    assert "NaN: nothing was written there" in sentence


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(x.shape),
        lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
        lambda x: x.new_empty_strided(x.shape, x.stride()),
        lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    ],
)
def test_every_way_to_get_fresh_memory_is_poisoned_and_fenced(make):
    with Fences() as fences:
        x = torch.ones(4, 6)
        made = make(x)
    assert made.isnan().all()
    assert made.shape == (4, 6)
    assert fences.broken() == 0
    made.fill_(1.0)
    assert fences.broken() == 0
    made.as_strided((25,), (1,), made.storage_offset()).fill_(1.0)
    assert fences.broken() == 1


def test_whole_numbers_are_not_poisoned():
    with Fences():
        assert torch.empty(3, dtype=torch.int32).shape == (3,)


def test_an_output_full_of_zeros():
    sentence = refused(lambda x, w, b: torch.zeros_like(x))
    assert "0 instead of" in sentence
    assert "Zero everywhere" in sentence


def test_zeros_at_the_end_are_a_mask_that_shuts_out_too_much():
    def cut(x):
        y = x.clone()
        y[..., 100:] = 0
        return y

    sentence = refused(cut, lambda x: x, one)
    assert "Zero in the last 28 of 128 columns: a mask that shuts out too much" in sentence


def test_a_wrong_edge_is_told_from_a_wrong_middle():
    def edge(x):
        y = x.clone()
        y[-1:] += 1.5
        return y

    def middle(x):
        y = x.clone()
        y[:, 7:9] += 1.5 * torch.rand_like(y[:, 7:9])
        return y

    assert "Wrong in the last 1 of 64 rows: the edge of a tile" in refused(edge, lambda x: x, one)
    assert "Scattered all over" in refused(middle, lambda x: x, one)


def test_an_output_that_an_earlier_call_left():
    kept = {}

    def stale(x, w, b):
        if x.shape not in kept:
            kept[x.shape] = affine(x, w, b)
        return kept[x.shape]

    assert "the output is wrong" in refused(stale)


def test_the_wrong_dtype():
    sentence = refused(lambda x, w, b: x.float() * w + b, dtypes=(torch.float32, torch.float16))
    assert "float16, contiguous inputs: the output has shape (64, 128) and dtype torch.float32" in sentence
    assert "not (64, 128) and torch.float16" in sentence


def test_the_wrong_shape():
    sentence = refused(lambda x, w, b: (x * w + b).flatten())
    assert "the output has shape (8192,) and dtype torch.float32, not (64, 128)" in sentence


def test_an_error_says_for_which_inputs():
    def fussy(x, w, b):
        if x.shape[-1] % 2:
            raise ValueError("width must be even")
        return affine(x, w, b)

    sentence = refused(fussy)
    assert sentence.startswith(
        "it, shape (37, 33), float32, contiguous inputs: it raised ValueError: width must"
    )


def test_an_output_without_gradients():
    assert "it raised RuntimeError" in refused(lambda x, w, b: (x * w + b).detach(), gradients=True)


def test_results_that_change_from_run_to_run():
    turn = itertools.count()

    def racing(x, w, b):
        y = affine(x, w, b)
        return torch.nextafter(y, y + 1) if next(turn) % 2 else y

    sentence = refused(racing)
    assert "the output changed from one run to the next: a race, or atomics in any order" in sentence


def test_gradients_that_change_from_run_to_run():
    turn = itertools.count()

    def racing(dy, x, w, b):
        dx, dw, db = affine_gradients(dy, x, w, b)
        return dx, dw * (1 + next(turn) % 2 * 3e-7), db

    sentence = refused(differentiable(affine, racing), gradients=True)
    assert "the gradient of input 1 changed from one run to the next" in sentence


def test_an_input_that_is_overwritten():
    def in_place(x, w, b):
        return x.mul_(w).add_(b)

    assert "input 0 was overwritten; write to a new tensor" in refused(in_place)


def test_right_on_one_shape_only():
    def fixed(x, w, b):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        affine_kernel[(2, 1)](x, w, b, y, 64, 128, 0, ROWS=32, COLS=128)
        return y

    check(fixed, reference, vectors, shapes=[(64, 128)], gradients=False)
    assert "shape (37, 33)" in refused(fixed)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_empty_inputs_must_work_and_give_gradients(shape):
    def needs_rows(x, w, b):
        if not x.numel():
            raise ZeroDivisionError("division by zero")
        return x * w + b

    assert f"shape {shape}" in refused(needs_rows, shapes=[(3, 5), shape])


def test_the_gradient_of_no_rows_is_zero_not_unwritten():
    def unwritten(dy, x, w, b):
        if x.numel():
            return affine_gradients(dy, x, w, b)
        return torch.empty_like(x), torch.empty_like(w), torch.empty_like(b)

    sentence = refused(differentiable(affine, unwritten), gradients=True)
    assert "shape (0, 8)" in sentence
    assert "the gradient of input 1 is wrong" in sentence
    assert "nan instead of 0" in sentence


# A gradient that a random upstream gradient hardly tests


def rms_norm(x, w):
    return x * (x * x).mean(-1, keepdim=True).rsqrt() * w


def rms_gradients(dy, x, w, shift=0, keep=1.0):
    """The dot product of dy and y is taken from a row away, or left out, when it should not be."""
    scale = (x * x).mean(-1, keepdim=True).rsqrt()
    dot = (dy * w * x).mean(-1, keepdim=True).roll(shift, 0) * keep
    return dy * w * scale - x * dot * scale**3, (dy * x * scale).sum(tuple(range(x.dim() - 1)))


def rms_operator(**options):
    def forward(x, w):
        return rms_norm(x.float(), w.float()).to(x.dtype)

    def backward(dy, x, w):
        dx, dw = rms_gradients(dy.float(), x.float(), w.float(), **options)
        return dx.to(x.dtype), dw.to(w.dtype)

    return differentiable(forward, backward)


def rows_of_their_own(shape):
    """Rows of different size, so that one row's dot product is not another's."""
    size = torch.linspace(0.5, 2.0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape) * size, torch.randn(shape[-1])


@pytest.mark.parametrize("shape", [(64, 128), (7, 33), (1, 1), (5, 1), (2, 3, 2)])
def test_a_right_gradient_passes_also_where_its_terms_cancel(shape):
    """Of a single element the gradient is zero, but for the rounding of two large terms."""
    report = check(rms_operator(), rms_norm, rows_of_their_own, shapes=[shape], dtypes=FLOAT32)
    assert report.worst_error < 1e-5
    assert check(rms_operator(), rms_norm, rows_of_their_own, shapes=[shape]).worst_error < 1e-2


WIDE = (8, 8192)


def test_a_random_upstream_gradient_hardly_sees_a_dot_product_that_is_left_out():
    torch.manual_seed(1)
    x, w = rows_of_their_own(WIDE)
    for upstream, least, most in ((torch.randn(WIDE), 0.0, 0.02), (2 * rms_norm(x, w), 0.3, 1.0)):
        right, wrong = (rms_gradients(upstream, x, w, keep=keep)[0] for keep in (1.0, 0.0))
        assert least < checks.relative_error(wrong, right) < most


@pytest.mark.parametrize("wrong", [{"keep": 0.0}, {"shift": 1}])
def test_the_correlated_one_shows_it_even_in_bfloat16(wrong):
    options = {"inputs": rows_of_their_own, "gradients": True, "shapes": [WIDE], "dtypes": (torch.bfloat16,)}
    assert "the gradient of input 0 is wrong" in refused(rms_operator(**wrong), rms_norm, **options)


# What is allowed for


def signs(shape):
    """As large as their root mean square, so that an error of twice the tolerance is just allowed."""
    return (torch.randn(shape).sign(),)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_chain_of_roundings_is_allowed_as_many_times_the_error_of_one(dtype):
    options = dict(inputs=signs, dtypes=(dtype,), shapes=[(5, 7)], gradients=False)

    def off(times):
        return lambda x: x * (1 + times * checks.TOLERANCE[dtype])

    for times, roundings in ((1, 1), (4, 3)):
        check(off(times), lambda x: x, roundings=roundings, **options)
    for times, roundings in ((4, 1), (8, 3)):
        assert "is wrong" in refused(off(times), lambda x: x, roundings=roundings, **options)


def test_in_float32_no_rounding_between_is_allowed_for():
    wrong = "is wrong"
    assert wrong in refused(lambda x: x * (1 + 4e-5), lambda x: x, inputs=signs, roundings=3, shapes=[(5, 7)])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1e-6), (torch.bfloat16, 1.4e-40)])
def test_below_the_smallest_normal_number_a_rounding_is_no_share_of_the_number(dtype, scale):
    spacing = torch.finfo(dtype).tiny * torch.finfo(dtype).eps

    def denormal(x, steps=0):
        return (x.double() * scale + steps * spacing).to(dtype)

    def exact(x):
        return x.double() * scale

    options = dict(shapes=[(5, 7)], dtypes=(dtype,), gradients=False)
    assert checks.diagnose(denormal(torch.ones(3)), exact(torch.ones(3)), checks.TOLERANCE[dtype])
    check(denormal, exact, one, **options)
    assert "is wrong" in refused(lambda x: denormal(x, 3), exact, one, **options)
    check(lambda x: denormal(x, 2), exact, one, roundings=3, **options)


# The parts


def test_the_relative_error_is_of_norms_in_float64():
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert checks.relative_error(want + torch.tensor([0.0, 0.05]).double(), want) == pytest.approx(
        0.01, rel=1e-6
    )
    assert checks.relative_error(torch.tensor([3.0, math.nan]), want) != 0
    assert math.isnan(checks.relative_error(torch.tensor([3.0, math.nan]), want))
    assert checks.relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert checks.relative_error(torch.ones(4), torch.zeros(4)) == 2.0
    assert checks.relative_error(torch.ones(4), torch.zeros(4), 8.0) == 0.25


def test_the_tolerance_is_a_few_roundings_of_each_dtype():
    torch.manual_seed(0)
    exact = torch.randn(1000, dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounding = torch.finfo(dtype).eps
        assert diagnose(exact.to(dtype), exact, checks.TOLERANCE[dtype]) == ""
        assert diagnose(exact * (1 + 200 * rounding), exact, checks.TOLERANCE[dtype]) != ""


def test_the_worst_element_is_named():
    want = torch.ones(3, 4)
    got = want.clone()
    got[1, 2], got[2, 0] = 1.5, 1.2
    assert "2 of 12 elements; worst at (1, 2): 1.5 instead of 1" in diagnose(got, want, 1e-5)
    got[0, 1] = math.nan
    assert "3 of 12 elements; worst at (0, 1): nan instead of 1" in diagnose(got, want, 1e-5)


def test_nothing_is_wrong_with_nothing():
    assert diagnose(torch.zeros(0, 3), torch.zeros(0, 3), 1e-5) == ""


def test_interpreted_or_on_a_gpu_inputs_are_where_kernels_run():
    seen = []
    check(lambda x: seen.append(x.device.type) or x * 2, lambda x: x * 2, one, shapes=[(3, 5)])
    assert set(seen) == {device.name()}
