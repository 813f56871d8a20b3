"""Grouped Linears: what lies where. Plans of other GPUs, views, every byte once, NaN, and 2**31 elements."""

import math

import cases
import launches
import operators as op
import pytest
import torch
from grouped import KERNELS, assert_right, examine, grouped, in_columns, plain
from operators import assert_close, bf16, drawn, fp32, gradients, limits_of

import labkit
from labkit.kernels import grouped as family
from labkit.kernels import grouped_linear
from labkit.measure import launch_counts


class Spy(launches.Recorder):
    """Stands before a kernel: its launches are recorded, and made."""

    def __getitem__(self, grid):
        record = super().__getitem__(grid)

        def launch(*args, **options):
            record(*args, **options)
            return self.kernel[grid](*args, **options)

        return launch


@pytest.fixture
def seen(monkeypatch):
    """The launches that were made."""
    made = []
    for name in KERNELS[family]:
        monkeypatch.setattr(family, name, Spy(getattr(family, name), made))
    return made


def named(made, kernel):
    return [launch for launch in made if launch.title == kernel]


# --- the plans of GPUs that are not here --------------------------------------------------------------

SIZES = [
    (5, 16, 16, 200), (4, 32, 32, 130), (4, 16, 32, 70), (4, 50, 64, 130), (2, 64, 64, 130),
    (2, 100, 100, 70), (1, 200, 100, 70), (1, 256, 256, 70),
]  # fmt: skip
"""Groups, widths in and out, rows; those of 50 and 100 start in the middle of 16 bytes."""


@op.INTERPRETED
@pytest.mark.parametrize(
    ("target", "dtype", "some"),
    [
        ("sm_90", bf16, range(len(SIZES))),
        ("sm_90", fp32, (0, 3, 5)),
        ("sm_80", bf16, (0, 4, 6)),
        ("sm_120", bf16, (1, 4)),
    ],
    ids=str,
)
def test_the_plans_of_other_gpus_are_right(monkeypatch, target, dtype, some):
    op.pretend(monkeypatch, limits_of(target, multiprocessors=1), family)
    for groups, d_in, d_out, rows in (SIZES[number] for number in some):
        examine(grouped(groups, d_in, d_out), (rows,), dtypes=(dtype,))


@op.INTERPRETED
@pytest.mark.parametrize(("groups", "width"), [(8, 63), (8, 13)])
def test_a_tile_that_starts_before_its_group_reaches_its_end(monkeypatch, groups, width):
    """The descriptor path begins at a multiple of 16 bytes, up to seven numbers before the group."""
    op.pretend(monkeypatch, limits_of("sm_90"), family)
    for dtype in (bf16, fp32):
        assert_right(drawn(grouped(groups, width, 64), 5, dtype=dtype))


@op.INTERPRETED
@pytest.mark.parametrize("width", [16, 20, 70])
def test_the_sums_over_rows_are_right_in_any_number_of_parts(monkeypatch, seen, width):
    tensors = drawn(grouped(2, width), 200)
    for count in (1, 132):
        op.pretend(monkeypatch, family.DeviceLimits(count, 0, True), family)
        assert_right(tensors)
    parts = {launch.P for launch in named(seen, "sum_kernel")}
    assert len(parts) > 1 and max(parts) >= 3


# --- memory: read where it lies -----------------------------------------------------------------------

VIEWS = {
    "columns, (B, C, T)": lambda C: torch.randn(2, C, 35).mT,
    "columns of one sequence": lambda C: torch.randn(C, 35).T,
    "columns of which some times are left out": lambda C: torch.randn(2, C, 50)[:, :, 7:40].mT,
    "columns, four dimensions": lambda C: torch.randn(2, 2, C, 9).mT,
    "rows of a wider matrix": lambda C: torch.randn(35, 2 * C)[:, 3 : 3 + C],
    "some times of each sequence": lambda C: torch.randn(3, 40, C)[:, 4:37],
    "times before sequences": lambda C: torch.randn(9, 4, C).transpose(0, 1),
    "every third column": lambda C: torch.randn(35, 3 * C)[:, ::3],
    "one row for all": lambda C: torch.randn(1, C).expand(35, C),
    "one column for all times": lambda C: torch.randn(2, C, 1).expand(2, C, 35).mT,
    "one number": lambda C: torch.randn(1, 1).expand(35, C),
}


