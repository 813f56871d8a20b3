"""Lesson 4's exercises: every plausible wrong answer is refused for its own reason, the solutions pass."""

import difflib
import re

import pytest
from judging import (
    INTERPRETED,
    Answers,
    RefusalTests,
    assert_refused,
    cases,
    code_lines,
)

from labkit import exercises
from labkit.tasks import group_bias_hints, group_floor, group_floor_hints, neighbour_hints

pytestmark = pytest.mark.usefixtures("cache")
ANSWERS = Answers("04_grouped_matmul")
TASKS, SOLUTIONS = ANSWERS.tasks, ANSWERS.solutions
SCAFFOLDS = {name: ANSWERS.scaffold(name) for name in TASKS}
"""The cells as the lesson gives them."""
solved, changed = ANSWERS.solved, ANSWERS.changed


# --- what an exercise on a kernel is not about

EMPTY = "torch.empty_like(x)"
DOT = "    total = tl.dot"


def wrong_forms(name):
    """Wrong answers that any exercise on a kernel may get."""
    return {
        "zeroed": (changed(name, (EMPTY, "torch.zeros_like(x)")), "several-launches"),
        "one place further": (changed(name, ("tl.store(y + at", "tl.store(y + at + 1")), "unmasked-store"),
        "small grid": (changed(name, ("G * triton.cdiv(R, 32)", "G * max(1, R // 32)")), "not-all-written"),
        "no group": (changed(name, ("tl.program_id(0) % G", "0 * tl.program_id(0)")), "stored-twice"),
        "no smallest tile": (
            changed(name, ("max(16, triton.next_power_of_2(D))", "triton.next_power_of_2(D)")),
            "small-tile",
        ),
        "not compiled": (changed(name, (DOT, "    d + len(type(d).__mro__)\n" + DOT)), "not-compiled"),
        "into x": (changed(name, (EMPTY, "x")), "writes-input"),
        "one output for all calls": (
            "kept = {}\n" + changed(name, (EMPTY, f"kept.setdefault((R, G, D, x.dtype), {EMPTY})")),
            "reused-output",
        ),
        "nothing returned": (changed(name, ("    return y", "")), "not-a-tensor"),
        "float32 out": (
            changed(name, (EMPTY, "x.new_empty(x.shape, dtype=torch.float32)")),
            "shape-or-dtype",
        ),
        "strides ignored": (changed(name, (".contiguous()", "")), "strides"),
    }


# --- the neighbour

IN_X, IN_WEIGHT, IN_Y = "x + at, inside", "d[None, :], square", "total, inside"
ROWS, COLUMNS = "(row < R)", "(d < D)[None, :]"
OF_ROWS, OF_SQUARE = f"{ROWS} & {COLUMNS}", f"(d < D)[:, None] & {COLUMNS}"


def masks(x=None, weight=None, y=None, **also):
    """The solution with other masks; none where it is empty."""
    given = ((IN_X, x), (IN_WEIGHT, weight), (IN_Y, y))
    pairs = [(old, old.rpartition(", ")[0] + ", " + new) for old, new in given if new is not None]
    return changed("neighbour", *pairs, *also.items())


def everywhere(condition):
    """The solution with another condition on columns, in all masks."""
    return changed("neighbour", ("(d < D)", f"({condition})"))


