"""Lesson 7's exercises: every plausible wrong answer is refused for its own reason, the solutions pass."""

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
from labkit.tasks import recurrence_loop_hints, recurrence_reset_hints, rms_original_hints

pytestmark = pytest.mark.usefixtures("cache")
ANSWERS = Answers("07_recurrent_kernel")
TASKS = ANSWERS.tasks
SCAFFOLDS = {name: ANSWERS.scaffold(name) for name in TASKS}
"""The cells as the lesson gives them."""
solved, changed = ANSWERS.solved, ANSWERS.changed


# --- the published backward

AT, TERM, TOTAL = "at = row * H + k", "gy * value / r, inside", "dw.sum(0).to"
FROM_DY = "tl.load(dy + at, at < N, other=0.0)"
RMS = "tl.load(rms + row, inside, other=1.0)"
START = (AT, "at = column + k")
AUTOGRAD = """
def rms_norm_grad(dy, x, weight, eps=1e-6):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return torch.autograd.grad(y, (x, weight), dy)


tasks.check("original", rms_norm_grad)
"""


def mended(*pairs):
    return changed("original", *pairs)


def begun(expression):
    """The solution, where each element sums from somewhere else on."""
    return mended((AT, f"at = {expression}"))


def reduced(expression):
    return mended((TOTAL, f"{expression}.to"))


def terms(expression, reduction="dw.sum(0)", *pairs):
    return mended((TERM, f"{expression}, inside"), (TOTAL, f"{reduction}.to"), *pairs)


EMPTY_DX, KEPT_DX = "torch.empty_like(x)", "kept.setdefault((N, x.dtype), torch.empty_like(x))"
WRONG_GRADS = {
    "untouched": (SCAFFOLDS["original"], "nothing-mended"),
    "the first row's": (SCAFFOLDS["original"].replace("dw[-1]", "dw[0]"), "nothing-mended"),
    "only dx": (terms("gy", "dw[-1]"), "only-first"),
    "only dx, the first row's": (terms("gy", "dw[0]"), "only-first"),
    "only the weight": (mended(START), "only-second"),
    "no factor": (terms("gy"), "no-factor"),
    "no factor, dx not mended": (terms("gy", "dw.sum(0)", START), "no-factor"),
    "the mean of dy": (terms("gy", "dw.mean(0)"), "no-factor"),
    "not reduced": (reduced("dw[-1]"), "not-reduced"),
    "not reduced, dx not mended": (mended(START, (TOTAL, "dw[0].to")), "not-reduced"),
    "mean": (reduced("dw.mean(0)"), "mean"),
    "one row of the batch": (reduced("dw[:x.shape[1]].sum(0)"), "part-of-rows"),
    "one step": (reduced("dw[::x.shape[1]].sum(0)"), "part-of-rows"),
    "over columns": (reduced("dw.sum(1)"), "shape-or-dtype"),
    "as it is": (reduced("dw"), "shape-or-dtype"),
    "a row of one": (reduced("dw.sum(0, keepdim=True)"), "shape-or-dtype"),
    "dw in float32": (mended((".to(weight.dtype)", "")), "shape-or-dtype"),
    "no rms": (terms("gy * value"), "no-rms"),
    "times rms": (terms("gy * value * r"), "times-rms"),
    "the weight too": (terms("gy * value / r * tl.load(weight + column)"), "with-weight"),
    "no x": (terms("gy / r"), "no-x"),
    "only x mended": (mended(("dy + at, at < N", "dy + column + k, column + k < N")), "half-start"),
    "only dy mended": (mended(("x + at, at < N", "x + column + k, column + k < N")), "half-start"),
    "from the element": (begun("idx + k"), "from-element"),
    "from the element, dw as given": (terms("gy", "dw[0]", (AT, "at = idx + k")), "from-element"),
    "row without H": (begun("row + k"), "row-for-start"),
    "row 0": (begun("k + 0 * row"), "first-row"),
    "round in row 0": (begun("(column + k) % H"), "rotated"),
    "round in its row": (begun("row * H + (column + k) % H"), "rotated"),
    "nothing but the first term": (mended((" - value * dot / (H * r * r * r)", "")), "no-sum"),
    "start, and the weight": (terms("gy * value / r + 1", "dw.sum(0)", START), "wrong-values"),
    "plus": (mended(("/ r - value", "/ r + value")), "wrong-values"),
    "no H": (mended(("(H * r * r * r)", "(r * r * r)")), "wrong-values"),
    "dots": (mended((AT, f"...\n        {AT}")), "unfinished"),
    "only dx returned": (mended(("return dx, ", "return dx  # ")), "not-a-pair"),
    "three": (mended(("return dx, ", "return dx, rms, ")), "not-a-pair"),
    "into x": (mended((EMPTY_DX, "x")), "writes-input"),
    "one dx for all calls": ("kept = {}\n" + mended((EMPTY_DX, KEPT_DX)), "reused-output"),
    "strides ignored": (mended((".contiguous()", "")), "strides"),
    "not compiled": (mended((AT, f"len(type(dot).__mro__)\n        {AT}")), "not-compiled"),
    "store unmasked": (mended((TERM, "gy * value / r")), "unmasked-store"),
    "store of dx unmasked": (mended(("(H * r * r * r), inside", "(H * r * r * r)")), "unmasked-store"),
    "load unmasked": (mended((FROM_DY, "tl.load(dy + at)")), "unmasked-load"),
    "small grid": (mended(("cdiv(N, 1024)", "cdiv(N, 2048)")), "not-all-written"),
    "overlapping": (mended(("tl.program_id(0) * BLOCK", "tl.program_id(0) * 64")), "stored-twice"),
    "dw in x's dtype": (mended(("dtype=torch.float32", "dtype=x.dtype")), "half-precision"),
    "rms in x's dtype": (mended(("x.float()", "x"), (RMS, f"{RMS}.to(tl.float32)")), "half-precision"),
    "product rounded": (mended((f"{FROM_DY}.to(tl.float32)", FROM_DY)), "half-precision"),
    "PyTorch": (AUTOGRAD, "no-kernel"),
}  # fmt: skip

