"""Lesson 9's exercises: every plausible wrong answer is refused for its own reason, the solutions pass."""

import re

import pytest
import torch
from judging import (
    INTERPRETED,
    Answers,
    RefusalTests,
    assert_refused,
    cases,
    code_lines,
)

from labkit import exercises, network_works
from labkit.tasks import (
    ledger_cell_hints,
    ledger_floor,
    ledger_floor_hints,
    ledger_wall,
    ledger_wall_hints,
)

pytestmark = pytest.mark.usefixtures("cache")
ANSWERS = Answers("09_microsecond_ledger")
TASKS = ANSWERS.tasks
SCAFFOLDS = {name: ANSWERS.scaffold(name) for name in TASKS}
"""The cells as the lesson gives them."""
solved, changed = ANSWERS.solved, ANSWERS.changed


def lines(indent, texts):
    return "".join(f"{'    ' * indent}{text}\n" for text in texts)


# --- the floor

MOVED = "(rows * in_and_out + weights) * itemsize"
DONE = "2 * rows * sum(multiplications)"
LARGER = "return max(moved / bytes_per_us, done / flops_per_us)"


def model(*pairs):
    return changed("floor", *pairs)


def moved(expression):
    return model((MOVED, expression))


def done(expression):
    return model((DONE, expression))


def returned(expression):
    return model((LARGER, f"return {expression}"))


def each_layer(numbers, over="sum"):
    """The floors of the layers, each with so many numbers; m is its multiplications."""
    of_one = f"max({numbers} * itemsize / bytes_per_us, 2 * rows * m / flops_per_us)"
    return returned(f"{over}({of_one} for m in multiplications)")