NO_MASK = "d[None, :] >= 0"
WRONG_NEIGHBOURS = wrong_forms("neighbour") | {
    "untouched, but for a name": (SCAFFOLDS["neighbour"].replace("total", "acc"), "no-mask"),
    "BD": (everywhere("d < BD"), "tile-width"),
    "BD in a load": (masks(x=f"{ROWS} & (d < BD)[None, :]"), "tile-width"),
    "only the store": (masks(x=ROWS, weight=NO_MASK), "only-store"),
    "only the loads": (masks(y=ROWS), "only-loads"),
    "only weight": (masks(x=ROWS, y=ROWS), "only-one"),
    "only x": (masks(weight=NO_MASK, y=ROWS), "only-one"),
    "not x": (masks(x=ROWS), "x-unmasked"),
    "not weight": (masks(weight=NO_MASK), "weight-unmasked"),
    "rows of weight": (masks(weight="(d < D)[:, None]"), "weight-one-axis"),
    "columns of weight": (masks(weight="(d < D)[None, :]"), "weight-one-axis"),
    "the mask of x for weight": (masks(weight="inside"), "rows-of-weight"),
    "columns only": (changed("neighbour", (OF_ROWS, COLUMNS)), "rows-unmasked"),
    "columns only, x": (masks(x=COLUMNS), "rows-unmasked"),
    "columns only, y": (masks(y=COLUMNS), "rows-unmasked"),
    "G * D": (everywhere("d < G * D"), "whole-row"),
    "the end of the row": (everywhere("group * D + d < G * D"), "whole-row"),
    "the end of the row, x": (masks(x=f"{ROWS} & (group * D + d < G * D)[None, :]"), "whole-row"),
    "the end of the row, y": (masks(y=f"{ROWS} & (group * D + d < G * D)[None, :]"), "whole-row"),
    "the end of weight": (
        masks(weight="group * D * D + d[:, None] * D + d[None, :] < G * D * D"),
        "whole-row",
    ),
    "columns of the row": (everywhere("group * D + d < D"), "first-group"),
    "at most D": (everywhere("d <= D"), "off-by-one"),
    "D - 1": (everywhere("d < D - 1"), "one-short"),
    "inverted": (everywhere("d >= D"), "inverted"),
    "row": (changed("neighbour", (OF_ROWS, f"{ROWS} & (row < D)")), "wrong-axis"),
    "a column": (changed("neighbour", (OF_ROWS, f"{ROWS} & (d < D)[:, None]")), "wrong-axis"),
    "R": (everywhere("d < R"), "wrong-bound"),
    "G": (everywhere("d < G"), "wrong-bound"),
    "a number": (everywhere("d < 20"), "literal"),
    "no other": (changed("neighbour", (", other=0.0", "")), "no-other"),
    "no other for x": (changed("neighbour", ("inside, other=0.0", "inside")), "no-other"),
    "no other for weight": (changed("neighbour", ("square, other=0.0", "square")), "no-other"),
    "and": (changed("neighbour", (OF_ROWS, f"{ROWS} and {COLUMNS}")), "python-and"),
    "no parentheses": (changed("neighbour", (OF_ROWS, "row < R & d[None, :] < D")), "chained"),
    "if": (masks(x=ROWS, **{DOT: "    a = a if d < D else 0.0 * a\n" + DOT}), "python-if"),
    "zeroed after the load": (
        masks(x=ROWS, **{DOT: f"    a = tl.where({COLUMNS}, a, 0.0)\n{DOT}"}),
        "reads-outside",
    ),
    "weight zeroed after the load": (
        masks(weight=NO_MASK, **{DOT: f"    w = tl.where({OF_SQUARE}, w, 0.0)\n{DOT}"}),
        "reads-outside",
    ),
    "PyTorch": (
        "def neighbour(x, w):\n    parts = zip(x.chunk(len(w), 1), w)\n"
        "    return torch.cat([a @ b for a, b in parts], 1)\n\n\ntasks.check('neighbour', neighbour)",
        "no-kernel",
    ),
    "dots": (SCAFFOLDS["neighbour"].replace("total, row < R", "total, ..."), "unfinished"),
    "ones": (changed("neighbour", ("other=0.0", "other=1.0")), "wrong-values"),
    "rounded": (changed("neighbour", ("y + at, total", "y + at, total.to(tl.float16)")), "wrong-values"),
}

# --- the bias

LOAD = "b = tl.load(bias + group * D + d, d < D, other=0.0)"
ADD = "total += b.to(tl.float32)[None, :]"
HALF = "y.dtype.element_ty"


def loaded(address, mask="d < D", add=ADD):
    return changed("bias", (LOAD, f"b = tl.load({address}, {mask}, other=0.0)"), (ADD, add))


def added(how):
    return changed("bias", (ADD, how))


