"""Lesson 3: grouped Linears of every width and layout, their gradients, what they read and write."""

import dataclasses
import itertools
import math

import launches as launches_of
import pytest
import torch
from grouped import (
    KERNELS,
    NAME,
    assert_close,
    bf16,
    compiled,
    drawn,
    fp16,
    fp32,
    grouped,
    launch_both_ways,
    meta,
    plain,
    pretend,
)
from torch.nn import functional
from triton.runtime import interpreter

from labkit import checks, counts, device, lessons, machine, memory, ops

pytestmark = pytest.mark.usefixtures("cache")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="plans for other GPUs may not fit this one, and its kernels' accesses cannot be watched",
)
GPU = pytest.mark.skipif(
    not device.has_gpu(),
    reason="CUDA graphs, memory statistics and races exist on a GPU only",
)
LARGE = pytest.mark.skipif(
    machine.identity().memory_bytes < 48 * 2**30,
    reason="more than 2**31 elements, forward and backward, need a GPU with 48 GiB",
)


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


def examine(call, make, *leading, layouts=("contiguous",), dtypes=(fp32,), **options):
    """A check in some layouts only; all of them are the business of a few classes of shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        return checks.check(call, plain, make, shapes=leading, dtypes=dtypes, **options)


def gradients(call, tensors, upstream=None):
    """The output and the gradient of every tensor; upstream twice the output where nothing else is given."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, 2 * y.detach() if upstream is None else upstream)]


def is_right(call, tensors, upstream=None):
    """In these very strides, which a copy in float64 need not have."""
    upstream = 2 * plain(*tensors).detach() if upstream is None else upstream
    wants = gradients(plain, [t.double() for t in tensors], upstream.double())
    for got, want in zip(gradients(call, tensors, upstream), wants, strict=True):
        assert_close(got, want, tensors[0].dtype)


def in_columns(x):
    """The same numbers, their memory (B, C, T)."""
    return x.mT.contiguous().mT


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# --- launches: recorded instead of made, or made and recorded -----------------------------------------


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, KERNELS, monkeypatch)


class Spy(launches_of.Recorder):
    """Stands before a kernel: its launches are recorded, and made."""

    def __getitem__(self, grid):
        record = super().__getitem__(grid)

        def launch(*args, **options):
            record(*args, **options)
            return self.kernel[grid](*args, **options)

        return launch


@pytest.fixture
def seen(lesson, monkeypatch):
    made = []
    for name in KERNELS:
        monkeypatch.setattr(lesson, name, Spy(getattr(lesson, name), made))
    return made


def launches_named(made, kernel):
    return [launch for launch in made if launch.title == kernel]


# --- right on every shape -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "width"), [(5, 16), (3, 20), (2, 70)], ids=["packed", "alone", "wide, in squares"]
)
def test_each_kind_of_width_is_right_in_every_layout(lesson, groups, width):
    """33 rows are a tile and one row, wherever they end; 5 groups are a pack and one."""
    dtypes = checks.DTYPES if width < 64 else (fp32, bf16)
    examine(lesson.grouped_linear, grouped(groups, width), (33,), layouts=checks.LAYOUTS, dtypes=dtypes)


WIDTHS = [
    *((3, d, d) for d in (1, 5, 24, 32)),
    *((2, d, d) for d in (50, 64)),
    (5, 16, 32), (4, 32, 16), (3, 20, 50), (3, 50, 20), (1, 5, 70), (2, 70, 5), (1, 16, 16), (1, 24, 16),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "d_in", "d_out"), WIDTHS, ids=str)
def test_every_width_is_right(lesson, groups, d_in, d_out):
    dtypes = (fp32, bf16) if d_in == d_out else (bf16,)
    examine(lesson.grouped_linear, grouped(groups, d_in, d_out), (37,), dtypes=dtypes)


LEADING = ((1,), (), (0,), (2, 33), (3, 1), (2, 0), (2, 3, 5))


@pytest.mark.parametrize(("groups", "width"), [(5, 16), (3, 20)])
def test_any_number_of_rows_and_dimensions_is_right(lesson, groups, width):
    layouts = ("contiguous", "transposed") if width == 20 else ("contiguous",)
    examine(lesson.grouped_linear, grouped(groups, width), *LEADING, layouts=layouts)


@pytest.mark.parametrize(("groups", "d_in", "d_out"), [(5, 16, 16), (3, 20, 24), (2, 70, 70)])
def test_without_a_bias(lesson, groups, d_in, d_out):
    make = grouped(groups, d_in, d_out, bias=False)
    examine(lesson.grouped_linear, make, (37,), (0,), dtypes=(fp32, fp16))


@pytest.mark.parametrize(("groups", "d_in", "d_out"), [(3, 0, 4), (3, 4, 0), (0, 4, 5)])
def test_no_features_outside_or_inside_and_no_groups(lesson, groups, d_in, d_out):
    examine(lesson.grouped_linear, grouped(groups, d_in, d_out), (5,), (2, 5))


def test_every_group_is_its_own_linear_layer(lesson):
    """Against nn.Linear, not against our own reference."""
    x, weight, bias = drawn(grouped(3, 20, 7), 6)
    parts = [functional.linear(x[:, g * 20 :][:, :20], weight[g].T, bias[g]) for g in range(3)]
    assert_close(lesson.grouped_linear(x, weight, bias), torch.cat(parts, 1).double())


@pytest.mark.parametrize("across", [True, False])
def test_the_first_step_is_right_in_either_order(lesson, across):
    options = dict(dtypes=checks.DTYPES, gradients=False, name="step")
    for groups, width in ((5, 20), (3, 16), (1, 1)):
        examine(lesson.step(across), grouped(groups, width), (70,), (64,), **options)