def view(name, C):
    torch.manual_seed(0)
    with torch.device(labkit.gpu.device()):
        return VIEWS[name](C)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_right_and_the_result_has_its_order_in_memory(name):
    x, (weight, bias) = view(name, 60), drawn(grouped(3, 20, 24), 1)[1:]
    assert_right([x, weight, bias])
    y = grouped_linear(x, weight, bias)
    assert (y.mT if name.startswith("columns") else y).is_contiguous()


@op.INTERPRETED
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_not_copied_in_either_direction(name):
    """Whatever the upstream gradient's strides: no operation but the kernels."""
    x, made = view(name, 60).requires_grad_(), []
    weight, bias = drawn(grouped(3, 20), 1, grad=True)[1:]
    forward = launch_counts.count(lambda: made.append(grouped_linear(x, weight, bias)))
    assert [launch.name for launch in forward] == ["forward_kernel"]
    (y,) = made
    for upstream in (torch.randn_like(y), torch.randn(60).expand_as(y), torch.randn(1).expand_as(y)):
        back = launch_counts.count(
            lambda up=upstream: torch.autograd.grad(y, (x, weight, bias), up, retain_graph=True)
        )
        assert [launch.name for launch in back] == ["backward_kernel", "sum_kernel"]


def test_the_gradient_of_columns_is_columns():
    """What comes before in a network of (B, C, T) need not turn it."""
    x, weight, bias = drawn(grouped(3, 20), 2, 35)
    leaf = x.mT.contiguous().requires_grad_()
    (gradient,) = torch.autograd.grad(grouped_linear(leaf.mT, weight, bias).mT.square().sum(), leaf)
    assert gradient.is_contiguous()
    assert_close(gradient, gradients(plain, [x, weight, bias])[1].mT)


@pytest.mark.parametrize("sizes", [(5, 16, 16), (3, 20, 24), (2, 70, 24)], ids=str)
def test_weights_are_views_too(sizes):
    (groups, _, d_out), (x, weight, bias) = sizes, drawn(grouped(*sizes), 37)
    for seen_as in (
        (weight.mT.contiguous().mT, bias),
        (weight[:1].expand(groups, -1, -1), bias[:1].expand(groups, -1)),
        (weight[:, :, :1].expand(-1, -1, d_out), bias[:1, :1].expand(groups, d_out)),
        (weight, bias.T.contiguous().T),
    ):
        assert_right([x, *seen_as])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(5, 16), (3, 20), (2, 70)])
def test_an_upstream_gradient_of_other_strides(groups, width, columns):
    x, *weights = drawn(grouped(groups, width), 2, 35)
    tensors = [in_columns(x) if columns else x, *weights]
    row = torch.randn(groups * width, device=labkit.gpu.device())
    for upstream in (row.expand_as(x), in_columns(torch.randn_like(x)), row[:1].expand_as(x)):
        assert_right(tensors, upstream)


@op.INTERPRETED
@pytest.mark.parametrize(("groups", "width"), [(4, 16), (4, 50), (1, 64)])
def test_rows_of_stride_zero_by_descriptors(monkeypatch, groups, width):
    op.pretend(monkeypatch, limits_of("sm_90", multiprocessors=4), family)
    x, *weights = drawn(grouped(groups, width), 70, dtype=bf16)
    assert_right([x[:1].expand(70, -1), *weights], upstream=x[1:2].expand(70, -1))


# --- every byte once ----------------------------------------------------------------------------------


def both_ways(*tensors):
    groups, _, d_out = tensors[1].shape
    return gradients(grouped_linear, tensors, torch.ones(len(tensors[0]), groups * d_out))


@op.INTERPRETED
@pytest.mark.parametrize(("groups", "d_in", "d_out"), [(5, 16, 16), (5, 32, 16), (3, 20, 50), (2, 64, 64)])
@pytest.mark.parametrize("rows", [5, 170])
def test_every_number_is_read_and_written_once(monkeypatch, groups, d_in, d_out, rows):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    one = family.DeviceLimits(30, 0, True)
    op.pretend(monkeypatch, one, family)
    x, weight, bias = drawn(grouped(groups, d_in, d_out), rows)
    y, w, b = rows * groups * d_out, weight.numel(), bias.numel()
    (forward,) = op.kernels_of(grouped_linear, x, weight, bias)
    parts, rest = divmod(
        forward.programs, math.ceil(groups / family.forward_tiling(d_in, d_out, 4, False, one).pack)
    )
    assert rest == 0 and (parts > 1) is (rows > 32)
    assert (forward.bytes_read, forward.bytes_written) == (4 * (x.numel() + parts * (w + b)), 4 * y)
    _, back, total = op.kernels_of(both_ways, x, weight, bias)
    tiling = family.backward_tiling(d_in, d_out, 4, one)
    parts, rest = divmod(back.programs, math.ceil(groups / tiling.pack))
    assert rest == 0 and (parts > 1) is (rows > 32)
    assert back.bytes_read == 4 * (y + x.numel() + parts * w)
    assert back.bytes_written == 4 * (x.numel() + parts * (w + b))
    assert (total.bytes_read, total.bytes_written) == (4 * parts * (w + b), 4 * (w + b))