WRONG_BIASES = wrong_forms("bias") | {
    "dots": (SCAFFOLDS["bias"].replace("total = tl.dot", "_ = 0\n    total = tl.dot"), "unfinished"),
    "loaded only": (added(""), "no-bias"),
    "added to nothing": (added("total + b[None, :]"), "no-bias"),
    "row 0": (loaded("bias + d"), "first-group"),
    "BD": (loaded("bias + group * BD + d"), "tile-width"),
    "one number": (changed("bias", (LOAD, "b = tl.load(bias + group)"), (ADD, "total += b")), "one-number"),
    "as (D, G)": (loaded("bias + d * G + group"), "other-way-round"),
    "a row for each row": (loaded("bias + row * D + d[None, :]", "inside", "total += b"), "by-rows"),
    "like x": (loaded("bias + at", "inside", "total += b"), "by-rows"),
    "a number for each row": (loaded("bias + row", "row < R", "total += b"), "by-rows"),
    "a column": (added("total += b[:, None]"), "wrong-axis"),
    "a column, unmasked": (
        changed("bias", (LOAD, "b = tl.load(bias + group * D + d)"), (ADD, "total += b[:, None]")),
        "wrong-axis",
    ),
    "to x": (
        changed("bias", (LOAD, ""), (DOT, f"    {LOAD}\n    a += b[None, :]\n{DOT}"), (ADD, "")),
        "before-product",
    ),
    "times": (added("total *= b[None, :]"), "multiplied"),
    "rounded to float16": (added("total = total.to(tl.float16) + b[None, :]"), "half-precision"),
    "rounded to y's": (added(f"total = total.to({HALF}) + b[None, :]"), "half-precision"),
    "unmasked": (changed("bias", (LOAD, "b = tl.load(bias + group * D + d)")), "unmasked-load"),
    "added by PyTorch": (
        changed("bias", (LOAD, ""), (ADD, ""), ("return y", "return y + bias.flatten()")),
        "several-launches",
    ),
    "PyTorch": (
        "def with_bias(x, w, b):\n    parts = zip(x.chunk(len(w), 1), w, b)\n"
        "    return torch.cat([F.linear(x, w.T, b) for x, w, b in parts], 1)\n\n\n"
        "tasks.check('bias', with_bias)",
        "no-kernel",
    ),
    "and": (changed("bias", ("< D) & (d[None", "< D) and (d[None")), "python-and"),
    "no parentheses": (
        changed("bias", ("(d[:, None] < D) & (d[None, :] < D)", "d[:, None] < D & d[None, :] < D")),
        "chained",
    ),
    "if": (added("total = total + b[None, :] if d >= D else total"), "python-if"),
    "columns only": (changed("bias", (IN_Y, f"total, {COLUMNS}")), "unmasked-store"),
    "minus": (added("total -= b[None, :]"), "wrong-values"),
    "x unmasked": (changed("bias", ("x + at, inside", "x + at, row < R")), "wrong-values"),
}

# --- the floor

NUMBERS = "rows * groups * (d_in + d_out) + groups * d_in * d_out"
COMPUTED = "2 * rows * groups * d_in * d_out / rate"
RETURN = "return 1e6 * max(moved, computed)"


def model(*pairs):
    return changed("floor", *pairs)


def numbers(expression):
    return model((NUMBERS, expression))


def computed(expression):
    return model((COMPUTED, expression))


def returned(expression):
    return model((RETURN, f"return {expression}"))