# --- what the recurrences are not about

EMPTY, KEPT = "torch.empty_like(a)", "kept.setdefault((B, T, H, a.dtype), torch.empty_like(a))"
STORE = "tl.store(h + at, state, inside)"


def before_store(name, line):
    """The solution of a recurrence with another line before its store."""
    return changed(name, (STORE, f"{line}\n        {STORE}"))


def wrong_forms(name):
    """Wrong answers that both recurrences may get."""
    return {
        "zeroed": (changed(name, (EMPTY, "torch.zeros_like(a)")), "several-launches"),
        "small grid": (changed(name, ("cdiv(H, 128)", "cdiv(H, 256)")), "not-all-written"),
        "no block": (changed(name, ("tl.program_id(1) * BH", "0 * tl.program_id(1)")), "stored-twice"),
        "all channels": (changed(name, ("channel < H", "channel >= 0")), "unmasked-store"),
        "not compiled": (before_store(name, "len(type(state).__mro__)"), "not-compiled"),
        "into a": (changed(name, (EMPTY, "a")), "writes-input"),
        "one h for all calls": ("kept = {}\n" + changed(name, (EMPTY, KEPT)), "reused-output"),
        "nothing returned": (changed(name, ("    return h", "")), "not-a-tensor"),
        "float32 out": (changed(name, (EMPTY, "torch.empty_like(a.float())")), "shape-or-dtype"),
        "strides ignored": (changed(name, (".contiguous()", "")), "strides"),
        "unmasked load": (changed(name, ("(b + at, inside)", "(b + at)")), "unmasked-load"),
        "float16": (before_store(name, "state = state.to(tl.float16).to(tl.float32)"), "half-precision"),
        "h's dtype": (before_store(name, "state = state.to(h.dtype.element_ty)"), "half-precision"),
        "minus": (changed(name, ("+ tl.load(b", "- tl.load(b")), "wrong-values"),
    }  # fmt: skip


