"""Lesson 2's exercises: every plausible wrong answer is refused for its own reason, the solutions pass."""

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
from labkit.tasks import pays, pays_hints, ragged_hints, swiglu_hints

pytestmark = pytest.mark.usefixtures("cache")
ANSWERS = Answers("02_kernel_fusion")
TASKS, SOLUTIONS = ANSWERS.tasks, ANSWERS.solutions
SCAFFOLDS = {name: ANSWERS.scaffold(name) for name in TASKS}
"""The cells as the lesson gives them."""
solved, changed = ANSWERS.solved, ANSWERS.changed


# --- the missing mask

ROWS, COLUMNS = "row[:, None] < M", "col[:, None] < N"
INSIDE = " & (k[None, :] < K)"
A_MASK, B_MASK = f"({ROWS}){INSIDE}", f"({COLUMNS}){INSIDE}"
UNMASKED = ((A_MASK, ROWS), (B_MASK, COLUMNS))
DOT = "        acc = tl.dot"
SIZES = "    (M, K), N"
COPIES = "    x, weight = x.contiguous(), weight.contiguous()\n"


def both(condition):
    """The solution with another condition on k, in both masks."""
    return changed("ragged", ("(k[None, :] < K)", f"({condition})"))


def in_x(condition):
    return changed("ragged", (A_MASK, A_MASK.replace("k[None, :] < K", condition)))


def where(operand):
    return f"        {operand} = tl.where(k[None, :] < K, {operand}, 0.0)\n"


def launched(*pairs):
    """The unmasked kernel, launched in another way."""
    return changed("ragged", *UNMASKED, *pairs)


