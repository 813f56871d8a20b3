"""The finished affine layer: right on every shape, its plan, the bytes it moves, what the compiler makes."""

import importlib
import itertools
import re

import launches as launches_of
import pytest
import torch
from launches import POINTWISE

from labkit import checks, codegen, counts, device
from labkit.kernels import affine
from labkit.kernels.common import Gpu
from labkit.works import AFFINE

pytestmark = pytest.mark.usefixtures("cache")
module = importlib.import_module("labkit.kernels.affine")  # the package's attribute is the function
KERNELS = ("flat_kernel", "fold_kernel", "backward_kernel", "column_sum_kernel")
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(), reason="a kernel's accesses can be watched where it is interpreted"
)
LARGE = pytest.mark.large


def vectors(shape):
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def inputs(*shape, dtype=torch.float32, grad=False):
    torch.manual_seed(0)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in vectors(shape)]


def meta(*shape, dtype=torch.float32):
    like = dict(dtype=dtype, device="meta")
    return torch.empty(shape, **like), *torch.empty(2, shape[-1], **like)


@pytest.fixture
def multiprocessors(monkeypatch):
    """Makes the GPU one of so many: the number of programs that share the rows in the backward."""
    return lambda count: monkeypatch.setattr(module, "gpu_of", lambda where: Gpu(count, 0, True))


@pytest.fixture
def launches(monkeypatch):
    return launches_of.recorded(module, KERNELS, monkeypatch)


def both(x, weight, bias):
    """The launches of a forward and a backward, with meta tensors."""
    module.affine_forward(x, weight, bias)
    module.affine_backward(x, x, weight)


def copies(width, dtype=torch.float32):
    """How many rows become one, where there are enough."""
    return module.fold(2**40, width, module.ROW_BYTES // dtype.itemsize)[1] // width


# --- right --------------------------------------------------------------------------------------------


def examine(*shapes, dtypes=(torch.float32,), layouts=("contiguous",), call=affine, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in layouts})
        checks.check(call, AFFINE.reference, vectors, shapes=shapes, dtypes=dtypes, **options)


@pytest.mark.parametrize("count", [1, 3])
def test_full_ragged_and_empty_shapes_in_every_dtype_and_layout(multiprocessors, count):
    """Float64, gradients of a correlated upstream, outputs of NaN between fences, equal bits twice."""
    multiprocessors(count)
    examine(*checks.SHAPES, dtypes=checks.DTYPES, layouts=checks.LAYOUTS)


@pytest.mark.parametrize("count", [1, 132])
@pytest.mark.parametrize("width", [1, 3, 15])
def test_below_at_and_above_a_whole_folded_row(multiprocessors, width, count):
    multiprocessors(count)
    k = copies(width)
    examine(*((batch, width) for batch in (3, k, k + 1, 11 * k + 2)))


@pytest.mark.parametrize("width", [16, 17, 160, 161, 2049, 4096, 4097])
def test_wide_and_odd_widths(multiprocessors, width):
    multiprocessors(132)
    k = copies(width)
    examine((3 * k + 2 if k * width < 50_000 else k + 1, width))


@pytest.mark.parametrize("tile", [(1, 2048), (4, 2048), (2, 1024), (2, 4096)])
def test_every_tile_shape_that_the_lesson_measures(tile):
    columns = tile[1] // 4
    shapes = ((5 * columns + 2, 3), (columns + 1, 33), (7, 4 * columns + 1))
    examine(*shapes, call=lambda *tensors: module.folded(*tensors, *tile), gradients=False)


