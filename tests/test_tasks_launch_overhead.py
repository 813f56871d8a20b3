"""Lesson 1's exercises: every plausible wrong answer is refused for its own reason, the solutions pass."""

import difflib
import re

import pytest
from judging import INTERPRETED, Answers, ExerciseTests, assert_hints_of_its_own, cases, code_lines, reasons

from labkit import exercises
from labkit.tasks import benchmark, find, fuse_hints, mask, slips

pytestmark = pytest.mark.usefixtures("cache")
ANSWERS = Answers("01_launch_overhead")
TASKS, SOLUTIONS = ANSWERS.tasks, ANSWERS.solutions
SCAFFOLDS = {name: ANSWERS.scaffold(name) for name in TASKS}
"""The cells as the lesson gives them."""
solved, changed = ANSWERS.solved, ANSWERS.changed


def masked(expression):
    return changed("mask", ("mask = at < count", f"mask = {expression}"))


RIGHT_MASKS = ["count > at", "at >= 0 and at < count", "(at >= 0) & (at < count)", "at <= count - 1"]
"""Triton's compiler takes `and` between blocks."""

LAST = "tl.store(y + at, 2 * tl.load(x + at, mask=mask), mask=mask)"
WRONG_MASKS = {
    "true": (masked("True"), "no-mask"),
    "none": (masked("None"), "no-mask"),
    "tautology": (masked("at >= 0"), "no-mask"),
    "two comparisons in one": (masked("0 <= at < count"), "not-compiled"),
    "at most count": (masked("at <= count"), "off-by-one"),
    "count - 1": (masked("at < count - 1"), "one-short"),
    "block": (masked("at < BLOCK"), "one-block"),
    "arange only": (masked("(tl.program_id(0) == 0) & (at >= 0)"), "one-block"),
    "program": (masked("tl.program_id(0) < count"), "whole-programs"),
    "start of program": (masked("tl.program_id(0) * BLOCK < count"), "whole-programs"),
    "whole blocks only": (masked("(tl.program_id(0) + 1) * BLOCK <= count"), "whole-programs"),
    "literal 10": (masked("at < 10"), "literal"),
    "literal 100": (masked("at < 100"), "literal"),
    "load only": (changed("mask", (", mask=mask), mask=mask)", ", mask=mask))")), "unmasked-store"),
    "store only": (changed("mask", ("tl.load(x + at, mask=mask)", "tl.load(x + at)")), "unmasked-load"),
    "false": (masked("False"), "always-false"),
    "negative": (masked("at < 0"), "always-false"),
    "inverted": (masked("at > count"), "inverted"),
    "inverted too": (masked("at >= count"), "inverted"),
    "odd places": (masked("(at < count) & (at % 2 == 1)"), "other-places"),
    "no factor": (changed("mask", ("2 * tl.load", "tl.load")), "wrong-values"),
    "loads nothing": (changed("mask", ("x + at, mask=mask", "x + at, mask=at < 0")), "wrong-values"),
    "dots": (SCAFFOLDS["mask"].replace("y + at, 2 *", "y + at, 1 *"), "unfinished"),
    "not a kernel": (changed("mask", ("@triton.jit\n", "")), "not-a-kernel"),
    "launched": (changed("mask", ("double_kernel)", "double_kernel[(1,)])")), "not-a-kernel"),
}