WRONG_FLOORS = {
    "untouched": (SCAFFOLDS["floor"], "unfinished"),
    "no return": (model((LARGER, "max(moved / bytes_per_us, done / flops_per_us)")), "unfinished"),
    "both": (returned("moved / bytes_per_us, done / flops_per_us"), "several-numbers"),
    "not a number": (returned("float('nan')"), "not-a-number"),
    "yes or no": (returned("moved > done"), "not-a-number"),
    "a tensor": (returned("torch.tensor(1.0)"), "not-a-number"),
    "constant": (returned("12.5"), "constant"),
    "sum": (returned("moved / bytes_per_us + done / flops_per_us"), "sum-of-floors"),
    "min": (model(("max(", "min(")), "smaller-floor"),
    "memory": (returned("moved / bytes_per_us"), "bytes-only"),
    "arithmetic": (returned("done / flops_per_us"), "arithmetic-only"),
    "no factor 2": (done("rows * sum(multiplications)"), "multiply-adds"),
    "the largest layer": (done("2 * rows * max(multiplications)"), "one-layer"),
    "the first layer": (done("2 * rows * multiplications[0]"), "one-layer"),
    "the last layer": (done("2 * rows * multiplications[-1]"), "one-layer"),
    "the mean layer": (done("2 * rows * sum(multiplications) / len(multiplications)"), "one-layer"),
    "the slowest layer": (each_layer("(rows * in_and_out + weights)", "max"), "one-layer"),
    "cut, all bytes each time": (each_layer("(rows * in_and_out + weights)"), "cut-by-layer"),
    "cut, a part of the bytes": (
        each_layer("(rows * in_and_out + weights) / len(multiplications)"), "cut-by-layer"
    ),
    "cut, rows and own weights": (each_layer("(rows * in_and_out + m)"), "cut-by-layer"),
    "cut, own weights": (each_layer("m"), "cut-by-layer"),
    "weights for each row": (moved("rows * (in_and_out + weights) * itemsize"), "per-row"),
    "no weights": (moved("rows * in_and_out * itemsize"), "no-weights"),
    "weights alone": (moved("weights * itemsize"), "weights-only"),
    "multiplications for weights": (
        moved("(rows * in_and_out + sum(multiplications)) * itemsize"), "own-weights"
    ),
    "in and out doubled": (moved("(2 * rows * in_and_out + weights) * itemsize"), "twice"),
    "bytes of one row": (moved("(in_and_out + weights) * itemsize"), "one-row"),
    "operations of one row": (done("2 * sum(multiplications)"), "one-row"),
    "one row": (model(("rows * in_and", "in_and"), ("2 * rows *", "2 *")), "one-row"),
    "numbers": (moved("rows * in_and_out + weights"), "no-itemsize"),
    "numbers of the rows": (moved("rows * in_and_out + weights * itemsize"), "no-itemsize"),
    "numbers of the weights": (moved("rows * in_and_out * itemsize + weights"), "no-itemsize"),
    "times both rates": (model(("/ bytes_per", "* bytes_per"), ("/ flops_per", "* flops_per")), "times-rate"),
    "times one rate": (model(("/ bytes_per", "* bytes_per")), "times-rate"),
    "times the other rate": (model(("/ flops_per", "* flops_per")), "times-rate"),
    "upside down": (returned("max(bytes_per_us / moved, flops_per_us / done)"), "times-rate"),
    "rates swapped": (returned("max(moved / flops_per_us, done / bytes_per_us)"), "swapped-rates"),
    "from seconds": (returned("1e6 * max(moved / bytes_per_us, done / flops_per_us)"), "other-unit"),
    "to seconds": (returned("1e-6 * max(moved / bytes_per_us, done / flops_per_us)"), "other-unit"),
    "whole numbers": (model(("moved / ", "moved // "), ("done / ", "done // ")), "whole-numbers"),
    "half as many bytes again": (moved("1.5 * (rows * in_and_out + weights) * itemsize"), "bytes"),
    "three operations": (done("3 * rows * sum(multiplications)"), "arithmetic"),
    "half of everything": (returned("max(moved / bytes_per_us, done / flops_per_us) / 2"), "wrong-values"),
}  # fmt: skip
FLOOR_ERRORS = {
    "the list": (done("2 * rows * multiplications"), "a-list"),
    "the list times a number": (done("2.0 * multiplications"), "a-list"),
    "max of one": (returned("max(moved / bytes_per_us + done / flops_per_us)"), "max-of-one"),
    "six arguments": (model(("bytes_per_us, flops_per_us):", "bytes_per_us):")), "arguments"),
    "torch.max": (returned("torch.max(moved / bytes_per_us, done / flops_per_us)"), "a-tensor"),
    "misspelt": (returned("max(moved / bytes_per_us, doen / flops_per_us)"), "unknown-name"),
    "too late": (done("2 * rows * done"), "unset"),
    "anything": (returned("moved / 0"), "other-error"),
}
OTHER_FLOORS = {
    "in a loop": '''
def floor_us(rows, multiplications, in_and_out, weights, itemsize, bytes_per_us, flops_per_us):
    operations = 0
    for layer in multiplications:
        operations += rows * layer + rows * layer
    arithmetic = operations / flops_per_us
    memory = itemsize * rows * in_and_out / bytes_per_us + itemsize * weights / bytes_per_us
    return arithmetic if arithmetic > memory else memory


tasks.check("floor", floor_us)
''',
    "numpy": "import numpy as np\n" + model(("max(moved", "np.maximum(moved")),
    "sums of layers": returned(
        "max(moved / bytes_per_us, sum(2 * rows * m / flops_per_us for m in multiplications))"
    ),
}  # fmt: skip

# --- the cell

NEW_S = "s = (1 - gate) * s + gate * value"
NEW_U = "u = (1 - gate) * r + s  # of this step's s, which never goes to memory"
NEW_R = "r = w * u / tl.sqrt(tl.sum(u * u) / H + eps)"
STORE = "tl.store(result + at, r, inside)"
EMPTY, KEPT = "torch.empty_like(z)", "kept.setdefault((z.shape, z.dtype), torch.empty_like(z))"
LOAD_Z, LOAD_C = (f"tl.load({name} + at, inside, other=0.0)" for name in ("z", "candidate"))
LOAD_W = "tl.load(gain + n, inside, other=0.0)"
CONTIGUOUS = "    z, candidate, gain = z.contiguous(), candidate.contiguous(), gain.contiguous()\n"
ONCE_MORE = "both_kernel[(B,)](z, candidate, gain, result"
IN_TORCH = """
def both(z, candidate, gain):
    s = r = torch.zeros_like(z[:, 0])
    result = torch.empty_like(z)
    for t in range(z.shape[1]):
        s = (1 - z[:, t]) * s + z[:, t] * candidate[:, t]
        u = (1 - z[:, t]) * r + s
        r = result[:, t] = gain * u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return result


tasks.check("cell", both)
"""