@pytest.mark.parametrize(("rows", "width", "count"), [(3000, 16, 8), (400, 4096, 0)])
def test_half_precision_is_rounded_once(multiprocessors, rows, width, count):
    """A sum over hundreds of rounds of a program's loop that is kept in 16 bits is off by more."""
    multiprocessors(count)
    tensors = inputs(rows, width, dtype=torch.float16, grad=True)
    upstream = (tensors[0] / 8 + 0.5).detach()
    y = affine(*tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = AFFINE.reference(*exact)
    pairs = zip(
        torch.autograd.grad(y, tensors, upstream),
        torch.autograd.grad(want, exact, upstream.double()),
        strict=True,
    )
    for got, right in [(y.detach(), want.detach()), *pairs]:
        slack = 1e-6 * right.abs().max()  # of float32, where terms cancel
        assert ((got - right).abs() <= 1.001 * 2**-11 * right.abs() + slack).all()


@LARGE
@pytest.mark.parametrize(
    ("rows", "width"),
    [(2**31 // 161 + 3, 161), (2**31 // 4096 + 3, 4096), (17, 2**26 + 1), (17, 2**27 + 1), (1, 2**31 + 16)],
)
def test_more_elements_than_32_bits_count(rows, width):
    x, weight, bias = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((rows, width), width, width)
    )
    ends = slice(0, 5), slice(width // 2, width // 2 + 5), slice(width - 5, width)
    y = module.affine_forward(x, weight, bias)
    for at in ends:
        torch.testing.assert_close(
            y[:, at].float(), x[:, at].float() * weight[at].float() + bias[at].float(), rtol=1e-2, atol=1e-2
        )
    del y
    dx, dweight, dbias = module.affine_backward(x, x, weight)
    for at in ends:
        torch.testing.assert_close(dx[:, at], x[:, at] * weight[at], rtol=1e-2, atol=1e-2)
        column = x[:, at].double()
        torch.testing.assert_close(dweight[at].double(), column.square().sum(0), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(dbias[at].double(), column.sum(0), rtol=1e-2, atol=1e-2 * rows**0.5)


# --- the plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33, 127, 160, 161, 511, 513, 2049, 4096, 4097])
def test_fold_covers_every_element_once(width):
    for columns in (256, 512, 1024, 2048):
        k = module.fold(2**40, width, columns)[1] // width
        for batch in {0, 1, k - 1, k, k + 1, 5 * k + 3}:
            rows, wide, left = module.fold(batch * width, width, columns)
            assert rows * wide + left == batch * width and rows == batch // k
            assert wide % width == 0, "a folded row holds whole rows, or the weights shift"
            if not rows:
                assert wide == left, "few rows are no wider than they are: sums take as much memory as that"
                continue
            assert left < wide and wide % 16 == 0, "else not every folded row begins on 16 bytes"
            if width < 4 * columns:
                assert wide % columns == 0, "a narrow row has to fill its tiles"


@pytest.mark.parametrize("width", [2**25 + 1, 2**26 + 1, 2**27 - 1, 2**27 + 1, 2**30 + 1])
def test_columns_and_sums_of_the_widest_rows_are_counted_in_32_bits(width):
    for batch in (1, 15, 16, 100):
        rows, wide, _ = module.fold(batch * width, width, 1024)
        assert wide < 2**31 or width >= 2**31, (batch, rows)


def test_the_flat_kernel_is_taken_only_where_its_loads_are_wide_and_32_bits_suffice(launches):
    for shape in ((4, 160), (4, 161), (2**20 - 1, 2048), (2**20, 2048)):
        module.affine_forward(*meta(*shape))
    assert [made.title for made in launches] == ["flat_kernel", "fold_kernel", "flat_kernel", "fold_kernel"]


def test_the_shapes_above_reach_every_path(launches, multiprocessors):
    """A kernel that changes its tiles could leave these shapes on one path, and nothing would tell."""
    for count, width in itertools.product((1, 132), (1, 3, 15)):
        multiprocessors(count)
        k = copies(width)
        for batch in (3, k, k + 1, 11 * k + 2):
            both(*meta(batch, width))
    both(*meta(17, 4097))
    main = [made for made in launches if made.title == "backward_kernel"]
    assert {(made.rows > 0, made.tail > 0) for made in main} == {(0, 1), (1, 0), (1, 1)}
    assert any(made.rows % made.ROWS for made in main if made.rows), "a ragged last tile of rows"
    assert any(made.groups > 1 and made.rows > made.groups * made.ROWS for made in main), "several rounds"
    assert any(made.blocks > 1 and made.groups > 1 for made in main)
    assert any(made.width % made.COLS for made in main), "a ragged last tile of columns"
    sums = [made for made in launches if made.title == "column_sum_kernel"]
    assert len({made.ROWS for made in sums}) == 2, "both shapes of the second kernel"
    assert any(made.rows > made.ROWS for made in sums) and any(made.rows % made.ROWS for made in sums)


def test_programs_of_the_backward_fill_the_tensors_own_gpu(launches, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "gpu_of", lambda where: asked.append(where) or Gpu(10, 0, True))
    both(*meta(10**6, 16))
    (main,) = (made for made in launches if made.title == "backward_kernel")
    assert asked == [torch.device("meta")] and (main.blocks, main.groups) == (1, 40)


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "width"), [(7, 160), (4, 16), (7, 161), (1541, 3), (3, 2049)])
def test_every_byte_is_moved_once_and_none_beyond_the_end(multiprocessors, batch, width, dtype):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    multiprocessors(0)  # one program takes all rows of its columns
    x, weight, bias = inputs(batch, width, dtype=dtype)
    size, item = x.numel(), x.element_size()
    rows, wide, _ = module.fold(size, width, module.ROW_BYTES // item)
    (forward,) = kernels_of(module.affine_forward, x, weight, bias)
    fetched = size if width % 16 == 0 else max(1, -(-rows // 2)) * wide
    assert forward.bytes_written == size * item
    assert forward.bytes_read == (size + 2 * fetched) * item, "x once, weight and bias once for each tile"
    (main, second) = kernels_of(module.affine_backward, x, x, weight)
    assert main.bytes_read == (2 * size + wide) * item, "dy and x once, the weight once for each program"
    assert main.bytes_written == size * item + 2 * wide * 4, "dx and two sums in float32"
    assert (second.bytes_read, second.bytes_written) == (2 * wide * 4, 2 * width * item)


def kernels_of(call, *tensors):
    """The launches of Triton kernels in a call, between fences, so that strays hit nothing else."""
    fences = checks.Fences()
    placed = [fences.place(tensor, "contiguous") for tensor in tensors]
    with fences:
        return [launch for launch in counts.count(lambda: call(*placed)).launches if launch.programs]


# --- as a layer ---------------------------------------------------------------------------------------


def gradients(call, tensors, wanted=None):
    output = call(*tensors)
    return [output.detach(), *torch.autograd.grad(output.float().sum(), wanted or tensors)]


def expected(tensors, wanted=None):
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    return gradients(AFFINE.reference, exact, wanted and [exact[i] for i in wanted])


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2]])
@pytest.mark.parametrize("width", [32, 33])
def test_gradients_of_some_inputs_with_an_expanded_upstream(wanted, width):
    tensors = inputs(3, 5, width)
    for index in wanted:
        tensors[index].requires_grad_()
    got = gradients(affine, tensors, [tensors[i] for i in wanted])
    for one, want in zip(got, expected(tensors, wanted), strict=True):
        assert checks.relative_error(one, want) < 1e-6


@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16", "float32", "float32"), ("float32",) * 3, ("float32", "bfloat16", "float16")],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("width", [32, 33])
def test_autocast_takes_mixed_dtypes_and_its_output_has_the_dtype_that_a_linear_layers_has(
    width, compiled, dtypes, fresh_compiler
):
    tensors = [
        t.to(getattr(torch, d)).requires_grad_() for t, d in zip(inputs(6, width), dtypes, strict=True)
    ]
    call = torch.compile(affine, fullgraph=True, backend="aot_eager") if compiled else affine
    with torch.autocast(device.name(), dtype=torch.bfloat16):
        output = call(*tensors)
    got = [output.detach(), *torch.autograd.grad(output.float().sum(), tensors)]
    assert [t.dtype for t in got] == [torch.bfloat16, *(t.dtype for t in tensors)]
    for one, want in zip(got, expected(tensors), strict=True):
        assert not checks.diagnose(one, want, checks.TOLERANCE[torch.bfloat16])


@INTERPRETED
def test_inside_autocast_parameters_are_not_copied():
    x, weight, bias = inputs(6, 33, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        launched = counts.count(lambda: affine(x.detach().bfloat16(), weight, bias)).launches
    assert [made.name for made in launched] == ["_to_copy", "fold_kernel"], "the cast of x is this test's own"


X, W = torch.ones(4, 6), torch.ones(6)
WRONG_CALLS = {
    "a scalar": ("x", torch.tensor(1.0), W, W),
    "a short weight": ("weight", X, torch.ones(5), W),
    "one weight for all": ("weight", X, torch.ones(1), W),
    "a long bias": ("bias", X, W, torch.ones(7)),
    "a matrix as weight": ("weight", X, torch.ones(1, 6), W),
    "a matrix as bias": ("bias", X, W, torch.ones(6, 6)),
    "whole numbers": ("x", X.int(), W.int(), W.int()),
    "double precision": ("x", X.double(), W.double(), W.double()),
    "a weight in half": ("weight", X, W.half(), W),
    "a bias in bf16": ("bias", X, W, W.bfloat16()),
    "a weight elsewhere": ("weight", X, W.to("meta"), W),
    "a bias elsewhere": ("bias", X, W, W.to("meta")),
    "no bias": ("bias", X, W, None),
}


@pytest.mark.parametrize("call", WRONG_CALLS, ids=str)
def test_a_wrong_call_names_the_argument(call):
    name, *tensors = WRONG_CALLS[call]
    tensors = [t if t is None or t.is_meta else t.to(device.name()) for t in tensors]
    with pytest.raises(ValueError, match=rf"^{name}: (has|is) .*should be"):
        affine(*tensors)


# --- what the compiler makes of it, for GPUs that are not here ----------------------------------------


@pytest.fixture(scope="module")
def variants(cache):
    """Every kernel as the host code launches it: (launch, compiled, dtype, width).

    In float32 for one target only: it changes how much a thread has, not what a target does with it.
    """
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        made = launches_of.recorded(module, KERNELS, patch)
        patch.setattr(module, "gpu_of", lambda where: Gpu(132, 0, True))
        for dtype, width in itertools.product((torch.float32, torch.bfloat16), (160, 161)):
            for batch in (1030, 100_001):  # 1030: one whole folded row, a constant to Triton, and a rest
                made.clear()
                both(*meta(batch, width, dtype=dtype))
                targets = POINTWISE if dtype is torch.bfloat16 and batch == 1030 else ("sm_90",)
                for launch, target in itertools.product(made, targets):
                    request = codegen.request(
                        launch.kernel, launch.arguments, target=target, **launch.options
                    )
                    asked.append((request, launch, dtype, width))
    compiled = codegen.compile_many([request for request, *_ in asked])
    return [
        (launch, one, dtype, width) for one, (_, launch, dtype, width) in zip(compiled, asked, strict=True)
    ]


def test_every_kernel_compiles_for_old_and_new_targets_and_fits(variants):
    assert {(one.kernel, one.target) for _, one, *_ in variants} == set(itertools.product(KERNELS, POINTWISE))
    assert any(launch.rows == 1 for launch, one, *_ in variants if one.kernel == "fold_kernel")
    for _, one, *_ in variants:
        assert one.spills == 0 and one.shared_bytes <= 99 * 1024, one


def test_loads_are_wide(variants):
    for _, one, dtype, width in variants:
        bits = 8 * dtype.itemsize
        if one.kernel == "flat_kernel":
            assert set(one.loads) == {128}, one
        elif one.kernel == "fold_kernel":
            # two of a tile's rows, 16 bytes for each of 128 threads; parameters and the rest narrow
            assert one.loads[128] >= 2 and one.stores[128] >= 2 and set(one.loads) <= {128, bits}, (
                one,
                width,
            )
        elif one.kernel == "backward_kernel":
            assert set(one.async_copies) == {128}, one
            assert one.async_copies[128] >= 8, "dy and x, two rows each, ahead of the loop and in it"


def test_arithmetic_is_in_float32_and_sums_are_added_in_a_fixed_order(variants):
    for _, one, *_ in variants:
        half = re.findall(r"arith\.\w+f .*xb?f16>", one.ttir)
        assert not [line for line in half if not re.match(r"arith\.(extf|truncf) ", line)], one
        stores = re.findall(r"tt\.store .*!tt\.ptr<b?f16>", one.ttir)
        assert one.ttir.count("arith.truncf") == len(stores), one
        assert not re.search(r"\b(atom|red)\.", one.ptx), one


def test_what_is_summed_is_zero_beyond_the_end(variants):
    """The interpreter fills masked lanes with zeros unasked; a GPU leaves there what it likes."""
    for _, one, *_ in variants:
        loads = re.findall(r"tt\.load (.*?) :", one.ttir)
        filled = sum(operands.count(",") >= 2 for operands in loads)
        assert filled == {"backward_kernel": 4, "column_sum_kernel": 1}.get(one.kernel, 0), one


def test_elements_beyond_two_to_the_31_are_addressed_in_64_bits(variants, launches):
    """Those of x, y, dy and dx always; of all other tensors where the width is a number of 64 bits."""
    both(*meta(2, 2**31 + 16, dtype=torch.bfloat16))
    huge = codegen.compile_many(codegen.request(m.kernel, m.arguments, **m.options) for m in launches)
    for made, one in zip(launches, huge, strict=True):
        in_32_bits = rf"arith\.muli .*%c{made.COLS}_i32"
        assert "get_program_id x" in one.ttir and not re.search(in_32_bits, one.ttir), "the first column"
    others = ("weight", "bias", "sums", "dweight", "dbias")
    for one, *far in [(one,) for _, one, *_ in variants] + [(one, *others) for one in huge]:
        far += ["x", "y", "dx", "dy"] if one.kernel in ("fold_kernel", "backward_kernel") else []
        splats = re.findall(r"(%\w+) = tt\.splat %([a-z]+)(?:_\d+)? :", one.ttir)
        bases = [base for base, name in splats if name in far]
        offsets = re.findall(r"tt\.addptr (%\w+), %\w+ : \S+>>, tensor<\S*?(i\d+)>", one.ttir)
        found = [bits for base, bits in offsets if base in bases]
        assert found == ["i64"] * len(bases) and bool(found) == bool(far), (one.kernel, found, bases)