RESIDUAL = " + tl.load(residual + at, inside).to(tl.float32)"
RELU = "tl.maximum(affine, 0.0)"
LAUNCH = "    fused_kernel[grid]"
X = "tl.load(x + at, inside).to(tl.float32)"
WRONG_FUSIONS = {
    "dots": (SCAFFOLDS["fuse"].replace("inside = at < count", "inside = at < 1 * count"), "unfinished"),
    "no residual": (changed("fuse", (RESIDUAL, "")), "no-residual"),
    "relu after residual": (
        changed("fuse", (RELU + RESIDUAL, f"tl.maximum(affine{RESIDUAL}, 0.0)")),
        "relu-last",
    ),
    "no relu": (changed("fuse", (RELU, "affine")), "no-relu"),
    "relu of x": (
        changed(
            "fuse",
            (
                "affine = tl.load(x + at, inside).to(tl.float32)",
                "affine = tl.maximum(tl.load(x + at, inside).to(tl.float32), 0.0)",
            ),
        ),
        "wrong-values",
    ),
    "no bias": (changed("fuse", (" * scale + shift", " * scale")), "wrong-values"),
    "subtracted": (changed("fuse", (RELU + " +", RELU + " -")), "wrong-values"),
    "residual unmasked": (changed("fuse", ("residual + at, inside", "residual + at")), "unmasked-load"),
    "x unmasked": (changed("fuse", ("x + at, inside", "x + at")), "unmasked-load"),
    "store unmasked": (changed("fuse", ("y + at, value, inside", "y + at, value")), "unmasked-store"),
    "nothing masked": (changed("fuse", (", inside)", ")")), "unmasked-store"),
    "mask of one too many": (changed("fuse", ("at < count", "at <= count")), "unmasked-store"),
    "weight + at": (changed("fuse", ("at % width", "at")), "wrong-index"),
    "weight + at, relu by where": (
        changed("fuse", ("at % width", "at"), (RELU, "tl.where(affine < 0, 0.0, affine)")),
        "wrong-index",
    ),
    "weight alone + at": (changed("fuse", ("weight + at % width", "weight + at")), "wrong-index"),
    "row for column": (changed("fuse", ("at % width", "at // width")), "row-is-not-column"),
    "x by its address alone": (changed("fuse", (X, "tl.load(x).to(tl.float32)")), "not-all-read"),
    "residual by column": (changed("fuse", ("residual + at", "residual + at % width")), "not-all-read"),
    "max": (changed("fuse", (RELU, "max(affine, 0.0)")), "python-max"),
    "max, zero first": (changed("fuse", (RELU, "max(0.0, affine)")), "python-max"),
    "minus min": (changed("fuse", (RELU, "affine - min(affine, 0.0)")), "python-max"),
    "if": (
        changed(
            "fuse", (RELU, "affine"), ("    value", "    if affine < 0:\n        affine = 0.0\n    value")
        ),
        "python-if",
    ),
    "if in a line": (changed("fuse", (RELU, "(affine if affine > 0 else 0.0)")), "python-if"),
    "width is BLOCK": (changed("fuse", ("at % width", "at % BLOCK")), "block-is-not-width"),
    "arange as column": (changed("fuse", ("at % width", "tl.arange(0, BLOCK)")), "block-is-not-width"),
    "no program": (changed("fuse", ("tl.program_id(0) * BLOCK + ", "")), "no-program"),
    "one program": (changed("fuse", ("(triton.cdiv(x.numel(), block),)", "(1,)")), "small-grid"),
    "rounded down": (changed("fuse", ("triton.cdiv(x.numel(), block)", "x.numel() // block")), "small-grid"),
    "half precision": (changed("fuse", (".to(tl.float32)", "")), "half-precision"),
    "residual added in half": (
        changed("fuse", (RELU + RESIDUAL, f"{RELU}.to(y.dtype.element_ty) + tl.load(residual + at, inside)")),
        "half-precision",
    ),
    "product in half": (
        changed(
            "fuse",
            ("(tl.float32) * scale + shift", "(y.dtype.element_ty) * scale.to(y.dtype.element_ty) + shift"),
        ),
        "half-precision",
    ),
    "only PyTorch": (
        'def fused(x, w, b, r):\n    return torch.relu(x * w + b) + r\n\n\ntasks.check("fuse", fused)',
        "no-kernel",
    ),
    "residual in PyTorch": (
        changed("fuse", (RESIDUAL, ""), ("return y", "return y + residual")),
        "several-launches",
    ),
    "two kernels": (
        changed("fuse", ("    return y", LAUNCH + SOLUTIONS["fuse"].split(LAUNCH)[1])),
        "several-launches",
    ),
    "zeroed first": (changed("fuse", ("empty_like", "zeros_like")), "several-launches"),
    "into the residual": (changed("fuse", ("torch.empty_like(x)", "residual")), "writes-input"),
    "into x": (changed("fuse", ("torch.empty_like(x)", "x")), "writes-input"),
    "one output for all calls": (
        "kept = {}\n"
        + changed(
            "fuse", ("torch.empty_like(x),", "kept.setdefault((x.shape, x.dtype), torch.empty_like(x)),")
        ),
        "reused-output",
    ),
    "stale output": (
        "kept = {}\n"
        + changed(
            "fuse",
            (
                LAUNCH,
                "    if x.shape in kept:\n        return kept[x.shape]\n    kept[x.shape] = y\n" + LAUNCH,
            ),
        ),
        "reused-output",
    ),
    "nothing returned": (changed("fuse", ("    return y", "")), "not-a-tensor"),
    "float32 out": (
        changed("fuse", ("torch.empty_like(x)", "torch.empty_like(x, dtype=torch.float32)")),
        "shape-or-dtype",
    ),
    "flattened": (changed("fuse", ("return y", "return y.flatten()")), "shape-or-dtype"),
    "strides ignored": (
        changed(
            "fuse", ("(t.contiguous() for t in (x, weight, bias, residual))", "(x, weight, bias, residual)")
        ),
        "strides",
    ),
    "residual twice": (
        changed("fuse", (RESIDUAL, f"{RESIDUAL}{RESIDUAL} - tl.load(residual + at, inside).to(tl.float32)")),
        "read-again",
    ),
    "does not compile": (
        changed("fuse", ("    inside =", "    print(type(at).__mro__)\n    inside =")),
        "not-compiled",
    ),
}