def cell(*pairs):
    return changed("cell", *pairs)


def new_s(expression):
    return cell((NEW_S, f"s = {expression}"))


def new_u(expression):
    return cell((NEW_U, f"u = {expression}"))


def new_r(*texts):
    """The solution with other lines in place of the one that sets r."""
    return cell((NEW_R, "\n        ".join(texts)))


def stored(expression, *pairs):
    return cell((STORE, f"tl.store(result + at, {expression}, inside)"), *pairs)


ROOT = "tl.sqrt(tl.sum(u * u) / H + eps)"
WRONG_CELLS = {
    "untouched": (SCAFFOLDS["cell"], "unfinished"),
    "dots left": (cell((NEW_R, f"{NEW_R}\n        ...")), "unfinished"),
    "PyTorch": (IN_TORCH, "no-kernel"),
    "zeroed": (cell((EMPTY, "torch.zeros_like(z)")), "several-launches"),
    "1 - z by PyTorch": (
        cell(("(1 - gate) * ", "gate * "), ("gate * value", "(1 - gate) * value"),
             (ONCE_MORE, "both_kernel[(B,)](1 - z, candidate, gain, result")), "several-launches"
    ),
    "into z": (cell((EMPTY, "z")), "writes-input"),
    "one result for all calls": ("kept = {}\n" + cell((EMPTY, KEPT)), "reused-output"),
    "nothing returned": (cell(("    return result", "")), "not-a-tensor"),
    "two returned": (cell(("    return result", "    return result, z")), "not-a-tensor"),
    "double": (cell((EMPTY, "torch.empty_like(z, dtype=torch.float64)")), "shape-or-dtype"),
    "float32 out": (cell((EMPTY, "torch.empty_like(z, dtype=torch.float32)")), "shape-or-dtype"),
    "strides ignored": (cell((CONTIGUOUS, "")), "strides"),
    "store unmasked": (cell((STORE, "tl.store(result + at, r)")), "unmasked-store"),
    "all lanes": (cell(("n < H", "n < BH")), "unmasked-store"),
    "stored twice": (stored("s", (NEW_U, f"{NEW_U}\n        {STORE}")), "stored-twice"),
    "always at step 0": (cell(("(row * T + t) * H", "row * T * H")), "stored-twice"),
    "but the last": (cell(("range(T)", "range(T - 1)")), "not-all-written"),
    "one row": (cell(("[(B,)]", "[(1,)]")), "not-all-written"),
    "after the loop": (cell((f"        {STORE}", f"    {STORE}")), "only-last"),
    "not compiled": (cell((NEW_S, f"{NEW_S}\n        len(type(s).__mro__)")), "not-compiled"),
    "nothing computed": (cell((NEW_S, ""), (NEW_U, ""), (NEW_R, "")), "zeros"),
    "another name": (cell((NEW_R, f"new_{NEW_R}")), "zeros"),
    "stored before": (cell((STORE, ""), (NEW_S, f"{STORE}\n        {NEW_S}")), "stored-early"),
    "z and 1 - z in s": (new_s("gate * s + (1 - gate) * value"), "swapped-s"),
    "z and 1 - z in both": (
        cell((NEW_S, "s = gate * s + (1 - gate) * value"), (NEW_U, "u = gate * r + s")), "swapped-s"
    ),
    "z r": (new_u("gate * r + s"), "swapped-u"),
    "the candidate as it is": (new_s("(1 - gate) * s + value"), "ungated-candidate"),
    "all of the old s": (new_s("s + gate * value"), "undecayed-s"),
    "no old s": (new_s("gate * value"), "no-s"),
    "all of the old r": (new_u("r + s"), "undecayed-r"),
    "no old r": (new_u("s"), "no-r"),
    "r begun anew": (cell((NEW_U, f"r = tl.zeros([BH], tl.float32)\n        {NEW_U}")), "no-r"),
    "r under another name": (
        cell((NEW_R, f"new_{NEW_R}"), (STORE, STORE.replace("r,", "new_r,"))), "no-r"
    ),
    "z s": (new_u("(1 - gate) * r + gate * s"), "gated-s"),
    "around the sum": (new_u("(1 - gate) * (r + s)"), "around-sum"),
    "the candidate in u": (new_u("(1 - gate) * r + value"), "candidate-for-s"),
    "the share of the candidate in u": (new_u("(1 - gate) * r + gate * value"), "no-s"),
    "the old s": (cell((NEW_S, ""), (NEW_U, f"{NEW_U}\n        {NEW_S}")), "old-s"),
    "norm of s": (new_r("r = w * u / tl.sqrt(tl.sum(s * s) / H + eps)"), "other-norm"),
    "norm of r": (new_r("r = w * u / tl.sqrt(tl.sum(r * r) / H + eps)"), "other-norm"),
    "s by u's norm": (new_r(f"r = w * s / {ROOT}"), "s-over-norm"),
    "mean over BH": (new_r("r = w * u / tl.sqrt(tl.sum(u * u) / BH + eps)"), "over-block"),
    "sum": (new_r("r = w * u / tl.sqrt(tl.sum(u * u) + eps)"), "sum-for-mean"),
    "no root": (new_r("r = w * u / (tl.sum(u * u) / H + eps)"), "no-root"),
    "times the root": (new_r(f"r = w * u * {ROOT}"), "times-root"),
    "by rsqrt": (new_r("r = w * u / tl.rsqrt(tl.sum(u * u) / H + eps)"), "times-root"),
    "no square": (new_r("r = w * u / tl.sqrt(tl.sum(u) / H + eps)"), "no-square"),
    "no square, no root": (new_r("r = w * u / (tl.sum(u) / H + eps)"), "no-square"),
    "gain alone": (new_r("r = w * u"), "no-norm"),
    "not normalised": (new_r("r = u"), "no-norm"),
    "no eps": (new_r("r = w * u / tl.sqrt(tl.sum(u * u) / H)"), "no-eps"),
    "eps outside the root": (new_r("r = w * u / (tl.sqrt(tl.sum(u * u) / H) + eps)"), "eps-elsewhere"),
    "eps in the sum": (new_r("r = w * u / tl.sqrt((tl.sum(u * u) + eps) / H)"), "eps-elsewhere"),
    "no gain": (new_r(f"r = u / {ROOT}"), "no-gain"),
    "gain only stored": (stored("w * r", (NEW_R, f"r = u / {ROOT}")), "gain-once"),
    "gain only carried": (stored(f"u / {ROOT}"), "gain-once"),
    "u stored": (stored("u"), "stores-u"),
    "s stored": (stored("s"), "stores-s"),
    "u carried": (
        stored("normed", (NEW_R, f"normed = w * u / {ROOT}\n        r = u")), "carries-u"
    ),
    "other=1": (
        cell((LOAD_Z, LOAD_Z.replace("0.0", "1.0")), (LOAD_C, LOAD_C.replace("0.0", "1.0"))), "masked-lanes"
    ),
    "unmasked z and candidate": (
        cell((LOAD_Z, "tl.load(z + at)"), (LOAD_C, "tl.load(candidate + at)")), "masked-lanes"
    ),
    "unmasked gain": (cell((LOAD_W, "tl.load(gain + n)")), "masked-lanes"),
    "no other for z": (cell((LOAD_Z, "tl.load(z + at, inside)")), "no-other"),
    "no other for the candidate": (cell((LOAD_C, "tl.load(candidate + at, inside)")), "no-other"),
    "no other for the gain": (cell((LOAD_W, "tl.load(gain + n, inside)")), "no-other"),
    "unmasked loads, the sum masked": (
        cell((LOAD_C, "tl.load(candidate + at)"), ("tl.sum(u * u)", "tl.sum(tl.where(inside, u * u, 0.0))")),
        "unmasked-load",
    ),
    "a rounded r": (new_r(NEW_R, "r = r.to(tl.bfloat16).to(tl.float32)"), "half-precision"),
    "a gate in 16 bits": (cell((f"{LOAD_Z}.to(tl.float32)", LOAD_Z)), "half-precision"),
    "an s of 16 bits": (new_s(f"({NEW_S[4:]}).to(z.dtype.element_ty).to(tl.float32)"), "half-precision"),
    "minus": (new_u("(1 - gate) * r - s"), "wrong-values"),
    "a norm for each feature": (new_r("r = w * u / tl.sqrt(u * u + eps)"), "wrong-values"),
}  # fmt: skip
CELL_ERRORS = {
    "a power": (new_r("r = w * u / tl.sqrt(tl.sum(u**2) / H + eps)"), "power"),
    "a power for a root": (new_r("r = w * u / (tl.sum(u * u) / H + eps) ** 0.5"), "power"),
    "as in the formula": (new_r("r = w * u / tl.sqrt(tl.sum(u^2) / H + eps)"), "power"),
    "z": (new_s("(1 - z) * s + z * candidate"), "addresses"),
    "candidate": (new_s("(1 - gate) * s + gate * candidate"), "addresses"),
    "gain": (new_r(f"r = gain * u / {ROOT}"), "addresses"),
    "Python's sum": (new_r("r = w * u / tl.sqrt(sum(u * u) / H + eps)"), "python-sum"),
    "tl.mean": (new_r("r = w * u / tl.sqrt(tl.mean(u * u) + eps)"), "unknown-function"),
    "u.mean": (new_r("r = w * u / tl.sqrt((u * u).mean() + eps)"), "unknown-function"),
    "torch.sqrt": (new_r("r = w * u / torch.sqrt(tl.sum(u * u) / H + eps)"), "unknown-function"),
    "math.sqrt": (
        "import math\n" + new_r("r = w * u / math.sqrt(tl.sum(u * u) / H + eps)"), "unknown-function"
    ),
    "numpy": ("import numpy as np\n" + new_r("r = w * u / np.sqrt(tl.sum(u * u))"), "unknown-function"),
    "along columns": (new_r("r = w * u / tl.sqrt(tl.sum(u * u, 1) / H + eps)"), "axis"),
    "a step's index": (new_s("(1 - gate) * s[t - 1] + gate * value"), "subscript"),
    "an address's index": (new_s("(1 - z[at]) * s + gate * value"), "subscript"),
    "block of H": (cell(("tl.arange(0, BH)", "tl.arange(0, H)")), "arange"),
    "one address": (cell((LOAD_Z, LOAD_Z.replace("at", "row"))), "one-address"),
    "number for a mask": (cell((STORE, STORE.replace("inside", "H"))), "mask-of-numbers"),
    "no grid": (cell(("both_kernel[(B,)]", "both_kernel")), "no-grid"),
    "eps left out": (cell(("T, 1e-6, H=H", "T, H=H")), "arguments"),
    "mean": (new_r("r = w * u / tl.sqrt(mean(u * u) + eps)"), "unknown-name"),
    "u before it's set": (cell((NEW_U, ""), (NEW_R, f"{NEW_R}\n        {NEW_U}")), "unset"),
    "anything": (new_s("1 / 0"), "other-error"),
}  # fmt: skip
OTHER_CELLS = {
    "towards the candidate": new_s("s + gate * (value - s)"),
    "by rsqrt": new_r("r = u * tl.rsqrt(eps + tl.sum(u * u, 0) / H) * w"),
    "decay by name": cell((NEW_S, f"keep = 1.0 - gate\n        {NEW_S}"), ("(1 - gate)", "keep")),
    "converted by the products": cell(*((f"{load}.to(tl.float32)", load) for load in (LOAD_C, LOAD_W))),
    "masked in the sum": cell(
        *((load, load.replace(", other=0.0", "")) for load in (LOAD_Z, LOAD_C, LOAD_W)),
        (NEW_R, NEW_R.replace("u * u", "tl.where(inside, u * u, 0.0)")),
    ),
    "the unit first": new_r("mean = tl.sum(u * u, keep_dims=True) / H", "r = u / tl.sqrt(mean + eps) * w"),
    "moving addresses": cell(
        ("    for t in range(T):", "    at = row * T * H + n\n    for _ in range(T):"),
        ("        at = (row * T + t) * H + n\n", ""),
        (STORE, f"{STORE}\n        at += H"),
    ),
    "a wider block": cell(("triton.next_power_of_2(H)", "max(16, triton.next_power_of_2(H))")),
}