WRONG_FLOORS = {
    "dots": (SCAFFOLDS["floor"].replace("computed = ...", "computed = 2 * rows / rate"), "unfinished"),
    "both": (returned("moved, computed"), "two-numbers"),
    "nothing": (model((RETURN, "_ = 0")), "not-a-number"),
    "not a number": (returned("float('nan')"), "not-a-number"),
    "yes or no": (returned("moved > computed"), "not-a-number"),
    "constant": (returned("12.5"), "constant"),
    "no weights": (numbers("rows * groups * (d_in + d_out)"), "no-weights"),
    "no x": (numbers("rows * groups * d_out + groups * d_in * d_out"), "no-x"),
    "no result": (numbers("rows * groups * d_in + groups * d_in * d_out"), "no-result"),
    "dense operations": (computed("2 * rows * groups * d_in * groups * d_out / rate"), "dense"),
    "dense weights": (numbers("rows * groups * (d_in + d_out) + groups * d_in * groups * d_out"), "dense"),
    "dense": (
        model(("groups * d_in * d_out", "groups * d_in * groups * d_out")),
        "dense",
    ),
    "weights of one group": (numbers("rows * groups * (d_in + d_out) + d_in * d_out"), "one-group"),
    "operations of one group": (computed("2 * rows * d_in * d_out / rate"), "one-group"),
    "columns of one group": (numbers("rows * (d_in + d_out) + groups * d_in * d_out"), "one-group"),
    "one group": (model(("rows * groups", "rows"), ("groups * d_in", "d_in")), "one-group"),
    "weights for each row": (
        numbers("rows * groups * (d_in + d_out) + rows * groups * d_in * d_out"),
        "per-row",
    ),
    "y as wide as x": (numbers("2 * rows * groups * d_in + groups * d_in * d_out"), "one-width"),
    "x as wide as y": (numbers("2 * rows * groups * d_out + groups * d_in * d_out"), "one-width"),
    "square weights": (numbers("rows * groups * (d_in + d_out) + groups * d_in * d_in"), "one-width"),
    "square": (model(("+ d_out", "+ d_in"), ("d_in * d_out", "d_in * d_in")), "one-width"),
    "multiply-adds": (model(("2 * rows", "rows")), "multiply-adds"),
    "numbers for bytes": (model((" * itemsize", "")), "no-itemsize"),
    "sum": (returned("1e6 * (moved + computed)"), "sum-of-floors"),
    "min": (model(("max(", "min(")), "smaller-floor"),
    "bytes only": (returned("1e6 * moved"), "bytes-only"),
    "operations only": (returned("1e6 * computed"), "arithmetic-only"),
    "seconds": (returned("max(moved, computed)"), "other-unit"),
    "milliseconds": (returned("1e3 * max(moved, computed)"), "other-unit"),
    "nanoseconds": (returned("1e9 * max(moved, computed)"), "other-unit"),
    "rates swapped": (model(("bandwidth, rate)", "rate, bandwidth)")), "swapped-rates"),
    "two mistakes in the bytes": (numbers("2 * rows * groups * (d_in + d_out)"), "bytes"),
    "operations": (computed("3 * rows * groups * d_in * d_out / rate"), "arithmetic"),
    "half of everything": (returned("5e5 * max(moved, computed)"), "wrong-values"),
}
WRONG_TABLES = {"floor": WRONG_FLOORS, "neighbour": WRONG_NEIGHBOURS, "bias": WRONG_BIASES}
HINTS = {
    "floor": group_floor_hints.HINTS,
    "neighbour": neighbour_hints.HINTS,
    "bias": group_bias_hints.HINTS,
}


@INTERPRETED
@pytest.mark.parametrize(("name", "source", "reason"), cases(WRONG_TABLES))
def test_a_wrong_answer_is_refused_for_its_reason(judged, name, source, reason):
    finding = judged(name, source)
    assert_refused(finding, reason, HINTS[name])
    assert not re.search("[Ii]ndex arithmetic|edge of a tile", finding["observed"]), "the reason decides"


@INTERPRETED
@pytest.mark.parametrize(
    ("what", "right"), [("the end of the row, y", True), ("only the loads", False), ("not x", None)]
)
def test_stores_to_a_neighbour_are_seen_even_where_it_puts_them_right(judged, what, right):
    observed = judged("neighbour", WRONG_NEIGHBOURS[what][0])["observed"]
    hidden = "(, though here the output came out right)?"
    sentence = rf"\d+ values went into another group than the program's own{hidden}\. "
    found = re.search(
        sentence + "On a GPU programs run in any order, so which value stays is chance", observed
    )
    assert (found is None) is (right is None)
    assert found is None or bool(found[1]) is right


@INTERPRETED
def test_a_value_that_is_multiplied_by_zero_is_refused_where_it_may_be_nan(judged):
    observed = judged("neighbour", WRONG_NEIGHBOURS["the end of weight"][0])["observed"]
    assert (
        "where group 1 of x is NaN and its weight infinite: the other groups' output is wrong in" in observed
    )


