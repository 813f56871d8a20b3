"""Lesson 1: its kernels on awkward shapes, wrong kernels that must be refused, its code, its execution."""

import csv
import functools
import html.parser
import itertools
import re
from dataclasses import replace
from typing import NamedTuple

import launches as launches_of
import nbformat
import pytest
import torch
from counting import calls_checked
from launches import POINTWISE

from labkit import (
    checks,
    claims,
    codegen,
    counts,
    device,
    figures,
    lessons,
    machine,
    places,
    published,
)
from labkit.works import AFFINE

pytestmark = pytest.mark.usefixtures("cache")
NAME = "01_launch_overhead"
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="reads and writes of a kernel's lanes can be watched only where it is interpreted",
)
NARROW = (1, 2, 15)
FOLDED = (*NARROW, 16, 17, 33, 127, 160, 161, 511, 513, 2049, 4096, 4097)
"""Widths below, at and above a tile and four tiles, with every kind of common divisor."""
RUN = (16, 17, 33, 160, 161, 2049, 4096, 4097)
"""Of these the ones whose kernels run: what tells 127, 511 and 513 from 161 is the fold alone."""
FOLD_COLUMNS = (256, 512, 1024, 2048)
SHARED_BYTES = 99 * 1024
"""What one block may use on sm_86, sm_89 and sm_120, the least of all targets."""


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


@pytest.fixture
def multiprocessors(monkeypatch):
    """Makes the device one of so many multiprocessors: the number of programs of the backward kernel.

    Where kernels are interpreted it is 0, so that one program walks down all rows of its columns.
    """

    def give(count):
        here = replace(machine.identity(), multiprocessors=count)
        monkeypatch.setattr(machine, "identity", lambda: here)

    yield give


LARGE = pytest.mark.skipif(
    machine.identity().memory_bytes < 48 * 2**30,
    reason="more than 2**31 elements, forward and backward, need a GPU with 48 GiB",
)