def timing(*pairs):
    return changed("benchmark", *pairs)


SYNC = "    gpu.synchronize()\n"
LOOP = "    for _ in range(calls):\n        layer(x)\n"
BEFORE_STOP = "    gpu.synchronize()\n    stop"
WRONG_BENCHMARKS = {
    "draws inside": (
        timing(("        layer(x)\n", "        layer(gpu.randn(batch, width))\n")),
        "draws-inside",
    ),
    "drawn after the clock started": (
        timing(
            ("    start = gpu.clock_us()\n", "    start = gpu.clock_us()\n    x = gpu.randn(batch, width)\n"),
            ("calls = 50", "calls = 10"),
        ),
        "draws-inside",
    ),
    "no warm-up": (timing(("    layer(x)\n    # Both", "    # Both")), "first-call-inside"),
    "warm-up inside": (
        timing(
            ("    start = gpu.clock_us()\n", ""),
            ("    # The first", "    start = gpu.clock_us()\n    # The first"),
        ),
        "first-call-inside",
    ),
    "not synchronised at the end": (timing((BEFORE_STOP, "    stop")), "stopped-early"),
    "synchronised too late": (
        timing((BEFORE_STOP, "    stop"), ("    return", "    gpu.synchronize()\n    return")),
        "stopped-early",
    ),
    "queued work at the start": (
        timing((SYNC + "    start", "    start"), ("calls = 50", "calls = 12")),
        "started-early",
    ),
    "one sample": (timing(("calls = 50", "calls = 1")), "few-calls"),
    "three calls": (timing(("calls = 50", "calls = 3")), "few-calls"),
    "waits after each": (timing((LOOP, LOOP + "        gpu.synchronize()\n")), "waits-inside"),
    "median of single calls": (
        timing(
            (LOOP, ""),
            (
                "    return (stop - start) / calls",
                """    times = []
    for _ in range(calls):
        start = gpu.clock_us()
        layer(x)
        gpu.synchronize()
        times.append(gpu.clock_us() - start)
    return sorted(times)[calls // 2]""",
            ),
        ),
        "waits-inside",
    ),
    "not divided": (timing((" / calls", "")), "wrong-divisor"),
    "divided twice": (timing((" / calls", " / calls / calls")), "wrong-divisor"),
    "warm-up counted": (timing(("calls = 50", "calls = 12"), ("/ calls", "/ (calls + 1)")), "wrong-divisor"),
    "constant": ("def time_us(*_):\n    return 104.8576\n\n\ntasks.check('benchmark', time_us)", "constant"),
    "seconds": (timing(("/ calls", "/ calls / 1e6")), "wrong-unit"),
    "milliseconds": (timing(("/ calls", "/ calls / 1e3")), "wrong-unit"),
    "clock taken for seconds": (timing(("/ calls", "/ calls * 1e6")), "wrong-unit"),
    "subtracts one device's overhead": (timing(("/ calls", "/ calls - 20")), "one-device"),
    "a device's name": (
        timing(("    return", "    return 104.8576 if 'A' in gpu.name else 0.5 *")),
        "one-device",
    ),
    "another shape": (timing(("randn(batch, width)", "randn(32, 1024)")), "other-shape"),
    "other clock": (
        timing(
            ("gpu.clock_us()", "time.perf_counter() * 1e6"), ("    # Many", "    import time\n    # Many")
        ),
        "no-clock",
    ),
    "never called": (
        timing(("        layer(x)\n", "        pass\n"), ("    layer(x)\n    # Both", "    # Both")),
        "no-call",
    ),
    "the layer's own number": (
        "def time_us(gpu, layer, batch, width):\n    return layer.device_us(batch, width)\n\n\n"
        "tasks.check('benchmark', time_us)",
        "no-call",
    ),
    "the layer's own number, clock once": (
        timing(
            ("    start = gpu.clock_us()\n", ""),
            ("(stop - start) / calls", "layer.device_us(batch, width)"),
        ),
        "no-clock",
    ),
    "nothing returned": (timing(("    return ", "    _ = ")), "not-a-number"),
    "not a number": (timing(("    return ", "    return float('nan') * ")), "not-a-number"),
    "off": (timing(("/ calls", "/ calls * 1.2345")), "inexact"),
}
WRONG_TABLES = {"mask": WRONG_MASKS, "fuse": WRONG_FUSIONS, "benchmark": WRONG_BENCHMARKS}
HINTS = {"mask": mask.HINTS, "fuse": fuse_hints.HINTS, "benchmark": benchmark.HINTS}