WRONG_MASKS = {
    "neither": (launched(), "no-mask"),
    "of the whole tile": (both("start < K"), "no-mask"),
    "only x": (changed("ragged", UNMASKED[1]), "only-x"),
    "only weight": (changed("ragged", UNMASKED[0]), "only-weight"),
    "no other": (changed("ragged", (", other=0.0", "")), "no-other"),
    "no other for x": (changed("ragged", ("a_mask, other=0.0", "a_mask")), "no-other"),
    "no other for weight": (changed("ragged", ("b_mask, other=0.0", "b_mask")), "no-other"),
    "at most K": (both("k[None, :] <= K"), "off-by-one"),
    "at most K, x only": (in_x("k[None, :] <= K"), "off-by-one"),
    "K - 1": (both("k[None, :] < K - 1"), "one-short"),
    "K - start": (both("k[None, :] < K - start"), "start-twice"),
    "arange": (both("tl.arange(0, BK)[None, :] < K"), "place-in-tile"),
    "whole tiles": (both("start + BK <= K"), "whole-tiles"),
    "whole tiles but the last": (both("start + BK < K"), "whole-tiles"),
    "loop to a multiple": (launched(("range(0, K, BK)", "range(0, K // BK * BK, BK)")), "whole-tiles"),
    "loop that ends early": (
        changed("ragged", ("range(0, K, BK)", "range(0, K - BK + 1, BK)")),
        "whole-tiles",
    ),
    "M": (both("k[None, :] < M"), "wrong-bound"),
    "N": (both("k[None, :] < N"), "wrong-bound"),
    "each its own rows": (
        changed("ragged", (A_MASK, A_MASK.replace("K)", "M)")), (B_MASK, B_MASK.replace("K)", "N)"))),
        "wrong-bound",
    ),
    "BK": (both("k[None, :] < BK"), "first-tile"),
    "inverted": (both("k[None, :] >= K"), "inverted"),
    "inverted too": (both("k[None, :] > K"), "inverted"),
    "a column": (both("k[:, None] < K"), "wrong-axis"),
    "a number": (both("k[None, :] < 70"), "literal"),
    "min": (both("min(k, K)"), "not-a-condition"),
    "K alone": (both("K"), "not-a-condition"),
    "k alone": (both("k[None, :]"), "not-a-condition"),
    "and": (changed("ragged", ("M) & (k", "M) and (k"), ("N) & (k", "N) and (k")), "python-and"),
    "or": (changed("ragged", ("M) & (k", "M) or (k")), "python-and"),
    "not": (both("not (k[None, :] >= K)"), "python-and"),
    "no parentheses": (
        changed("ragged", (A_MASK, f"{ROWS} & k[None, :] < K"), (B_MASK, f"{COLUMNS} & k[None, :] < K")),
        "chained",
    ),
    "parentheses of one": (changed("ragged", (A_MASK, f"{ROWS}{INSIDE}")), "chained"),
    "parentheses of the other": (changed("ragged", (A_MASK, f"({ROWS}) & k[None, :] < K")), "chained"),
    "two in one": (both("0 <= k[None, :] < K"), "chained"),
    "rows forgotten": (
        changed("ragged", (A_MASK, "k[None, :] < K"), (B_MASK, "k[None, :] < K")),
        "rows-unmasked",
    ),
    "either": (changed("ragged", ("M) & (k", "M) | (k"), ("N) & (k", "N) | (k")), "rows-unmasked"),
    "zeroed after the load": (launched((DOT, where("a") + where("b") + DOT)), "reads-outside"),
    "x zeroed after the load": (changed("ragged", UNMASKED[0], (DOT, where("a") + DOT)), "reads-outside"),
    "if": (
        changed("ragged", (DOT, "        a = 0.0 * a if k[None, :] < K else a\n" + DOT)),
        "python-if",
    ),
    "padded": (
        changed(
            "ragged",
            (
                SIZES,
                "    x, weight = (F.pad(t, (0, -t.shape[1] % 32)) for t in (x, weight))\n" + SIZES,
            ),
        ),
        "several-launches",
    ),
    "cut off": (
        launched(
            (
                SIZES,
                "    x, weight = (t[:, : t.shape[1] // 32 * 32].contiguous() for t in (x, weight))\n" + SIZES,
            )
        ),
        "several-launches",
    ),
    "rest by PyTorch": (
        launched(
            ("range(0, K, BK)", "range(0, K // BK * BK, BK)"),
            ("return y", "return y + x[:, K // 32 * 32 :] @ weight[:, K // 32 * 32 :].T"),
        ),
        "several-launches",
    ),
    "zeroed": (changed("ragged", ("x.new_empty", "x.new_zeros")), "several-launches"),
    "PyTorch": ("def ragged(x, w):\n    return x @ w.T\n\n\ntasks.check('ragged', ragged)", "no-kernel"),
    "F.linear": ("ragged = F.linear\n\n\ntasks.check('ragged', ragged)", "no-kernel"),
    "K handed over too small": (
        launched(("    y, grid", "    K = K // 32 * 32\n    y, grid")),
        "wrong-values",
    ),
    "ones": (changed("ragged", ("other=0.0", "other=1.0")), "wrong-values"),
    "BK of 1": (launched(("BK=32)", "BK=1)")), "small-tile"),
    "BK that divides K": (launched(("BK=32)", "BK=min(32, K & -K))")), "small-tile"),
    "not compiled": (
        changed("ragged", ("    acc = tl.zeros", "    col + len(type(col).__mro__)\n    acc = tl.zeros")),
        "not-compiled",
    ),
    "dots": (SCAFFOLDS["ragged"].replace("row[:, None] < M, other", "..., other"), "unfinished"),
    "store unmasked": (
        changed("ragged", (f", acc, ({ROWS}) & (col[None, :] < N)", ", acc")),
        "unmasked-store",
    ),
    "mask of the store": (launched((", acc, (row", ", acc, (k[None, :] < K) & (row")), "not-all-written"),
    "small grid": (changed("ragged", ("triton.cdiv(N, 32)", "max(1, N // 32)")), "not-all-written"),
    "no second program": (changed("ragged", ("tl.program_id(1) * BN + ", "")), "stored-twice"),
    "into x": (changed("ragged", ("x.new_empty(M, N)", "x.view(-1)[: M * N]")), "writes-input"),
    "one output for all calls": (
        "kept = {}\n"
        + changed("ragged", ("x.new_empty(M, N),", "kept.setdefault((M, N, x.dtype), x.new_empty(M, N)),")),
        "reused-output",
    ),
    "nothing returned": (changed("ragged", ("    return y", "")), "not-a-tensor"),
    "float32 out": (
        changed("ragged", ("new_empty(M, N)", "new_empty(M, N, dtype=torch.float32)")),
        "shape-or-dtype",
    ),
    "strides ignored": (changed("ragged", (COPIES, "")), "strides"),
}