# --- the loop over time

STEP = "at += H  # a step has H channels, not BH"
SUM = "state = tl.load(a + at, inside) * state + tl.load(b + at, inside)"
BY_STEPS = ("for _ in range(T)", "for t in range(T)")
FIRST = "row * T * H + channel"
TORCH = """
def recurrence(a, b):
    h, state = torch.empty_like(a), torch.zeros_like(a[:, 0])
    for t in range(a.shape[1]):
        state = h[:, t] = a[:, t] * state + b[:, t]
    return h


tasks.check("recurrence", recurrence)
"""


def loop(*pairs):
    return changed("recurrence", *pairs)


def summed(expression):
    """The solution with another line for the state, from the A and B of the step."""
    loads = {"A": "tl.load(a + at, inside)", "B": "tl.load(b + at, inside)"}
    return loop((SUM, re.sub(r"\b[AB]\b", lambda name: loads[name[0]], expression)))


def last(at):
    """The solution that stores once, after the loop."""
    return loop((STORE, ""), (STEP, f"at += H\n    tl.store(h + {at}, state, inside)"))


ONE_BACK = "(a + at - H, inside & (t > 0), other=0.0)"
WRONG_LOOPS = wrong_forms("recurrence") | {
    "untouched": (SCAFFOLDS["recurrence"], "unfinished"),
    "nothing": (loop((SUM, ""), (STORE, ""), (STEP, "pass")), "not-all-written"),
    "no mask": (loop((STORE, "tl.store(h + at, state)")), "unmasked-store"),
    "stays at step 0": (loop((STEP, "at += 0")), "not-advanced"),
    "steps of BH": (loop((STEP, "at += BH")), "wrong-stride"),
    "steps of one": (loop((STEP, "at += 1")), "wrong-stride"),
    "steps of T": (loop((STEP, "at += T")), "wrong-stride"),
    "steps of rows": (loop((STEP, "at += T * H")), "wrong-stride"),
    "a step too early": (loop((STEP, ""), (SUM, f"at += H\n        {SUM}")), "one-ahead"),
    "from step 1": (loop((FIRST, f"{FIRST} + H"), ("range(T)", "range(1, T)")), "from-one"),
    "but the last": (loop(("range(T)", "range(T - 1)")), "one-short"),
    "from 1, at step 0": (loop(("range(T)", "range(1, T)")), "one-short"),
    "one more": (loop(("range(T)", "range(T + 1)")), "one-more"),
    "after the loop": (last("at"), "only-last"),
    "after the loop, one back": (last("at - H"), "only-last"),
    "h from memory": (loop(BY_STEPS, ("* state", "* tl.load(h + at - H, t > 0)")), "through-memory"),
    "h from memory, unmasked": (loop(("* state", "* tl.load(h + at - H, inside)")), "through-memory"),
    "no carry": (summed("step = A * state + B").replace(STORE, STORE.replace("state", "step")), "no-carry"),
    "zero at each step": (summed("state = A * tl.zeros([BH], tl.float32) + B"), "no-carry"),
    "sum of b": (summed("state += B"), "no-decay"),
    "product of a": (summed("state = A * state"), "no-b"),
    "b before a": (summed("state = B * state + A"), "swapped"),
    "added before": (summed("state = A * (state + B)"), "before-product"),
    "a times b": (summed("state += A * B"), "wrong-factor"),
    "average": (summed("state = A * state + (1 - A) * B"), "complement"),
    "stored before": (loop((STORE, ""), (SUM, f"{STORE}\n        {SUM}")), "stored-early"),
    "a of the next step": (loop(("a + at", "a + at + H")), "shifted"),
    "a of the last step": (loop(("a + at", "a + at - H")), "shifted"),
    "b of the next step": (loop(("b + at", "b + at + H")), "shifted"),
    "loads ahead": (loop(("b + at", "b + at + H"), ("a + at", "a + at + H")), "shifted"),
    "a of the last step, masked": (loop(BY_STEPS, ("(a + at, inside)", ONE_BACK)), "shifted"),
    "backwards": (loop((FIRST, f"{FIRST} + (T - 1) * H"), (STEP, "at -= H")), "backwards"),
    "loads stay": (loop((STEP, "h += H")), "same-step"),
    "one number for all channels": (loop(("a + at, inside", "a + at - channel")), "wrong-values"),
    "PyTorch": (TORCH, "no-kernel"),
}  # fmt: skip

