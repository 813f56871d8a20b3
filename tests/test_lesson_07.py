"""Lesson 7's taught kernels: the norm of a row, the loop, the tree and the rebuilt original."""

import math

import launches as launches_of
import pytest
import torch
from recurring import offsets
from taught import GPU, INTERPRETED, assert_no_backward, bf16, compiled, counted, drawn, examine, meta

from labkit import gpu
from labkit.lessons import notebooks
from labkit.measure import correctness
from labkit.profiling import launch_counts
from labkit.workloads import recurrent as work

pytestmark = pytest.mark.usefixtures("cache")
KERNELS = (
    "row_norm_kernel", "original_kernel", "original_backward_kernel", "looped_kernel", "scan_kernel"
)  # fmt: skip


@pytest.fixture(scope="module")
def lesson(cache):
    return notebooks.load("07_recurrent_kernel")


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


EVERY = dict(layouts=correctness.LAYOUTS, dtypes=correctness.DTYPES)
RIGHT = {
    "norm, a warp": ("row_norm", (1,), ((33, 64), (2, 5, 20), (1, 3), (1, 1), (0, 8), (3, 600)), EVERY),
    "norm, four warps": ("row_norm", (4,), ((33, 64), (1, 3), (3, 600)), EVERY),
    "original": ("original_norm", (), ((70, 20), (3, 25, 4), (1, 8)),
                 dict(layouts=("contiguous", "transposed"), gradients=True)),
    "loop": ("looped", 1, ((2, 3, 130), (1, 1, 1), (3, 2, 20)), EVERY),
    "loop, loads ahead": ("looped", 12, ((2, 3, 130), (1, 1, 1), (3, 2, 20)), EVERY),
    "tree": ("scanned", (), tuple((2, time, 9) for time in (0, 1, 2, 5, 16, 129)), {}),
    "tree, layouts": ("scanned", (), ((2, 5, 3), (0, 3, 8)), EVERY),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_each_is_right(lesson, case):
    name, given, shapes, options = RIGHT[case]
    norm = name.endswith("norm")
    reference, inputs = (work.rms_norm, rows_of) if norm else (work.linear_recurrence, sequences)
    call = lesson.looped(given) if name == "looped" else lambda *t: getattr(lesson, name)(*t, *given)
    examine(call, reference, inputs, *shapes, **options)


def test_the_tree_of_many_lanes_is_right(lesson):
    """Its blocks of 64 steps and 32 features, where a sequence ends in the middle of the second."""
    a, b = drawn(sequences, 1, 70, 40)
    h = torch.full_like(a, math.nan)
    lesson.scan_kernel[(1, 2)](a, b, h, 70, H=40, BT=64, BH=32, num_warps=4)
    assert correctness.relative_error(h, work.linear_recurrence(a.double(), b.double())) < 1e-6


@GPU
def test_the_tree_is_right_after_two_thousand_steps(lesson):
    for batch, width in ((2, 40), (64, 256)):
        a, b = drawn(sequences, batch, 2048, width)
        want = work.linear_recurrence(a.double(), b.double())
        assert correctness.relative_error(lesson.scanned(a, b), want) < 1e-5


def test_half_precision_keeps_the_state_in_float32(lesson):
    """One, and 63 times a 512th, which a sum in bf16 would not notice."""
    ones = torch.ones(1, 64, 1, dtype=bf16, device=gpu.device())
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


def test_what_has_no_derivative_refuses_to_be_differentiated(lesson):
    assert_no_backward("row_norm", lesson.row_norm, drawn(rows_of, 2, 3, 20))
    assert_no_backward("looped", lesson.looped(4), drawn(sequences, 2, 3, 20))
    assert_no_backward("scanned", lesson.scanned, drawn(sequences, 2, 3, 20))
    x, weight = (t.requires_grad_() for t in drawn(rows_of, 3, 20))
    y = lesson.original_norm(x, weight)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)


@INTERPRETED
def test_every_number_is_read_and_written_once_and_the_originals_row_for_each_of_its_numbers(lesson):
    calls = ((lesson.looped(4), (2, 3, 130)), (lesson.scanned, (2, 9, 20)), (lesson.scanned, (1, 130, 3)))
    for call, shape in calls:
        (made,) = counted(call, *drawn(sequences, *shape))
        N = math.prod(shape)
        assert (made.bytes_read, made.bytes_written) == (4 * 2 * N, 4 * N)
    (made,) = counted(lesson.row_norm, *drawn(rows_of, 33, 20))
    assert (made.bytes_read, made.bytes_written) == (2 * 4 * 33 * 20, 4 * 33 * 20), "the weight for each row"
    assert not counted(lesson.scanned, *drawn(sequences, 2, 0, 4))
    assert not counted(lesson.row_norm, *drawn(rows_of, 0, 4))
    (x, weight), (N, H) = drawn(rows_of, 70, 20), (70 * 20, 20)
    (forward,) = counted(lesson.original_norm, x, weight)
    assert forward.distinct_bytes == 4 * (2 * N + H) and forward.bytes_read >= 2 * 4 * N
    leaves = [t.requires_grad_() for t in (x, weight)]
    y = lesson.original_norm(*leaves)
    upstream = torch.ones_like(y)
    back, *_ = launch_counts.count(lambda: torch.autograd.grad(y, leaves, upstream)).launches
    assert back.bytes_read >= 2 * 4 * N * H and back.bytes_written == 2 * 4 * N


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
    assert not correctness.diagnose(output[..., :4], want, correctness.TOLERANCE[bf16])


def test_for_other_gpus_places_are_counted_in_64_bits_and_one_warp_adds_up_by_shuffles_alone(
    lesson, launches
):
    """For every address of x, y, a, b, h, dy, dx and dw: those of a weight have no more than H."""
    x, weight = meta(64, 512), meta(512)
    lesson.row_norm(x, weight, 1)
    lesson.row_norm(x, weight, 2)
    y = lesson.original_norm(x.clone().requires_grad_(), weight)
    y.backward(torch.empty_like(y))
    lesson.looped(4)(meta(2, 64, 100), meta(2, 64, 100))
    lesson.scanned(meta(2, 64, 100), meta(2, 64, 100))
    assert {made.title for made in launches} == set(KERNELS)
    found = compiled(launches)
    for one in found:
        assert not one.spills, one
        addresses = offsets(one.ttir)
        assert addresses and all(bits == "i64" or base == "weight" for base, bits in addresses), one
    # what the page says: five rounds, and a barrier only where several warps share a row
    one, two = (each for each in found if each.kernel == "row_norm_kernel" and each.target == "sm_90")
    assert one.shuffles == {"bfly": 5} and not one.barriers and not one.shared_bytes
    assert set(one.loads) == set(one.stores) == {128} and two.barriers and two.shared_bytes