# --- the wall

LOOP = "for launch, kernel in zip(launches, kernels, strict=True):"
READY = "ready += launch  # the host goes on whatever the GPU does"
ENDS = "done = max(done, ready) + kernel"


def wall(*pairs):
    return changed("wall", *pairs)


def ends(expression):
    return wall((ENDS, f"done = {expression}"))


def sums(expression):
    return wall(("return done", f"return {expression}"))


HOST, DEVICE = "sum(launches) + kernels[-1]", "launches[0] + sum(kernels)"
BOTH_SUMS = "max(sum(launches), sum(kernels))"
PAIRS = "sum(max(launch, kernel) for launch, kernel in zip(launches, kernels))"
OVERLAP = "sum(max(launch, kernel) for launch, kernel in zip(launches[1:], kernels))"
POPPED = "ready = done = 0.0\n    while launches:\n        ready += launches.pop(0)\n        "
WRONG_WALLS = {
    "untouched": (SCAFFOLDS["wall"], "unfinished"),
    "no return": (wall(("return done", "")), "unfinished"),
    "both times": (sums("ready, done"), "several-numbers"),
    "the larger list": (sums("max(launches, kernels)"), "several-numbers"),
    "not a number": (sums("float('inf')"), "not-a-number"),
    "yes or no": (sums("done > ready"), "not-a-number"),
    "constant": (sums("10"), "constant"),
    "taken out": (
        sums("done").replace("ready = done = 0.0", f"{POPPED}done = max(done, ready) + kernels.pop(0)\n"
                             "    return done"), "changes-lists"
    ),
    "both sums": (sums("sum(launches) + sum(kernels)"), "in-turn"),
    "all at once, as a list": (sums("sum(launches + kernels)"), "in-turn"),
    "the host waits": (wall((READY, "ready = max(ready, done) + launch")), "in-turn"),
    "launched after the last kernel": (wall((READY, "ready = done + launch")), "in-turn"),
    "all launched before": (
        wall((READY, ""), ("ready = done = 0.0", "done = ready = sum(launches)")), "in-turn"
    ),
    "the host's end": (sums("ready"), "launches-alone"),
    "the later of both": (ends("max(done, ready)"), "launches-alone"),
    "kernels": (sums("sum(kernels)"), "kernels-alone"),
    "no launch": (ends("done + kernel"), "kernels-alone"),
    "the larger sum": (sums(BOTH_SUMS), "larger-sum"),
    "the larger sum and the last kernel": (sums(f"{BOTH_SUMS} + kernels[-1]"), "larger-sum-and-end"),
    "the first launch and the larger sum": (sums(f"launches[0] + {BOTH_SUMS}"), "larger-sum-and-end"),
    "host-bound": (sums(HOST), "host-bound"),
    "device-bound": (sums(DEVICE), "device-bound"),
    "either": (sums(f"max({HOST}, {DEVICE})"), "two-bounds"),
    "in pairs": (sums(PAIRS), "pairs"),
    "in pairs, and the last kernel": (sums(f"{PAIRS} + kernels[-1]"), "pairs"),
    "in pairs, behind the first launch": (sums(f"launches[0] + {PAIRS}"), "pairs"),
    "one ahead": (sums(f"launches[0] + {OVERLAP} + kernels[-1]"), "one-ahead"),
    "before it's launched": (
        wall((READY, ""), (ENDS, f"{ENDS}\n        ready += launch")), "before-launched"
    ),
    "not added up": (wall((READY, "ready = launch")), "not-added-up"),
    "in the max": (ends("max(done + kernel, ready)"), "kernel-in-max"),
    "at once": (ends("max(done, ready + kernel)"), "at-once"),
    "without the one before": (ends("ready + kernel"), "host-bound"),
    "returned at once": (wall(("    return done", "        return done")), "only-first"),
    "begun anew": (
        wall(("    ready = done = 0.0\n", ""), (LOOP, f"{LOOP}\n        ready = done = 0.0")), "anew"
    ),
    "the waiting": (sums("done - sum(kernels)"), "waiting"),
    "from the first kernel": (sums("done - sum(launches[:1])"), "from-first"),
    "swapped": (wall(("zip(launches, kernels", "zip(kernels, launches")), "swapped"),
    "no last kernel": (
        wall(("return done", "return done + 0 * kernels[-1]")), "empty"
    ),
    "nothing for none": (sums("done if launches else None"), "empty"),
    "5 for none": (sums("done if launches else 5"), "empty"),
    "a list for none": (sums("done if launches else []"), "several-numbers"),
    "half": (sums("done / 2"), "wrong-values"),
}  # fmt: skip
WALL_ERRORS = {
    "no zip": (wall((LOOP, "for launch, kernel in launches, kernels:")), "unpacking"),
    "pairs of one list": (wall((LOOP, "for launch, kernel in launches:")), "unpacking"),
    "lists added to a time": (wall((READY, "ready += launches")), "a-list"),
    "compared with a list": (ends("max(done, launches) + kernel"), "a-list"),
    "sum of one": (wall((READY, "ready += sum(launch)")), "a-number"),
    "index of one": (wall((READY, "ready += launch[0]")), "a-number"),
    "the next launch": (sums("launches[1]"), "index"),
    "one argument": (wall(("(launches, kernels):", "(launches):", )), "arguments"),
    "misspelt": (ends("max(done, raedy) + kernel"), "unknown-name"),
    "not begun": (wall(("ready = done = 0.0", "done = 0.0")), "unset"),
    "anything": (sums("done / 0"), "other-error"),
}  # fmt: skip
OTHER_WALLS = {
    "from the end": sums(
        "max((sum(launches[: i + 1]) + sum(kernels[i:]) for i in range(len(kernels))), default=0.0)"
    ),
    "by a branch": wall((ENDS, "done = (ready if ready > done else done) + kernel")),
    "by places": wall(
        (LOOP, "for i in range(len(launches)):"),
        (READY, "ready += launches[i]"),
        ("+ kernel", "+ kernels[i]"),
    ),
    "by waits": wall((ENDS, "done += max(0, ready - done) + kernel")),
    "accumulated": "from itertools import accumulate\n"
    + wall((LOOP, "for ready, kernel in zip(accumulate(launches), kernels):"), (READY, "")),
}  # fmt: skip