# --- the epilogue

VALUE = "value = gate / (1 + tl.exp(-gate)) * up"


def epilogue(expression, *pairs):
    return changed("swiglu", (VALUE, f"value = {expression}"), *pairs)


HALF = "y.dtype.element_ty"
WRONG_EPILOGUES = {
    "dots": (SCAFFOLDS["swiglu"].replace("a_mask =", "_ = 0\n        a_mask ="), "unfinished"),
    "silu of up": (epilogue("gate * up / (1 + tl.exp(-up))"), "swapped"),
    "up first": (changed("swiglu", ("gate, up =", "up, gate =")), "swapped"),
    "gate by the sigmoid of up": (epilogue("gate * tl.sigmoid(up)"), "swapped"),
    "sigmoid only": (epilogue("tl.sigmoid(gate) * up"), "no-factor"),
    "1 above the line": (epilogue("1 / (1 + tl.exp(-gate)) * up"), "no-factor"),
    "silu only": (epilogue("gate * tl.sigmoid(gate)"), "no-up"),
    "gate for up": (epilogue("gate * tl.sigmoid(gate) * gate"), "no-up"),
    "product only": (epilogue("gate * up"), "no-activation"),
    "gelu": (
        epilogue("gate * tl.sigmoid(1.5957691 * (gate + 0.044715 * gate * gate * gate)) * up"),
        "other-activation",
    ),
    "gelu by erf": (epilogue("0.5 * gate * (1 + tl.erf(gate * 0.70710678)) * up"), "other-activation"),
    "quick gelu": (epilogue("gate * tl.sigmoid(1.702 * gate) * up"), "other-activation"),
    "relu": (epilogue("tl.maximum(gate, 0.0) * up"), "other-activation"),
    "tanh": (epilogue("(2 * tl.sigmoid(2 * gate) - 1) * up"), "other-activation"),
    "silu of the product": (epilogue("gate * up * tl.sigmoid(gate * up)"), "activation-last"),
    "exp(z)": (epilogue("gate / (1 + tl.exp(gate)) * up"), "wrong-sign"),
    "minus z": (epilogue("-gate / (1 + tl.exp(gate)) * up"), "wrong-sign"),
    "sum": (epilogue("gate * tl.sigmoid(gate) + up"), "sum"),
    "both": (epilogue("gate * tl.sigmoid(gate) * up * tl.sigmoid(up)"), "both-activated"),
    "no 1": (epilogue("gate / tl.exp(-gate) * up"), "no-one"),
    "no parentheses": (epilogue("gate / 1 + tl.exp(-gate) * up"), "precedence"),
    "parentheses too far": (epilogue("gate / (1 + tl.exp(-gate) * up)"), "precedence"),
    "exp above and below": (epilogue("gate * tl.exp(gate) / (1 + tl.exp(gate)) * up"), "overflows"),
    "exp of both": (
        epilogue("gate * tl.exp(gate / 2) / (tl.exp(gate / 2) + tl.exp(-gate / 2)) * up"),
        "overflows",
    ),
    "float16 gate": (epilogue("gate.to(tl.float16) * tl.sigmoid(gate) * up"), "half-precision"),
    "product in half": (epilogue(f"(gate * tl.sigmoid(gate)).to({HALF}) * up.to({HALF})"), "half-precision"),
    "rounded before": (
        changed("swiglu", ("split()\n", f"split()\n    gate = gate.to({HALF}).to(tl.float32)\n")),
        "half-precision",
    ),
    "activation on the host": (
        epilogue("gate * up", ("return y", "return F.silu(y)")),
        "several-launches",
    ),
    "PyTorch": (
        "def swiglu(x, w):\n    return F.silu(x @ w[0].T) * (x @ w[1].T)\n\n\ntasks.check('swiglu', swiglu)",
        "no-kernel",
    ),
    "clipped": (epilogue("gate / (1 + tl.exp(-tl.maximum(gate, -2.0))) * up"), "wrong-values"),
    "clipped gates": (
        epilogue("tl.minimum(gate, 60.0) / (1 + tl.exp(-gate)) * up"),
        "wrong-values",
    ),
    "masks gone": (changed("swiglu", ("a_mask, other=0.0", "k[None, :] < K, other=0.0")), "unmasked-load"),
    "and": (changed("swiglu", ("M) & (k", "M) and (k")), "python-and"),
    "no parentheses in a mask": (
        changed("swiglu", ("(row[:, None] < M) & (k[None, :] < K)", "row[:, None] < M & k[None, :] < K")),
        "chained",
    ),
    "if": (
        epilogue("gate / (1 + tl.exp(-gate)) * up if gate > -80 else 0.0"),
        "python-if",
    ),
    "if, for large gates": (
        changed("swiglu", (VALUE, "if gate > 0:\n        value = gate * up\n    else:\n        value = up")),
        "no-activation",
    ),
    "if of a wrong branch": (epilogue("up - gate if gate > 0 else gate"), "python-if"),
    "BK of 8": (changed("swiglu", ("BK=32)", "BK=8)")), "small-tile"),
    "not compiled": (
        changed("swiglu", ("    acc = tl.zeros", "    col + len(type(col).__mro__)\n    acc = tl.zeros")),
        "not-compiled",
    ),
    "store unmasked": (
        changed("swiglu", (", value, (row[:, None] < M) & (col[None, :] < H)", ", value")),
        "unmasked-store",
    ),
    "small grid": (changed("swiglu", ("triton.cdiv(H, 32)", "max(1, H // 32)")), "not-all-written"),
    "no program": (
        changed("swiglu", ("col = tl.program_id(1) * BN + ", "col = ")),
        "stored-twice",
    ),
    "into x": (changed("swiglu", ("x.new_empty(M, H)", "x.view(-1)[: M * H]")), "writes-input"),
    "one output for all calls": (
        "kept = {}\n"
        + changed("swiglu", ("x.new_empty(M, H),", "kept.setdefault((M, H, x.dtype), x.new_empty(M, H)),")),
        "reused-output",
    ),
    "nothing returned": (changed("swiglu", ("    return y", "")), "not-a-tensor"),
    "float32 out": (
        changed("swiglu", ("new_empty(M, H)", "new_empty(M, H, dtype=torch.float32)")),
        "shape-or-dtype",
    ),
    "strides ignored": (changed("swiglu", (COPIES.replace("weight", "w_gate_up"), "")), "strides"),
}

