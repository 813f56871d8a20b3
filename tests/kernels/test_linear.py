"""labkit.kernels.linear: the product and its epilogues on awkward shapes, their gradients and plans."""

import itertools
import math
import typing

import cases
import operators as op
import pytest
import torch
from cases import ACTIVATIONS, with_bias, with_weight
from operators import assert_close, bf16, drawn, fp16, fp32, limits_of, meta
from products import KERNELS, kept_is_right

import labkit
from labkit.kernels import common, linear
from labkit.kernels.linear import linear_act, matmul
from labkit.kernels.mlp import geglu_mlp
from labkit.measure import correctness, launch_counts

GELU = cases.linear_act("gelu_tanh", with_bias(40))
LIBRARY_IS_FAST = linear.library_is_fast

SHAPES = ((64, 128), (37, 33), (70, 40), (1, 1), (3, 5, 24), (19,), (16,), (0, 8), (4, 0), (2, 0, 3))
"""Full; ragged, by pointers and by descriptors; one element; three dimensions; one; no rows; K = 0."""


@pytest.fixture(autouse=True)
def kernel_alone(monkeypatch):
    """The kernel computes what cuBLAS would otherwise; the tests of that put the rule back."""
    monkeypatch.setattr(linear, "library_is_fast", lambda *_: False)


@pytest.fixture
def rule(monkeypatch, kernel_alone):
    monkeypatch.setattr(linear, "library_is_fast", LIBRARY_IS_FAST)


# --- right on every shape -----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("make", [with_bias, with_weight])
def test_linear_act_is_right(activation, make):
    """z and its gradient are rounded on the way from the output to the gradients of the inputs."""
    whole = activation == "gelu_tanh"  # the tiles and the host's part are the same for all
    layouts = correctness.LAYOUTS if whole and make is with_bias else ("contiguous",)
    case = cases.linear_act(activation, make(40))
    op.examine(case, *SHAPES[: None if whole else 4], layouts=layouts, roundings=3)
    if whole:
        op.examine(case._replace(inputs=make(33)), (37, 33), (70, 40), roundings=3)


@pytest.mark.parametrize("out", [40, 33])
def test_matmul_is_right(out):
    matrices = [shape for shape in SHAPES if len(shape) == 2]
    layouts = correctness.LAYOUTS if out == 40 else ("contiguous",)
    op.examine(cases.matmul(out), *matrices, layouts=layouts, roundings=2)


def test_a_single_row_may_have_a_stride_that_no_descriptor_takes():
    """Whatever its stride is, PyTorch calls it contiguous."""
    x, weight = torch.randn(2, 5, 19, device=labkit.gpu.device())[..., :16]
    for first, second in ((x[:1], weight), (x, weight[:1])):
        assert_close(matmul(first, second), first.double() @ second.double().T)
    assert_close(linear_act(x[:1], weight[:1], None, "none"), x[:1].double() @ weight[:1].double().T)


def test_an_inner_size_of_zero_leaves_the_activation_of_the_bias():
    x, weight, bias = drawn(with_bias(5), 3, 0)
    for activation, plain in ACTIVATIONS.items():
        assert_close(linear_act(x, weight, bias, activation), plain(bias).expand(3, 5))
        assert not linear_act(x, weight, None, activation).any()
    assert torch.equal(linear_act(x, weight, bias), linear_act(x, weight, bias, "gelu_tanh"))


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_a_deep_sum_is_rounded_once(dtype):
    """Sums in 16 bits, or parts of them, would be far outside: 128 tiles are added here."""
    x, weight, bias = drawn(with_bias(24), 20, 4096, dtype=dtype)
    exact = [t.double() for t in (x, weight, bias)]
    op.assert_rounded_once(matmul(x, weight), exact[0] @ exact[1].T)
    for activation in ACTIVATIONS:
        op.assert_rounded_once(
            linear_act(x, weight, bias, activation),
            cases.linear_act(activation, with_bias(24)).reference(*exact),
            times=2,
        )


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
def test_dz_and_its_sum_are_rounded_once_however_rows_are_shared(
    monkeypatch, activation, multiprocessors, dtype
):
    op.pretend(monkeypatch, common.DeviceLimits(multiprocessors, 0, True), linear)
    for rows, columns in ((600, 130), (1, 3)):
        dy, z = drawn(
            lambda shape: (torch.randn(shape), torch.randn(shape) + 0.5), rows, columns, dtype=dtype
        )
        leaf = z.double().requires_grad_()
        (want,) = torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, dy.double())
        dz, dbias = linear.linear_dz(dy, z, activation, True)
        assert dz.stride(0) * dz.itemsize % 16 == 0 and not dz[:, columns:].any(), "zeros behind each row"
        for got, exact in ((dz[:, :columns], want), (dbias, want.sum(0))):
            assert_close(got, exact, dtype)
            if dtype is not fp32 and rows > 1:  # of few numbers the error is a matter of luck
                op.assert_rounded_once(got, exact, times=2)
        assert not linear.linear_dz(dy, z, activation, False)[1].numel(), "what nobody wants is not summed"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", correctness.DTYPES, ids=str)
