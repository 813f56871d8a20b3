"""Lesson 2's taught kernels: the pointwise chain and the tiled product. The finished ones: tests/kernels."""

import math
import re

import launches as launches_of
import pytest
import torch
from launches import POINTWISE, ROOM
from torch.nn import functional

from labkit import checks, codegen, counts, device, lessons
from labkit.mlp_works import chain

pytestmark = pytest.mark.usefixtures("cache")
INTERPRETED = pytest.mark.skipif(device.has_gpu(), reason="a GPU's kernels' accesses cannot be watched")
LARGE = pytest.mark.large
MATRICES = ((64, 128), (37, 33), (70, 40), (150, 20), (1, 1), (0, 8), (4, 0))


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load("02_kernel_fusion")


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, ("chain_kernel", "tile_kernel"), monkeypatch)


def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def chain_inputs(shape):
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)


def tiled(lesson, group):
    def call(x, weight):
        x, weight = x.contiguous(), weight.contiguous()
        (M, K), N = x.shape, weight.shape[0]
        y, sizes = x.new_empty(M, N), dict(GROUP=group, BM=32, BN=16, BK=16)
        if y.numel():
            lesson.tile_kernel[(-(-M // 32) * -(-N // 16),)](x, weight, y, M, N, K, **sizes)
        return y

    return call


def test_the_pointwise_chain_is_right(lesson):
    shapes = (*checks.SHAPES, (3, 1024))
    checks.check(lesson.fused_chain, chain, chain_inputs, shapes=shapes, gradients=False)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_first_step_of_the_product_is_right(lesson, group):
    def inputs(shape):
        return torch.randn(shape), torch.randn(50, shape[-1]) * max(1, shape[-1]) ** -0.5

    dtypes = checks.DTYPES if group == 3 else (torch.float32,)  # the tiles' order does not depend on it
    options = dict(shapes=MATRICES, dtypes=dtypes, gradients=False, name="tiled")
    checks.check(tiled(lesson, group), functional.linear, inputs, **options)


def test_the_chain_is_not_cut_off_from_autograd_in_silence(lesson):
    tensors = [t.to(device.name()).requires_grad_() for t in chain_inputs((3, 8))]
    with pytest.raises(RuntimeError, match="fused_chain has no backward"):
        lesson.fused_chain(*tensors)
    with torch.no_grad():
        assert lesson.fused_chain(*tensors).grad_fn is None


@pytest.mark.parametrize("count", [2**31 - 1025, 2**31 - 1024, 2**31, 2**31 - 2**11])
def test_the_chain_counts_in_64_bits_before_32_run_out(lesson, launches, count):
    x = meta(count)
    lesson.fused_chain(x.view(1, -1), x, x.view(1, -1))
    (made,) = launches
    assert made.LARGE or math.prod(made.grid) * made.BLOCK < 2**31, "the last lane's number, masked or not"
    assert math.prod(made.grid) * made.BLOCK >= count
    assert made.LARGE is (count > 2**31 - 1025)


@LARGE
@pytest.mark.parametrize("width", [2048, 2047])
def test_a_chain_of_more_elements_than_32_bits_count(lesson, width):
    rows = 2**31 // width + 3
    x, other = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    y = lesson.fused_chain(x, bias, other)
    for part in (slice(None, 5), slice(rows // 2, rows // 2 + 5), slice(-5, None)):
        want = chain(x[part].double(), bias.double(), other[part].double())
        assert not checks.diagnose(y[part], want, checks.TOLERANCE[torch.bfloat16])


@INTERPRETED
@pytest.mark.parametrize("shape", [(3, 500), (5, 1024), (37, 33)])
def test_the_chain_reads_and_writes_nothing_beyond_the_end(lesson, shape):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    fences = checks.Fences()
    placed = [fences.place(tensor, "contiguous") for tensor in chain_inputs(shape)]
    with fences:
        made = counts.count(lambda: lesson.fused_chain(*placed)).launches
    (fused,) = [launch for launch in made if launch.programs]
    size = 4 * math.prod(shape)
    assert (fused.bytes_read, fused.bytes_written) == (3 * size, size)


def test_the_taught_kernels_compile_for_other_gpus(lesson, launches):
    x = meta(8192, 4096)
    lesson.fused_chain(x, x[0], x)
    (made,) = launches
    sizes = dict.fromkeys(("x", "weight", "y"), "*bf16:16") | dict(M=4096, N=4096, K=4096)
    tile = dict(GROUP=8, BM=128, BN=128, BK=64, num_warps=8, num_stages=3)
    kernel = lesson.tile_kernel.kernel  # below the recorder
    asked = []
    for target in POINTWISE:
        asked.append(codegen.request(made.kernel, made.arguments, target=target, **made.options))
        fits = tile if ROOM[target] >= 160 else tile | dict(BK=32)
        asked.append(codegen.request(kernel, sizes, target=target, **fits))
    compiled = codegen.compile_many(asked)
    for one in compiled:
        assert one.spills == 0 and one.shared_bytes <= ROOM[one.target] * 1024, one
    for one in compiled[::2]:
        assert set(one.loads) == {128} and set(one.stores) == {128}, one
        half = re.findall(r"arith\.\w+f .*xb?f16>", one.ttir)
        assert all(re.match(r"arith\.(extf|truncf) ", line) for line in half), "computed in float32"
    assert all(one.matrix for one in compiled[1::2])
