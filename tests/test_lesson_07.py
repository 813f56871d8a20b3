"""Lesson 7's taught kernels: the norm of a row, the loop, the tree and the rebuilt original."""

import dataclasses
import math

import launches as launches_of
import pytest
import torch
from launches import POINTWISE
from recurring import offsets
from triton.runtime import interpreter

from labkit import checks, codegen, counts, device, lessons
from labkit import recurrent_works as work

NAME = "07_recurrent_kernel"
pytestmark = pytest.mark.usefixtures("cache")
GPU = pytest.mark.skipif(not device.has_gpu(), reason="two thousand steps need a GPU")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="accesses are counted, and kernels compiled for other GPUs, where there is none",
)
bf16, fp32 = torch.bfloat16, torch.float32
KERNELS = (
    "row_norm_kernel", "original_kernel", "original_backward_kernel", "looped_kernel", "scan_kernel"
)  # fmt: skip


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, KERNELS, monkeypatch)


def rows_of(shape):
    """A quarter of the weight is zero: what it was multiplied with cannot be told from the product."""
    weight = 1 + 0.1 * torch.randn(shape[-1])
    weight[1::4] = 0
    return torch.randn(shape) * torch.randn(*shape[:-1], 1).exp(), weight


def sequences(shape):
    return torch.sigmoid(1 + torch.randn(shape)), torch.randn(shape)


def drawn(inputs, *shape, dtype=fp32):
    torch.manual_seed(0)
    return [t.to(device.name(), dtype) for t in inputs(shape)]


def meta(*shape, dtype=fp32):
    return torch.empty(shape, dtype=dtype, device="meta")


def examine(call, reference, inputs, *shapes, layouts=("contiguous",), dtypes=(fp32,), gradients=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        checks.check(call, reference, inputs, shapes=shapes, dtypes=dtypes, gradients=gradients)


# --- right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warps", [1, 4])
def test_the_norm_of_a_row_is_right(lesson, warps):
    shapes = ((33, 64), (2, 5, 20), (1, 3), (1, 1), (0, 8), (3, 600))
    call = lambda x, weight: lesson.row_norm(x, weight, warps)  # noqa: E731
    examine(call, work.rms_norm, rows_of, *shapes, layouts=checks.LAYOUTS, dtypes=checks.DTYPES)


@pytest.mark.parametrize("shape", [(70, 20), (3, 25, 4), (1, 8)], ids=str)
def test_the_original_rebuilt_is_right(lesson, shape):
    layouts = ("contiguous", "transposed")
    examine(lesson.original_norm, work.rms_norm, rows_of, shape, layouts=layouts, gradients=True)


@pytest.mark.parametrize("stages", [1, 12])
def test_the_loop_is_right(lesson, stages):
    shapes, layouts = ((2, 3, 130), (1, 1, 1), (3, 2, 20)), ("contiguous", "strided")
    call = lesson.looped(stages)
    examine(call, work.linear_recurrence, sequences, *shapes, layouts=layouts, dtypes=checks.DTYPES)


@pytest.mark.parametrize("time", [0, 1, 2, 5, 16, 129])
def test_the_tree_is_right(lesson, time):
    examine(lesson.scanned, work.linear_recurrence, sequences, (2, time, 9))


def test_the_tree_takes_every_layout_and_dtype(lesson):
    options = dict(layouts=checks.LAYOUTS, dtypes=checks.DTYPES)
    examine(lesson.scanned, work.linear_recurrence, sequences, (2, 5, 3), (0, 3, 8), **options)


def test_the_tree_of_many_lanes_is_right(lesson):
    """Its blocks of 64 steps and 32 features, where a sequence ends in the middle of the second."""
    a, b = drawn(sequences, 1, 70, 40)
    h = torch.full_like(a, math.nan)
    lesson.scan_kernel[(1, 2)](a, b, h, 70, H=40, BT=64, BH=32, num_warps=4)
    assert checks.relative_error(h, work.linear_recurrence(a.double(), b.double())) < 1e-6


def test_half_precision_keeps_the_state_in_float32(lesson):
    """One, and 63 times a 512th, which a sum in bf16 would not notice."""
    ones = torch.ones(1, 64, 1, dtype=bf16, device=device.name())
    given = ones / 512
    given[:, 0] = 1
    for call in (lesson.looped(4), lesson.scanned):
        assert call(ones, given)[:, -1].item() == pytest.approx(1 + 63 / 512, abs=2**-7)


def test_nan_does_not_run_back_in_the_tree(lesson):
    a, b = drawn(sequences, 2, 9, 20)
    want = lesson.scanned(a, b)
    b[1, 5, 3] = math.nan
    got = lesson.scanned(a, b)
    assert got[1, 5:, 3].isnan().all()
    got[1, 5:, 3] = want[1, 5:, 3] = 0
    assert torch.equal(got, want)


# --- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["row_norm", "looped", "scanned"])
def test_what_has_no_backward_refuses_to_be_differentiated(lesson, name):
    call = lesson.looped(4) if name == "looped" else getattr(lesson, name)
    one, other = drawn(rows_of if name == "row_norm" else sequences, 2, 3, 20)
    for which in (one, other):
        which.requires_grad_()
        with pytest.raises(RuntimeError, match=f"^{name} has no backward"):
            call(one, other)
        with torch.no_grad():
            assert not call(one, other).requires_grad
        which.requires_grad_(False)


def test_the_originals_second_derivative_is_refused(lesson):
    x, weight = (t.requires_grad_() for t in drawn(rows_of, 3, 20))
    y = lesson.original_norm(x, weight)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)


# --- what is read and written -------------------------------------------------------------------------