@op.INTERPRETED
@pytest.mark.parametrize(("groups", "d_in", "d_out", "rows"), [(2, 70, 130, 70), (1, 5, 70, 1)])
def test_a_wide_product_reads_and_writes_nothing_beyond_the_end(groups, d_in, d_out, rows):
    """Tiles of 64 rows and, in float32, of 64 columns; squares of 64 for the gradient of the weight."""
    x, weight, bias = drawn(grouped(groups, d_in, d_out), rows)
    down, across, inner = (math.ceil(n / 64) for n in (rows, d_out, d_in))
    w, b, y = weight.numel(), bias.numel(), rows * groups * d_out
    (forward,) = op.kernels_of(grouped_linear, x, weight, bias)
    assert forward.programs == down * across * groups
    assert (forward.bytes_read, forward.bytes_written) == (4 * (across * x.numel() + down * (w + b)), 4 * y)
    _, back, _, dx = op.kernels_of(both_ways, x, weight, bias)
    parts, rest = divmod(back.programs, inner * across * groups)
    assert rest == 0
    assert back.bytes_read == 4 * (across * x.numel() + inner * y)
    assert back.bytes_written == 4 * parts * (w + b)
    assert (dx.bytes_read, dx.bytes_written) == (4 * (inner * y + down * w), 4 * x.numel())


# --- a number that is not finite stays in its group ---------------------------------------------------

REACHED = {"x": (0, 2), "weights": (0, 1), "upstream": (1, 2, 3)}
"""Which of output and gradients a spoilt tensor reaches, in its own group."""


def spoiled(tensors, upstream, which):
    """Copies with NaN at the one end of group 1 and an infinity at the other, and the gradient of y."""
    x, weight, bias, dy = (t.clone() for t in (*tensors, upstream))
    if which == "weights":
        weight[1, 0, 0], weight[1, -1, -1], bias[1, 0] = math.nan, math.inf, math.nan
    else:
        rows = (x if which == "x" else dy).unflatten(-1, (len(weight), -1))
        rows[..., 3, 1, 0], rows[..., -2, 1, -1] = math.nan, -math.inf
    return (x, weight, bias), dy


def by_groups(results, groups):
    """Output and gradients with the groups first."""
    y, dx, dweight, dbias = results
    return [*(t.unflatten(-1, (groups, -1)).movedim(-2, 0) for t in (y, dx)), dweight, dbias]


def stays_in_its_group(dtype, groups, d_in, d_out, leading, columns=False):
    tensors = drawn(grouped(groups, d_in, d_out), *leading, dtype=dtype)
    upstream = torch.randn(*leading, groups * d_out).to(tensors[0])
    tensors[0] = in_columns(tensors[0]) if columns else tensors[0]
    wants = gradients(plain, [t.double() for t in tensors], upstream.double())
    for which, reached in REACHED.items():
        given, dy = spoiled(tensors, upstream, which)
        got = by_groups(gradients(grouped_linear, given, dy), groups)
        for number, (one, want) in enumerate(zip(got, by_groups(wants, groups), strict=True)):
            assert bool(one[1].isfinite().all()) is (number not in reached), (which, number)
            for group in {*range(groups)} - {1}:
                assert_close(one[group], want[group], dtype)


@pytest.mark.parametrize("sizes", [(5, 16, 16), (3, 20, 20), (4, 50, 64), (3, 70, 20)], ids=str)
def test_nan_and_infinity_stay_in_their_group(sizes):
    stays_in_its_group(fp32, *sizes, (2, 35))
    if sizes == (3, 20, 20):
        stays_in_its_group(fp32, *sizes, (2, 35), columns=True)