@pytest.mark.parametrize("across", [True, False])
def test_the_first_programs_share_rows_or_a_group(lesson, across):
    x, weight, bias = drawn(grouped(3, 20), 192)
    y = torch.full_like(x, math.nan)
    lesson.step_kernel[(3,)](x, weight, bias, y, 192, 3, ACROSS=across, D=20, BM=64, BD=32)
    written = y.isnan().logical_not()
    assert written[:64].all() if across else written[:, :20].all()
    assert written.sum() == 3 * 64 * 20


# --- the plans of GPUs that are not here --------------------------------------------------------------

SIZES = [
    (5, 16, 16, 200), (8, 16, 16, 200), (4, 32, 32, 130), (4, 16, 32, 70), (3, 20, 20, 130),
    (4, 50, 64, 130), (2, 64, 64, 130), (2, 100, 100, 70), (1, 128, 128, 70), (1, 200, 100, 70),
    (2, 32, 64, 130), (1, 256, 256, 70),
]  # fmt: skip
"""Groups, widths in and out, rows; those of 50 and 100 start in the middle of 16 bytes."""


def plans_are_right(lesson, patch, target, dtype, sizes):
    pretend(lesson, patch, target, multiprocessors=1)
    for groups, d_in, d_out, rows in sizes:
        examine(lesson.grouped_linear, grouped(groups, d_in, d_out), (rows,), dtypes=(dtype,))


@INTERPRETED
def test_the_plans_of_an_h200_are_right(lesson, monkeypatch):
    plans_are_right(lesson, monkeypatch, "sm_90", bf16, SIZES)


@INTERPRETED
@pytest.mark.parametrize(
    ("target", "dtype", "some"),
    [("sm_90", fp32, (0, 4, 5, 7)), ("sm_80", bf16, (1, 6, 7, 9)), ("sm_120", bf16, (1, 2, 8))],
)
def test_some_plans_of_other_gpus_are_right(lesson, monkeypatch, target, dtype, some):
    plans_are_right(lesson, monkeypatch, target, dtype, [SIZES[number] for number in some])


@INTERPRETED
def test_the_sizes_above_take_every_path(lesson, monkeypatch, launches):
    """A change of the conditions could leave them all on one path, and nothing would tell."""
    pretend(lesson, monkeypatch, "sm_90", multiprocessors=1)
    for groups, d_in, d_out, rows in SIZES:
        launch_both_ways(lesson, bf16, groups, d_in, d_out, rows)
    forwards, backwards = (launches_named(launches, f"{way}_kernel") for way in ("forward", "backward"))
    assert {made.PACK > 1 for made in forwards} == {made.PACK > 1 for made in backwards} == {True, False}
    assert {(made.TMA, made.STORE) for made in forwards} >= set(itertools.product((True, False), repeat=2))
    assert {(made.TMA, made.STORE) for made in backwards} == {(True, True), (False, True), (False, False)}
    assert {made.D_IN == made.BK for made in forwards if made.TMA} == {True, False}
    assert {made.dx is None for made in backwards} == {True, False}
    assert any(made.step > 1 and made.per > 1 for made in forwards), "tiles that lie far apart"
    assert any(made.step == 1 and made.per > 1 for made in forwards), "one after the other"
    assert any(made.per > 1 for made in backwards)
    assert any(made.parts.shape[0] > 1 for made in backwards)
    assert {made.w_tiles is None for made in forwards if made.TMA} == {True, False}
    assert launches_named(launches, "once_kernel")


@INTERPRETED
@pytest.mark.parametrize(("groups", "width"), [(8, 63), (8, 61), (8, 13)])
def test_a_tile_that_starts_before_its_group_reaches_its_end(lesson, monkeypatch, groups, width):
    """The descriptor path begins at a multiple of 16 bytes, up to seven numbers before the group."""
    pretend(lesson, monkeypatch, "sm_90")
    for dtype in (bf16, fp32):
        is_right(lesson.grouped_linear, drawn(grouped(groups, width, 64), 5, dtype=dtype))


def test_no_width_is_cut_off_by_the_shift(lesson, monkeypatch, launches):
    taken = set()
    for target, dtype in itertools.product(("sm_90", "sm_120"), (bf16, fp32)):
        pretend(lesson, monkeypatch, target)
        align = 16 // dtype.itemsize
        for width in range(1, 258):
            x, weight = meta(64, align * width, dtype=dtype), meta(align, width, width, dtype=dtype)
            launches.clear()
            lesson.grouped_linear(x, weight)
            for made in launches:
                if made.options.get("TMA"):
                    shift = max(group * width % align for group in range(align))
                    assert shift + width <= made.BK, (target, dtype, width)
                    taken.add(width)
    assert taken >= {50, 64, 100, 128}


SLICED = [
    ((20, 40), dict(pack=1, rows=32, cols=16, warps=4, stages=1, resident=1)),
    ((20, 24), dict(pack=1, rows=16, cols=16, warps=4, stages=1, resident=1, tiles=3)),
    ((16, 16), dict(pack=2, rows=16, cols=32, warps=4, stages=1, resident=1, tiles=2)),
]


@pytest.mark.parametrize(("widths", "plan"), SLICED, ids=str)
def test_a_weight_may_be_cut_into_slices_and_the_rows_into_any_parts(lesson, monkeypatch, widths, plan):
    monkeypatch.setattr(lesson, "forward_plan", lambda *_: lesson.Plan(**plan))
    for mixed in (False, True):
        made = lesson.Plan(**plan, mixed=mixed)
        monkeypatch.setattr(lesson, "forward_plan", lambda *_, made=made: made)
        examine(lesson.grouped_linear, grouped(3, *widths), (70,), (2, 37), gradients=False)