# --- the prediction

RETURN = "return (gemm + pointwise) / fused"
ARITHMETIC = "arithmetic = 2 * rows * d * (2 * h) / rate"
GEMM = "gemm = max(arithmetic, (inputs + 2 * hidden) / bandwidth)"
FUSED = "fused = max(arithmetic, (inputs + hidden) / bandwidth)"
INPUTS = "2 * (rows * d + 2 * h * d)"


def model(*pairs):
    return changed("pays", *pairs)


def returned(expression):
    return model((RETURN, f"return {expression}"))


WRONG_MODELS = {
    "dots": (SCAFFOLDS["pays"].replace("return (gemm", "return 1 * (gemm"), "unfinished"),
    "one product": (
        model(
            (ARITHMETIC, "arithmetic = 2 * rows * d * h / rate"),
            ("2 * h * d), 2", "h * d), 2"),
            ("inputs + 2 * hidden", "inputs + hidden"),
        ),
        "one-product",
    ),
    "one product's operations": (
        model((ARITHMETIC, "arithmetic = 2 * rows * d * h / rate")),
        "half-operations",
    ),
    "multiply-adds": (model(("= 2 * rows * d * (2", "= rows * d * (2")), "half-operations"),
    "float32": (
        model(("= 2 * (rows", "= 4 * (rows"), ("2 * rows * h\n", "4 * rows * h\n")),
        "half-operations",
    ),
    "elements": (model(("= 2 * (rows", "= (rows"), (", 2 * rows * h", ", rows * h")), "half-bytes"),
    "sums": (
        model(
            (GEMM, "gemm = arithmetic + (inputs + 2 * hidden) / bandwidth"),
            (FUSED, "fused = arithmetic + (inputs + hidden) / bandwidth"),
        ),
        "sum-of-floors",
    ),
    "min": (model(("max(", "min(")), "smaller-floor"),
    "arithmetic only": (model((GEMM, "gemm = arithmetic"), (FUSED, "fused = arithmetic")), "arithmetic-only"),
    "bytes only": (model(("max(arithmetic, ", "(")), "bytes-only"),
    "fused writes both": (model(("(inputs + hidden)", "(inputs + 2 * hidden)")), "both-written"),
    "fused writes nothing": (model(("(inputs + hidden)", "(inputs)")), "nothing-written"),
    "gemm writes one": (model(("(inputs + 2 * hidden)", "(inputs + hidden)")), "hidden-once"),
    "no output": (
        model(("(inputs + 2 * hidden)", "(inputs)"), ("(inputs + hidden)", "(inputs)")),
        "no-output",
    ),
    "no weights": (model((INPUTS, "2 * rows * d")), "no-weights"),
    "one weight": (model((INPUTS, "2 * (rows * d + h * d)")), "one-weight"),
    "no x": (model((INPUTS, "2 * (2 * h * d)")), "no-x"),
    "x twice": (model((INPUTS, "2 * (2 * rows * d + 2 * h * d)")), "x-twice"),
    "one read": (model(("3 * hidden", "2 * hidden")), "two-passes"),
    "one pass": (model(("3 * hidden", "hidden")), "one-pass"),
    "GELU's result written": (model(("3 * hidden", "5 * hidden")), "too-many-passes"),
    "rates swapped": (model(("h, rate, bandwidth)", "h, bandwidth, rate)")), "swapped-rates"),
    "inverse": (returned("fused / (gemm + pointwise)"), "inverse"),
    "time": (returned("gemm + pointwise"), "seconds"),
    "fused time": (returned("fused"), "seconds"),
    "time saved": (returned("gemm + pointwise - fused"), "seconds"),
    "percent": (returned("100 * ((gemm + pointwise) / fused - 1)"), "gain"),
    "less one": (returned("(gemm + pointwise - fused) / fused"), "gain"),
    "no gemm": (returned("pointwise / fused"), "gemm-left-out"),
    "no pointwise": (returned("gemm / fused"), "pointwise-left-out"),
    "bool": (returned("gemm + pointwise > fused"), "yes-or-no"),
    "nothing": (model((RETURN, "_ = 0")), "unfinished"),
    "three numbers": (returned("gemm, pointwise, fused"), "several-numbers"),
    "not a number": (returned("float('nan')"), "not-a-number"),
    "text": (returned("'1.3 times'"), "not-a-number"),
    "constant": (returned("1.35"), "constant"),
    "two mistakes in the bytes": (
        model(("(inputs + hidden)", "(inputs + 2 * hidden)"), (INPUTS, "2 * (2 * h * d)")),
        "bytes",
    ),
    "operations": (model((ARITHMETIC, "arithmetic = 3 * rows * d * h / rate")), "arithmetic"),
    "half a pointwise": (model(("3 * hidden", "3.5 * hidden")), "wrong-values"),
}
WRONG_TABLES = {"ragged": WRONG_MASKS, "swiglu": WRONG_EPILOGUES, "pays": WRONG_MODELS}
HINTS = {"ragged": ragged_hints.HINTS, "swiglu": swiglu_hints.HINTS, "pays": pays_hints.HINTS}