def filled(hints, templates):
    """Whether the hints are the templates with something in place of what stands in braces."""
    patterns = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(template)) for template in templates]
    return len(hints) == len(patterns) and all(map(re.fullmatch, patterns, hints))


@INTERPRETED
@pytest.mark.parametrize(("name", "source", "reason"), cases(WRONG_TABLES))
def test_a_wrong_answer_is_refused_for_its_reason(judged, name, source, reason):
    finding = judged(name, source)
    assert finding["status"] == "wrong", finding
    assert finding["reason"] == reason, finding
    assert filled(finding["hints"], HINTS[name][reason]), finding
    assert finding["observed"]
    assert not re.search("[Ii]ndex arithmetic|edge of a tile", finding["observed"]), "the reason decides"


@INTERPRETED
@pytest.mark.parametrize("expression", RIGHT_MASKS)
def test_a_mask_may_be_written_in_other_words(judged, expression):
    assert judged("mask", masked(expression))["status"] == "right"


@INTERPRETED
@pytest.mark.parametrize(("name", "source", "reason"), cases({"benchmark": WRONG_BENCHMARKS}))
def test_a_lying_benchmark_is_told_its_numbers_first_and_the_cause_by_the_second_hint(
    judged, name, source, reason
):
    finding = judged(name, source)
    if reason == "not-a-number":
        assert finding["observed"] in ("The function returned None.", "The function returned nan.")
        return
    numbers = (
        r"On pretend device [ABC], at \d+ x \d+, your benchmark says \S+ us\. A call really takes \S+ us\."
    )
    assert re.fullmatch(numbers, finding["observed"])
    where, cause, cure = finding["hints"]
    assert "{what}" not in where and "{what}" not in cure and cause != cure


