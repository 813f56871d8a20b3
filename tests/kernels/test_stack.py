"""The stack of blocks, in one launch or several: right, its plan, its bytes, what the compiler makes."""

import re

import launches as launches_of
import pytest
import torch
from launches import ROOM

from labkit import checks, codegen, counts, device
from labkit.kernels import blocks, stack
from labkit.kernels.common import Gpu
from labkit.stack_works import stack as reference

pytestmark = pytest.mark.usefixtures("cache")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(), reason="launches are counted, and kernels compiled for other GPUs, where there is none"
)
LARGE = pytest.mark.large
TWO_GPUS = pytest.mark.skipif(
    not device.has_gpu() or torch.cuda.device_count() < 2, reason="there is no second GPU here"
)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("x", "weight", "bias", "gain")


def drawn(shape, depth=3):
    width = shape[-1]
    weight = torch.randn(depth, width, width) * max(width, 1) ** -0.5
    return torch.randn(shape), weight, 0.3 * torch.randn(depth, width), 1 + 0.1 * torch.randn(depth, width)


def inputs(rows, width, depth=3, dtype=fp32, where=None):
    torch.manual_seed(0)
    return [t.to(where or device.name(), dtype) for t in drawn((rows, width), depth)]


def close(got, tensors, dtype):
    problem = checks.diagnose(got, reference(*(t.double() for t in tensors)), checks.TOLERANCE[dtype])
    assert not problem, problem


# --- right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2, 99])
def test_it_is_right_in_every_dtype_and_layout(at_once):
    """Float64, outputs of NaN between fences, equal bits twice; h is rounded three times."""
    shapes = ((33, 64), (5, 20), (1, 1), (40, 96), (0, 8), (4, 0))
    options = dict(shapes=shapes, gradients=False, roundings=3)
    assert checks.check(blocks(at_once), reference, drawn, **options)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_any_number_of_rows_a_program_is_right(monkeypatch, rows):
    monkeypatch.setattr(stack, "rows_for", lambda *_: rows)
    tensors = inputs(70, 32, dtype=bf16)
    close(blocks(99)(*tensors), tensors, bf16)


def test_products_and_means_are_those_of_float32():
    """Rounded once: a product or a sum of squares in 16 bits is further off than float16 rounds."""
    tensors = inputs(48, 256, depth=1, dtype=fp16)
    want = reference(*(t.double() for t in tensors))
    assert checks.relative_error(blocks(1)(*tensors), want) < 2.6e-4


def test_no_blocks_are_a_copy():
    x, *weights = inputs(3, 8, depth=0)
    y = blocks(1)(x, *weights)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()