@INTERPRETED
@pytest.mark.parametrize(("name", "source", "reason"), cases(WRONG_TABLES))
def test_a_wrong_answer_is_refused_for_its_reason(judged, name, source, reason):
    finding = judged(name, source)
    assert_refused(finding, reason, HINTS[name])
    assert not re.search("[Ii]ndex arithmetic|edge of a tile", finding["observed"]), "the reason decides"


@INTERPRETED
@pytest.mark.parametrize("masked", ["only x", "only weight"])
def test_masking_one_operand_is_nan_only_where_the_others_garbage_is(judged, masked):
    observed = judged("ragged", WRONG_MASKS[masked][0])["observed"]
    wrong, count = map(int, re.search(r"wrong in (\d+) of (\d+) elements", observed).groups())
    assert wrong < 0.05 * count and "nan instead of" in observed


def test_a_wrong_prediction_is_told_with_its_case(judged):
    observed = judged("pays", WRONG_MODELS["no weights"][0])["observed"]
    numbers = (
        r"On .+, with \d+ rows, d = \d+ and h = \d+, your function says [\d.]+; the floors give [\d.]+\."
    )
    assert re.fullmatch(rf"{numbers} The products alone are ruled by memory there\.", observed)


# --- answers that raise

LOAD = "tl.load(x + row[:, None] * K + k[None, :], a_mask, other=0.0)"
RAGGED_ERRORS = {
    "a mask of an address": (both("x < K"), "pointer-arithmetic"),
    "not loaded": (changed("ragged", (LOAD, "x + row[:, None] * K + k[None, :]")), "pointer-arithmetic"),
    "torch": (both("torch.arange(K) < K"), "unknown-function"),
    "invented": (both("tl.mask(k, K)"), "unknown-function"),
    "brackets": (changed("ragged", (LOAD, "x[row, k]")), "subscript"),
    "other without a mask": (changed("ragged", ("a_mask, other", "other")), "other-without-mask"),
    "number for a mask": (
        changed("ragged", (f"acc, ({ROWS}) & (col[None, :] < N)", "acc, M")),
        "mask-of-numbers",
    ),
    "block of K": (changed("ragged", ("tl.arange(0, BK)", "tl.arange(0, K)")), "arange"),
    "BK is K": (changed("ragged", ("BK=32)", "BK=K)")), "arange"),
    "a column of another length": (
        changed("ragged", ("(k[None, :] < K)", "(k[:, None] < K)"), ("BK=32", "BK=64")),
        "shapes",
    ),
    "one tensor": (changed("ragged", ("(x: Tensor, weight: Tensor)", "(x: Tensor)")), "arguments"),
    "sizes left out": (changed("ragged", ("M, N, K, BM=", "M, N, BM=")), "arguments"),
    "no grid": (changed("ragged", ("ragged_kernel[grid]", "ragged_kernel")), "no-grid"),
    "misspelt": (both("kk[None, :] < K"), "unknown-name"),
    "set too late": (changed("ragged", ("        a_mask = ", "        a_mask = a_mask & ")), "unset"),
    "anything": (both("1 / 0"), "other-error"),
}
SWIGLU_ERRORS = {
    "F.silu": (epilogue("F.silu(gate) * up"), "unknown-function"),
    "torch.sigmoid": (epilogue("gate * torch.sigmoid(gate) * up"), "unknown-function"),
    "tl.silu": (epilogue("tl.silu(gate) * up"), "unknown-function"),
    "tl.tanh": (epilogue("gate * (0.5 + 0.5 * tl.tanh(gate / 2)) * up"), "unknown-function"),
    "math": (
        epilogue("gate / (1 + math.exp(-gate)) * up", ("@triton", "import math\n@triton")),
        "unknown-function",
    ),
    "silu": (epilogue("silu(gate) * up"), "unknown-name"),
    "half before exp": (epilogue("gate / (1 + tl.exp(-gate.to(tl.float16))) * up"), "half-exp"),
    "half before sigmoid": (
        changed("swiglu", (VALUE, f"value = gate * tl.sigmoid(gate.to({HALF})) * up")),
        "half-exp",
    ),
    "acc": (epilogue("acc * tl.sigmoid(acc)"), "whole-tile"),
    "every second column": (epilogue("acc[:, ::2] * tl.sigmoid(acc[:, ::2]) * acc[:, 1::2]"), "subscript"),
    "gate's first": (epilogue("gate[0] * up"), "subscript"),
    "an address": (epilogue("x * tl.sigmoid(gate) * up"), "pointer-arithmetic"),
    "another address": (epilogue("w_gate_up"), "pointer-arithmetic"),
    "two arguments": (epilogue("tl.sigmoid(gate, up)"), "arguments"),
    "a row": (epilogue("gate * tl.sigmoid(gate) * tl.arange(0, 16)"), "shapes"),
    "one number for a grid": (
        changed("swiglu", ("(triton.cdiv(M, 32), triton.cdiv(H, 32))", "triton.cdiv(M, 32)")),
        "no-grid",
    ),
    "size of a tile": (epilogue("gate * tl.arange(0, 33) * up"), "arange"),
}
PAYS_ERRORS = {
    "max of one": (model((GEMM, "gemm = max(arithmetic + inputs / bandwidth)")), "max-of-one"),
    "four arguments": (model(("h, rate, bandwidth", "h, rate")), "arguments"),
    "torch.max": (model((GEMM, "gemm = torch.max(arithmetic, inputs / bandwidth)")), "a-tensor"),
    "misspelt": (returned("(gem + pointwise) / fused"), "unknown-name"),
    "too late": (model((GEMM, GEMM.replace("arithmetic", "fused"))), "unset"),
    "anything": (returned("gemm / 0"), "other-error"),
}
ERROR_TABLES = {"ragged": RAGGED_ERRORS, "swiglu": SWIGLU_ERRORS, "pays": PAYS_ERRORS}