@op.INTERPRETED
@pytest.mark.parametrize(
    ("dtype", "groups", "d_in", "d_out"),
    [(bf16, 4, 50, 64), (fp32, 4, 50, 50), (bf16, 2, 100, 36), (bf16, 8, 16, 16)],
)
def test_what_comes_along_by_descriptors_stays_out(monkeypatch, seen, dtype, groups, d_in, d_out):
    """As on an H200, whose tiles of x hold numbers of both neighbours where groups are unaligned."""
    op.pretend(monkeypatch, limits_of("sm_90", multiprocessors=4), family)
    stays_in_its_group(dtype, groups, d_in, d_out, (130,))
    if d_in > 32:
        forward = named(seen, "forward_kernel")
        assert all(launch.TMA and launch.BK > launch.D_IN for launch in forward)
        assert not any(launch.STORE for launch in forward), "the second pass would meet stores under way"
    else:
        assert all(launch.TMA and launch.STORE for launch in named(seen, "backward_kernel"))


@op.GPU
@pytest.mark.parametrize(("d_in", "d_out"), [(50, 64), (50, 50), (100, 100), (20, 20), (16, 16)])
def test_nan_stays_in_its_group_where_all_of_the_gpu_is_at_work(d_in, d_out):
    stays_in_its_group(bf16, 16, d_in, d_out, (4096,))


# --- more elements than 32 bits count -----------------------------------------------------------------


APART = {
    "rows": ((70, 60), (2**25, 1), 3),
    "sequences": ((3, 5, 60), (2**30, 60, 1), 3),
    "columns": ((9, 40), (1, 2**26), 8),
    "rows of wide groups": ((70, 70), (2**25, 1), 1),
    "rows of a tile": ((20, 20), (2**27, 1), 1),
    "columns of a group": ((9, 20), (1, 2**27), 1),
    "rows and columns of a tile": ((33, 32), (2**25, 2**25 + 1), 1),
    "columns of a wide group": ((9, 70), (1, 2**25), 1),
    "columns of a wider group": ((9, 1100), (1, 2**21), 1),
}
"""Shape, strides, groups of tensors that span more than 2**31 elements, of which few are ever touched."""


def apart(t, strides):
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True))
    return torch.empty(span, dtype=t.dtype).as_strided(t.shape, strides).copy_(t)


@op.INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
@pytest.mark.parametrize("kind", APART)
def test_numbers_that_lie_more_than_32_bits_apart(kind):
    shape, strides, groups = APART[kind]
    d_out = 16 if shape[-1] > 1000 else None
    near, weight, bias = drawn(grouped(groups, shape[-1] // groups, d_out), *shape[:-1], dtype=bf16)
    far = apart(near, strides)
    assert_right([far, weight, bias])
    if d_out is None:
        assert_right([near, weight, bias], upstream=far)


@op.INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
def test_weights_that_lie_more_than_32_bits_apart():
    for groups, width, strides in ((3, 16, (2**30, 16, 1)), (2, 20, (1, 2**27, 32)), (2, 70, (1, 2**25, 2))):
        x, weight, bias = drawn(grouped(groups, width), 5, dtype=bf16)
        assert_right([x, apart(weight, strides), bias])


@op.LARGE
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(128, 16), (100, 20), (32, 64), (20, 100), (1, 1)])
def test_more_elements_than_32_bits_count(groups, width, columns):
    C, times = groups * width, 1001 if width == 20 else 1024
    options = dict(device=labkit.gpu.device(), dtype=bf16)
    batches = 2**31 // (C * times) + 3
    x = torch.randn(batches, C, times, **options).mT if columns else torch.randn(batches, times, C, **options)
    tensors = [x, *drawn(grouped(groups, width), 1, dtype=bf16)[1:]]
    op.assert_right_in_parts(cases.GROUPED, tensors, max(1, 2**15 // C), roundings=1)


@op.LARGE
def test_more_numbers_of_weight_than_32_bits_count():
    """Four rows of 2**13 + 1 groups of 512: the gradient's parts have more than 2**31 numbers."""
    x, upstream = (torch.randn(4, (2**13 + 1) * 512, device=labkit.gpu.device(), dtype=bf16) for _ in "xy")
    weight = torch.randn(2**13 + 1, 512, 512, device=labkit.gpu.device(), dtype=bf16) / 16
    y, dx, dweight = gradients(grouped_linear, [x, weight], upstream)
    for group in (0, 2**12, 2**13):
        one = slice(group * 512, group * 512 + 512)
        wants = gradients(
            plain, [t.double() for t in (x[:, one], weight[group : group + 1])], upstream[:, one]
        )
        for got, want in zip((y[:, one], dx[:, one], dweight[group : group + 1]), wants, strict=True):
            assert_close(got, want, bf16)