@INTERPRETED
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (5, 20), (33, 33)])
def test_every_row_is_read_and_written_once_and_none_beyond_the_last(rows, width):
    """A load without the mask of its rows gives the right result: no row is used for another."""
    fences = checks.Fences()
    tensors = [fences.place(tensor, "contiguous") for tensor in inputs(rows, width, depth=2)]
    (launch,) = counts.count(lambda: blocks(99)(*tensors)).launches
    assert launch.bytes_written == 4 * rows * width
    assert launch.bytes_read == 4 * (rows * width + -(-rows // 16) * 2 * width * (width + 2))


@INTERPRETED
def test_one_launch_or_one_a_block_and_none_for_nothing():
    tensors = inputs(20, 16, depth=5)
    for at_once, launches in ((99, 1), (1, 5), (2, 3)):
        assert len(counts.count(lambda n=at_once: blocks(n)(*tensors)).launches) == launches
    for nothing in (inputs(0, 16), inputs(4, 16, depth=0)):
        made = [launch.name for launch in counts.count(lambda t=nothing: blocks(99)(*t)).launches]
        assert "stack_kernel" not in made, "a GPU refuses an empty grid"


def test_weights_of_2_to_the_31_elements_are_taken_in_parts(monkeypatch):
    launches = launches_of.recorded(stack, ("stack_kernel",), monkeypatch)
    depth = 2**17 + 3
    meta = (torch.empty(shape, device="meta") for shape in ((5, 128), (depth, 128, 128), *[(depth, 128)] * 2))
    blocks(10**9)(*meta)
    assert sum(made.last - made.first for made in launches) == depth
    assert all(made.weight.numel() < 2**31 for made in launches) and len(launches) == 2


@LARGE
def test_the_last_of_many_blocks_is_the_one_that_is_read():
    width, depth = 256, 2**15 + 3
    x, last, bias, gain = inputs(20, width, depth=2, dtype=bf16)
    weight = torch.zeros(depth, width, width, dtype=bf16, device="cuda")
    weight[-1] = last[1]  # the block before makes rows of its bias
    biases, gains = (torch.ones(depth, width, dtype=bf16, device="cuda") for _ in range(2))
    biases[-2:], gains[-2:] = bias, gain
    y = blocks(depth)(x, weight, biases, gains)
    close(y, (x, weight[-2:], bias, gain), bf16)


@LARGE
@pytest.mark.parametrize(("rows", "width"), [(2**25 + 5, 64), (2**31 + 40, 1)])
def test_rows_beyond_2_to_the_31_elements(rows, width):
    _, *weights = inputs(1, width, depth=1, dtype=fp16)
    x = torch.empty(rows, width, dtype=fp16, device="cuda").normal_()
    y = blocks(1)(x, *weights)
    for part in (slice(0, 100), slice(rows - 100, None)):
        close(y[part], (x[part], *weights), fp16)


@TWO_GPUS
def test_tensors_on_a_gpu_that_is_not_the_current_one():
    tensors = inputs(33, 64, where="cuda:1")
    y = blocks(2)(*tensors)
    assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    close(y, tensors, fp32)


# --- with PyTorch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_refused_in_a_sentence_and_not_dropped(name):
    tensors = dict(zip(NAMES, inputs(4, 16), strict=True))
    tensors[name].requires_grad_()
    with pytest.raises(RuntimeError, match=r"^blocks has no backward"):
        blocks(99)(**tensors)
    with torch.no_grad():
        assert not blocks(99)(**tensors).requires_grad


def test_autocast_computes_in_its_dtype():
    tensors = inputs(5, 20)
    with torch.autocast(device.name(), bf16):
        assert torch.equal(blocks(99)(*tensors), blocks(99)(*(t.bfloat16() for t in tensors)))


def test_it_compiles_whole_with_a_number_that_is_new(fresh_compiler):
    tensors = inputs(5, 20)
    for at_once in (1, 3):
        compiled = torch.compile(lambda *t, n=at_once: blocks(n)(*t) * 2, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*tensors), blocks(at_once)(*tensors) * 2)


@pytest.mark.parametrize("wrong", NAMES)
def test_a_wrong_call_names_the_argument(wrong):
    tensors = dict(zip(NAMES, inputs(4, 16), strict=True))
    short, double = dict(tensors), dict(tensors)
    short[wrong] = tensors[wrong][..., None] if wrong == "x" else tensors[wrong][:, :-1]
    double[wrong] = tensors[wrong].double()
    for given in (short, double, {**tensors, wrong: tensors[wrong].flatten()}):
        with pytest.raises(ValueError, match=f"^{wrong}:"):
            blocks(99)(**given)


def test_no_blocks_at_once_are_refused():
    with pytest.raises(ValueError, match=r"^at_once: is 0"):
        blocks(0)


# --- plans, and what the compiler makes of them -------------------------------------------------------

FEW, MANY, FAR = 256, 10**5, 2**31 + 40
"""Rows for which a program takes the fewest and the most, and more than 32 bits count."""
WIDTHS = ((bf16, 64), (bf16, 100), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128))
SIZES = {
    "sm_80": [(bf16, 64, FEW), (bf16, 256, MANY), (fp32, 128, MANY)],
    "sm_86": [(bf16, 100, MANY), (bf16, 128, MANY), (fp32, 128, MANY)],
    "sm_89": [(bf16, 128, MANY)],
    "sm_90": [
        *((*width, MANY) for width in WIDTHS),
        *((bf16, 64, 1), (bf16, 256, FEW), (fp32, 128, FEW), (bf16, 1, FAR)),
    ],
    "sm_100": [(bf16, 64, FEW), (bf16, 100, MANY), (bf16, 256, MANY), (fp32, 128, MANY)],
    "sm_120": [(bf16, 128, MANY), (fp32, 128, MANY)],
}
"""By target; all of them on the one that is measured, elsewhere the largest of each kind of tile."""