@INTERPRETED
def test_the_evidence_says_what_a_ragged_depth_costs(judged):
    evidence = judged("ragged", solved("ragged"))["evidence"]
    assert "128 bits where K is 64, and 16 where it is 70" in evidence


@INTERPRETED
def test_the_evidence_says_what_stays_out_of_memory(judged):
    evidence = judged("swiglu", solved("swiglu"))["evidence"]
    assert "stores 8,192 bytes" in evidence and "16,384 bytes of gate and up" in evidence
    assert "mma instructions" in evidence and "spills 0 bytes" in evidence


def test_the_evidence_names_the_two_numbers_and_the_end_of_the_gain(judged):
    evidence = judged("pays", solved("pays"))["evidence"]
    assert "1 + 1.5 * ridge / d" in evidence
    assert "d = 2,679 on an H200 and d = 3,750 on an L4" in evidence


def test_the_formula_of_the_finding_holds_wherever_arithmetic_rules():
    shapes = [(rows, d, h) for rows in (512, 8192) for d in (128, 1024, 8192) for h in (1024, 16384)]
    at = [pays._Case(name, *rates, *shape) for name, rates in pays.DEVICES.items() for shape in shapes]
    ruled = [case for case in at if case.arithmetic_rules]
    assert 0 < len(ruled) < len(at)
    for case in ruled:
        ridge = case.rate / case.bandwidth
        assert pays.RIGHT.speedup(case) == pytest.approx(1 + 1.5 * ridge / case.d)
    assert all(1 < pays.RIGHT.speedup(case) < 5 for case in at)


