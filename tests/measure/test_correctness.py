"""checks.check: what it accepts, and what it refuses with which sentence. Most calls here are wrong."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from cases import vectors
from counting import calls_checked

from labkit import gpu
from labkit.measure import correctness
from labkit.measure.correctness import GuardZones, check, diagnose

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
    assert report.passed == sum(map(calls_checked, correctness.SHAPES))
    assert set(correctness.DTYPES) == {torch.float32, torch.float16, torch.bfloat16}
    assert {(64, 128), (37, 33), (1, 1), (0, 8), (4, 0)} < set(correctness.SHAPES), "full, ragged, one, none"
    assert {len(shape) for shape in correctness.SHAPES} == {1, 2, 3}
    assert check(lambda x: x.float().sum().to(x.dtype), torch.sum, one, shapes=[(3, 5)]).passed == 3 * 4 * 2


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(
    "shapes", [correctness.SHAPES, [(2, 7, 20), (1, 1, 33), (2, 0, 8)], [(4, 6), (9,), (5, 3)]]
)
def test_every_dtype_meets_every_layout(monkeypatch, shapes, gpu):
    """A call that is wrong in one of each is refused, however few of the shapes have a layout."""
    for name, does in dict(available=lambda: gpu, device=lambda: "cpu", synchronize=lambda: None).items():
        monkeypatch.setattr(f"labkit.gpu.{name}", does)
    for wrong in itertools.product(correctness.DTYPES, correctness.LAYOUTS):

        def call(x, wrong=wrong):
            tells = sum(size > 1 for size in x.shape) > 1
            layout = "misaligned" if x.data_ptr() % 16 else "contiguous"
            if tells and not x.is_contiguous():
                layout = "transposed" if x.stride(-1) > x.stride(-2) else "strided"
            return x * (3 if tells and (x.dtype, layout) == wrong else 2)

        with pytest.raises(AssertionError, match=f"{wrong[1]} inputs: the output is wrong"):
            check(call, lambda x: x * 2, one, shapes=shapes, gradients=False)


def affine_gradients(dy, x, w, b):
    rows = tuple(range(x.dim() - 1)) or None
    sums = (dy.float() * x.float(), dy.float())
    return dy * w, *((s.sum(rows) if rows else s).to(w.dtype) for s in sums)


def test_gradients_of_every_input_are_counted_in_a_sentence_and_in_data():
    operator = differentiable(affine, affine_gradients)
    report = check(operator, reference, vectors, shapes=[(37, 161), (19,), (0, 8)])
    assert report.passed == 4 * 3 * (4 + 3 + 4)
    assert "outputs and gradients" in str(report)
    shown = report._repr_mimebundle_()
    assert shown["application/vnd.labkit.check+json"] == {"name": report.name, "passed": report.passed}
    assert shown["text/plain"] == str(report) and str(report) in shown["text/html"]


def test_the_upstream_gradient_is_twice_the_output_in_the_layout_of_the_inputs_and_the_same_every_time():
    seen = []

    def recording(dy, x):
        seen.append((dy.clone(), x.clone(), dy.stride(), x.stride(), x.device.type))
        return (3 * dy,)

    operator = differentiable(lambda x: 3 * x, recording)
    for _ in range(2):
        check(operator, lambda x: 3 * x, one, shapes=[(32, 64)], dtypes=FLOAT32)
    strides = [(64, 1), (64, 1), (1, 32), (128, 2), (64, 1)]
    for number, (dy, x, of_dy, of_x, where) in enumerate(seen):
        torch.testing.assert_close(dy, 6 * x)
        assert of_dy == of_x == strides[number % 5] and where == gpu.device()
        assert torch.equal(x, seen[number % 5][1])
    assert len(seen) == 10


# What each mistake is refused with


def broken(**options):
    return lambda x, w, b: affine(x, w, b, **options)


def before(x):
    y = torch.empty_like(x).copy_(x)
    y.as_strided((1,), (1,), y.storage_offset() - 3).fill_(7.0)
    return y


def loads(place):
    """A copy of x that also depends on the element at this place, before or after all."""
    return lambda x: x + 0 * x.as_strided((1,), (1,), x.storage_offset() + place(x))


def half_sum(x):
    total = torch.zeros(x.shape[1:], dtype=torch.float16, device=x.device)
    for row in x:
        total = total + row.half() * row.half()
    return total.to(x.dtype)


def same(x):
    return x


def square_sum(x):
    return (x * x).sum(0)


def times(factor):
    return lambda x: x * factor


def changed(where, how):
    """A copy of x that is changed at one place."""

    def call(x):
        y = x.clone()
        y[where] = how(y[where])
        return y

    return call


def stale(kept):
    return lambda x, w, b: kept.setdefault(x.shape, affine(x, w, b))


def racing(turn):
    return lambda x: torch.nextafter(x, x + next(turn) % 2)


HALF, SHORT, TALL = (torch.float16,), {"shapes": [(1, 161)]}, {"shapes": [(700, 96)]}
MISTAKES = {
    "no store mask": (broken(extra=1), reference, SHORT, "(1, 161), float32, contiguous", "up to 1 elements"),
    "none far out": (broken(extra=1000), reference, SHORT, "A store lacks its mask", "up to 95 elements"),
    "store before": (before, same, {}, "up to 3 elements away"),
    "load before": (loads(lambda x: -1), same, {}, "8192 of 8192", "nan instead of"),
    "load after": (loads(torch.numel), same, {}, "8192 of 8192", "nan instead of"),
    "columns": (broken(missing_columns=1, cols=64), reference, {}, "4096 of 8192", "nan instead of"),
    "rows": (broken(missing_rows=1), reference, {}, "4096 of 8192", "nan instead of"),
    "strides": (broken(contiguous=False), reference, {}, "transposed inputs", "contiguous inputs of this"),
    "no bias": (lambda x, w, b: x * w, reference, {}, "the output is wrong"),
    "half sum": (half_sum, square_sum, TALL, "the output is wrong"),
    "half sum of half": (half_sum, square_sum, {**TALL, "dtypes": HALF}, "the output is wrong"),
    "half product": (lambda x, w, b: (x.half() * w.half() + b.half()).to(x.dtype), reference, {}, "wrong"),
    "overflow": (lambda x: (300 * x.half()) ** 2, lambda x: 9e4 * x * x, {"dtypes": HALF}, "inf instead of"),
    "never written": (lambda x, w, b: torch.empty_like(x), reference, {}, "8192 of 8192", "nan instead of"),
    "zeros": (lambda x, w, b: torch.zeros_like(x), reference, {}, "0 instead of"),
    "shut out": (
        changed((..., slice(100, None)), lambda y: 0), same, {}, "1792 of 8192", "0 instead of"
    ),
    "edge": (changed(slice(-1, None), lambda y: y + 1.5), same, {}, "128 of 8192"),
    "stale": (stale({}), reference, {}, "the output is wrong"),
    "dtype": (lambda x: x.float() * 1, same, {"dtypes": HALF}, "has shape (64, 128) and dtype torch.float32"),
    "shape": (lambda x: x.flatten(), same, {}, "has shape (8192,) and dtype torch.float32, not (64, 128)"),
    "no gradient": (lambda x: (x * 1).detach(), same, {"gradients": True}, "it raised RuntimeError"),
    "race": (racing(itertools.count()), same, {}, "the output changed from one run to the next"),
    "in place": (lambda x, w, b: x.mul_(w).add_(b), reference, {}, "input 0 was overwritten"),
    "ragged": (lambda x: x + (x.shape[-1] % 2) / 9, same, {}, "shape (37, 33)"),
    "no rows": (lambda x: x + 0 // len(x), same, {"shapes": [(4, 4), (0, 8)]}, "shape (0, 8)"),
    "no columns": (lambda x: x + 0 // x.shape[1], same, {"shapes": [(4, 4), (4, 0)]}, "(4, 0)"),
    "chain in float32": (times(1 + 4e-5), same, {"roundings": 3}, "is wrong"),
    # also one so small that elements close to zero pass with it
    **{f: (times(f), same, {}, "the output is wrong") for f in (2.0, -1.0, 128 / 127, 1 + 1e-4)},
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_what_was_seen(name):
    call, wanted, options, *words = MISTAKES[name]
    sentence = refused(call, wanted, vectors if wanted is reference else one, **options)
    assert all(word in sentence for word in words), sentence
    assert sentence.startswith("it, shape (")


def noisy(turn):
    return lambda given, size: (given[0], given[1] * (1 + next(turn) % 2 * 3e-7), given[2])


def spoilt(how):
    """The affine operator with a gradient that ``how`` makes of the right one, for inputs of this size."""
    return differentiable(affine, lambda dy, *tensors: how(affine_gradients(dy, *tensors), dy.numel()))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda given, size: (given[0], given[1] / 2, given[2]), "input 1 is wrong. 128 of 128"),
        (noisy(itertools.count()), "the gradient of input 1 changed from one run to the next"),
        (
            lambda given, size: given if size else tuple(map(torch.empty_like, given)),
            "shape (0, 8), float32, contiguous inputs: the gradient of input 1 is wrong. 8 of 8",
        ),
    ],
    ids=["input", "race", "unwritten without rows"],
)
def test_a_wrong_gradient_is_named(how, words):
    assert words in refused(spoilt(how), gradients=True, shapes=[(64, 128), (0, 8)])


# A gradient that a random upstream gradient hardly tests


def rms_norm(x, w):
    return x * (x * x).mean(-1, keepdim=True).rsqrt() * w


def rms_operator(shift=0, keep=1.0):
    """Of dx, the dot product of dy and y is taken from a row away, or left out, when it should not be."""

    def forward(x, w):
        return rms_norm(x.float(), w.float()).to(x.dtype)

    def backward(dy, *tensors):
        x, w = (t.float() for t in tensors)
        scale = (x * x).mean(-1, keepdim=True).rsqrt()
        dot = (dy * w * x).mean(-1, keepdim=True).roll(shift, 0) * keep
        dw = (dy * x * scale).sum(tuple(range(x.dim() - 1)))
        return (dy * w * scale - x * dot * scale**3).to(dy.dtype), dw.to(dy.dtype)

    return differentiable(forward, backward)


def rows_of_their_own(shape):
    """Rows of different size, so that one row's dot product is not another's."""
    size = torch.linspace(0.5, 2.0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape) * size, torch.randn(shape[-1])


@pytest.mark.parametrize("shape", [(64, 128), (7, 33), (1, 1), (5, 1), (2, 3, 2)])
def test_a_right_gradient_passes_also_where_its_terms_cancel(shape):
    """Of a single element the gradient is zero, but for the rounding of two large terms."""
    assert check(rms_operator(), rms_norm, rows_of_their_own, shapes=[shape]).passed


@pytest.mark.parametrize("wrong", [{"keep": 0.0}, {"shift": 1}])
def test_the_correlated_one_shows_it_even_in_bfloat16(wrong):
    options = dict(inputs=rows_of_their_own, gradients=True, shapes=[(8, 8192)], dtypes=(torch.bfloat16,))
    assert "the gradient of input 0 is wrong" in refused(rms_operator(**wrong), rms_norm, **options)


# What is allowed for


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_chain_of_roundings_is_allowed_as_many_times_the_error_of_one(dtype):
    """Of signs, as large as their root mean square: an error of twice the tolerance is just allowed."""
    options = dict(inputs=lambda shape: (torch.randn(shape).sign(),), dtypes=(dtype,), gradients=False)
    for off, roundings in ((1, 1), (4, 3)):
        check(times(1 + off * correctness.TOLERANCE[dtype]), same, roundings=roundings, **options)
    for off, roundings in ((4, 1), (8, 3)):
        wrong = times(1 + off * correctness.TOLERANCE[dtype])
        assert "is wrong" in refused(wrong, same, roundings=roundings, **options)


# The parts


def test_the_relative_error_is_of_norms_in_float64():
    want, zeros, ones = torch.tensor([3.0, 4.0]).double(), torch.zeros(4), torch.ones(4)
    assert correctness.relative_error(want + torch.tensor([0.0, 0.05]), want) == pytest.approx(0.01, rel=1e-6)
    assert math.isnan(correctness.relative_error(torch.tensor([3.0, math.nan]), want))
    assert [correctness.relative_error(each, zeros) for each in (zeros, ones)] == [0.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        torch.empty_like, lambda x: x.new_empty(x.shape), lambda x: x.new_empty_strided(x.shape, x.stride()),
        lambda x: torch.empty_strided(x.shape, x.stride(), device=x.device),
        lambda x: torch.empty(x.shape, device=x.device),
    ],
)  # fmt: skip
def test_every_way_to_get_fresh_memory_is_poisoned_and_fenced(make):
    with GuardZones() as fences:
        made = make(torch.ones(4, 6))
        assert torch.empty(3, dtype=torch.int32).shape == (3,), "whole numbers are left alone"
    assert made.isnan().all() and made.shape == (4, 6) and fences.broken() == 0
    made.fill_(1.0)
    assert fences.broken() == 0
    made.as_strided((25,), (1,), made.storage_offset()).fill_(1.0)
    assert fences.broken() == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, *correctness.DTYPES])
@pytest.mark.parametrize("at", [-1, 6])
def test_a_store_beside_a_tensor_that_was_placed_breaks_its_fence(dtype, at):
    fences = GuardZones()
    first, last = (fences.place(torch.arange(6).to(dtype), "contiguous") for _ in range(2))
    assert torch.equal(first, torch.arange(6).to(dtype)) and fences.broken() == 0
    last.fill_(7)
    assert fences.broken() == 0
    first.as_strided((1,), (1,), first.storage_offset() + at).fill_(7)
    assert fences.broken() == 1


def test_the_worst_element_is_named():
    want = torch.ones(3, 4)
    got = want.clone()
    got[1, 2], got[2, 0] = 1.5, 1.2
    assert "2 of 12 elements; worst at (1, 2): 1.5 instead of 1" in diagnose(got, want, 1e-5)
    got[0, 1] = math.nan
    assert "3 of 12 elements; worst at (0, 1): nan instead of 1" in diagnose(got, want, 1e-5)
    assert diagnose(torch.zeros(0, 3), torch.zeros(0, 3), 1e-5) == ""