def counted(call, *tensors):
    """The launches of a call between fences, so that strays hit nothing else."""
    fences = checks.Fences()
    given = [fences.place(t, "contiguous") for t in tensors]
    with fences:
        return counts.count(lambda: call(*given)).launches


@INTERPRETED
def test_the_loop_the_tree_and_the_norm_read_and_write_every_number_once(lesson):
    calls = ((lesson.looped(4), (2, 3, 130)), (lesson.scanned, (2, 9, 20)), (lesson.scanned, (1, 130, 3)))
    for call, shape in calls:
        (made,) = counted(call, *drawn(sequences, *shape))
        N = math.prod(shape)
        assert (made.bytes_read, made.bytes_written) == (4 * 2 * N, 4 * N)
    (made,) = counted(lesson.row_norm, *drawn(rows_of, 33, 20))
    assert (made.bytes_read, made.bytes_written) == (2 * 4 * 33 * 20, 4 * 33 * 20), "the weight for each row"


@INTERPRETED
def test_the_original_reads_a_row_for_each_of_its_numbers(lesson):
    (x, weight), (N, H) = drawn(rows_of, 70, 20), (70 * 20, 20)
    (forward,) = counted(lesson.original_norm, x, weight)
    assert forward.touched == 4 * (2 * N + H) and forward.bytes_read >= 2 * 4 * N
    leaves = [t.requires_grad_() for t in (x, weight)]
    y = lesson.original_norm(*leaves)
    upstream = torch.ones_like(y)
    back, *_ = counts.count(lambda: torch.autograd.grad(y, leaves, upstream)).launches
    assert back.bytes_read >= 2 * 4 * N * H and back.bytes_written == 2 * 4 * N


@INTERPRETED
def test_without_rows_or_steps_no_kernel_is_launched(lesson):
    assert not counted(lesson.scanned, *drawn(sequences, 2, 0, 4))
    assert not counted(lesson.row_norm, *drawn(rows_of, 0, 4))


# --- more elements than 32 bits count -----------------------------------------------------------------


@pytest.fixture
def overflow_is_an_error(monkeypatch):
    """Before an address that ran over could be read."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))


@INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
@pytest.mark.parametrize(("kernel", "sizes"), [("looped", dict(STAGES=2)), ("scan", dict(BT=4))], ids=str)
def test_steps_whose_address_needs_64_bits(lesson, kernel, sizes):
    """Three steps of 2**30 features, of which the first program has four."""
    H, T = 2**30, 3
    near = drawn(sequences, 1, T, 4, dtype=bf16)

    def far(values):
        block = torch.empty(1, T, H, dtype=bf16)
        block[..., :4] = values
        return block

    output = far(math.nan)
    getattr(lesson, f"{kernel}_kernel")[1, 1](*map(far, near), output, T, H=H, BH=4, **sizes)
    want = work.linear_recurrence(*(t.double() for t in near))
    assert not checks.diagnose(output[..., :4], want, checks.TOLERANCE[bf16])


@INTERPRETED
def test_places_are_counted_in_64_bits(lesson, launches):
    """For every address of x, y, a, b, h, dy, dx and dw: those of a weight have no more than H."""
    x, weight = meta(64, 100), meta(100)
    lesson.row_norm(x, weight)
    leaf = x.clone().requires_grad_()
    y = lesson.original_norm(leaf, weight)
    torch.autograd.grad(y, leaf, torch.empty_like(y))
    lesson.looped(4)(meta(2, 64, 100), meta(2, 64, 100))
    lesson.scanned(meta(2, 64, 100), meta(2, 64, 100))
    assert {made.title for made in launches} == set(KERNELS)
    asked = [(made, target) for made in launches for target in POINTWISE]
    requests = [codegen.request(m.kernel, m.arguments, target=t, **m.options) for m, t in asked]
    for one in codegen.compile_many(requests):
        assert not one.spills, one
        addresses = offsets(one.ttir)
        assert addresses, one
        for base, bits in addresses:
            assert bits == "i64" or base == "weight", (one.kernel, base, bits)


# --- how the work is cut up ---------------------------------------------------------------------------


def test_the_tree_takes_more_steps_at_once_where_there_are_few_lanes(lesson, launches):
    for batch, width, time, tile in (
        (1, 8192, 1000, (128, 8)),
        (1, 8193, 1000, (64, 32)),
        (512, 128, 17, (32, 32)),
        (4, 20, 3, (4, 8)),
    ):
        launches.clear()
        lesson.scanned(meta(batch, time, width), meta(batch, time, width))
        (made,) = launches
        _, columns = tile
        assert tile == (made.BT, made.BH) and made.grid == (batch, math.ceil(width / columns))


@INTERPRETED
def test_one_warp_adds_up_by_shuffles_alone(lesson, launches):
    """What the page says: five rounds, and a barrier only where several warps share a row."""
    for warps in (1, 2):
        lesson.row_norm(meta(64, 512), meta(512), warps)
    one, two = codegen.compile_many(
        codegen.request(m.kernel, m.arguments, target="sm_90", **m.options) for m in launches
    )
    assert one.shuffles == {"bfly": 5} and not one.barriers and not one.shared_bytes
    assert set(one.loads) == set(one.stores) == {128} and two.barriers and two.shared_bytes


# --- on a GPU -----------------------------------------------------------------------------------------


@GPU
def test_the_tree_is_right_after_two_thousand_steps(lesson):
    for batch, width in ((2, 40), (64, 256)):
        a, b = drawn(sequences, batch, 2048, width)
        want = work.linear_recurrence(a.double(), b.double())
        assert checks.relative_error(lesson.scanned(a, b), want) < 1e-5