OTHER_RIGHT_ANSWERS = {
    "the tile's own places": ("ragged", both("tl.arange(0, BK)[None, :] < K - start")),
    "the other way round": ("ragged", both("K > k[None, :]")),
    "one dimension": ("ragged", both("k < K")),
    "nothing else than outside": ("ragged", both("~(k[None, :] >= K)")),
    "in place": (
        "ragged",
        changed("ragged", ("a_mask, other", f"{A_MASK}, other"), (f"a_mask = {A_MASK}", "")),
    ),
    "another depth": ("ragged", changed("ragged", ("BK=32)", "BK=64)"))),
    "depth by size": ("ragged", changed("ragged", ("BK=32)", "BK=max(16, triton.next_power_of_2(K)))"))),
    "other tiles": ("ragged", changed("ragged", ("BM=32", "BM=16"), ("cdiv(M, 32)", "cdiv(M, 16)"))),
    "one operand of zeros is enough": (
        "ragged",
        changed("ragged", ("a_mask, other=0.0", "a_mask, other=1.0")),
    ),
    "sigmoid": ("swiglu", epilogue("gate * tl.sigmoid(gate) * up")),
    "a method": ("swiglu", epilogue("up * gate * gate.sigmoid()")),
    "one less": ("swiglu", epilogue("gate * (1 - 1 / (1 + tl.exp(gate))) * up")),
    "two branches": (
        "swiglu",
        epilogue(
            "tl.where(gate > 0, gate / (1 + tl.exp(-gate)), gate * tl.exp(gate) / (1 + tl.exp(gate))) * up"
        ),
    ),
    "converted": ("swiglu", epilogue(f"(gate * tl.sigmoid(gate) * up).to({HALF})")),
    "in numbers": (
        "pays",
        """
def speedup(rows, d, h, rate, bandwidth):
    flops, tensor = 4 * rows * d * h, 2 * rows * h
    read = 2 * rows * d + 4 * h * d
    unfused = max(flops / rate, (read + 2 * tensor) / bandwidth) + 3 * tensor / bandwidth
    return unfused / max(flops / rate, (read + tensor) / bandwidth)


tasks.check("pays", speedup)
""",
    ),
    "a number of NumPy's": (
        "pays",
        returned("__import__('numpy').float32((gemm + pointwise) / fused)"),
    ),
}


