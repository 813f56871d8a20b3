"""Lesson 2's taught kernels: the pointwise chain and the tiled product. The finished ones: tests/kernels."""

import math

import launches as launches_of
import pytest
import torch
from launches import POINTWISE, ROOM
from taught import INTERPRETED, assert_float32, assert_no_backward, bf16, compiled, counted, drawn, fp32, meta
from torch.nn import functional

from labkit.lessons import notebooks
from labkit.measure import correctness
from labkit.profiling import codegen
from labkit.workloads.mlp import chain

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def lesson(cache):
    return notebooks.load("02_kernel_fusion")


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, ("chain_kernel", "tile_kernel"), monkeypatch)


def chain_inputs(shape):
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)


def test_the_pointwise_chain_is_right(lesson):
    shapes = (*correctness.SHAPES, (3, 1024))
    correctness.check(lesson.fused_chain, chain, chain_inputs, shapes=shapes, gradients=False)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_first_step_of_the_product_is_right(lesson, group):
    def inputs(shape):
        return torch.randn(shape), torch.randn(50, shape[-1]) * max(1, shape[-1]) ** -0.5

    def tiled(x, weight):
        x, weight = x.contiguous(), weight.contiguous()
        (M, K), N = x.shape, weight.shape[0]
        y, sizes = x.new_empty(M, N), dict(GROUP=group, BM=32, BN=16, BK=16)
        if y.numel():
            lesson.tile_kernel[(-(-M // 32) * -(-N // 16),)](x, weight, y, M, N, K, **sizes)
        return y

    shapes = ((64, 128), (37, 33), (70, 40), (150, 20), (1, 1), (0, 8), (4, 0))
    dtypes = correctness.DTYPES if group == 3 else (fp32,)  # the tiles' order does not depend on it
    correctness.check(tiled, functional.linear, inputs, shapes=shapes, dtypes=dtypes, gradients=False)


def test_the_chain_is_not_cut_off_from_autograd_in_silence(lesson):
    assert_no_backward("fused_chain", lesson.fused_chain, drawn(chain_inputs, 3, 8))


@pytest.mark.parametrize("count", [2**31 - 1025, 2**31 - 1024, 2**31, 2**31 - 2**11])
def test_the_chain_counts_in_64_bits_before_32_run_out(lesson, launches, count):
    x = meta(count, dtype=bf16)
    lesson.fused_chain(x.view(1, -1), x, x.view(1, -1))
    (made,) = launches
    assert made.LARGE or math.prod(made.grid) * made.BLOCK < 2**31, "the last lane's number, masked or not"
    assert math.prod(made.grid) * made.BLOCK >= count
    assert made.LARGE is (count > 2**31 - 1025)


@pytest.mark.large
@pytest.mark.parametrize("width", [2048, 2047])
def test_a_chain_of_more_elements_than_32_bits_count(lesson, width):
    rows = 2**31 // width + 3
    x, other = (torch.randn(rows, width, device="cuda", dtype=bf16) for _ in range(2))
    bias = torch.randn(width, device="cuda", dtype=bf16)
    y = lesson.fused_chain(x, bias, other)
    for part in (slice(None, 5), slice(rows // 2, rows // 2 + 5), slice(-5, None)):
        want = chain(x[part].double(), bias.double(), other[part].double())
        assert not correctness.diagnose(y[part], want, correctness.TOLERANCE[bf16])


@INTERPRETED
@pytest.mark.parametrize("shape", [(3, 500), (5, 1024), (37, 33)])
def test_the_chain_reads_and_writes_nothing_beyond_the_end(lesson, shape):
    (fused,) = counted(lesson.fused_chain, *drawn(chain_inputs, *shape))
    size = 4 * math.prod(shape)
    assert (fused.bytes_read, fused.bytes_written) == (3 * size, size)


def test_the_taught_kernels_compile_for_other_gpus(lesson, launches):
    x = meta(8192, 4096, dtype=bf16)
    lesson.fused_chain(x, x[0], x)
    for one in compiled(launches):
        assert one.spills == 0 and set(one.loads) == {128} and set(one.stores) == {128}, one
        assert_float32(one.ttir)
    sizes = dict.fromkeys(("x", "weight", "y"), "*bf16:16") | dict(M=4096, N=4096, K=4096)
    tile, kernel = dict(GROUP=8, BM=128, BN=128, num_warps=8, num_stages=3), lesson.tile_kernel.kernel
    for one in codegen.compile_many(
        codegen.request(kernel, sizes, target=target, BK=64 if ROOM[target] >= 160 else 32, **tile)
        for target in POINTWISE
    ):
        assert one.matrix and one.spills == 0 and one.shared_bytes <= ROOM[one.target] * 1024, one