# --- answers that raise

MISSING = "    value = ...  # load all four as float32, then relu(x*w + b) + residual"


def fused(*lines):
    """The scaffold with lines in place of the one that is missing."""
    assert MISSING in SCAFFOLDS["fuse"]
    return SCAFFOLDS["fuse"].replace(MISSING, "\n".join(f"    {line}" for line in lines))


MASK_ERRORS = {
    "an address": (masked("x < count"), "pointer-arithmetic"),
    "addresses": (masked("x + at < x + count"), "pointer-arithmetic"),
    "length": (masked("at < len(x)"), "size-of-address"),
    "shape": (masked("at < x.shape[0]"), "size-of-address"),
    "numel": (masked("at < x.numel()"), "size-of-address"),
    "torch": (masked("torch.arange(count) < count"), "unknown-function"),
    "invented": (masked("tl.mask(at, count)"), "unknown-function"),
    "where alone": (masked("tl.where(at < count)"), "arguments"),
    "numbers": (masked("min(at, count)"), "mask-of-numbers"),
    "count": (masked("count"), "mask-of-numbers"),
    "block of count": (masked("tl.arange(0, count)"), "arange"),
    "loop": (masked("[place < count for place in at]"), "python-loop"),
    "misspelt": (masked("at < conut"), "unknown-name"),
    "from another cell": (masked("at < len(widths)"), "unknown-name"),
    "set too late": (changed("mask", ("mask = at < count", "mask = mask & (at < count)")), "unset"),
    "a magic": ("get_ipython().run_line_magic('time', '')\n" + solved("mask"), "magic"),
    "anything": (masked("1 / 0"), "other-error"),
    "exit": ("raise SystemExit(2)\n" + solved("mask"), "other-error"),
}
FUSE_ERRORS = {
    "addresses": (fused("value = tl.maximum(x*weight + bias, 0.0) + residual"), "pointer-arithmetic"),
    "sum of addresses": (fused("value = tl.maximum(x + bias, 0.0) + residual"), "pointer-arithmetic"),
    "residual not loaded": (changed("fuse", (RESIDUAL, " + (residual + at)")), "pointer-arithmetic"),
    "brackets": (fused("value = x[at] * weight[at % width]"), "subscript"),
    "comma": (changed("fuse", ("weight + at % width", "weight, at % width")), "one-address"),
    "no addition": (changed("fuse", ("x + at, inside", "x, inside")), "one-address"),
    "block of width": (changed("fuse", ("weight + at % width", "weight + tl.arange(0, width)")), "arange"),
    "odd block": (changed("fuse", ("2048 //", "1000 //")), "arange"),
    "loop": (fused("for place in at:", "    value = tl.load(x + place)"), "python-loop"),
    "tl.relu": (changed("fuse", (RELU, "tl.relu(affine)")), "unknown-function"),
    "F.relu": (changed("fuse", (RELU, "F.relu(affine)")), "unknown-function"),
    "torch.relu": (changed("fuse", (RELU, "torch.relu(affine)")), "unknown-function"),
    "a method": (changed("fuse", (RELU, "affine.relu()")), "unknown-function"),
    "half a clamp": (changed("fuse", (RELU, "tl.clamp(affine, min=0)")), "unknown-function"),
    "tl.max": (changed("fuse", (RELU, "tl.max(affine, 0.0)")), "largest-of-all"),
    "torch.float32": (changed("fuse", ("tl.float32", "torch.float32")), "conversion"),
    "float()": (changed("fuse", ("to(tl.float32)", "float()")), "conversion"),
    "dtype of a load": (changed("fuse", (X, "tl.load(x + at, inside, dtype=tl.float32)")), "conversion"),
    "no residual taken": (changed("fuse", (", residual: Tensor", "")), "arguments"),
    "too few": (changed("fuse", ("x.shape[-1], BLOCK", "BLOCK")), "arguments"),
    "no grid": (changed("fuse", ("fused_kernel[grid]", "fused_kernel")), "no-grid"),
    "grid of no tuple": (
        changed("fuse", ("(triton.cdiv(x.numel(), block),)", "triton.cdiv(x.numel(), block)")),
        "no-grid",
    ),
    "nothing called value": (changed("fuse", ("    value =", "    result =")), "unknown-name"),
    "the lesson's letters": (fused("value = tl.maximum(x*w + b, 0.0) + r"), "unknown-name"),
}
BENCHMARK_ERRORS = {
    "sync": (timing(("synchronize", "sync")), "unknown-attribute"),
    "time": (timing(("clock_us", "time")), "unknown-attribute"),
    "event": (timing(("gpu.clock_us()", "gpu.Event(enable_timing=True)")), "unknown-attribute"),
    "torch.cuda": (timing(("gpu.synchronize", "torch.cuda.synchronize")), "another-gpu"),
    "perf_counter": (timing(("gpu.clock_us", "time.perf_counter")), "clock-of-the-computer"),
    "forward": (timing(("layer(x)", "layer.forward(x)")), "not-a-layer-like-that"),
    "moved": (timing(("layer(x)", "layer(x.cuda())")), "not-a-layer-like-that"),
    "torch.randn": (timing(("gpu.randn", "torch.randn")), "not-drawn"),
    "a tuple": (timing(("batch, width)\n    #", "(batch, width))\n    #")), "arguments"),
    "weights too": (timing(("layer(x)", "layer(x, 1)")), "arguments"),
    "other parameters": (timing(("(gpu, layer, batch, width)", "(gpu, layer)")), "arguments"),
    "no calls": (timing(("calls = 50", "calls = 0")), "no-calls-to-divide-by"),
    "warm before drawing": (
        SCAFFOLDS["benchmark"].replace("    start", "    layer(x)\n    start", 1),
        "unset",
    ),
    "another name": (timing(("layer(x)", "layer(inputs)")), "unknown-name"),
}
ERROR_TABLES = {"mask": MASK_ERRORS, "fuse": FUSE_ERRORS, "benchmark": BENCHMARK_ERRORS}