@INTERPRETED
def test_the_judges_print_no_warnings_above_the_verdict(judged, recwarn, capfd):
    for name, what in (("ragged", "neither"), ("swiglu", "exp above and below")):
        judged(name, WRONG_TABLES[name][what][0])
    assert not [warning for warning in recwarn if "encountered" in str(warning.message)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "dots"), [("swiglu", 1), ("pays", 3)])
def test_the_solution_only_adds_to_the_scaffold(name, dots):
    given = [line for line in code_lines(SCAFFOLDS[name]) if not line.endswith("= ...")]
    assert len(given) == len(code_lines(SCAFFOLDS[name])) - dots
    lines = iter(code_lines(solved(name)))
    assert all(line in lines for line in given)  # in this order


def test_the_solution_changes_two_loads_of_the_scaffold():
    given, repaired = code_lines(SCAFFOLDS["ragged"]), code_lines(solved("ragged"))
    gone = [line[2:] for line in difflib.ndiff(given, repaired) if line.startswith("- ")]
    assert len(gone) == 2 and all("tl.load" in line for line in gone)


def test_solutions_run_as_plain_python():
    module = exercises.of(ANSWERS.lesson)
    for name, task in TASKS.items():
        assert callable(module.answer(name)), task.answer


class TestExercises(RefusalTests):
    answers, others, least_passed = ANSWERS, OTHER_RIGHT_ANSWERS, 21
    wrong, errors, hints = WRONG_TABLES, ERROR_TABLES, HINTS