# --- the reset

FRESH = "tl.load(reset + row * T + t)"
SELECT = f"decayed = tl.where({FRESH}, 0.0, decayed)  # reset (B, T) has no channels"
DECAYED = "decayed = tl.load(a + at, inside) * state"
NEW = "state = decayed + tl.load(b + at, inside)"


def begins(*pairs):
    return changed("reset", *pairs)


def selected(*lines):
    """The solution with other lines in place of its choice; FRESH is the load of reset."""
    return begins((SELECT, "\n        ".join(lines).replace("FRESH", FRESH)))


def looked_up(place):
    return begins((FRESH, f"tl.load(reset + {place})"))


def after(line, *lines, first=""):
    """The solution without its choice, but with lines after another; FRESH is the load of reset."""
    added = "\n        ".join((line, *lines)).replace("FRESH", FRESH)
    return begins((SELECT, first), (line, added))


OUTPUT = f"tl.where({FRESH}, state - decayed, state)"
MASKED = "](a.masked_fill(reset[..., None], 0), b, reset"
ZEROED = "state = tl.where(FRESH, 0.0, state)"
IN_TORCH = TORCH.replace("(a, b)", "(a, b, reset)").replace('"recurrence"', '"reset"')
WRONG_RESETS = wrong_forms("reset") | {
    "untouched": (SCAFFOLDS["reset"], "no-reset"),
    "loaded only": (selected("FRESH"), "no-reset"),
    "inverted": (selected("decayed = tl.where(FRESH, decayed, 0.0)"), "inverted"),
    "inverted factor": (selected("decayed *= FRESH"), "inverted"),
    "always": (selected("decayed = tl.where(FRESH >= 0, 0.0, decayed)"), "always"),
    "an address": (selected("decayed = tl.where(reset, 0.0, decayed)"), "always"),
    "after the step": (after(STORE, ZEROED), "off-by-one"),
    "the next step's": (looked_up("row * T + t + 1"), "off-by-one"),
    "the last step's": (looked_up("row * T + t - 1"), "off-by-one"),
    "the last step's, masked": (looked_up("row * T + t - 1, t > 0, other=0"), "off-by-one"),
    "all zero": (after(NEW, ZEROED), "drops-b"),
    "held": (after(NEW, "state = tl.where(FRESH, before, state)", first="before = state"), "held"),
    "only stored": (begins((SELECT, ""), ("at, state", f"at, {OUTPUT}")), "only-output"),
    "row 0": (looked_up("t"), "first-row"),
    "step 0": (looked_up("row * T"), "first-step"),
    "rows of H": (looked_up("row * H + t"), "wrong-place"),
    "as (T, B)": (looked_up("t * tl.num_programs(0) + row"), "wrong-place"),
    "row + t": (looked_up("row + t"), "wrong-place"),
    "as h": (looked_up("at, inside"), "by-channel"),
    "channel": (looked_up("row * T + channel, inside"), "by-channel"),
    "multiplied": (selected("decayed *= 1 - FRESH.to(tl.float32)"), "multiplied"),
    "factor of the state": (selected(f"decayed = {DECAYED[10:]} * (1.0 - FRESH)"), "multiplied"),
    "a is zero": (
        selected("decayed = tl.where(FRESH, 0.0, tl.load(a + at, inside)) * state"), "zeroed-decay"
    ),
    "state is zero": (
        selected("decayed = tl.load(a + at, inside) * tl.where(FRESH, 0.0, state)"), "zeroed-state"
    ),
    "by PyTorch": (begins((SELECT, ""), ("](a, b, reset", MASKED)), "several-launches"),
    "converted by PyTorch": (begins(("](a, b, reset", "](a, b, reset.float()")), "several-launches"),
    "the next row's too": (selected(SELECT, "tl.load(reset + row * T + T + t)"), "unmasked-load"),
    "dots": (selected("..."), "unfinished"),
    "PyTorch": (IN_TORCH, "no-kernel"),
}  # fmt: skip
WRONG_TABLES = {"original": WRONG_GRADS, "recurrence": WRONG_LOOPS, "reset": WRONG_RESETS}
HINTS = {
    "original": rms_original_hints.HINTS,
    "recurrence": recurrence_loop_hints.HINTS,
    "reset": recurrence_reset_hints.HINTS,
}