def test_relu_and_its_gradient_are_pytorchs_at_nan_zero_and_infinity(dtype):
    """NaN stays NaN and its gradient passes; at 0 and below there is none, even an infinite one."""
    values = [math.nan, 0.0, -0.0, 1.0, -1.0, math.inf, -math.inf]
    z, dy = (t.to(labkit.gpu.device(), dtype).contiguous() for t in torch.meshgrid(
        torch.tensor(values), torch.tensor([1.0, -2.0, math.nan, math.inf]), indexing="ij"))  # fmt: skip
    leaf = z.clone().requires_grad_()
    (want,) = torch.autograd.grad(torch.relu(leaf), leaf, dy)
    dz, dbias = linear.linear_dz(dy, z, "relu", True)
    torch.testing.assert_close(dz[:, :4], want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dbias, want.sum(0), equal_nan=True)
    one = torch.ones(1, 1, dtype=dtype, device=z.device)
    y = linear_act(z[:, :1], one, None, "relu")
    torch.testing.assert_close(y, torch.relu(z[:, :1]), rtol=0, atol=0, equal_nan=True)


# --- both ways to load a tile, every tile, every split of the work ------------------------------------


def test_which_rows_are_copied_and_which_go_by_descriptors(monkeypatch):
    """A change of the conditions could leave all shapes on one path, and no result would tell."""
    launches = op.recorded(monkeypatch, KERNELS)
    for width, out, dtype in ((40, 40, bf16), (24, 40, bf16), (16, 40, bf16), (20, 40, fp32)):
        matmul(meta(70, width, dtype=dtype), meta(out, width, dtype=dtype))
    assert [made.title for made in launches] == ["linear_kernel"] * 4
    assert all(made.TMA and made.STORE for made in launches)
    launches.clear()
    for width in (33, 19, 20):  # rows of x and of the weight begin anywhere: copied, with zeros behind
        matmul(meta(70, width, dtype=bf16), meta(40, width, dtype=bf16))
    assert [made.title for made in launches] == ["pad_kernel", "linear_kernel"] * 3
    assert all(made.TMA and made.STORE and made.K in (32, 48) for made in launches[1::2])
    launches.clear()
    matmul(meta(70, 40, dtype=bf16), meta(33, 40, dtype=bf16))  # rows of the output begin anywhere
    block, weight = (torch.empty(n, dtype=bf16, device=labkit.gpu.device()) for n in (70 * 40 + 1, 40 * 40))
    matmul(block[1:].view(70, 40), weight.view(40, 40))  # so does x: copied, without zeros
    assert [(made.title, made.TMA, made.STORE) for made in launches] == [
        ("linear_kernel", True, False),
        ("linear_kernel", True, True),
    ]


@op.INTERPRETED
def test_rows_that_descriptors_cannot_count_go_by_pointers(monkeypatch):
    """Coordinates of TMA are numbers of 32 bits: a row further down would be another one, or zeros."""
    launches = op.recorded(monkeypatch, KERNELS)
    op.pretend(monkeypatch, limits_of("sm_90"), linear)
    for rows in (2**31 - 1, 2**31):
        matmul(meta(rows, 8, dtype=bf16), meta(16, 8, dtype=bf16))
    assert [made.TMA for made in launches] == [True, False]


TABLES = [name for name in vars(linear) if name.startswith("TILES")]


@pytest.mark.parametrize("has_tma", [True, False])
def test_aligned_sizes_are_right_by_descriptors_and_by_pointers(monkeypatch, has_tma):
    its = common.device_limits(torch.device(labkit.gpu.device()))
    op.pretend(monkeypatch, common.DeviceLimits(its.multiprocessors, its.shared_bytes, has_tma), linear)
    wide = GELU._replace(inputs=with_bias(104))
    op.examine(wide, (70, 40), layouts=("contiguous", "misaligned"), roundings=3)