@pytest.mark.parametrize("side", [16, 32])
def test_a_gradient_may_be_cut_into_squares(lesson, monkeypatch, seen, side):
    plan = lesson.Plan(1, 32, side, 4, 1, 2)
    monkeypatch.setattr(lesson, "backward_plan", lambda *_: plan)
    examine(lesson.grouped_linear, grouped(2, 20, 40), (2, 37), dtypes=(fp32,))
    assert {launch.dx for launch in launches_named(seen, "backward_kernel")} == {None}


@pytest.mark.parametrize("width", [16, 20, 70])
def test_the_sums_over_rows_are_right_in_any_number_of_parts(lesson, monkeypatch, seen, width):
    parts, tensors = set(), drawn(grouped(2, width), 200)
    for count in (1, 3, 132):
        monkeypatch.setattr(lesson, "multiprocessors", lambda count=count: count)
        is_right(lesson.grouped_linear, tensors)
        parts |= {launch.P for launch in launches_named(seen, "sum_kernel")}
    assert len(parts) > 1 and max(parts) >= 3


# --- memory: read where it lies -----------------------------------------------------------------------


def moved(t):
    return t.to(device.name())


def times(t, *shape):
    return t.expand(*shape)


VIEWS = {
    "columns, (B, C, T)": lambda C: moved(torch.randn(2, C, 35)).mT,
    "columns of one sequence": lambda C: moved(torch.randn(C, 35)).T,
    "columns of which some times are left out": lambda C: moved(torch.randn(2, C, 50))[:, :, 7:40].mT,
    "columns, every other sequence": lambda C: moved(torch.randn(5, C, 9))[::2].mT,
    "columns, four dimensions": lambda C: moved(torch.randn(2, 2, C, 9)).mT,
    "every other row": lambda C: moved(torch.randn(70, C))[::2],
    "rows of a wider matrix": lambda C: moved(torch.randn(35, 2 * C))[:, 3 : 3 + C],
    "some times of each sequence": lambda C: moved(torch.randn(3, 40, C))[:, 4:37],
    "times before sequences": lambda C: moved(torch.randn(9, 4, C)).transpose(0, 1),
    "every third column": lambda C: moved(torch.randn(35, 3 * C))[:, ::3],
    "one row for all": lambda C: times(moved(torch.randn(1, C)), 35, C),
    "one row for each sequence": lambda C: times(moved(torch.randn(3, 1, C)), 3, 35, C),
    "one column for all times": lambda C: times(moved(torch.randn(2, C, 1)), 2, C, 35).mT,
    "one number": lambda C: times(moved(torch.randn(1, 1)), 35, C),
}


def a_view_is_right(lesson, view, groups, width):
    torch.manual_seed(0)
    x = VIEWS[view](groups * width)
    is_right(lesson.grouped_linear, [x, *drawn(grouped(groups, width), 1)[1:]])


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_right(lesson, view):
    a_view_is_right(lesson, view, 3, 20)


@pytest.mark.parametrize("view", ["columns, (B, C, T)", "some times of each sequence", "every third column"])
@pytest.mark.parametrize(("groups", "width"), [(5, 16), (2, 70)])
def test_a_view_is_right_packed_and_wide(lesson, view, groups, width):
    a_view_is_right(lesson, view, groups, width)


@INTERPRETED
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_not_copied_in_either_direction(lesson, view):
    """Whatever the upstream gradient's strides: no operation but the kernels."""
    x = VIEWS[view](60).requires_grad_()
    weight, bias = drawn(grouped(3, 20), 1, grad=True)[1:]
    made = []
    forward = counts.count(lambda: made.append(lesson.grouped_linear(x, weight, bias)))
    assert [launch.name for launch in forward.launches] == ["forward_kernel"]
    (y,) = made
    for upstream in (torch.randn_like(y), torch.randn(60).expand_as(y), torch.randn(1).expand_as(y)):
        back = counts.count(
            lambda up=upstream: torch.autograd.grad(y, (x, weight, bias), up, retain_graph=True)
        )
        assert [launch.name for launch in back.launches] == ["backward_kernel", "sum_kernel"]


@pytest.mark.parametrize("view", VIEWS)
def test_the_result_has_the_order_of_x_in_memory(lesson, view):
    x = VIEWS[view](60)
    y = lesson.grouped_linear(x, *drawn(grouped(3, 20, 24), 1)[1:])
    assert (y.mT if view.startswith("columns") else y).is_contiguous()


@pytest.mark.parametrize("view", [view for view in VIEWS if view.startswith("columns")])
def test_the_gradient_of_columns_is_columns(lesson, view):
    """What comes before in a network of (B, C, T) need not turn it."""
    x, (weight, bias) = VIEWS[view](60), drawn(grouped(3, 20), 1)[1:]
    leaf = x.mT.contiguous().requires_grad_()
    y = lesson.grouped_linear(leaf.mT, weight, bias)
    (gradient,) = torch.autograd.grad(y.mT.square().sum(), leaf)
    assert gradient.is_contiguous()
    assert_close(gradient, gradients(plain, [x, weight, bias])[1].mT)


@pytest.mark.parametrize(("groups", "d_in", "d_out"), [(5, 16, 16), (3, 20, 24), (2, 70, 24)])
def test_weights_are_views_too(lesson, groups, d_in, d_out):
    x, weight, bias = drawn(grouped(groups, d_in, d_out), 37)
    linears = weight.mT.contiguous()
    is_right(lesson.grouped_linear, [x, linears.mT, bias])
    is_right(lesson.grouped_linear, [x, weight[:1].expand(groups, -1, -1), bias])
    is_right(lesson.grouped_linear, [x, weight[:, :, :1].expand(-1, -1, d_out), bias])
    is_right(lesson.grouped_linear, [x, weight, bias[:1].expand(groups, -1)])
    is_right(lesson.grouped_linear, [x, weight, bias[:1, :1].expand(groups, d_out)])
    is_right(lesson.grouped_linear, [x, weight, bias.T.contiguous().T])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(5, 16), (3, 20), (2, 70)])