@INTERPRETED
@pytest.mark.parametrize(("name", "source", "reason"), cases(ERROR_TABLES))
def test_an_answer_that_raises_gets_hints_of_its_own(judged, name, source, reason):
    finding = judged(name, source)
    assert finding["status"] == "raised", finding
    assert finding["reason"] == reason, finding
    (slip,) = (slip for slip in (*TASKS[name].slips, *slips.ANYWHERE) if slip.reason == reason)
    assert filled(finding["hints"], slip.hints), finding


@INTERPRETED
def test_a_name_that_is_missing_is_told_beside_those_that_are_there(judged):
    first, second = judged("mask", MASK_ERRORS["misspelt"][0])["hints"]
    assert first == "The line sees x, y, count, BLOCK, at. Is one of these what you call `conut`?"
    assert "flat_kernel" in second and "torch" in second and "double_kernel" not in second


@pytest.mark.parametrize("name", TASKS)
def test_every_reason_has_a_wrong_answer_and_hints_of_its_own(name):
    assert reasons(WRONG_TABLES[name]) == set(HINTS[name])
    own = {slip.reason for slip in TASKS[name].slips}
    assert own - reasons(ERROR_TABLES[name]) <= {slip.reason for slip in slips.IN_KERNELS}
    assert_hints_of_its_own(TASKS[name], HINTS[name], shared=("{what}",))