@op.INTERPRETED
@pytest.mark.parametrize("has_tma", [True, False])
@pytest.mark.parametrize("table", TABLES)
def test_every_tile_is_right_where_several_meet_and_the_last_are_ragged(monkeypatch, has_tma, table):
    op.pretend(monkeypatch, common.DeviceLimits(4, 0, has_tma), linear)
    for tile in getattr(linear, table):
        monkeypatch.setattr(linear, "choose_tile", lambda *_, tile=tile: tile)
        odd = not has_tma  # descriptors take aligned sizes alone
        x, out = (tile.BM + 5, tile.BK + 8 + odd), tile.BN + tile.BN // 2 + 8 + odd
        op.examine(GELU._replace(inputs=with_bias(out)), x, dtypes=(fp32,))
        kept_is_right(*x, out - tile.BN // 2)


def test_one_program_walks_over_all_tiles(monkeypatch):
    shared = common.device_limits(torch.device(labkit.gpu.device())).shared_bytes
    op.pretend(monkeypatch, common.DeviceLimits(1, shared, True), linear)
    op.examine(GELU._replace(inputs=with_bias(200)), (300, 40), dtypes=(fp32,))
    kept_is_right(300, 40, 200)
    launches = op.recorded(monkeypatch, KERNELS)
    matmul(meta(300, 40), meta(200, 40))
    (made,) = launches
    assert math.prod(made.grid) <= 2 and math.prod(made.grid) * made.BM * made.BN < 300 * 200


@op.INTERPRETED
@pytest.mark.parametrize(("rows", "width", "out"), [(37, 33, 70), (70, 40, 40), (1, 1, 1)])
def test_nothing_is_read_or_written_beyond_the_end(monkeypatch, rows, width, out):
    """By pointers, whose masks are ours: rows of tiles read the weight, columns of tiles x."""
    op.pretend(monkeypatch, common.DeviceLimits(4, 0, False), linear)
    pad, *made = op.kernels_of(matmul, *drawn(with_weight(out), rows, width))
    if width % 4:  # rows are copied, and end at multiples of 16 numbers
        held, width = width, 16 * math.ceil(width / 16)
        assert pad.bytes_read == 4 * (rows + out) * held and pad.bytes_written == 4 * (rows + out) * width
    else:
        made = [pad]
    made += op.kernels_of(linear_act, *drawn(with_bias(out), rows, width))
    tile = linear.choose_tile(rows, out, 4, True, common.DeviceLimits(4, 0, False))
    down, across = math.ceil(rows / tile.BM), math.ceil(out / tile.BN)
    for one, bias in zip(made, (0, 1), strict=True):
        assert one.programs == down * across
        assert one.bytes_read == 4 * (width * (across * rows + down * out) + down * bias * out)
        assert one.bytes_written == 4 * rows * out
    z = torch.randn(rows, out)
    (dz,) = op.kernels_of(lambda dy, z: linear.linear_dz(dy, z, "silu", False), z, z)
    groups, held = dz.programs // math.ceil(out / 128), 4 * math.ceil(out / 4)
    assert (dz.bytes_read, dz.bytes_written) == (2 * 4 * rows * out, 4 * (rows * held + groups * out))
    half, held = z.bfloat16(), 8 * math.ceil(out / 8)
    (dz,) = op.kernels_of(lambda dy, z: linear.linear_dz(dy, z, "silu", True), half, half)
    assert dz.bytes_written == 2 * rows * held + 4 * groups * out, "parts of dbias have 32 bits"


# --- gradients, torch.compile -------------------------------------------------------------------------


def test_z_is_kept_only_for_a_backward_through_an_activation(monkeypatch):
    none = cases.linear_act("none", with_bias(40))
    tensors = drawn(none, grad=True)
    assert {t.data_ptr() for t in op.saved_by(none.call, tensors)[1]} == {t.data_ptr() for t in tensors[:2]}
    launches = op.recorded(monkeypatch, KERNELS)
    for grad in (True, False):
        linear_act(meta(8, 16, grad=grad), meta(24, 16))
        assert (launches[-1].kept is not None) is grad
    with torch.no_grad():
        linear_act(meta(8, 16, grad=True), meta(24, 16))
    assert launches[-1].kept is None


@op.INTERPRETED
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_no_product_for_gradients_that_nobody_needs(needed):
    for case, products in ((GELU, len({*needed} - {2})), (cases.geglu_mlp(40), 1 + len(needed))):
        y = case.call(*(t.requires_grad_(n in needed) for n, t in enumerate(drawn(case))))
        made = launch_counts.count(lambda y=y: y.backward(2 * y.detach())).launches
        assert sum(one.name == "mm" for one in made) == products, case


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_product_keeps_nothing_without_gradients():
    x, weight = drawn(with_weight(24), 6, 24)

    def call(x, weight):
        return linear_act(matmul(x, weight), weight)

    want = ACTIVATIONS["gelu_tanh"](x.double() @ weight.double().T @ weight.double().T)
    assert_close(op.compiled(call)(x, weight), want)
    assert op.library_calls(call, x, weight) == [["linear_forward"] * 2]


@pytest.mark.usefixtures("fresh_compiler")
def test_sizes_may_be_dynamic():
    layer = op.compiled(GELU.call, dynamic=True)
    shapes = (with_bias(40), (6, 24)), (with_bias(40), (5, 24)), (with_weight(33), (2, 3, 24))
    for make, shape in shapes:
        tensors = drawn(make, *shape)
        op.all_close(op.gradients(layer, tensors), op.exact(GELU, tensors))


# --- which tile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_the_tile_suits_the_product(target):
    its = limits_of(target)
    large, small = (linear.choose_tile(*sizes, 2, True, its) for sizes in ((8192, 8192), (64, 512)))
    assert large.BM * large.BN >= 2**14, "its bytes serve many numbers"
    assert small.BM == small.BN == 64, "it has 8 tiles: none larger, where most of the GPU is idle"
    for M, N, itemsize, store in itertools.product((1, 64, 4096), (1, 256, 22016), (2, 4), (True, False)):
        tile = linear.choose_tile(M, N, itemsize, store, its)
        assert store or tile.BM * tile.BN // (32 * tile.warps) <= 64
        assert itemsize == 2 or tile.BM <= 64 or its.shared_bytes >= 200 * 1024


def test_no_more_programs_start_than_fit_where_they_walk(monkeypatch):
    launches = op.recorded(monkeypatch, KERNELS)
    for target, rows in (("sm_80", 8192), ("sm_90", 8192), ("sm_90", 64)):
        asked = op.pretend(monkeypatch, limits_of(target), linear)
        matmul(meta(rows, 1024, dtype=bf16), meta(rows, 1024, dtype=bf16))
        tile = linear.choose_tile(rows, rows, 2, True, limits_of(target))
        tiles, made = math.ceil(rows / tile.BM) * math.ceil(rows / tile.BN), launches[-1]
        assert made.TMA is (target == "sm_90")
        assert made.grid == (min(tiles, tile.programs * 132) if made.TMA else tiles,)
    asked.clear()
    op.launch_both_ways(linear_act, meta(8, 16), meta(24, 16), meta(24))
    assert set(asked) == {torch.device("meta")}, "the tensors' own"


# --- cuBLAS instead -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("rule")
def test_who_computes_which_product():
    its = limits_of("sm_90")
    for dtype, M, N, library in (
        (bf16, 8192, 4096, True), (fp16, 1, 8, True), (bf16, 8192, 4097, False), (fp16, 64, 4, False),
        (fp32, 8192, 4096, False), (fp32, 64, 4096, True),
    ):  # fmt: skip
        assert linear.library_is_fast(M, N, dtype, its) is library, (dtype, M, N)


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("make", [with_bias, with_weight])
def test_what_the_library_computes_is_right(activation, make):
    """Rows of x that begin anywhere are copied; z is rounded before an activation."""
    case, dtypes = cases.linear_act(activation, make(40)), (bf16, fp16, fp32)
    op.examine(case, (37, 33), (3, 5, 24), (0, 8), (4, 0), dtypes=dtypes, roundings=4)


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("by_function", [True, False])
def test_pytorchs_precision_of_float32_is_honoured(monkeypatch, request, by_function):
    """Where it allows TF32 no product takes three of them: cuBLAS's takes one, and the kernel's dot does."""
    products: typing.Any = torch.backends.cuda.matmul
    ways = {
        True: torch.set_float32_matmul_precision,
        False: lambda to: setattr(products, "fp32_precision", to),
    }
    to, usual = ways[by_function], "highest" if by_function else products.fp32_precision
    request.addfinalizer(lambda: to(usual))
    to("high" if by_function else "tf32")
    assert linear.library_is_fast(8192, 4096, fp32, limits_of("sm_90"))
    launches = op.recorded(monkeypatch, KERNELS)
    geglu_mlp(meta(70, 40), meta(2, 64, 40), meta(40, 64))
    assert [made.PRECISION for made in launches] == ["tf32"]
    to(usual)
    geglu_mlp(meta(70, 40), meta(2, 64, 40), meta(40, 64))
    assert launches[-1].PRECISION == "tf32x3"


# --- on a GPU -----------------------------------------------------------------------------------------


@op.LARGE
@pytest.mark.parametrize("out", [2048, 2049])
def test_more_elements_than_32_bits_count(out):
    tensors = drawn(with_bias(out), 2**31 // 2048 + 70, 16, dtype=bf16)
    op.assert_right_in_parts(GELU, tensors, 2**12, roundings=3)


@op.GPU
@pytest.mark.parametrize("dtype", correctness.DTYPES, ids=str)
@pytest.mark.parametrize("case", [cases.matmul(40), GELU, cases.geglu_mlp(40)], ids=repr)
def test_the_bits_are_the_same_from_run_to_run(case, dtype):
    tensors = drawn(case, 4096, 512, dtype=dtype)
    first = op.gradients(case.call, tensors)
    for _ in range(5):
        assert op.equal(op.gradients(case.call, tensors), first)