def test_an_expanded_upstream_gradient(lesson, groups, width, columns):
    x, weight, bias = drawn(grouped(groups, width), 2, 35)
    x = in_columns(x) if columns else x
    row = torch.randn(groups * width, device=device.name())
    is_right(lesson.grouped_linear, [x, weight, bias], upstream=row.expand_as(x))
    is_right(lesson.grouped_linear, [x, weight, bias], upstream=in_columns(torch.randn_like(x)))
    leaves = [t.requires_grad_() for t in (x.detach(), weight, bias)]
    lesson.grouped_linear(*leaves).sum().backward()
    wants = gradients(plain, [t.double() for t in leaves], torch.ones_like(x).double())
    for leaf, want in zip(leaves, wants[1:], strict=True):
        assert_close(leaf.grad, want)


@INTERPRETED
@pytest.mark.parametrize(("groups", "width"), [(4, 16), (4, 50), (1, 64)])
def test_rows_of_stride_zero_by_descriptors(lesson, monkeypatch, groups, width):
    pretend(lesson, monkeypatch, "sm_90", multiprocessors=4)
    x, weight, bias = drawn(grouped(groups, width), 70, dtype=bf16)
    is_right(lesson.grouped_linear, [x[:1].expand(70, -1), weight, bias], upstream=x[1:2].expand(70, -1))


SOME = [subset for subset in itertools.product((True, False), repeat=3) if any(subset)]


@pytest.mark.parametrize("needed", SOME, ids=str)
@pytest.mark.parametrize("columns", [False, True])
def test_gradients_of_some_inputs_only(lesson, needed, columns):
    tensors = drawn(grouped(5, 16), 2, 35)
    wants = gradients(plain, tensors)[1:]
    tensors[0] = in_columns(tensors[0]) if columns else tensors[0]
    for tensor, needs in zip(tensors, needed, strict=True):
        tensor.requires_grad_(needs)
    y = lesson.grouped_linear(*tensors)
    y.backward(2 * y.detach())
    for tensor, needs, want in zip(tensors, needed, wants, strict=True):
        assert (tensor.grad is not None) is needs
        if needs:
            assert_close(tensor.grad, want)


@INTERPRETED
def test_the_gradient_of_x_alone_is_one_forward(lesson):
    x, weight, bias = drawn(grouped(3, 20), 37)
    y = lesson.grouped_linear(x.requires_grad_(), weight, bias)
    upstream = torch.randn_like(y)
    made = counts.count(lambda: torch.autograd.grad(y, x, upstream))
    assert [launch.name for launch in made.launches] == ["forward_kernel"]


@INTERPRETED
@pytest.mark.parametrize("width", [20, 70])
def test_gradients_without_that_of_x_take_no_product_with_the_weight(lesson, width):
    x, weight, bias = drawn(grouped(3, width), 37)
    y = lesson.grouped_linear(x, weight.requires_grad_(), bias.requires_grad_())
    upstream = torch.randn_like(y)
    made = counts.count(lambda: torch.autograd.grad(y, (weight, bias), upstream)).launches
    kernels = [launch for launch in made if launch.programs]
    assert [launch.name for launch in kernels] == ["backward_kernel", "sum_kernel"]
    squares = math.ceil(width / 64)
    assert kernels[0].bytes_read == 4 * squares * (x.numel() + y.numel())
    assert kernels[0].bytes_written == 4 * kernels[0].programs // (3 * squares**2) * weight.numel()


def test_inputs_are_kept_but_nothing_else(lesson):
    tensors = drawn(grouped(3, 20), 37, grad=True)
    saved = []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lesson.grouped_linear(*tensors)
    assert set(saved) <= {t.data_ptr() for t in tensors}
    with torch.no_grad():
        assert lesson.grouped_linear(*tensors).grad_fn is None


# --- every byte once ----------------------------------------------------------------------------------


def kernels_of(call, *tensors):
    """The launches of Triton kernels in a call, between fences, so that strays hit nothing else."""
    fences = checks.Fences()
    placed = [fences.place(tensor, "contiguous") for tensor in tensors]
    with fences:
        made = counts.count(lambda: call(*placed)).launches
    return [launch for launch in made if launch.programs]


@INTERPRETED
@pytest.mark.parametrize(("groups", "d_in", "d_out"), [(5, 16, 16), (5, 32, 16), (3, 20, 50), (2, 64, 64)])
@pytest.mark.parametrize("rows", [5, 170])
def test_every_number_is_read_and_written_once(lesson, monkeypatch, groups, d_in, d_out, rows):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    monkeypatch.setattr(lesson, "multiprocessors", lambda: 30)
    x, weight, bias = drawn(grouped(groups, d_in, d_out), rows)
    y, w, b = rows * groups * d_out, weight.numel(), bias.numel()
    (forward,) = kernels_of(lesson.grouped_linear, x, weight, bias)
    packs = math.ceil(groups / lesson.forward_plan(d_in, d_out, 4, False).pack)
    parts, rest = divmod(forward.programs, packs)
    assert rest == 0 and (parts > 1) is (rows > 32)
    assert (forward.bytes_read, forward.bytes_written) == (4 * (x.numel() + parts * (w + b)), 4 * y)

    def both(x, weight, bias):
        return gradients(lesson.grouped_linear, (x, weight, bias), torch.ones(rows, groups * d_out))

    _, back, total = kernels_of(both, x, weight, bias)
    packs = math.ceil(groups / lesson.backward_plan(d_in, d_out, 4).pack)
    parts, rest = divmod(back.programs, packs)
    assert rest == 0 and (parts > 1) is (rows > 32)
    assert back.bytes_read == 4 * (y + x.numel() + parts * w)
    assert back.bytes_written == 4 * (x.numel() + parts * (w + b))
    assert (total.bytes_read, total.bytes_written) == (4 * parts * (w + b), 4 * (w + b))


