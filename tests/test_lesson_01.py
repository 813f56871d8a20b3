"""Lesson 1: its taught kernels, wrong ones that must be refused, their code, the lesson's execution.

The finished layer is tried in kernels/test_affine.py.
"""

import csv
import html.parser
import itertools
import re

import launches as launches_of
import nbformat
import pytest
import torch
from counting import calls_checked
from launches import POINTWISE

from labkit import checks, claims, codegen, counts, device, figures, lessons, places, published
from labkit.runs import record
from labkit.works import AFFINE

pytestmark = pytest.mark.usefixtures("cache")
NAME = "01_launch_overhead"
INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="reads and writes of a kernel's lanes can be watched only where it is interpreted",
)
LARGE = pytest.mark.large


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


def vectors(shape):
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def inputs(*shape):
    torch.manual_seed(0)
    return [t.to(device.name()) for t in vectors(shape)]


def meta(*shape, dtype=torch.float32):
    like = dict(dtype=dtype, device="meta")
    return torch.empty(shape, **like), *torch.empty(2, shape[-1], **like)


def examine(lesson, name, *shapes):
    """One function of the lesson on shapes of our own; layouts are the business of the whole grid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "LAYOUTS", {"contiguous": checks.LAYOUTS["contiguous"]})
        call, dtypes = getattr(lesson, name), (torch.float32,)
        checks.check(call, AFFINE.reference, vectors, shapes=shapes, dtypes=dtypes, gradients=False)


# --- the taught kernels -------------------------------------------------------------------------------


def test_the_lesson_checks_its_functions_on_the_whole_grid(result):
    """The grid runs inside the lesson; here is what it must have covered. The steps may take fewer shapes."""
    outputs = sum(map(calls_checked, checks.SHAPES))
    done = {data["name"]: data["passed"] for data in shown(result, "application/vnd.labkit.check+json")}
    assert done["affine"] == 4 * outputs, "the output and three gradients"
    assert all(done[step] >= outputs / 2 for step in ("flat", "tile", "folded"))


@pytest.mark.parametrize(
    ("name", "shapes"), [("flat", [(3, 513), (1, 4097)]), ("tile", [(3, 513), (5, 1025)])]
)
def test_the_first_steps_are_right_beyond_one_tile_and_without_rows_or_elements(lesson, name, shapes):
    examine(lesson, name, *shapes, (19,), (1,), (0, 8), (4, 0), (2, 0, 3))


@pytest.mark.parametrize("name", ["flat", "tile"])
def test_a_step_that_has_no_backward_says_so(lesson, name):
    x, weight, bias = inputs(3, 5)
    with pytest.raises(RuntimeError, match=rf"^{name} has no backward"):
        getattr(lesson, name)(x, weight.requires_grad_(), bias)
    with torch.no_grad():
        getattr(lesson, name)(x, weight, bias)


def test_flat_refuses_more_elements_than_it_counts(lesson):
    with pytest.raises(AssertionError, match="32 bits"):
        lesson.flat(*meta(2**21 + 1, 1024))


@LARGE
@pytest.mark.parametrize(("name", "rows"), [("flat", 2**21), ("tile", 2**21 + 3)])
def test_as_many_elements_as_a_step_takes(lesson, name, rows):
    x, weight, bias = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((rows, 1024), 1024, 1024)
    )
    y = getattr(lesson, name)(x, weight, bias)
    for part in (slice(None, 5), slice(-5, None)):
        assert torch.allclose(y[part], x[part] * weight + bias, rtol=1e-2, atol=2e-2)


# --- wrong kernels, which must not pass ---------------------------------------------------------------

ROW_MASK = "(row < rows)[:, None] & "
CONTIGUOUS = "x.contiguous(), weight.contiguous(), bias.contiguous()"
MUTANTS = {
    "flat: stores without a mask": ("flat_kernel", "value, inside)", "value)"),
    "flat: loads without a mask": ("flat_kernel", "tl.load(x + at, inside)", "tl.load(x + at)"),
    "flat: no remainder": ("flat_kernel", "weight + at % width", "weight + at"),
    "flat: one element too few": ("flat_kernel", "at < count", "at < count - 1"),
    "flat: weight for bias": ("flat_kernel", "bias + at", "weight + at"),
    "flat: a block too few": ("flat", "triton.cdiv(x.numel(), block)", "max(1, x.numel() // block)"),
    "flat: takes any strides": ("flat", CONTIGUOUS, "x, weight, bias"),
    "tile: row mask": ("tile_kernel", f"mask = {ROW_MASK}", "mask = (row < row + 1)[:, None] & "),
    "tile: column mask": ("tile_kernel", " & (column < width)[None, :]", " & (column < column + 1)[None, :]"),
    "tile: every block the first": ("tile_kernel", "% blocks * COLS", "% blocks * 0"),
    "tile: rows from blocks": ("tile_kernel", "(tl.program_id(0) // blocks).to", "tl.program_id(0).to"),
    "tile: a tile of rows too few": ("tile", "triton.cdiv(rows, 2)", "max(1, rows // 2)"),
    "tile: takes any strides": ("tile", CONTIGUOUS, "x, weight, bias"),
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
        cell.source = "".join(parts)
    path = folder / f"{NAME}.ipynb"
    nbformat.write(notebook, path)
    return lessons.load(path)


def judge(lesson, name):
    """What a wrong kernel has to get past.

    First come shapes so small that all strays end inside the fences: this process has to survive them.
    """
    call = getattr(lesson, name)
    if name == "flat":
        examine(lesson, "flat", (3, 5), (5, 160), (300, 3))
        judge_touched(call, (3, 5), fetched=15)
    else:
        examine(lesson, "tile", (3, 5))
        judge_touched(call, (3, 5), fetched=2 * 5)
        examine(lesson, "tile", (4, 600))
    x, weight, bias = inputs(4, 6)
    tensors = x.T, weight[:4], bias[:4]
    assert checks.relative_error(call(*tensors), AFFINE.reference(*tensors)) < 1e-6


def judge_touched(call, shape, fetched):
    """x is read once and y written once, ``fetched`` elements each of weight and bias, and nothing beyond.

    A stray load that brings NaN, stored astray too, leaves fences of NaN as they were.
    """
    tensors = inputs(*shape)
    size, item = tensors[0].numel(), tensors[0].element_size()
    fences = checks.Fences()
    placed = [fences.place(tensor, "contiguous") for tensor in tensors]
    with fences:
        (made,) = (launch for launch in counts.count(lambda: call(*placed)).launches if launch.programs)
    assert (made.bytes_read, made.bytes_written) == ((size + 2 * fetched) * item, size * item)


@INTERPRETED
@pytest.mark.parametrize("name", ["flat", "tile"])
def test_the_lesson_itself_passes_what_mutants_fail(lesson, name):
    judge(lesson, name)


@INTERPRETED
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_refused(mutant, tmp_path):
    function, old, new = MUTANTS[mutant]
    wrong = mutated(tmp_path, function, old, new)
    with pytest.raises(AssertionError):
        judge(wrong, function.removesuffix("_kernel"))


# --- what the compiler makes of them, for GPUs that are not here --------------------------------------


@pytest.fixture(scope="module")
def variants(lesson):
    """Each kernel in bfloat16 as the host code launches it: (compiled, width)."""
    with pytest.MonkeyPatch.context() as patch:
        made = launches_of.recorded(lesson, ("flat_kernel", "tile_kernel"), patch)
        for width in (160, 161):
            for call in (lesson.flat, lesson.tile):
                call(*meta(1030, width, dtype=torch.bfloat16))
    asked = list(itertools.product(made, POINTWISE))
    compiled = codegen.compile_many(
        codegen.request(launch.kernel, launch.arguments, target=target, **launch.options)
        for launch, target in asked
    )
    widths = {id(launch): width for launch, width in zip(made, (160, 160, 161, 161), strict=True)}
    return [(one, widths[id(launch)]) for one, (launch, _) in zip(compiled, asked, strict=True)]


def test_loads_are_as_wide_as_the_lesson_says_and_arithmetic_is_in_float32(variants):
    assert len(variants) == 4 * len(POINTWISE)
    for one, width in variants:
        assert set(one.loads) == {128 if width == 160 else 16}, one
        # the tile at odd widths is the step that is not good enough; the others are what the layer runs
        assert one.spills == 0 or (one.kernel, width) == ("tile_kernel", 161), one
        half = re.findall(r"arith\.\w+f .*xb?f16>", one.ttir)
        assert not [line for line in half if not re.match(r"arith\.(extf|truncf) ", line)], one
        assert one.ttir.count("arith.truncf") == 1, one


def test_a_tile_beyond_two_to_the_31_elements_is_addressed_in_64_bits(variants):
    for one, _ in variants:
        if one.kernel == "tile_kernel":
            full = re.findall(r"(%\w+) = tt\.splat %[xy] :", one.ttir)
            offsets = dict(re.findall(r"tt\.addptr (%\w+), %\w+ : \S+>>, tensor<\S*?(i\d+)>", one.ttir))
            assert [offsets[base] for base in full] == ["i64", "i64"], one


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


ALL_FIGURES = pytest.mark.skipif(
    not device.has_gpu() and record.state(lessons.resolve(NAME)).status != "recorded",
    reason="lesson 1 is not recorded: without a GPU its figures of time are missing",
)


@ALL_FIGURES
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


@ALL_FIGURES
def test_both_figures_of_the_lesson_have_the_published_points(result):
    alts = [alt for alt in Page(result.html_path.read_text()).images if "Published" in alt]
    assert len(alts) == 2
    for alt, (name, points) in itertools.product(alts, posted().items()):
        (first, *_, last) = sorted(points)
        assert f"{name} {first[1]:.3g}× at width {first[0]} to {last[1]:.3g}× at {last[0]}" in alt