WRONG_TABLES = {"floor": WRONG_FLOORS, "cell": WRONG_CELLS, "wall": WRONG_WALLS}
ERROR_TABLES = {"floor": FLOOR_ERRORS, "cell": CELL_ERRORS, "wall": WALL_ERRORS}
HINTS = {
    "floor": ledger_floor_hints.HINTS,
    "cell": ledger_cell_hints.HINTS,
    "wall": ledger_wall_hints.HINTS,
}
OTHER_RIGHT_ANSWERS = {
    f"{name}: {what}": (name, source)
    for name, table in (("floor", OTHER_FLOORS), ("cell", OTHER_CELLS), ("wall", OTHER_WALLS))
    for what, source in table.items()
}


@INTERPRETED
@pytest.mark.parametrize(("name", "source", "reason"), cases(WRONG_TABLES))
def test_a_wrong_answer_is_refused_for_its_reason(judged, name, source, reason):
    finding = judged(name, source)
    assert_refused(finding, reason, HINTS[name])
    assert not re.search(r"\by\b", finding["observed"])


@INTERPRETED
def test_the_judges_print_nothing_above_the_verdict(judged, recwarn, capfd):
    for name in TASKS:
        judged(name, solved(name))
    for what in ("no square", "no eps", "times the root"):
        judged("cell", WRONG_CELLS[what][0])
    assert not [warning for warning in recwarn if "encountered" in str(warning.message)]
    assert capfd.readouterr() == ("", "")