def test_a_wrong_prediction_is_told_with_its_case(judged):
    observed = judged("floor", WRONG_FLOORS["no weights"][0])["observed"]
    assert re.fullmatch(
        r"On .+, with \d+ rows, \d+ groups, d_in = \d+, d_out = \d+ and [24] bytes a number, "
        r"your function says [\d.]+ microseconds; the larger floor, that of memory, is [\d.]+\.",
        observed,
    )


# --- answers that raise

X = "tl.load(x + at, inside, other=0.0)"
KERNEL_ARGUMENTS = "R, G, D, BM=32"


def wrong_calls(name, changed_mask):
    """Answers that raise, in both exercises on kernels; ``changed_mask`` puts a condition in a mask."""
    return {
        "a mask of an address": (changed_mask("x < D"), "pointer-arithmetic"),
        "not loaded": (changed(name, (X, "x + at")), "pointer-arithmetic"),
        "torch": (changed_mask("torch.arange(D) < D"), "unknown-function"),
        "invented": (changed_mask("tl.mask(d, D)"), "unknown-function"),
        "brackets": (changed(name, (X, "x[row, d]")), "subscript"),
        "other without a mask": (changed(name, ("at, inside, other", "at, other")), "other-without-mask"),
        "number for a mask": (changed(name, (IN_Y, "total, R")), "mask-of-numbers"),
        "block of D": (changed(name, ("tl.arange(0, BD)", "tl.arange(0, D)")), "arange"),
        "a column": (
            changed(name, ("inside = (row < R) & (d < D)[None, :]", "inside = (row < R) & (d < D)[:, None]"),
            ("BM=32", "BM=64"), ("cdiv(R, 32)", "cdiv(R, 64)")),
            "shapes",
        ),
        "sizes left out": (changed(name, (KERNEL_ARGUMENTS, "R, G, BM=32")), "arguments"),
        "no grid": (changed(name, ("_kernel[(G * triton.cdiv(R, 32),)]", "_kernel")), "no-grid"),
        "misspelt": (changed_mask("dd < D"), "unknown-name"),
        "set too late": (changed(name, ("    inside = ", "    inside = inside & ")), "unset"),
        "anything": (changed_mask("1 / 0"), "other-error"),
    }  # fmt: skip


FLOOR_ERRORS = {
    "max of one": (returned("1e6 * max(moved + computed)"), "max-of-one"),
    "six arguments": (model(("bandwidth, rate)", "bandwidth)")), "arguments"),
    "torch.max": (returned("1e6 * torch.max(moved, computed)"), "a-tensor"),
    "misspelt": (returned("1e6 * max(moved, computd)"), "unknown-name"),
    "too late": (computed("2 * moved * computed"), "unset"),
    "anything": (returned("moved / 0"), "other-error"),
}
ERROR_TABLES = {
    "floor": FLOOR_ERRORS,
    "neighbour": wrong_calls("neighbour", everywhere),
    "bias": wrong_calls("bias", lambda condition: loaded("bias + group * D + d", condition)),
}


@INTERPRETED
def test_the_evidence_says_what_an_odd_width_costs(judged):
    evidence = judged("neighbour", solved("neighbour"))["evidence"]
    assert "where D is 33 the tile is 64 wide, and 27% of its multiplications count" in evidence
    assert "128 bits where D is 32, and 16 where it is 33" in evidence


@INTERPRETED
def test_the_evidence_says_what_the_epilogue_saves(judged):
    evidence = judged("bias", solved("bias"))["evidence"]
    assert "reads 256 bytes of bias" in evidence and "32,768 bytes" in evidence
    assert "mma instructions" in evidence and "spills 0 bytes" in evidence


def test_the_evidence_says_where_arithmetic_overtakes_memory(judged):
    evidence = judged("floor", solved("floor"))["evidence"]
    assert "D = 357 on an H200 and D = 500 on an L4" in evidence