@INTERPRETED
@pytest.mark.filterwarnings("ignore:tl.where with a non-boolean condition")
@pytest.mark.parametrize(("name", "source", "reason"), cases(WRONG_TABLES))
def test_a_wrong_answer_is_refused_for_its_reason(judged, name, source, reason):
    finding = judged(name, source)
    assert_refused(finding, reason, HINTS[name])
    assert not re.search(r"\by\b(?! *[.:])", finding["observed"].replace("2y", ""))


# --- answers that raise

LOAD_A = "tl.load(a + at, inside)"


def wrong_calls(name):
    """Answers that raise, in both recurrences."""
    return {
        "one address": (changed(name, (LOAD_A, "tl.load(a + row, inside)")), "one-address"),
        "not loaded": (changed(name, (LOAD_A, "(a + at)")), "pointer-arithmetic"),
        "torch": (changed(name, (STORE, f"state = torch.relu(state)\n        {STORE}")), "unknown-function"),
        "invented": (changed(name, (LOAD_A, "tl.read(a + at)")), "unknown-function"),
        "brackets": (changed(name, (LOAD_A, "a[row, 0]")), "subscript"),
        "number for a mask": (changed(name, (STORE, "tl.store(h + at, state, H)")), "mask-of-numbers"),
        "sizes left out": (changed(name, ("T, H, BH=", "T, BH=")), "arguments"),
        "no grid": (changed(name, ("[(B, triton.cdiv(H, 128))]", "")), "no-grid"),
        "misspelt": (changed(name, (LOAD_A, "tl.load(a + att, inside)")), "unknown-name"),
        "set too late": (changed(name, ("channel < H", "channel < H + 0 * state")), "unset"),
        "anything": (changed(name, (LOAD_A, "1 / 0")), "other-error"),
    }  # fmt: skip


ERROR_TABLES = {
    "original": {
        "one address": (mended(("weight + k)", "weight + k, inside)")), "one-address"),
        "not loaded": (mended((FROM_DY, "(dy + at)")), "pointer-arithmetic"),
        "torch": (mended((TERM, "torch.mul(gy, value), inside")), "unknown-function"),
        "brackets": (mended((FROM_DY, "dy[row, k]")), "subscript"),
        "number for a mask": (mended((TERM, "gy * value / r, N")), "mask-of-numbers"),
        "sizes left out": (mended(("dw, N, H, BLOCK=1024", "dw, N, BLOCK=1024")), "arguments"),
        "no grid": (mended(("[(triton.cdiv(N, 1024),)]", "")), "no-grid"),
        "third dimension": (reduced("dw.sum(2)"), "shapes"),
        "misspelt": (begun("rows * H + k"), "unknown-name"),
    },
    "recurrence": wrong_calls("recurrence")
    | {"block of H": (loop(("tl.arange(0, BH)", "tl.arange(0, H)")), "arange")},
    "reset": wrong_calls("reset")
    | {
        "a mask for one": (looked_up("row * T + t, inside"), "one-address"),
        "reset in brackets": (selected("decayed = tl.where(reset[row, t], 0.0, decayed)"), "subscript"),
    },
}


EVIDENCE = {
    "original": r"by \d+% with a random dy, .* loads each number of dy 34 times for rows of 33",
    "recurrence": r"of up to 64 steps\. For 2,560 numbers of h it loads 5,120 and stores 2,560: 3 for each",
    "reset": r"in float16 its 64 bytes, loaded 64 times, stand beside 49,152 of a, b and h",
}