def test_every_reason_that_exercises_share_is_in_a_table():
    shared = {slip.reason for slip in (*slips.IN_KERNELS, *slips.ANYWHERE)}
    assert shared <= set().union(*map(reasons, ERROR_TABLES.values()))


@INTERPRETED
def test_fusing_shows_what_it_counted_and_compiled(judged):
    evidence = judged("fuse", solved("fuse"))["evidence"]
    assert "One launch" in evidence and "128 bits wide" in evidence
    assert "moves 12,288 bytes" in evidence
    assert "three tensors (x and residual in, y out), is 12,288" in evidence


OTHER_RIGHT_ANSWERS = {
    "the other way round": ("mask", masked("count > at")),
    "with brackets": ("mask", masked("(at < count) & (at >= 0)")),
    "no variable": (
        "mask",
        changed("mask", ("mask=mask", "mask=at < count"), ("    mask = at < count\n", "")),
    ),
    "named other": (
        "fuse",
        changed("fuse", (RELU, "tl.where(affine > 0, affine, 0.0)"), ("y, block =", "y = None; y, block =")),
    ),
    "tile": (
        "fuse",
        """
@triton.jit
def rows_kernel(x, weight, bias, residual, y, width, COLS: tl.constexpr):
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < width
    at = tl.program_id(0) * width + column
    value = tl.load(x + at, inside).to(tl.float32) * tl.load(weight + column, inside).to(tl.float32)
    value = tl.maximum(value + tl.load(bias + column, inside).to(tl.float32), 0.0)
    tl.store(y + at, value + tl.load(residual + at, inside).to(tl.float32), inside)


def fused(x, weight, bias, residual):
    x, weight, bias, residual = (t.contiguous() for t in (x, weight, bias, residual))
    y, width = torch.empty_like(x), x.shape[-1]
    grid = (x.numel() // width, triton.cdiv(width, 256))
    rows_kernel[grid](x, weight, bias, residual, y, width, COLS=256)
    return y


tasks.check("fuse", fused)
""",
    ),
    "several regions": (
        "benchmark",
        timing(
            (LOOP, ""),
            (
                "    return (stop - start) / calls",
                """    times = []
    for _ in range(7):
        gpu.synchronize()
        start = gpu.clock_us()
        for _ in range(calls):
            layer(x)
        gpu.synchronize()
        times.append((gpu.clock_us() - start) / calls)
    return sorted(times)[3]""",
            ),
        ),
    ),
    "for a time": (
        "benchmark",
        timing(
            (
                LOOP,
                """    calls = 0
    while gpu.clock_us() - start < 3000:
        calls += 1
        layer(x)
""",
            )
        ),
    ),
}


class TestExercises(ExerciseTests):
    answers, others, least_passed = ANSWERS, OTHER_RIGHT_ANSWERS, 6


@pytest.mark.parametrize("name", ["mask", "fuse"])
def test_the_solution_only_adds_to_the_scaffold(name):
    given = [line for line in code_lines(SCAFFOLDS[name]) if not line.endswith("= ...")]
    assert len(given) == len(code_lines(SCAFFOLDS[name])) - 1
    lines = iter(code_lines(solved(name)))
    assert all(line in lines for line in given)  # in this order


def test_the_solution_repairs_the_benchmark_and_leaves_its_frame():
    given, repaired = code_lines(SCAFFOLDS["benchmark"]), code_lines(solved("benchmark"))
    kept = difflib.SequenceMatcher(None, given, repaired, autojunk=False).ratio()
    assert given[:2] == repaired[:2] and given[-2:] == repaired[-2:]
    assert kept > 0.6


def test_solutions_run_as_plain_python():
    module = exercises.of(ANSWERS.lesson)
    for name, task in TASKS.items():
        assert callable(getattr(module.answer(name), "run", module.answer(name))), task.answer


def test_a_lesson_without_exercises_is_refused():
    for name in ("09_nothing", "01_mask", "../launch_overhead"):
        with pytest.raises(ValueError, match=f"no exercises for '{name}'"):
            find(name)