def test_the_widths_of_the_finding_are_where_both_floors_are_equal():
    for name, width in (("an H200", 357), ("an L4", 500)):
        rate, bandwidth = group_floor.DEVICES[name]
        leads = [
            group_floor._Case(name, rate, bandwidth, 10**9, 16, d, d, 2).lead for d in (width - 1, width + 1)
        ]
        assert leads[0] < 1 < leads[1]


ONE_MASK = "inside = " + OF_ROWS
OTHER_RIGHT_ANSWERS = {
    "other tiles, in another order": (
        "neighbour",
        changed(
            "neighbour",
            ("BM=32", "BM=16"),
            ("cdiv(R, 32)", "cdiv(R, 16)"),
            (
                "tl.program_id(0) % G, tl.program_id(0) // G",
                "tl.program_id(0) // tl.cdiv(R, BM), tl.program_id(0) % tl.cdiv(R, BM)",
            ),
            ("(d < D)", "(D > d)"),
        ),
    ),
    "in place, and one operand of zeros": (
        "neighbour",
        changed(
            "neighbour",
            (ONE_MASK, ""),
            (IN_X + ", other=0.0", f"x + at, {OF_ROWS}, other=1.0"),
            (IN_Y, f"total, {OF_ROWS}"),
        ),
    ),
    "within the group's matrix": ("neighbour", masks(weight="d[:, None] * D + d[None, :] < D * D")),
    "zeroed, but not beyond the tensors": (
        "neighbour",
        masks(
            weight="group * D * D + d[:, None] * D + d[None, :] < G * D * D",
            **{DOT: f"    w = tl.where({OF_SQUARE}, w, 0.0)\n{DOT}"},
        ),
    ),
    "converted": (
        "bias",
        loaded("bias + group * D + d[None, :]", "d[None, :] < D", f"total = (b + total).to({HALF})"),
    ),
    "as what tl.dot begins with": (
        "bias",
        changed(
            "bias",
            (ADD, ""),
            (LOAD, ""),
            (DOT, f"    {LOAD}\n    b = b.to(tl.float32)[None, :] + tl.zeros([BM, BD], tl.float32)\n{DOT}"),
            ("tl.dot(a, w, input", "tl.dot(a, w, b, input"),
        ),
    ),
    "in numbers": (
        "floor",
        """
def floor_us(rows, groups, d_in, d_out, itemsize, bandwidth, rate):
    of_one = rows * d_in + d_in * d_out + rows * d_out
    return max(groups * of_one * itemsize / (bandwidth / 1e6), groups * rows * d_in * d_out * 2e6 / rate)


tasks.check("floor", floor_us)
""",
    ),
}


@INTERPRETED
def test_the_judges_print_no_warnings_above_the_verdict(judged, recwarn, capfd):
    for name, what in (("neighbour", "not weight"), ("bias", "to x")):
        judged(name, WRONG_TABLES[name][what][0])
    assert not [warning for warning in recwarn if "encountered" in str(warning.message)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["floor", "bias"])
def test_the_solution_only_adds_to_the_scaffold(name):
    unfinished = re.compile(r"\.\.\.$|return moved, computed$")
    given = [line for line in code_lines(SCAFFOLDS[name]) if not unfinished.search(line)]
    assert 1 <= len(code_lines(SCAFFOLDS[name])) - len(given) <= 3
    lines = iter(code_lines(solved(name)))
    assert all(line in lines for line in given)  # in this order


def test_the_solution_changes_the_masks_of_the_scaffold():
    given, repaired = code_lines(SCAFFOLDS["neighbour"]), code_lines(solved("neighbour"))
    gone = [line[2:] for line in difflib.ndiff(given, repaired) if line.startswith("- ")]
    assert len(gone) == 3 and all(re.search(r"tl\.(load|store)", line) for line in gone)


def test_solutions_run_as_plain_python():
    module = exercises.of(ANSWERS.lesson)
    for name, task in TASKS.items():
        assert callable(module.answer(name)), task.answer


class TestExercises(RefusalTests):
    answers, others, least_passed = ANSWERS, OTHER_RIGHT_ANSWERS, 21
    wrong, errors, hints = WRONG_TABLES, ERROR_TABLES, HINTS