@INTERPRETED
@pytest.mark.parametrize(("groups", "d_in", "d_out", "rows"), [(2, 70, 130, 70), (1, 5, 70, 1)])
def test_a_wide_product_reads_and_writes_nothing_beyond_the_end(lesson, groups, d_in, d_out, rows):
    """Tiles of 64 rows and, in float32, of 64 columns; squares of 64 for the gradient of the weight."""
    x, weight, bias = drawn(grouped(groups, d_in, d_out), rows)
    down, across, inner = (math.ceil(n / 64) for n in (rows, d_out, d_in))
    w, b, y = weight.numel(), bias.numel(), rows * groups * d_out
    (forward,) = kernels_of(lesson.grouped_linear, x, weight, bias)
    assert forward.programs == down * across * groups
    assert forward.bytes_read == 4 * (across * x.numel() + down * (w + b))
    assert forward.bytes_written == 4 * y

    def both(x, weight, bias):
        return gradients(lesson.grouped_linear, (x, weight, bias), torch.ones(rows, groups * d_out))

    _, back, _, dx = kernels_of(both, x, weight, bias)
    parts, rest = divmod(back.programs, inner * across * groups)
    assert rest == 0
    assert back.bytes_read == 4 * (across * x.numel() + inner * y)
    assert back.bytes_written == 4 * parts * w
    assert dx.bytes_read == 4 * (inner * y + down * w) and dx.bytes_written == 4 * x.numel()


@INTERPRETED
@pytest.mark.parametrize("across", [True, False])
def test_the_first_step_reads_and_writes_nothing_beyond_the_end(lesson, across):
    x, weight, bias = drawn(grouped(3, 20), 70)
    (made,) = kernels_of(lesson.step(across), x, weight, bias)
    assert made.programs == 2 * 3
    assert made.bytes_read == 4 * (x.numel() + 2 * (weight.numel() + bias.numel()))
    assert made.bytes_written == 4 * x.numel()


# --- a number that is not finite stays in its group ---------------------------------------------------


def spoiled(tensors, upstream, which):
    """Copies with NaN at the one end of group 1 and an infinity at the other, and the gradient of y."""
    x, weight, bias, dy = (t.clone() for t in (*tensors, upstream))
    if which == "weights":
        weight[1, 0, 0], weight[1, -1, -1], bias[1, 0] = math.nan, math.inf, math.nan
    else:
        rows = (x if which == "x" else dy).unflatten(-1, (len(weight), -1))
        rows[..., 3, 1, 0], rows[..., -2, 1, -1] = math.nan, -math.inf
    return (x, weight, bias), dy


REACHED = {"x": (0, 2), "weights": (0, 1), "upstream": (1, 2, 3)}
"""Which of output and gradients a spoilt tensor reaches, in its own group."""


def by_groups(results, groups):
    """Output and gradients with the groups first."""
    y, dx, dweight, dbias = results
    return [*(t.unflatten(-1, (groups, -1)).movedim(-2, 0) for t in (y, dx)), dweight, dbias]


def stays_in_its_group(lesson, dtype, groups, d_in, d_out, leading, columns=False):
    *tensors, upstream = drawn(
        lambda leading: (*grouped(groups, d_in, d_out)(leading), torch.randn(*leading, groups * d_out)),
        *leading,
        dtype=dtype,
    )
    tensors[0] = in_columns(tensors[0]) if columns else tensors[0]
    wants = gradients(plain, [t.double() for t in tensors], upstream.double())
    for which, reached in REACHED.items():
        given, dy = spoiled(tensors, upstream, which)
        got = by_groups(gradients(lesson.grouped_linear, given, dy), groups)
        for number, (one, want) in enumerate(zip(got, by_groups(wants, groups), strict=True)):
            assert bool(one[1].isfinite().all()) is (number not in reached), (which, number)
            for group in range(groups):
                if group != 1:
                    assert_close(one[group], want[group], dtype)


@pytest.mark.parametrize(
    ("groups", "d_in", "d_out", "columns"),
    [(5, 16, 16, False), (3, 20, 20, False), (3, 20, 20, True), (4, 50, 64, False), (3, 70, 20, False)],
)
def test_nan_and_infinity_stay_in_their_group(lesson, groups, d_in, d_out, columns):
    stays_in_its_group(lesson, fp32, groups, d_in, d_out, (2, 35), columns)


@INTERPRETED
@pytest.mark.parametrize(
    ("dtype", "groups", "d_in", "d_out"), [(bf16, 4, 50, 64), (fp32, 4, 50, 50), (bf16, 2, 100, 36)]
)
def test_what_comes_along_by_descriptors_stays_out(lesson, monkeypatch, seen, dtype, groups, d_in, d_out):
    """As on an H200, whose tiles hold numbers of both neighbours."""
    pretend(lesson, monkeypatch, "sm_90", multiprocessors=4)
    stays_in_its_group(lesson, dtype, groups, d_in, d_out, (130,))
    made = launches_named(seen, "forward_kernel")
    assert made and all(launch.TMA and launch.BK > launch.D_IN for launch in made)