# --- what a verdict says

EVIDENCE = {
    "floor": r"64 cases on 4 devices\. .* can't do 1,024 rows in less than 0\.31 microseconds",
    "cell": r"of the result it loads 5,120 and stores 2,560, 3 for each; .* would take 6,.* spills 0 bytes",
    "wall": r"12 short kernels are over after [\d.]+ .*: the host decides\. 5 long kernels are over after",
}


@INTERPRETED
@pytest.mark.parametrize("name", TASKS)
def test_the_evidence_has_numbers(judged, name):
    evidence = judged(name, solved(name))["evidence"]
    assert re.search(EVIDENCE[name], evidence), evidence


@pytest.mark.parametrize(
    ("name", "what", "observed"),
    [
        ("wall", "both sums", "For launches [5, 4.5, 6, 5.5, 5, 4.5, 6, 5.5, 5, 4.5, 6, 5.5] and kernels "),
        ("wall", "kernels", "For launches [5] and kernels [3], the function says 3 microseconds; it should"),
        ("floor", "memory", "On an H200, with 1024 rows, 5 layers and 2 bytes a number, your function says"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_told_with_its_case(judged, name, what, observed):
    assert judged(name, WRONG_TABLES[name][what][0])["observed"].startswith(observed)


def test_the_cases_of_a_wall_tell_all_mistakes_apart():
    all_cases = [ledger_wall._Case(*case) for case in ledger_wall.CASES]
    apart(ledger_wall._mistakes(), all_cases, [case.right for case in all_cases])


def test_the_cases_of_a_floor_tell_all_mistakes_apart():
    all_cases = list(ledger_floor._cases(lambda *_: 1.0))
    apart(ledger_floor._mistakes(), all_cases, [ledger_floor.RIGHT.least(case) for case in all_cases])


def apart(mistakes, all_cases, right):
    told = {}
    for reason, other in mistakes:
        said = tuple(f"{other(case):.5e}" for case in all_cases)
        assert said != tuple(f"{number:.5e}" for number in right), reason
        assert told.setdefault(said, reason) == reason


def test_the_networks_of_a_floor_are_ruled_by_either():
    leads = [case.lead for case in ledger_floor._cases(lambda *_: 1.0)]
    assert sum(lead > 2 for lead in leads) >= 10 and sum(lead < 0.5 for lead in leads) >= 10


def test_the_network_of_the_evidence_is_the_lessons():
    shape, told = {"batch": 16, "time": 64, "width": 128}, ledger_floor.TOLD
    moved_bytes = (told.rows * told.in_and_out + told.weights) * 4
    assert moved_bytes == network_works.NETWORK.min_bytes(shape, 4, "forward")
    flops = network_works.NETWORK.flops(shape, "forward")
    assert 2 * told.rows * sum(told.multiplications) == flops


# --- the lesson


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_only_adds_to_the_scaffold(name):
    given = [line for line in code_lines(SCAFFOLDS[name]) if line.strip() != "..."]
    left = iter(code_lines(solved(name)))
    assert all(line in left for line in given)  # in this order


@INTERPRETED
def test_solutions_run_as_plain_python():
    module = exercises.of(ANSWERS.lesson)
    for name, task in TASKS.items():
        assert callable(module.answer(name)), task.answer
    z = torch.rand(2, 3, 8)
    gates = torch.stack([z.logit(), torch.randn(2, 3, 8)], -2).flatten(-2)
    want = network_works.cell(gates, torch.ones(8), 1)
    logit, candidate = network_works.split(gates, 1)
    torch.testing.assert_close(module.answer("cell")(logit.sigmoid(), candidate, torch.ones(8)), want)


class TestExercises(RefusalTests):
    answers, others, least_passed = ANSWERS, OTHER_RIGHT_ANSWERS, 8
    wrong, errors, hints = WRONG_TABLES, ERROR_TABLES, HINTS
