"""labkit.kernels.linear_gluon: compiled for Hopper anywhere; run on a Hopper GPU, beside the plain kernel."""

import inspect
import re

import pytest
import torch
import triton
from operators import bf16, fp16, fp32, limits_of
from torch.nn import functional

from labkit import gpu
from labkit.kernels import linear
from labkit.profiling import codegen

if triton.__version__.split(".")[:2] not in (["3", "6"], ["3", "7"]):
    pytest.skip("Gluon of Triton 3.6 and 3.7", allow_module_level=True)

from labkit.kernels import linear_gluon

DEVICE = torch.device(gpu.device())
REGISTERS = 64 * 1024
needs_hopper = pytest.mark.skipif(linear.gluon_kernel(DEVICE, bf16) is None, reason="runs on Hopper alone")


def test_other_devices_and_dtypes_have_the_plain_kernel():
    assert linear.gluon_kernel(torch.device("cpu"), bf16) is None
    assert linear.gluon_kernel(DEVICE, fp32) is None


def test_it_compiles_without_spills_and_fits(monkeypatch):
    """Of each tile what a launch would compile."""
    asked, limits = [], limits_of("sm_90")
    names = [*inspect.signature(linear_gluon.linear_hopper_kernel.fn).parameters]

    class Launcher:
        def __getitem__(self, grid):
            return lambda *args, **options: asked.append((dict(zip(names, args, strict=False)), options))

    kernel = linear_gluon.linear_hopper_kernel
    monkeypatch.setattr(linear_gluon, "linear_hopper_kernel", Launcher())
    monkeypatch.setattr(linear_gluon, "device_limits", lambda device: limits)
    for n, tile in enumerate(linear_gluon.TILES):
        x, weight, y, bias = (torch.empty(size, dtype=(bf16, fp16)[n % 2]) for size in SIZES)
        linear_gluon.launch(x, weight, y, (bias, None)[n % 2], ("gelu_tanh", "none")[n % 2], tile)
    made = codegen.compile_many(codegen.request(kernel, args, **options) for args, options in asked)
    for tile, (_, options), code in zip(linear_gluon.TILES, asked, made, strict=True):
        assert not code.spills, tile
        assert code.shared_bytes <= limits.shared_bytes and options["STAGES"] >= 3, tile
        widths = {int(n) for n in re.findall(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16", code.ptx)}
        assert widths == {tile.BN, tile.BN // 2} if tile.more else {tile.BN}, tile
        assert code.num_warps == 12 and 12 * 32 * code.registers <= REGISTERS, tile
        grown = [int(n) for n in re.findall(r"setmaxnreg\S+\s+(\d+)", code.ptx)]
        assert grown.count(240) == 2 and 24 in grown, tile


SIZES = ((200, 264), (120, 264), (200, 120), (120,))


@needs_hopper
@pytest.mark.parametrize("tile", linear_gluon.TILES)
@pytest.mark.parametrize("size", [(64, 64, 64), (200, 264, 1016), (3000, 776, 3080), (5000, 4104, 72)])
def test_it_is_right(tile, size):
    M, N, K = size
    for act, dtype in (("none", bf16), ("gelu_tanh", bf16), ("silu", fp16)):
        x, weight, bias = torch.randn(M, K), torch.randn(N, K) * K**-0.5, torch.randn(N)
        x, weight, bias = (t.to(DEVICE, dtype) for t in (x, weight, bias))
        z = functional.linear(x.double(), weight.double(), bias.double())
        activation = {"none": lambda z: z, "silu": functional.silu}
        want = activation.get(act, lambda z: functional.gelu(z, approximate="tanh"))(z)
        kept = torch.full((M * N + 4096,), torch.nan, device=DEVICE, dtype=dtype)
        y = kept[: M * N].view(M, N)
        linear_gluon.launch(x, weight, y, bias, act, tile)
        assert float((y.double() - want).norm() / want.norm()) < (3e-3 if dtype == bf16 else 6e-4)
        assert kept[M * N :].isnan().all()


@needs_hopper
def test_linear_uses_it(monkeypatch):
    """Where it should be faster; and what autograd records, which keeps z, is the plain kernel's."""
    tiles = []
    launch = linear_gluon.launch
    monkeypatch.setattr(linear_gluon, "launch", lambda *args: (tiles.append(args[-1]), launch(*args)))
    x, weight = (torch.randn(4096, 1024, device=DEVICE, dtype=bf16) for _ in range(2))
    y = linear.matmul(x, weight)
    assert len(tiles) == 1
    monkeypatch.setattr(linear, "gluon_kernel", lambda *args: None)
    torch.testing.assert_close(linear.matmul(x, weight), y)