@INTERPRETED
@pytest.mark.parametrize(("groups", "width"), [(8, 16), (3, 32)])
def test_gradients_by_descriptors_stay_in_their_group(lesson, monkeypatch, seen, groups, width):
    pretend(lesson, monkeypatch, "sm_90", multiprocessors=4)
    stays_in_its_group(lesson, bf16, groups, width, width, (130,))
    back = launches_named(seen, "backward_kernel")
    assert back and all(launch.TMA and launch.STORE for launch in back)


@INTERPRETED
@pytest.mark.parametrize(("dtype", "groups"), [(fp32, 3), (bf16, 4)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("store", [False, True])
def test_the_shifted_descriptor_path(lesson, monkeypatch, seen, dtype, groups, store):
    """Groups of 20 in tiles of 32: both neighbours come along. Their rows are aligned, most groups not."""
    d_out = 32 if store else 20
    plan = lesson.Plan(1, 32, 32, 4, 1, 1, 2, tma=True, store=store)
    monkeypatch.setattr(lesson, "forward_plan", lambda *_: plan)
    monkeypatch.setattr(lesson, "aligned", lambda t: True)
    x, weight, bias = drawn(grouped(groups, 20, d_out), 150, dtype=dtype)
    wants = plain(*(t.double() for t in (x, weight, bias)))
    assert_close(lesson.grouped_linear(x, weight, bias), wants, dtype)
    assert_close(lesson.grouped_linear(x, weight), wants - bias.double().flatten(), dtype)
    spoilt, lost = x.clone(), torch.zeros(150, groups, dtype=torch.bool)
    places = ((0, 1, 0), (149, 1, 19), (70, 0, 19), (71, groups - 1, 0), (5, 0, 0), (100, 1, 7))
    for (row, group, column), value in zip(places, itertools.cycle((math.nan, math.inf)), strict=False):
        spoilt[row, group * 20 + column] = value
        lost[row, group] = True
    y = lesson.grouped_linear(spoilt, weight, bias).unflatten(1, (groups, -1))
    assert not y[lost].isfinite().any()
    y[lost] = wants.unflatten(1, (groups, -1))[lost].to(dtype)
    assert_close(y.flatten(1), wants, dtype)
    assert {launch.TMA for launch in seen} == {True}
    assert {launch.STORE for launch in seen} == {False}, "the second pass would meet stores under way"


# --- more elements than 32 bits count -----------------------------------------------------------------


@pytest.fixture
def overflow_is_an_error(monkeypatch):
    """Before an address that ran over could be read."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))


APART = {
    "rows": ((70, 60), (2**25, 1), 3),
    "sequences": ((3, 5, 60), (2**30, 60, 1), 3),
    "columns": ((9, 40), (1, 2**26), 8),
    "rows of wide groups": ((70, 70), (2**25, 1), 1),
}
"""Shape, strides, groups of tensors that span more than 2**31 elements, of which few are ever touched."""
FARTHER = {
    "rows of a tile": ((34, 20), (2**26, 1), 1),
    "columns of a group": ((9, 20), (1, 2**27), 1),
    "columns of a wide group": ((9, 70), (1, 2**25), 1),
}


def far_apart_is_right(lesson, shape, strides, groups):
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    near, weight, bias = drawn(grouped(groups, shape[-1] // groups), *shape[:-1], dtype=bf16)
    far = torch.empty(span, dtype=bf16).as_strided(shape, strides).copy_(near)
    is_right(lesson.grouped_linear, [far, weight, bias])
    is_right(lesson.grouped_linear, [near, weight, bias], upstream=far)


@INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
@pytest.mark.parametrize("kind", APART)
def test_tiles_that_lie_more_than_32_bits_apart(lesson, kind):
    far_apart_is_right(lesson, *APART[kind])


@INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
@pytest.mark.parametrize("kind", FARTHER)
def test_a_tile_whose_numbers_lie_more_than_32_bits_apart(lesson, kind):
    far_apart_is_right(lesson, *FARTHER[kind])


def many_rows_are_right(lesson, batches, times, groups, width, columns, at_once=16):
    """Every gradient of a weight, and the rows at the beginning, in the middle and at the end."""
    C, options = groups * width, dict(device=device.name(), dtype=bf16)
    x = torch.randn(batches, C, times, **options).mT if columns else torch.randn(batches, times, C, **options)
    tensors = [t.requires_grad_() for t in (x, *drawn(grouped(groups, width), 1, dtype=bf16)[1:])]
    y = lesson.grouped_linear(*tensors)
    upstream = y.detach()
    dx, *sums = torch.autograd.grad(y, tensors, upstream)
    x, weight, bias = (t.detach() for t in tensors)
    totals = [torch.zeros_like(t, dtype=torch.float64) for t in (weight, bias)]
    parts = [slice(start, start + at_once) for start in range(0, batches, at_once)]
    for part in parts:
        exact = [t.double() for t in (x[part], weight, bias)]
        wants = gradients(plain, exact, upstream[part].double())
        totals = [total + want for total, want in zip(totals, wants[2:], strict=True)]
        if part in (parts[0], parts[len(parts) // 2], parts[-1]):
            assert_close(upstream[part], wants[0], bf16)
            assert_close(dx[part], wants[1], bf16)
    for got, want in zip(sums, totals, strict=True):
        assert_close(got, want, bf16)


@LARGE
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(128, 16), (100, 20), (32, 64), (20, 100)])
def test_more_elements_than_32_bits_count(lesson, groups, width, columns):
    times = 1001 if width == 20 else 1024
    many_rows_are_right(lesson, 2**31 // (groups * width * times) + 3, times, groups, width, columns)


# --- the same bits, inside torch.compile, inside autocast ---------------------------------------------


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(5, 16), (3, 20)])
def test_two_runs_agree_to_the_last_bit(lesson, monkeypatch, groups, width, columns):
    monkeypatch.setattr(lesson, "multiprocessors", lambda: 132)  # many parts to be added
    x, weight, bias = drawn(grouped(groups, width), 2, 70, dtype=bf16)
    tensors = [in_columns(x) if columns else x, weight, bias]
    assert equal(gradients(lesson.grouped_linear, tensors), gradients(lesson.grouped_linear, tensors))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("leading", "columns", "bias"),
    [((2, 35), True, True), ((2, 35), False, False), ((6,), False, True), ((0, 5), True, False)],
    ids=str,
)
def test_torch_compile_takes_it_whole(lesson, leading, columns, bias):
    x, *weights = drawn(grouped(3, 20, 24, bias), *leading)
    tensors = [in_columns(x) if columns else x, *weights]

    def layer(x, *weights):
        return torch.tanh(lesson.grouped_linear(x * 2, *weights))

    want = gradients(layer, tensors)
    got = gradients(compiled(layer), tensors)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other.double())
    assert got[0].stride() == want[0].stride()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("columns", [False, True])
def test_the_number_of_rows_may_be_dynamic(lesson, columns):
    layer = compiled(lesson.grouped_linear, dynamic=True)
    for rows in (5, 35):
        x, *weights = drawn(grouped(3, 20, 24), 2, rows)
        tensors = [in_columns(x) if columns else x, *weights]
        want = gradients(lesson.grouped_linear, tensors)
        for one, other in zip(gradients(layer, tensors), want, strict=True):
            assert_close(one, other.double())  # dY may come in other strides, and db is added in their order


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("columns", "name"), [(False, "grouped_linear"), (True, "grouped_linear_columns")])
def test_a_compiled_graph_is_one_operator(lesson, columns, name):
    graphs = []

    def record(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    x, *weights = drawn(grouped(3, 20), 2, 35)
    x = in_columns(x) if columns else x
    torch.compile(lesson.grouped_linear, backend=record, fullgraph=True)(x, *weights)
    (graph,) = graphs
    assert [str(n.target) for n in graph.graph.nodes if "labkit" in str(n.target)] == [
        f"labkit.{name}.default"
    ]


def test_a_second_derivative_is_refused(lesson):
    tensors = drawn(grouped(3, 20), 4, grad=True)
    y = lesson.grouped_linear(*tensors).square().sum()
    dx, *_ = torch.autograd.grad(y, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_autograds_own_check_in_float32(lesson):
    """Along a random direction: what the gradients say the loss changes by is what it changes by."""
    tensors = drawn(grouped(3, 20, 24), 37)
    moves = [torch.randn_like(t) for t in tensors]
    upstream = torch.randn(37, 72, device=device.name())
    _, *made = gradients(lesson.grouped_linear, tensors, upstream)
    said = sum((g.double() * m.double()).sum() for g, m in zip(made, moves, strict=True))
    ends = [
        plain(*(t.double() + step * m.double() for t, m in zip(tensors, moves, strict=True)))
        for step in (1e-3, -1e-3)
    ]
    changed = ((ends[0] - ends[1]) * upstream.double()).sum().item() / 2e-3
    assert changed == pytest.approx(said.item(), rel=1e-4)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_autocast_computes_in_half_and_gives_gradients_in_float32(lesson, columns, dtype):
    x, *weights = drawn(grouped(3, 20, 24), 2, 35)
    tensors = [t.requires_grad_() for t in (in_columns(x) if columns else x, *weights)]
    with torch.autocast(device.name(), dtype=dtype):
        y = lesson.grouped_linear(*tensors)
        mixed = lesson.grouped_linear(tensors[0].to(dtype), *weights)
    assert torch.equal(y, mixed)
    wants = gradients(plain, [t.detach().to(dtype).double() for t in tensors])
    assert_close(y, wants[0], dtype)
    made = torch.autograd.grad(y, tensors, 2 * y.detach())
    for gradient, want in zip(made, wants[1:], strict=True):
        assert gradient.dtype is fp32
        assert not checks.diagnose(gradient, want, 2 * checks.TOLERANCE[dtype])


def test_outside_autocast_nothing_is_rounded(lesson):
    x, weight, bias = drawn(grouped(3, 20), 5)
    with torch.autocast(device.name(), dtype=bf16, enabled=False):
        assert lesson.grouped_linear(x, weight, bias).dtype is fp32


# --- wrong calls --------------------------------------------------------------------------------------

X, WEIGHT, BIAS = torch.ones(4, 6), torch.ones(2, 3, 5), torch.ones(2, 5)
WRONG = {
    "a scalar": ("x", (r"\.\.\.", 6), torch.tensor(1.0), WEIGHT, BIAS),
    "other features": ("x", (r"\.\.\.", 6), torch.ones(4, 7), WEIGHT, BIAS),
    "the features of one group": ("x", (r"\.\.\.", 6), torch.ones(4, 2, 3), WEIGHT, BIAS),
    "features before times": ("x", (r"\.\.\.", 6), torch.ones(1, 6, 4), WEIGHT, BIAS),
    "one weight": ("weight", ("any", "any", "any"), X, torch.ones(3, 5), BIAS),
    "the weight of a convolution": ("weight", ("any", "any", "any"), X, torch.ones(10, 3, 1, 1), BIAS),
    "a scalar as weight": ("weight", ("any", "any", "any"), X, torch.tensor(1.0), BIAS),
    "one bias for all": ("bias", (2, 5), X, WEIGHT, torch.ones(5)),
    "one bias for all, with its dimension": ("bias", (2, 5), X, WEIGHT, torch.ones(1, 5)),
    "a flat bias": ("bias", (2, 5), X, WEIGHT, torch.ones(10)),
    "a bias of d_in": ("bias", (2, 5), X, WEIGHT, torch.ones(2, 3)),
}
MIXED = {
    "whole numbers": ("weight", X.int(), WEIGHT.int(), BIAS.int()),
    "double precision": ("weight", X.double(), WEIGHT.double(), BIAS.double()),
    "x in double": ("x", X.double(), WEIGHT, BIAS),
    "x in half": ("x", X.half(), WEIGHT, BIAS),
    "a bias in bf16": ("bias", X, WEIGHT, BIAS.bfloat16()),
    "a bias in double": ("bias", X, WEIGHT, BIAS.double()),
    "complex numbers": ("weight", X.cfloat(), WEIGHT.cfloat(), None),
    "x elsewhere": ("x", X.to("meta"), WEIGHT, BIAS),
    "a bias elsewhere": ("bias", X, WEIGHT, BIAS.to("meta")),
}


def placed(tensors):
    return [t if t is None or t.device.type == "meta" else t.to(device.name()) for t in tensors]


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_shape_is_named_with_the_right_one(lesson, call):
    argument, wanted, *tensors = WRONG[call]
    shape = ", ".join(map(str, wanted))
    with pytest.raises(ValueError, match=rf"^{argument}: has shape \(.*\), should be \({shape}\)$"):
        lesson.grouped_linear(*placed(tensors))


@pytest.mark.parametrize("call", MIXED)
def test_a_wrong_dtype_or_device_is_named(lesson, call):
    argument, *tensors = MIXED[call]
    with pytest.raises(ValueError, match=rf"^{argument}: (has dtype|is on) .*should be"):
        lesson.grouped_linear(*placed(tensors))


def test_inside_autocast_double_precision_is_refused_too(lesson):
    x, weight, bias = placed((X, WEIGHT, BIAS))
    with torch.autocast(device.name(), dtype=bf16):  # noqa: SIM117
        with pytest.raises(ValueError, match=r"^x: has dtype torch.float64"):
            lesson.grouped_linear(x.double(), weight, bias)


# --- on a GPU -----------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("width", [16, 20, 50, 64, 300])
def test_both_directions_can_be_captured_in_a_graph(lesson, width, columns):
    x, *weights = drawn(grouped(4, width), 2, 128, dtype=bf16)
    tensors = [in_columns(x) if columns else x, *weights]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles
            gradients(lesson.grouped_linear, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(lesson.grouped_linear, tensors)
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    assert equal(captured, gradients(lesson.grouped_linear, tensors))


@GPU
def test_the_forward_alone_can_be_captured(lesson):
    tensors = drawn(grouped(4, 64), 256, dtype=bf16)
    replay = ops.replayed(lesson.grouped_linear)
    assert torch.equal(replay(*tensors), lesson.grouped_linear(*tensors))
    tensors[0].normal_()
    assert torch.equal(replay(*tensors), lesson.grouped_linear(*tensors))


@GPU
@pytest.mark.parametrize(
    ("dtype", "width", "columns"),
    [
        *((bf16, width, False) for width in (16, 32, 50, 64, 100, 128, 256, 300)),
        *((bf16, width, True) for width in (16, 64, 100)),
        *((fp32, width, False) for width in (16, 64, 100)),
        (fp16, 64, False),
    ],
    ids=str,
)
def test_large_inputs_are_right_and_the_same_from_run_to_run(lesson, dtype, width, columns):
    """A race shows once in a while, and where all of the GPU is at work."""
    x, *weights = drawn(grouped(48, width), 8, 512, dtype=dtype)
    tensors = [in_columns(x) if columns else x, *weights]
    first = gradients(lesson.grouped_linear, tensors)
    for got, want in zip(
        first, gradients(plain, [t.double() for t in tensors], 2 * first[0].double()), strict=True
    ):
        assert checks.relative_error(got, want) < checks.TOLERANCE[dtype]
    for _ in range(10):
        assert equal(gradients(lesson.grouped_linear, tensors), first)


@GPU
@pytest.mark.parametrize("width", [16, 64, 100, 256, 512])
def test_float32_is_at_most_twice_as_far_off_as_cublas(lesson, width):
    x, weight, bias = drawn(grouped(16, width), 2048)
    exact = plain(x.double(), weight.double(), bias.double())
    with device.full_float32():
        batched = torch.bmm(x.view(-1, 16, width).transpose(0, 1), weight) + bias[:, None]
        ours = lesson.grouped_linear(x, weight, bias)
    theirs = batched.transpose(0, 1).flatten(1)
    assert checks.relative_error(ours, exact) <= 2 * checks.relative_error(theirs, exact)


@GPU
@pytest.mark.parametrize(("d_in", "d_out"), [(50, 64), (50, 50), (100, 100), (20, 20), (16, 16)])
def test_nan_stays_in_its_group_where_all_of_the_gpu_is_at_work(lesson, d_in, d_out):
    for _ in range(3):
        stays_in_its_group(lesson, bf16, 16, d_in, d_out, (4096,))


@GPU
@pytest.mark.parametrize("columns", [False, True])
def test_the_forward_takes_no_memory_but_the_result(lesson, columns):
    x, *weights = drawn(grouped(16, 64), 8, 512, dtype=bf16)
    x = in_columns(x) if columns else x
    assert memory.peak_bytes(lambda: lesson.grouped_linear(x, *weights)) == x.nbytes


@GPU
def test_a_gpu_other_than_the_first_is_used(lesson):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    tensors = [t.to("cuda:1") for t in drawn(grouped(4, 64), 70)]
    assert_close(lesson.grouped_linear(*tensors), plain(*(t.double() for t in tensors)))