@INTERPRETED
@pytest.mark.parametrize("name", TASKS)
def test_the_evidence_has_numbers(judged, name):
    evidence = judged(name, solved(name))["evidence"]
    assert re.search(EVIDENCE[name], evidence), evidence
    if name == "original":
        random, correlated = re.findall(r"(\d+)%", evidence)
        assert int(random) < 10 and int(correlated) > 20, "else any dy would show the error"


PLACE = "at = first + t * H\n        "
MOVED = "a += H\n        b += H\n        h += H"
TURNED = "turned = (column + k) % H\n        at = row * H + turned"
ATOMIC = "tl.atomic_add(dw + column, gy * value / r, inside)"
OTHER_RIGHT_ANSWERS = {
    "by the step's number": (
        "recurrence",
        loop(BY_STEPS, (STEP, ""), ("inside, at", "inside, first"), ("state = tl.l", f"{PLACE}state = tl.l")),
    ),
    "addresses that move, other blocks": (
        "recurrence", loop((STEP, MOVED), ("BH=128", "BH=64"), ("(H, 128)", "(H, 64)"))
    ),
    "converted": ("recurrence", summed("state = tl.fma(A.to(tl.float32), state, B.to(tl.float32))")),
    "a branch": ("reset", selected("if FRESH:", "    decayed = tl.zeros([BH], tl.float32)")),
    "the new state chosen": (
        "reset", after(NEW, "state = tl.where(FRESH, tl.load(b + at, inside).to(tl.float32), state)")
    ),
    "both factors chosen": (
        "reset",
        selected("fresh = FRESH", "decayed = tl.where(fresh, 0.0, tl.load(a + at, inside))",
                 "decayed *= tl.where(fresh, 0.0, state)"),
    ),
    "a value for each channel": ("reset", looked_up("row * T + t + 0 * channel")),
    "round in its row, weight too": ("original", mended((AT, TURNED), ("weight + k", "weight + turned"))),
    "added by the kernel": (
        "original",
        mended((f"tl.store(dw + idx, {TERM})", ATOMIC), ("dw.sum(0)", "dw"),
               ("x.new_empty(N // H, H, dtype", "x.new_zeros(H, dtype")),
    ),
}  # fmt: skip


@INTERPRETED
def test_an_answer_with_both_errors_left_is_told_of_both_gradients(judged):
    told = judged("original", SCAFFOLDS["original"])["observed"].partition(" and dy = 2y: ")[2]
    assert re.fullmatch("dx is wrong in .+, and the weight's gradient is wrong in .+", told)


@INTERPRETED
def test_the_judges_print_no_warnings_above_the_verdict(judged, recwarn, capfd):
    judged("reset", WRONG_RESETS["multiplied"][0])
    judged("recurrence", WRONG_LOOPS["one more"][0])
    assert not [warning for warning in recwarn if "encountered" in str(warning.message)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "added"), [("recurrence", 3), ("reset", 1)])
def test_the_solution_only_adds_to_the_scaffold(name, added):
    given = [line for line in code_lines(SCAFFOLDS[name]) if line.strip() != "..."]
    lines = code_lines(solved(name))
    assert len(lines) == len(given) + added
    left = iter(lines)
    assert all(line in left for line in given)  # in this order


def test_the_solution_mends_three_lines_of_the_original():
    pairs = zip(code_lines(SCAFFOLDS["original"]), code_lines(solved("original")), strict=True)
    mended_lines = [given for given, right in pairs if given != right]
    assert [line.split()[0] for line in mended_lines] == ["at", "tl.store(dw", "return"]


def test_solutions_run_as_plain_python():
    module = exercises.of(ANSWERS.lesson)
    for name, task in TASKS.items():
        assert callable(module.answer(name)), task.answer


class TestExercises(RefusalTests):
    answers, others, least_passed = ANSWERS, OTHER_RIGHT_ANSWERS, 11
    wrong, errors, hints = WRONG_TABLES, ERROR_TABLES, HINTS
