"""labkit.kernels.linear: the product on awkward shapes, its gradients and plans."""

import itertools
import math
import typing

import cases
import operators as op
import pytest
import torch
from cases import with_weight
from operators import assert_close, bf16, drawn, fp16, fp32, limits_of, meta
from products import KERNELS, kept_is_right

import labkit
from labkit.kernels import common, linear
from labkit.kernels.linear import matmul
from labkit.kernels.mlp import geglu_mlp
from labkit.measure import correctness, launch_counts

PRODUCT = cases.matmul(40)
LIBRARY_IS_FAST = linear.library_is_fast

SHAPES = ((64, 128), (37, 33), (70, 40), (1, 1), (0, 8), (4, 0))
"""Full; ragged, copied and by descriptors; one element; no rows; K = 0."""


@pytest.fixture(autouse=True)
def kernel_alone(monkeypatch):
    """The kernel computes what cuBLAS would otherwise; the tests of that put the rule back."""
    monkeypatch.setattr(linear, "library_is_fast", lambda *_: False)


@pytest.fixture
def rule(monkeypatch, kernel_alone):
    monkeypatch.setattr(linear, "library_is_fast", LIBRARY_IS_FAST)


# --- right on every shape -----------------------------------------------------------------------------


@pytest.mark.parametrize("out", [40, 33])
def test_matmul_is_right(out):
    layouts = correctness.LAYOUTS if out == 40 else ("contiguous",)
    op.examine(cases.matmul(out), *SHAPES, layouts=layouts, roundings=2)


def test_a_single_row_may_have_a_stride_that_no_descriptor_takes():
    """Whatever its stride is, PyTorch calls it contiguous."""
    x, weight = torch.randn(2, 5, 19, device=labkit.gpu.device())[..., :16]
    for first, second in ((x[:1], weight), (x, weight[:1])):
        assert_close(matmul(first, second), first.double() @ second.double().T)


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_a_deep_sum_is_rounded_once(dtype):
    """Sums in 16 bits, or parts of them, would be far outside: 128 tiles are added here."""
    x, weight = drawn(with_weight(24), 20, 4096, dtype=dtype)
    op.assert_rounded_once(matmul(x, weight), x.double() @ weight.double().T)


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
    op.examine(cases.matmul(104), (70, 40), layouts=("contiguous", "misaligned"), roundings=2)


@op.INTERPRETED
@pytest.mark.parametrize("has_tma", [True, False])
@pytest.mark.parametrize("table", TABLES)
def test_every_tile_is_right_where_several_meet_and_the_last_are_ragged(monkeypatch, has_tma, table):
    op.pretend(monkeypatch, common.DeviceLimits(4, 0, has_tma), linear)
    for tile in getattr(linear, table):
        monkeypatch.setattr(linear, "choose_tile", lambda *_, tile=tile: tile)
        odd = not has_tma  # descriptors take aligned sizes alone
        x, out = (tile.BM + 5, tile.BK + 8 + odd), tile.BN + tile.BN // 2 + 8 + odd
        op.examine(cases.matmul(out), x, dtypes=(fp32,))
        kept_is_right(*x, out - tile.BN // 2)


def test_one_program_walks_over_all_tiles(monkeypatch):
    shared = common.device_limits(torch.device(labkit.gpu.device())).shared_bytes
    op.pretend(monkeypatch, common.DeviceLimits(1, shared, True), linear)
    op.examine(cases.matmul(200), (300, 40), dtypes=(fp32,))
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
    *pads, made = op.kernels_of(matmul, *drawn(with_weight(out), rows, width))
    assert len(pads) == (width % 4 > 0)
    for pad in pads:  # rows are copied, and end at multiples of 16 numbers
        held, width = width, 16 * math.ceil(width / 16)
        assert pad.bytes_read == 4 * (rows + out) * held and pad.bytes_written == 4 * (rows + out) * width
    tile = linear.choose_tile(rows, out, 4, True, common.DeviceLimits(4, 0, False))
    down, across = math.ceil(rows / tile.BM), math.ceil(out / tile.BN)
    assert made.programs == down * across
    assert made.bytes_read == 4 * width * (across * rows + down * out)
    assert made.bytes_written == 4 * rows * out


# --- gradients, torch.compile -------------------------------------------------------------------------


@op.INTERPRETED
@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1)], ids=str)
def test_no_product_for_gradients_that_nobody_needs(needed):
    for case, products in ((PRODUCT, len(needed)), (cases.geglu_mlp(40), 1 + len(needed))):
        y = case.call(*(t.requires_grad_(n in needed) for n, t in enumerate(drawn(case))))
        made = launch_counts.count(lambda y=y: y.backward(2 * y.detach()))
        assert sum(one.name == "mm" for one in made) == products, case


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_product_keeps_nothing_without_gradients():
    x, weight = drawn(with_weight(24), 6, 24)

    def call(x, weight):
        return matmul(matmul(x, weight), weight)

    want = x.double() @ weight.double().T @ weight.double().T
    assert_close(op.compiled(call)(x, weight), want)
    assert op.library_calls(call, x, weight) == [["linear_forward"] * 2]


@pytest.mark.usefixtures("fresh_compiler")
def test_sizes_may_be_dynamic():
    layer = op.compiled(matmul, dynamic=True)
    for out, shape in ((40, (6, 24)), (40, (5, 24)), (33, (7, 24))):
        tensors = drawn(with_weight(out), *shape)
        op.all_close(op.gradients(layer, tensors), op.exact(PRODUCT, tensors))


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
    op.launch_both_ways(matmul, meta(8, 16), meta(24, 16))
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
def test_what_the_library_computes_is_right():
    """Rows of x that begin anywhere are copied."""
    op.examine(PRODUCT, (37, 33), (15, 24), (0, 8), (4, 0), dtypes=(bf16, fp16, fp32), roundings=2)


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
    """The last rows of y, and of x's gradient."""
    x, weight = drawn(with_weight(out), 2**31 // 2048 + 70, 16, dtype=bf16)
    y, dx, _ = op.gradients(matmul, (x, weight))
    want, change, _ = op.exact(PRODUCT, (x[-70:], weight), 2 * y[-70:].double())
    op.all_close((y[-70:], dx[-70:]), (want, change), bf16, roundings=2)


@op.GPU
@pytest.mark.parametrize("dtype", correctness.DTYPES, ids=str)
@pytest.mark.parametrize("case", [PRODUCT, cases.geglu_mlp(40)], ids=repr)
def test_the_bits_are_the_same_from_run_to_run(case, dtype):
    tensors = drawn(case, 4096, 512, dtype=dtype)
    first = op.gradients(case.call, tensors)
    for _ in range(5):
        assert op.equal(op.gradients(case.call, tensors), first)