def gpu_like(target):
    return Gpu(132, ROOM[target] * 1024, True)


def meta(rows, width, dtype):
    x, *weights = (t.to("meta", dtype) for t in drawn((1, width), depth=8))
    return x.expand(rows, -1), *weights


def test_programs_take_more_rows_where_there_are_more_than_places():
    sizes = (1, 1600, 1601, 3200, 3201, 10**6)
    gpu = Gpu(100, 0, True)
    assert [stack.rows_for(gpu, rows, 128, 2) for rows in sizes] == [16, 16, 32, 32, 64, 64]
    assert [stack.rows_for(gpu, rows, 256, 2) for rows in sizes] == [16, 16, 32, 32, 32, 32]
    assert stack.rows_for(gpu, 10**6, 128, 4) == 32


@pytest.mark.parametrize("target", ROOM)
def test_stages_fit_the_shared_memory_and_a_weight_that_does_not_is_refused(target):
    gpu = gpu_like(target)
    for width, itemsize in ((64, 2), (128, 2), (256, 2), (64, 4), (128, 4)):
        if width**2 * itemsize <= gpu.shared_bytes - 8192:
            kept = stack.stages_for(gpu, width, itemsize) - 1
            assert kept == 2 or 2 * width**2 * itemsize > gpu.shared_bytes - 8192
        else:
            with pytest.raises(ValueError, match=r"^weight: not one"):
                stack.stages_for(gpu, width, itemsize)


@pytest.fixture(scope="module")
def compiled(cache):
    """By target: each launch, and the kernel that was compiled for it."""
    launched = {}
    for target, sizes in SIZES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stack, "gpu_of", lambda where, target=target: gpu_like(target))
            launched[target] = launches_of.recorded(stack, ("stack_kernel",), patch)
            for dtype, width, rows in sizes:
                blocks(99)(*meta(rows, width, dtype))
    kernels = iter(
        codegen.compile_many(
            codegen.request(made.kernel, made.arguments, target=target, **made.options)
            for target, launches in launched.items()
            for made in launches
        )
    )
    return {target: [(made, next(kernels)) for made in launches] for target, launches in launched.items()}


@INTERPRETED
@pytest.mark.parametrize("target", ROOM)
def test_it_compiles_for_every_target_fits_and_spills_nothing(compiled, target):
    assert len(compiled[target]) == len(SIZES[target])
    for launch, code in compiled[target]:
        case = launch.W, launch.BM, str(launch.x.dtype)
        assert code.shared_bytes <= ROOM[target] * 1024 and code.spills == 0, case
        assert re.search(r"arith\.muli .*: i64", code.ttir), "elements beyond 2**31"
        assert bool(re.search(r"arith\.muli .*: i32", code.ttir)) == (launch.R != FAR), "rows beyond that"
        assert bool(code.matrix) == (launch.x.dtype is bf16), "float32 is multiplied in full, without TF32"


@INTERPRETED
def test_tiles_of_every_number_of_rows_are_compiled(compiled):
    assert {launch.BM for launch, _ in compiled["sm_90"]} == {16, 32, 64}