@LARGE
@pytest.mark.parametrize("width", [161, 4096])
def test_more_elements_than_32_bits_count(lesson, width):
    rows = 2**31 // width + 3
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight, bias = (torch.randn(width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    y = lesson.affine_forward(x, weight, bias)
    for part in (slice(None, 5), slice(rows // 2, rows // 2 + 5), slice(-5, None)):
        wanted = (x[part].double() * weight.double() + bias.double()).bfloat16()
        assert torch.allclose(y[part].float(), wanted.float(), rtol=1e-2, atol=1e-2)
    del y
    dx, dweight, dbias = lesson.affine_backward(x, x, weight, bias)
    for part in (slice(None, 5), slice(-5, None)):
        assert torch.allclose(dx[part].float(), (x[part] * weight).float(), rtol=1e-2, atol=1e-2)
    del dx
    squares = sum(part.float().square().sum(0, dtype=torch.float64) for part in x.split(2**20))
    sums = sum(part.float().sum(0, dtype=torch.float64) for part in x.split(2**20))
    assert torch.allclose(dweight.double(), squares, rtol=1e-2)
    assert torch.allclose(dbias.double(), sums, rtol=1e-2, atol=1e-2 * rows**0.5)


def vectors(shape):
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def inputs(*shape, dtype=torch.float32, grad=False):
    torch.manual_seed(0)
    return [t.to(device.name(), dtype).requires_grad_(grad) for t in vectors(shape)]


def examine(lesson, name, *shapes, dtypes=(torch.float32,)):
    """One function of the lesson on shapes of our own; layouts are the business of the whole grid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {"contiguous": checks.LAYOUTS["contiguous"]})
        return checks.check(
            getattr(lesson, name),
            AFFINE.reference,
            vectors,
            shapes=shapes,
            dtypes=dtypes,
            gradients=name == "affine",
        )


# --- right on every shape -----------------------------------------------------------------------------


def test_the_lesson_checks_its_functions_on_the_whole_grid(result):
    """The grid runs inside the lesson; here is what it must have covered. The steps may take fewer shapes."""
    outputs = sum(map(calls_checked, checks.SHAPES))
    done = {data["name"]: data["passed"] for data in shown(result, "application/vnd.labkit.check+json")}
    assert done["affine"] == 4 * outputs, "the output and three gradients"
    assert all(done[step] >= outputs / 2 for step in ("flat", "tile", "folded"))


@pytest.mark.parametrize("width", FOLDED)
def test_fold_covers_every_element_once(lesson, width):
    judge_fold(lesson, width)


def judge_fold(lesson, width):
    for columns in FOLD_COLUMNS:
        copies = lesson.fold(torch.empty(1, width, device="meta"), columns)[1] // width
        for batch in {0, 1, copies - 1, copies, copies + 1, 5 * copies + 3}:
            rows, wide, left = lesson.fold(torch.empty(batch, width, device="meta"), columns)
            assert rows * wide + left == batch * width and 0 <= left < wide
            assert wide % width == 0, "a folded row has to hold whole rows, or the weights shift"
            assert wide % 16 == 0, "else not every folded row begins on 16 bytes"
            if width < 4 * columns:
                assert wide % columns == 0, "a narrow row has to fill its tiles"


def copies(lesson, width, dtype=torch.float32):
    """How many rows become one in the lesson's own tiles of 2048 bytes."""
    x = torch.empty(0, width, device="meta", dtype=dtype)
    return lesson.fold(x, 2048 // x.element_size())[1] // width


@pytest.mark.parametrize("count", [1, 132])
@pytest.mark.parametrize("width", NARROW)
def test_affine_is_right_below_at_and_above_a_whole_folded_row(lesson, multiprocessors, width, count):
    multiprocessors(count)
    k = copies(lesson, width)
    examine(lesson, "affine", *((batch, width) for batch in (3, k, k + 1, 11 * k + 2)))


@pytest.mark.parametrize(("width", "dtype"), [(3, torch.float16), (17, torch.bfloat16)])
def test_affine_is_right_in_half_precision_with_whole_rows_and_a_rest(lesson, multiprocessors, width, dtype):
    multiprocessors(8)
    rows = 5 * copies(lesson, width, dtype) + 2  # with twice as many the sums leave float16's range
    examine(lesson, "affine", (rows, width), dtypes=(dtype,))


@pytest.mark.parametrize("width", RUN)
def test_affine_is_right_at_wide_and_odd_widths(lesson, multiprocessors, width):
    multiprocessors(132)
    k = copies(lesson, width)
    batch = 3 * k + 2 if k * width < 50_000 else k + 1
    examine(lesson, "affine", (batch, width))


KERNELS = ("flat_kernel", "tile_kernel", "fold_kernel", "backward_kernel", "column_sum_kernel")


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, KERNELS, monkeypatch)


def meta(*shape, dtype=torch.float32):
    return (
        torch.empty(shape, dtype=dtype, device="meta"),
        *torch.empty(2, shape[-1], dtype=dtype, device="meta"),
    )


def test_the_shapes_above_reach_every_path(lesson, launches, multiprocessors):
    """A kernel that changes its tiles could leave these shapes on one path, and nothing would tell."""
    for count, width in itertools.product((1, 132), NARROW):
        multiprocessors(count)
        k = copies(lesson, width)
        for batch in (3, k, k + 1, 11 * k + 2):
            x, weight, bias = meta(batch, width)
            lesson.affine_backward(x, x, weight, bias)
    backwards = [made for made in launches if made.title == "backward_kernel"]
    assert {(made.rows > 0, made.tail > 0) for made in backwards} == {(0, 1), (1, 0), (1, 1)}
    assert any(made.rows % made.ROWS for made in backwards if made.rows), "a ragged last tile of rows"
    assert any(made.groups > 1 and made.rows > made.groups * made.ROWS for made in backwards), (
        "several rounds"
    )
    assert any(made.blocks > 1 and made.groups > 1 for made in backwards)
    sums = [made for made in launches if made.title == "column_sum_kernel"]
    assert len({made.ROWS for made in sums}) == 2, "both shapes of the second kernel"
    assert any(made.rows > made.ROWS for made in sums) and any(made.rows % made.ROWS for made in sums)
    launches.clear()
    for width in FOLDED:
        x, weight, bias = meta(5, width)
        lesson.affine_backward(x, x, weight, bias)
    assert any(made.width % made.COLS for made in launches if made.title == "backward_kernel"), (
        "a ragged tile"
    )


@pytest.mark.parametrize("tile", [(1, 2048), (2, 2048), (4, 2048), (2, 1024), (2, 4096)])
def test_folded_is_right_in_every_tile_shape(lesson, monkeypatch, tile):
    monkeypatch.setattr(
        lesson,
        "shaped",
        functools.partial(lesson.folded, tile_rows=tile[0], row_bytes=tile[1]),
        raising=False,
    )
    columns = tile[1] // 4
    examine(lesson, "shaped", (5 * columns + 2, 3), (columns + 1, 33), (7, 4 * columns + 1))


@pytest.mark.parametrize(
    ("name", "shapes"), [("flat", [(3, 513), (1, 4097)]), ("tile", [(3, 513), (5, 1025)])]
)
def test_the_first_steps_are_right_beyond_one_tile(lesson, name, shapes):
    examine(lesson, name, *shapes)


@pytest.mark.parametrize("name", ["flat", "tile", "folded"])
def test_the_first_steps_take_tensors_without_rows_or_elements(lesson, name):
    examine(lesson, name, (19,), (1,), (0, 8), (4, 0), (2, 0, 3))


def test_affine_takes_the_flat_kernel_only_where_its_loads_are_wide(lesson, launches):
    for width in (160, 161):
        lesson.affine_forward(*meta(4, width))
    lesson.affine_forward(*meta(2**20, 2048))
    assert [made.title for made in launches] == ["flat_kernel", "fold_kernel", "fold_kernel"]


@INTERPRETED
@pytest.mark.parametrize(("batch", "width"), [(7, 160), (7, 161), (1541, 3), (3, 2049)])
def test_every_byte_is_moved_once_and_none_beyond_the_end(lesson, batch, width):
    judge_bytes(lesson, batch, width, torch.float32)


def judge_bytes(lesson, batch, width, dtype):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    x, weight, bias = inputs(batch, width, dtype=dtype)
    size, item = x.numel(), x.element_size()
    rows, wide, _ = lesson.fold(x, 2048 // item)
    (forward,) = kernels_of(lesson.affine_forward, x, weight, bias)
    fetched = size if width % 16 == 0 else max(1, -(-rows // 2)) * wide
    assert forward.bytes_written == size * item
    assert forward.bytes_read == (size + 2 * fetched) * item, "x once, weight and bias once for each tile"
    (main, second) = kernels_of(lesson.affine_backward, x, x, weight, bias)
    assert main.bytes_read == (2 * size + wide) * item, "dy and x once, the weight once for each program"
    assert main.bytes_written == size * item + 2 * wide * 4, "dx and two sums in float32"
    assert (second.bytes_read, second.bytes_written) == (2 * wide * 4, 2 * width * item)


def kernels_of(call, *tensors):
    """The launches of Triton kernels in a call, between fences, so that strays hit nothing else."""
    fences = checks.Fences()
    placed = [fences.place(tensor, "contiguous") for tensor in tensors]
    with fences:
        launches = counts.count(lambda: call(*placed)).launches
    return [launch for launch in launches if launch.programs]


# --- as a layer that people train with ----------------------------------------------------------------


def gradients(call, tensors, wanted=None):
    output = call(*tensors)
    return output, torch.autograd.grad(output.sum(), wanted or tensors)


def expected(tensors):
    exact = [t.detach().double().requires_grad_() for t in tensors]
    return gradients(AFFINE.reference, exact)


def assert_close(got, want):
    assert checks.relative_error(got.detach(), want.detach()) < 1e-6


@pytest.mark.parametrize("width", [160, 161])
def test_an_expanded_upstream_gradient(lesson, width):
    tensors = inputs(5, width, grad=True)
    lesson.affine(*tensors).sum().backward()
    for tensor, want in zip(tensors, expected(tensors)[1], strict=True):
        assert tensor.grad.shape == tensor.shape
        assert_close(tensor.grad, want)


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2]])
def test_gradients_of_some_inputs_only(lesson, wanted):
    tensors = inputs(3, 5, 33)
    _, want = expected(tensors)
    for index in wanted:
        tensors[index].requires_grad_()
    _, got = gradients(lesson.affine, tensors, [tensors[index] for index in wanted])
    for index, grad in zip(wanted, got, strict=True):
        assert_close(grad, want[index])


def test_nothing_is_kept_for_a_backward_that_nobody_asked_for(lesson):
    tensors = inputs(4, 33, grad=True)
    with torch.no_grad():
        output = lesson.affine(*tensors)
    assert output.grad_fn is None
    assert_close(output, AFFINE.reference(*tensors))


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16, torch.float32])
def test_autocast_takes_mixed_dtypes(lesson, first):
    other = torch.float32 if first != torch.float32 else torch.bfloat16
    x, weight, bias = (t.detach() for t in inputs(6, 33))
    tensors = [x.to(first).requires_grad_(), *(t.to(other).requires_grad_() for t in (weight, bias))]
    with torch.autocast(device.name(), dtype=torch.bfloat16):
        output = lesson.affine(*tensors)
    grads = torch.autograd.grad(output.float().sum(), tensors)
    output_wanted, wanted = expected(tensors)
    assert output.dtype is first and [grad.dtype for grad in grads] == [first, other, other]
    for got, want in zip((output, *grads), (output_wanted, *wanted), strict=True):
        assert not checks.diagnose(got.detach(), want.detach(), checks.TOLERANCE[got.dtype])


def test_a_second_derivative_is_refused(lesson):
    tensors = inputs(4, 33, grad=True)
    x_grad, *_ = torch.autograd.grad(lesson.affine(*tensors).square().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        x_grad.sum().backward()


def test_torch_compile_takes_it_whole(lesson):
    tensors = inputs(6, 161, grad=True)
    compiled = torch.compile(
        lambda x, w, b: torch.relu(lesson.affine(x * 2, w, b)), fullgraph=True, backend="aot_eager"
    )
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = gradients(lambda x, w, b: torch.relu(x * 2 * w + b), exact)
    got = gradients(compiled, tensors)
    assert_close(got[0], want[0])
    for one, other in zip(got[1], want[1], strict=True):
        assert_close(one, other)


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
    "complex numbers": ("x", X.cfloat(), W.cfloat(), W.cfloat()),
    "a weight in half": ("weight", X, W.half(), W),
    "a bias in bf16": ("bias", X, W, W.bfloat16()),
    "a weight elsewhere": ("weight", X, W.to("meta"), W),
    "a bias elsewhere": ("bias", X, W, W.to("meta")),
}


@pytest.mark.parametrize("call", WRONG_CALLS, ids=str)
def test_a_wrong_call_names_the_argument(lesson, call):
    name, *tensors = WRONG_CALLS[call]
    tensors = [t if t.device.type == "meta" else t.to(device.name()) for t in tensors]
    with pytest.raises(ValueError, match=rf"^{name}: (has|is) .*should be"):
        lesson.affine(*tensors)


# --- wrong kernels, which must not pass ---------------------------------------------------------------

ROW_MASK = "(row < rows)[:, None] & "
MUTANTS = {
    "flat: stores without a mask": ("flat_kernel", "value, inside)", "value)"),
    "flat: loads without a mask": ("flat_kernel", "tl.load(x + at, inside)", "tl.load(x + at)"),
    "flat: no remainder": ("flat_kernel", "weight + at % width", "weight + at"),
    "flat: one element too few": ("flat_kernel", "at < count", "at < count - 1"),
    "flat: weight for bias": ("flat_kernel", "bias + at", "weight + at"),
    "flat: a block too few": ("flat", "triton.cdiv(x.numel(), block)", "max(1, x.numel() // block)"),
    "flat: takes any strides": ("flat", "@ops.contiguous\n", ""),
    "tile: row mask": ("tile_kernel", f"mask = {ROW_MASK}", "mask = (row < row + 1)[:, None] & "),
    "tile: column mask": ("tile_kernel", " & (column < width)[None, :]", " & (column < column + 1)[None, :]"),
    "tile: every block the first": ("tile_kernel", "% blocks * COLS", "% blocks * 0"),
    "tile: rows from blocks": ("tile_kernel", "// blocks * ROWS", "* ROWS"),
    "tile: a tile of rows too few": ("tile", "triton.cdiv(rows, 2)", "max(1, rows // 2)"),
    "fold: row mask": ("fold_kernel", f"mask = {ROW_MASK}", "mask = (row < row + 1)[:, None] & "),
    "fold: column mask": ("fold_kernel", " & (column < width)[None, :]", " & (column < column + 1)[None, :]"),
    "fold: weight does not repeat": ("fold_kernel", "weight + column % period", "weight + column"),
    "fold: bias does not repeat": ("fold_kernel", "bias + column % period", "bias + column"),
    "fold: stride of one row": ("fold_kernel", "row[:, None] * width", "row[:, None] * period"),
    "fold: nothing left over": ("fold_kernel", "tl.program_id(0) < blocks:", "tl.program_id(0) < 0:"),
    "fold: left over in one program": ("fold_kernel", "tl.program_id(0) < blocks:", "tl.program_id(0) < 1:"),
    "fold: left over from the start": ("fold_kernel", "tl.int64) * width + column", "tl.int64) * 0 + column"),
    "fold: left over without bias": ("fold_kernel", "* scale + shift", "* scale"),
    "fold: stores beyond the end": ("fold_kernel", "last, column < tail", "last, column < width"),
    "fold: loads beyond the end": ("fold_kernel", "x + end, column < tail", "x + end, column < width"),
    "fold: no program without whole rows": (
        "folded",
        "max(1, triton.cdiv(rows, tile_rows))",
        "triton.cdiv(rows, tile_rows)",
    ),
    "fold: half of the rows": ("folded", "triton.cdiv(rows, tile_rows)", "triton.cdiv(rows, 2 * tile_rows)"),
    "fold: odd copies": ("fold", "math.gcd(width, unit)", "math.gcd(width, unit) // 2 * 2 + 1"),
    "fold: one left over too few": ("fold", "left * width", "max(0, left - 1) * width"),
    "backward: row mask": ("backward_kernel", f"mask = {ROW_MASK}", "mask = (row < row + 1)[:, None] & "),
    "backward: no bias from whole rows": (
        "backward_kernel",
        "        dbias += up\n        tl.store(dx + at",
        "        tl.store(dx + at",
    ),
    "backward: no bias left over": (
        "backward_kernel",
        "        dbias += up\n        tl.store(dx + end",
        "        tl.store(dx + end",
    ),
    "backward: no weight left over": (
        "backward_kernel",
        "dweight += up * tl.load(x + end",
        "dweight += 0 * tl.load(x + end",
    ),
    "backward: weight does not repeat": ("backward_kernel", "column % period", "column"),
    "backward: dx is dy": ("backward_kernel", "up * scale[None, :]", "up"),
    "backward: sums of dy": ("backward_kernel", "up * tl.load(x + at", "up + 0 * tl.load(x + at"),
    "backward: sums swapped": (
        "backward_kernel",
        "sums + group * width + column, dweight",
        "sums + group * width + column, dbias",
    ),
    "backward: sums in one place": ("backward_kernel", "(groups + group) * width", "(groups + 0) * width"),
    "backward: every group takes the rest": ("backward_kernel", "if group == 0:", "if group >= 0:"),
    "backward: groups overlap": ("backward_kernel", "rows, groups * ROWS,", "rows, ROWS,"),
    "backward: every group begins at the top": ("backward_kernel", "range(group * ROWS", "range(0 * ROWS"),
    "backward: one round only": (
        "backward_kernel",
        "group * ROWS, rows, groups",
        "group * ROWS, (group + 1) * ROWS, groups",
    ),
    "backward: sums between the kernels in half": ("affine_backward", "dtype=torch.float32", "dtype=x.dtype"),
    "backward: takes any strides": ("affine_backward", "@ops.contiguous\n", ""),
    "backward: empty input, no gradient": (
        "affine_backward",
        "dweight.zero_(), dbias.zero_()",
        "dweight, dbias",
    ),
    "backward: sums of the first group": (
        "affine_backward",
        "partial = groups * width // period",
        "partial = width // period",
    ),
    "sums: dbias is dweight": (
        "column_sum_kernel",
        "(tl.program_id(1) * rows + row)",
        "(tl.program_id(1) * 0 + row)",
    ),
    "sums: the first rows only": ("column_sum_kernel", "range(0, rows, ROWS)", "range(0, ROWS, ROWS)"),
    "sums: row mask": ("column_sum_kernel", f"mask = {ROW_MASK}", "mask = (row < row + 1)[:, None] & "),
    "sums: last tile only": ("column_sum_kernel", "total += ", "total = "),
    "sums: stores beyond the end": (
        "column_sum_kernel",
        "dbias + column, tl.sum(total, 0), column < width",
        "dbias + column, tl.sum(total, 0)",
    ),
}


def mutated(folder, function, old, new):
    """The lesson with one change in one function."""
    notebook = lessons.read(lessons.resolve(NAME))
    for _, cell in lessons.code_cells(notebook):
        parts = re.split(r"(\n\n\n)", cell.source)
        for index, part in enumerate(parts):
            if re.search(rf"^def {function}\(", part, re.MULTILINE):
                assert part.count(old) == 1, (
                    f"{function} has no {old!r} of its own: bring this mutant up to date"
                )
                parts[index] = part.replace(old, new)
        # the operator of the lesson itself stays registered
        cell.source = "".join(parts).replace('differentiable("affine"', 'differentiable("mutant"')
    path = folder / f"{NAME}.ipynb"
    nbformat.write(notebook, path)
    return lessons.load(path)


def judge(lesson, multiprocessors, function):
    """What a wrong kernel has to get past.

    First come shapes so small that all strays end inside the fences: this process has to survive them.
    """
    multiprocessors(3)
    if function.startswith("flat"):
        examine(lesson, "flat", (3, 5), (5, 160), (300, 3))
        judge_touched(lesson.flat, (3, 5), fetched=15)
        judge_strides(lesson.flat)
    elif function.startswith("tile"):
        examine(lesson, "tile", (3, 5))
        judge_touched(lesson.tile, (3, 5), fetched=2 * 5)
        examine(lesson, "tile", (4, 600))
    elif function.startswith("fold"):
        examine(lesson, "folded", (3, 5), (3 * 512 + 2, 5))
        judge_touched(lesson.folded, (3 * 512 + 2, 5), fetched=2 * 5 * 512)
        examine(lesson, "folded", (17, 2049))
        judge_fold(lesson, 6)
    else:
        examine(lesson, "affine", (3, 5), (0, 5), (5, 16), (11 * 512 + 2, 3))
        judge_bytes(lesson, 4, 16, torch.bfloat16)
        judge_strides(lesson.affine)


def judge_touched(call, shape, fetched):
    """x is read once and y written once, ``fetched`` elements each of weight and bias, and nothing beyond.

    A stray load that brings NaN, stored astray too, leaves fences of NaN as they were.
    """
    tensors = inputs(*shape)
    size, item = tensors[0].numel(), tensors[0].element_size()
    (made,) = kernels_of(call, *tensors)
    assert (made.bytes_read, made.bytes_written) == ((size + 2 * fetched) * item, size * item)


def judge_strides(call):
    x, weight, bias = inputs(4, 6)
    tensors = [t.requires_grad_() for t in (x.T.detach(), weight[:4].detach(), bias[:4].detach())]
    got, want = call(*tensors), AFFINE.reference(*tensors)
    assert_close(got, want)
    if got.requires_grad:
        pairs = zip(*(torch.autograd.grad(y.sum(), tensors) for y in (got, want)), strict=True)
        for one, other in pairs:
            assert_close(one, other)


@INTERPRETED
@pytest.mark.parametrize("function", ["flat", "tile", "fold", "affine_backward"])
def test_the_lesson_itself_passes_what_mutants_fail(lesson, multiprocessors, function):
    judge(lesson, multiprocessors, function)


@INTERPRETED
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_refused(mutant, tmp_path, multiprocessors):
    function, old, new = MUTANTS[mutant]
    wrong = mutated(tmp_path, function, old, new)
    with pytest.raises(AssertionError):
        judge(wrong, multiprocessors, function)


# --- what the compiler makes of it, for GPUs that are not here ----------------------------------------

BATCHES = {torch.float32: 600, torch.bfloat16: 1030}
"""At width 161 one whole folded row, which Triton takes for a constant, and some rows left over."""


class Variant(NamedTuple):
    """A kernel compiled as one launch would have it."""

    launch: launches_of.Launch
    dtype: torch.dtype
    width: int
    batch: int
    compiled: codegen.Compiled


@pytest.fixture(scope="module")
def variants(lesson):
    """Every kernel, with the arguments that the lesson's host code gives it.

    In float32, and with other rows, for one target only: they change how much a thread has and what is
    constant, not what a target does with it.
    """
    asked = {}
    with pytest.MonkeyPatch.context() as patch:
        made = launches_of.recorded(lesson, KERNELS, patch)
        here = replace(machine.identity(), multiprocessors=132)
        patch.setattr(machine, "identity", lambda: here)
        for dtype, width in itertools.product(BATCHES, (160, 161)):
            for batch in (BATCHES[dtype], 100_001):
                made.clear()
                x, weight, bias = meta(batch, width, dtype=dtype)
                few = batch == BATCHES[dtype]
                for call in (lesson.flat, lesson.tile, lesson.folded)[0 if few else 2 :]:
                    call(x, weight, bias)
                lesson.affine_backward(x, x, weight, bias)
                targets = POINTWISE if few and dtype is torch.bfloat16 else ("sm_90",)
                for launch, target in itertools.product(made, targets):
                    request = codegen.request(
                        launch.kernel, launch.arguments, target=target, **launch.options
                    )
                    asked.setdefault(request.key, (launch, dtype, width, batch, request))
    compiled = codegen.compile_many([request for *_, request in asked.values()])
    return [Variant(*rest, one) for (*rest, _), one in zip(asked.values(), compiled, strict=True)]


def test_every_kernel_compiles_for_every_family_of_targets_and_fits(variants):
    seen = {(v.compiled.kernel, v.compiled.target, v.dtype, v.width) for v in variants}
    hopper = itertools.product(KERNELS, ("sm_90",), BATCHES, (160, 161))
    assert seen == {*hopper, *itertools.product(KERNELS, POINTWISE, (torch.bfloat16,), (160, 161))}
    for v in variants:
        # the tile at odd widths is the step that is not good enough; the others are what the layer runs
        if (v.compiled.kernel, v.width) != ("tile_kernel", 161):
            assert v.compiled.spills == 0, v
        assert v.compiled.shared_bytes <= SHARED_BYTES, v


def test_one_whole_row_was_among_what_was_compiled(variants):
    """Triton compiles an argument that is 1 as a constant, which has broken kernels before."""
    for kernel in ("fold_kernel", "backward_kernel"):
        assert {v.dtype for v in variants if v.compiled.kernel == kernel and v.launch.rows == 1} == set(
            BATCHES
        )
    assert any(v.launch.groups == 1 for v in variants if v.compiled.kernel == "backward_kernel")


def test_loads_are_as_wide_as_the_lesson_says(variants):
    for v in variants:
        bits = 8 * v.dtype.itemsize
        if v.compiled.kernel in ("flat_kernel", "tile_kernel"):
            assert set(v.compiled.loads) == {128 if v.width == 160 else bits}, v
        elif v.compiled.kernel == "fold_kernel":
            # two of a tile's rows and the rest: 2 KiB each, 16 bytes for each of 128 threads
            assert v.compiled.loads[128] >= 2 and v.compiled.stores[128] >= 2, v
            assert set(v.compiled.loads) == ({128} if v.width == 160 else {128, bits}), v


def test_backward_has_its_next_tiles_on_the_way(variants):
    for v in variants:
        if v.compiled.kernel == "backward_kernel":
            assert set(v.compiled.async_copies) == {128}, v
            assert v.compiled.async_copies[128] >= 8, "dy and x, two rows each, ahead of the loop and in it"


def test_sums_are_added_in_a_fixed_order(variants):
    for v in variants:
        assert not re.search(r"\b(atom|red)\.", v.compiled.ptx), v


def test_arithmetic_is_in_float32_and_rounded_once(variants):
    """Sums in half precision pass a check by value when there are enough of them to even out."""
    for v in variants:
        half = re.findall(r"arith\.\w+f .*xb?f16>", v.compiled.ttir)
        assert not [line for line in half if not re.match(r"arith\.(extf|truncf) ", line)], v
        stores = re.findall(r"tt\.store .*!tt\.ptr<b?f16>", v.compiled.ttir)
        assert v.compiled.ttir.count("arith.truncf") == len(stores), v


def test_what_is_summed_is_zero_beyond_the_end(variants):
    """The interpreter fills masked lanes with zeros unasked; a GPU leaves there what it likes."""
    for v in variants:
        loads = re.findall(r"tt\.load (.*?) :", v.compiled.ttir)
        filled = sum(operands.count(",") >= 2 for operands in loads)
        wanted = {"backward_kernel": 4, "column_sum_kernel": 1}.get(v.compiled.kernel, 0)
        assert filled == wanted, v


def test_elements_beyond_two_to_the_31_are_addressed_in_64_bits(variants):
    for v in variants:
        if v.compiled.kernel not in ("fold_kernel", "backward_kernel"):
            continue
        full = dict(re.findall(r"(%\w+) = tt\.splat (%(?:x|y|dx|dy)) :", v.compiled.ttir))
        offsets = re.findall(r"tt\.addptr (%\w+), %\w+ : \S+>>, tensor<\S*?(i\d+)>", v.compiled.ttir)
        widths = [bits for base, bits in offsets if base in full]
        assert len(widths) == len(full) >= 4 and set(widths) == {"i64"}, v


# --- the lesson as a whole ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(executed):
    return executed(lessons.resolve(NAME))


def outputs(result):
    cells = lessons.code_cells(lessons.read(result.notebook_path))
    return [output for _, cell in cells for output in cell.outputs]


def shown(result, mime):
    return [output.data[mime] for output in outputs(result) if mime in output.get("data", {})]


def test_it_runs_to_its_end(result):
    assert result.passed, result.failure
    assert result.checks_passed > 0
    assert result.claims_held + result.claims_need_gpu > 10


def test_what_does_not_depend_on_the_device_holds_here(result):
    held = [claim["sentence"] for claim in shown(result, claims.MIME) if claim["status"] == claims.HELD]
    for words in ("Published: .* 3.1, not 1024", "x.w.b launches 2 kernels", "24 of 16 bits"):
        assert sum(bool(re.search(words, sentence)) for sentence in held) == 1, words


@INTERPRETED
def test_no_time_is_claimed_without_a_gpu(result):
    assert (result.claims_held, result.claims_not_held) == (3, 0)


def test_nothing_is_said_on_stderr(result):
    said = [
        output.text
        for output in outputs(result)
        if output.output_type == "stream" and output.name == "stderr"
    ]
    assert said == []


class Page(html.parser.HTMLParser):
    """Language, title and images of a page."""

    def __init__(self, text):
        super().__init__()
        self.language, self.title, self.images, self._in_title = None, "", [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._in_title = tag == "title"
        if tag == "html":
            self.language = dict(attributes).get("lang")
        if tag == "img":
            self.images.append(dict(attributes).get("alt") or "")

    def handle_endtag(self, tag):
        self._in_title = False

    def handle_data(self, data):
        self.title += data * self._in_title


def test_its_page_can_be_read_without_seeing_it(result):
    page = Page(result.html_path.read_text())
    assert page.language == "en"
    notebook = lessons.read(result.notebook_path)
    assert page.title == lessons.title(notebook)
    drawing = re.compile(r"\b(?:figures|panels)\.\w+\(|\.reveal\(")
    drawn = sum(len(drawing.findall(cell.source)) for _, cell in lessons.code_cells(notebook))
    assert len(page.images) == drawn > 5, "a figure is missing, or is not an <img>"
    assert all(len(alt) > 80 for alt in page.images), page.images
    assert all("image/png" not in output.get("data", {}) for output in outputs(result)), "no alt text there"


# --- the published figures ----------------------------------------------------------------------------

SERIES = ("a_eager", "b_eager", "b_graphed")


def posted():
    """The files as they stand, by series."""
    found = {}
    for name in SERIES:
        letter, kind = name.split("_")
        lines = csv.DictReader((places.PUBLISHED / f"pseudo_linear_device_{name}.csv").open())
        found[f"device {letter.upper()}, {kind}"] = [(int(p["width"]), float(p["speedup"])) for p in lines]
    return found


def test_published_speedups_come_from_their_files():
    table = published.pseudo_linear()
    found = {name: list(zip(part.width, part.speedup, strict=True)) for name, part in table.groupby("series")}
    assert found == posted()
    assert set(table.kind) == {"published"} and table.source.str.len().min() > 20
    assert (table.device == table.series.str.split(",").str[0]).all()


def test_published_points_are_drawn_where_they_were_published():
    shown = figures.speedup(published.pseudo_linear(), title="Published")
    lines = {
        tuple((float(x), float(y)) for x, y in zip(*line.get_data(), strict=True))
        for axes in shown.figure.axes
        for line in axes.lines
    }
    for points in posted().values():
        assert tuple((float(x), y) for x, y in points) in lines


def test_both_figures_of_the_lesson_have_the_published_points(result):
    alts = [alt for alt in Page(result.html_path.read_text()).images if "Published" in alt]
    assert len(alts) == 2
    for alt, (name, points) in itertools.product(alts, posted().items()):
        (first, *_, last) = sorted(points)
        assert f"{name} {first[1]:.3g}× at width {first[0]} to {last[1]:.3g}× at {last[0]}" in alt
