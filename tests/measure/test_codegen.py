"""What codegen shows of compiled kernels, for GPUs that are not here."""

import importlib.util
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from IPython.core.interactiveshell import InteractiveShell
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.measure import codegen

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def kernels(cache):
    requests = [codegen.request(kernel, args, **options) for kernel, args, options in ASKED.values()]
    return dict(zip(ASKED, codegen.compile_many(requests), strict=True))


@triton.jit
def affine(x_ptr, w_ptr, b_ptr, y_ptr, n, width, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    column = offsets % width
    x = tl.load(x_ptr + offsets, mask=mask)
    w = tl.load(w_ptr + column, mask=mask)
    b = tl.load(b_ptr + column, mask=mask)
    tl.store(y_ptr + offsets, x * w + b, mask=mask)


@triton.jit
def row_sum(x_ptr, y_ptr, WIDTH: tl.constexpr, SHIFT: tl.constexpr = float("-inf")):
    tl.store(y_ptr, tl.maximum(tl.sum(tl.load(x_ptr + tl.arange(0, WIDTH))), SHIFT))


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, K, SIZE: tl.constexpr):
    along = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for k in range(0, K, SIZE):
        a = tl.load(a_ptr + along[:, None] * K + k + along[None, :])
        b = tl.load(b_ptr + (k + along)[:, None] * SIZE + along[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + along[:, None] * SIZE + along[None, :], total)


@triton.jit
def fat(x_ptr, y_ptr, SIZE: tl.constexpr):
    along = tl.arange(0, SIZE)
    tile = along[:, None] * SIZE + along[None, :]
    x = tl.load(x_ptr + tile)
    tl.store(y_ptr + tile, x - tl.sum(x, 1)[:, None] * tl.sum(x, 0)[None, :])


@triton.jit
def copy_tile(source, target):
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def adds_unlike_shapes(x):
    return x + tl.zeros((48,), tl.float32)


@triton.jit
def calls_a_wrong_helper(x_ptr):
    tl.store(x_ptr + tl.arange(0, 32), adds_unlike_shapes(tl.arange(0, 32)))


def four(*, rows=1024, width=160):
    """The arguments of ``affine``."""
    x, w = torch.empty(rows, width, device="meta"), torch.empty(width, device="meta")
    return [x, w, w, x, x.numel(), width]


HALF = torch.empty(1024, 64, dtype=torch.bfloat16, device="meta")
MATMUL = HALF.view(64, 1024), HALF, torch.empty(64, 64, device="meta"), 1024
X = torch.empty(161 * 1024 + 4)
WHOLE, SHIFTED = X[: 160 * 1024], X[1 : 160 * 1024 + 1]
TILE = TensorDescriptor.from_tensor(torch.empty(64, 64), [64, 64])
TWO = ("*fp32:16", "*fp32:16")
TUNED = triton.autotune([triton.Config({"BLOCK": 64})], key=["n"])(
    triton.heuristics({"BLOCK": lambda args: 64})(affine)
)
ASKED = {
    **{("matmul", target): (matmul, MATMUL, {"target": target, "SIZE": 64}) for target in codegen.TARGETS},
    "wide": (affine, four(width=160), {"BLOCK": 1024}),
    "narrow": (affine, four(width=161), {"BLOCK": 1024}),
    "all narrow": (affine, four(rows=1001, width=161), {"BLOCK": 1024}),
    "misaligned": (affine, [SHIFTED, WHOLE, WHOLE, WHOLE, 160 * 1024, 160], {"BLOCK": 1024}),
    "width 1": (affine, [WHOLE, WHOLE, WHOLE, WHOLE, 160 * 1024, 1], {"BLOCK": 1024}),
    "typed": (affine, ["*fp32", *["*fp32:16"] * 3, 160 * 1024, 160], {"BLOCK": 1024}),
    "long": (affine, [WHOLE, WHOLE, WHOLE, WHOLE, 2**40, 160], {"BLOCK": 1024}),
    "one warp": (row_sum, TWO, {"WIDTH": 1024, "num_warps": 1}),
    "four warps": (row_sum, TWO, {"WIDTH": 1024, "num_warps": 4}),
    "tile on sm_90": (copy_tile, [TILE, TILE], {}),
    "tile on sm_80": (copy_tile, [TILE, TILE], {"target": "sm_80"}),
    "spilling": (fat, TWO, {"SIZE": 128, "num_warps": 2}),
    "roomy": (fat, TWO, {"SIZE": 128, "num_warps": 16}),
    "few registers": (affine, four(width=161), {"BLOCK": 8192, "maxnreg": 32}),
    "tuned": (TUNED, four(), {"BLOCK": 1024}),
}
"""What the tests look at, compiled in one process: to start one costs more than to compile a kernel."""


def test_a_width_divisible_by_16_has_wide_loads_of_the_weight_and_161_narrow_ones(kernels):
    wide, narrow, all_narrow = (kernels[name] for name in ("wide", "narrow", "all narrow"))
    assert wide.loads == {128: 6}
    assert narrow.loads == {128: 2, 32: 16}  # x is still wide: its length is divisible by 16
    assert all_narrow.loads == {32: 24}
    assert wide.stores == narrow.stores == {128: 2}
    assert (wide.widest_load, all_narrow.widest_load) == (128, 32)
    assert "ld.global.v4.b32" in wide.ptx


def test_an_argument_that_is_one_or_misaligned_is_specialised_as_triton_does(kernels):
    assert kernels["misaligned"].loads == {32: 8, 128: 4} == kernels["typed"].loads
    aligned, width_one, long = (kernels[name].ttir for name in ("wide", "width 1", "long"))
    assert "i32 %width" not in width_one.splitlines()[0] and "%width" in aligned
    assert "%n: i64" in long and "%n: i32" in aligned


def test_a_reduction_stays_in_the_warp_or_crosses_a_barrier(kernels):
    one, many = kernels["one warp"], kernels["four warps"]
    assert one.shuffles == {"bfly": 5}
    assert (one.barriers, one.shared_bytes) == ({}, 0)
    assert many.barriers["bar.sync"] > 0 and many.shared_bytes > 0
    assert (one.num_warps, many.num_warps) == (1, 4)


def test_a_matmul_uses_each_targets_matrix_unit(kernels):
    matmuls = {target: kernels["matmul", target] for target in codegen.TARGETS}
    units = dict.fromkeys(codegen.TARGETS, "mma") | {"sm_90": "wgmma", "sm_100": "tcgen05"}
    assert {target: list(each.matrix) for target, each in matmuls.items()} == {
        target: [unit] for target, unit in units.items()
    }
    assert matmuls["sm_100"].barriers["mbarrier"] > 0
    assert all(each.registers > 0 and each.shared_bytes >= 32 * 1024 for each in matmuls.values())
    assert sum(matmuls["sm_80"].async_copies.values()) == 24
    assert matmuls["sm_90"].matrix == {"wgmma": 4}


def test_a_pipelined_loop_copies_asynchronously(kernels):
    pipelined = kernels["matmul", "sm_80"]
    assert pipelined.async_copies == {128: 24} == pipelined.loads and kernels["wide"].async_copies == {}


def test_bulk_copies_and_spills_are_seen(kernels):
    hopper, ampere = kernels["tile on sm_90"], kernels["tile on sm_80"]
    assert (hopper.bulk_loads, hopper.bulk_stores) == (1, 1)
    assert hopper.loads == {} and hopper.barriers["mbarrier"] > 0
    assert ampere.bulk_loads == 0 and ampere.loads
    spilling, roomy = kernels["spilling"], kernels["roomy"]
    assert spilling.spills > 0 == roomy.spills and spilling.registers > roomy.registers


def test_what_a_kernel_is_given_and_wrapped_in_is_carried_along(kernels):
    assert "0fFF800000" in kernels["one warp"].ptx, "minus infinity, the default of a constexpr"
    assert kernels["few registers"].registers <= 32
    assert kernels["tuned"].loads == {128: 6}


@triton.jit(noinline=True)
def twice(x):
    return x + x


@triton.constexpr_function
def half(n):
    return math.ceil(n / 2)


def test_a_kernel_in_notebook_cells_brings_what_it_uses():
    """Helpers with their decorators, constants, closures, modules; not what the cells measured."""
    shell = InteractiveShell()
    cells = [
        "import triton\nimport triton.language as tl\n"
        "from triton.language import constexpr as C, sum as total\nfrom test_codegen import half, twice\n"
        "x = object()\nran = []",
        "SLOPE, KIND = tl.constexpr(0.25), tl.float16\n\n@triton.jit\ndef leaky(x, S: C = SLOPE):\n"
        "    return tl.where(x > 0, x, S * x)",
        "ran.append('a measurement that takes minutes')\n"
        "def make(operation):\n    @triton.jit\n    def closure(x):\n"
        "        return operation(x) * tl.sigmoid(x)\n"
        "    return closure\nboth = make(leaky)",
        "@triton.jit\ndef kernel(x_ptr, n, BLOCK: tl.constexpr):\n"
        "    i = tl.arange(0, half(BLOCK * 2))\n"
        "    x = tl.load(x_ptr + i, mask=i < n).to(KIND).to(tl.float32)\n"
        "    tl.store(x_ptr + i, both(x) / total(x), mask=i < twice(n))",
    ]
    for cell in cells:
        shell.run_cell(cell).raise_error()
    compiled = codegen.compile(shell.user_ns["kernel"], ["*fp32:16", 100], BLOCK=128)
    assert "0f3E800000" in compiled.ptx  # a quarter
    assert "ex2" in compiled.ptx and "f16.f32" in compiled.ptx
    assert "twice" in compiled.ptx, "it is not inlined"
    written = Path(codegen.source_of(shell.user_ns["kernel"].fn).file).read_text()
    assert "object" not in written and "measurement" not in written


def test_a_kernel_from_a_file_is_imported_with_what_it_uses(tmp_path):
    text = (
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\ndef helper(x):\n    return tl.minimum(x, LIMIT)\n"
        "@triton.jit(do_not_specialize=['n'])\ndef kernel(x_ptr, n):\n"
        "    tl.store(x_ptr, helper(tl.load(x_ptr)) * n)\n"
    )
    for limit, told in ((0.25, "0f3E800000"), (0.5, "0f3F000000")):
        (tmp_path / f"mine{told}.py").write_text(text + f"LIMIT = tl.constexpr({limit})\n")
        compiled = codegen.compile(module_from(tmp_path / f"mine{told}.py").kernel, ["*fp32", 16])
        assert told in compiled.ptx
        assert "tt.divisibility" not in compiled.ttir.split("%n: i32")[1].splitlines()[0].split(")")[0]
    namespace = {}
    exec("def nowhere(x):\n    return x", namespace)
    with pytest.raises(ValueError, match="source of nowhere cannot be read"):
        codegen.source_of(namespace["nowhere"])


def test_the_compilers_errors_come_back_with_the_line_that_caused_them():
    """Triton's own message shows the line that calls a helper; the mistake is in what caused it."""
    with pytest.raises(codegen.CompileError) as caught:
        codegen.compile(calls_a_wrong_helper, ["*fp32"])
    called, _, cause = str(caught.value).partition("adds_unlike_shapes(tl.arange(0, 32))")
    assert called.startswith("calls_a_wrong_helper for sm_90: ")
    assert "x + tl.zeros((48,), tl.float32)" in cause and "power of 2" in cause
    with pytest.raises(ValueError, match="blok"):
        codegen.compile(affine, four(), BLOCK=1024, blok=3)


@pytest.mark.parametrize(
    ("args", "keywords", "named"),
    [
        (four(), {"BLOCK": 64, "target": "sm_70"}, "target"), (four()[:-1], {"BLOCK": 64}, "width"),
        (four(), {}, "BLOCK"), ([*four(), 3], {"BLOCK": 64}, "args"), ({"x": 1}, {"BLOCK": 64}, "x"),
        (["*float", *four()[1:]], {"BLOCK": 64}, "x_ptr"), (["*fp32:8", *four()[1:]], {"BLOCK": 64}, "x_ptr"),
        (four(), {"BLOCK": object()}, "BLOCK"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(args, keywords, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        codegen.request(affine, args, **keywords)
    with pytest.raises(ValueError, match=r"^kernel: "):
        codegen.request(four, [])


def test_a_compiler_that_dies_is_an_error_with_its_last_words(tmp_path):
    """Here the module that the kernel stands in ends the process, as a crash of the compiler would."""
    file = tmp_path / "fatal.py"
    file.write_text(
        "import os, sys, triton\n@triton.jit\ndef kernel(x_ptr):\n    pass\n"
        f"if os.getpid() != {os.getpid()}:\n    os.write(1, b'no more memory')\n    os.abort()\n"
    )
    with pytest.raises(codegen.CompileError, match=r"SIGABRT(.|\n)*kernel for sm_90\nno more memory"):
        codegen.compile(module_from(file).kernel, ["*fp32"])


def module_from(file):
    """A module from a file that is nowhere on the import path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PTX = """
.visible .entry k( .param .u64 p ) { // ld.global.b32 in a comment
@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
@!%p1 ld.global.L1::evict_last.v2.b64 { %rd3, %rd4 }, [ %rd1 + 16 ]; ld.param.b64 %rd1, [p];
ld.global.nc.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%rd1]; ld.acquire.gpu.global.u16 %rs1, [%rd1];
ld.shared.v4.b32 {%r1,%r2,%r3,%r4}, [%r9]; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];
@%p2 st.global.b8 [ %rd1 + 0 ], { %rs1 }; cp.async.ca.shared.global [ %r1 ], [ %rd1 ], 4;
@%p2 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2; cp.async.commit_group;
@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}];
@%p3 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r1];
cp.async.bulk.commit_group; cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r2}];
shfl.sync.bfly.b32 %r1, %r2, 16, 31, -1; shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;
redux.sync.max.s32 %r1, %r2, -1;
bar.sync 0; barrier.sync 1; bar.warp.sync -1; mbarrier.init.shared::cta.b64 [%r1], 1;
waitLoop: mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2; wgmma.fence.sync.aligned;
tcgen05.mma.cta_group::1.kind::f16 [ %r1 ], %rd1, %rd2, %r3, %p4;
tcgen05.ld.sync.aligned.x32.b32 {%r1}, [%r2];
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, 1;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 }; }
"""


def test_instructions_are_counted_by_width_and_kind():
    assert codegen.count_instructions(PTX) == {
        "loads": {128: 3, 256: 1, 16: 1, 32: 1}, "stores": {8: 1}, "async_copies": {128: 1, 32: 1},
        "bulk_loads": 1, "bulk_stores": 1, "shuffles": {"bfly": 1, "idx": 1, "redux": 1},
        "matrix": {"tcgen05": 1, "wgmma": 1, "mma": 1}, "barriers": {"bar.sync": 2, "mbarrier": 1},
    }  # fmt: skip
