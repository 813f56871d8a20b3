"""Lesson 1, exercise "mask": complete the mask of a kernel that doubles a tensor of any size."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from labkit import checks, codegen
from labkit.tasks import Evidence, Wrong, lanes, some, whereabouts
from labkit.tasks.slips import IN_KERNELS, Slip

CASES = ((10, 4, 3), (1, 4, 1), (8, 4, 2), (7, 16, 1), (100, 32, 4), (5, 4, 8))
"""Elements, BLOCK, programs. The last has more programs than blocks: all of those must stay quiet."""

HINTS = {
    "not-a-kernel": (
        "What does the check get? It needs the kernel itself.",
        "Keep the line @triton.jit, and hand in double_kernel without brackets or parentheses.",
    ),
    "unfinished": (
        "Replace the three dots: for each place in the block, is it inside the tensor?",
        "The tensor has count elements, so the last place is count - 1. Compare `at` with `count`.",
    ),
    "no-mask": (
        "The last block reaches beyond the tensor. Which of its places may be loaded and stored?",
        "A mask is a tensor of true and false, one for each place in `at`: make it with a comparison.",
        "A place is inside when its number in `at` is less than `count`.",
    ),
    "off-by-one": (
        "Python counts from 0. What is the number of the last element of a tensor of 10?",
        "It is 9. Place 10, equal to `count`, is already outside.",
    ),
    "one-short": (
        "Which element is never written? Look at the last one of each size.",
        "Places count from 0 to count - 1, and all of them are inside: compare with `count` itself.",
    ),
    "one-block": (
        "BLOCK is the size of one program's share. How do programs after the first come out?",
        "`at` counts through the whole tensor, so in the second program all of it is beyond BLOCK. "
        "Compare with the size of the tensor.",
    ),
    "whole-programs": (
        "A program number says nothing about single places: it is the same for all of a block.",
        "The last block is partly inside. You need an answer for each place, so start from `at`.",
    ),
    "literal": (
        "A number written into the kernel is right for one size. Which argument knows the size?",
        "Use `count`.",
    ),
    "always-false": (
        "Nothing was stored: for which place can your comparison be true?",
        "Try it with numbers: BLOCK 4, count 10; `at` is 0 to 3 in program 0. All four should be true.",
    ),
    "inverted": (
        "True means: this place is loaded and stored. Which side of the comparison are they on?",
        "Turn the comparison round.",
    ),
    "unmasked-store": (
        "The load has its mask. What else touches memory?",
        "tl.store takes mask=mask too.",
    ),
    "unmasked-load": (
        "The stores are right. What else touches memory?",
        "tl.load takes mask=mask too: a load beyond the end can end a real kernel with an error.",
    ),
    "other-places": (
        "List by hand which places of a tensor of 10 your mask lets through, with BLOCK 4.",
        "It should be 0 to 3, 4 to 7, and 8 and 9: every place below `count`, no other.",
    ),
    "not-compiled": (
        "Interpreted it's right, but the compiler for a GPU refuses it. Its message says why.",
        "0 <= at < count is Python's and not for blocks: one comparison of `at` is enough.",
    ),
    "wrong-values": (
        "The right places are stored, but not the right numbers. Only the mask was yours to write.",
        "Put the last line back: tl.store(y + at, 2 * tl.load(x + at, mask=mask), mask=mask).",
    ),
}

SLIPS = (
    Slip(
        "size-of-address",
        r"'tensor' has no len\(\)|\.(shape|numel|size|dim)\b",
        (
            "x and y are addresses here, which don't know how many elements there are. Which argument does?",
            "`count` is the number of elements.",
        ),
    ),
    Slip(
        "pointer-arithmetic",
        r"pointer<|cannot add pointers",
        (
            "x and y are addresses. The mask is about the numbers of places, which are in `at`.",
            "Compare `at` with the number of elements, `count`.",
        ),
    ),
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be \w+, not tensor",
        (
            "Functions of torch don't work in a kernel, and none of `tl` makes a mask: a comparison does.",
            "`at` with a < and a number gives true or false for each place.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "A function on this line wants other arguments. Do you need one?",
            "A comparison is enough: `at`, a sign, and the number of elements.",
        ),
    ),
    *IN_KERNELS,
)


@dataclass(frozen=True)
class Run:
    """What one launch did."""

    count: int
    block: int
    programs: int
    loaded: np.ndarray
    stored: np.ndarray
    problem: str

    @property
    def lanes(self) -> int:
        return self.block * self.programs

    def stores(self, upto: int) -> bool:
        """Whether exactly the places 0 to ``upto`` - 1 were stored, as far as there are lanes."""
        return np.array_equal(self.stored, np.arange(min(max(upto, 0), self.lanes)))


def check(kernel: Any) -> Evidence:
    """Launch the kernel at several sizes and look at every place it loads and stores; `Wrong` if wrong."""
    if type(kernel).__name__ != "InterpretedFunction":
        kind = type(kernel).__name__
        raise Wrong(
            "not-a-kernel", f"The check was given a {kind}, not a @triton.jit kernel.", HINTS["not-a-kernel"]
        )
    if lanes.unfinished(kernel):
        raise Wrong(
            "unfinished", "The three dots are still there, and something else changed.", HINTS["unfinished"]
        )
    runs = [_run(kernel, *case) for case in CASES]
    reason = _reason(runs)
    if reason:
        raise Wrong(reason, _observed(runs), HINTS[reason])
    _refuse_interpreted_only(kernel)
    return Evidence(
        f"{len(runs)} sizes, among them one element, full blocks and more programs than blocks: every "
        "element is read once and written once, nothing beyond the end is touched.",
        len(runs),
    )


def _refuse_interpreted_only(kernel: Any) -> None:
    try:
        codegen.compile(kernel, ["*fp32:16", "*fp32:16", 100], target="sm_90", BLOCK=32)
    except codegen.CompileError as error:
        message = next(filter(None, reversed(str(error).strip().splitlines())), "")
        observed = f"The compiler for sm_90 refuses the kernel: {message}"
        raise Wrong("not-compiled", observed, HINTS["not-compiled"]) from error


def _run(kernel: Any, count: int, block: int, programs: int) -> Run:
    fences = checks.Fences()
    x = fences.place(torch.arange(1.0, count + 1), "contiguous")
    y = fences.allocate(count, x)
    _, seen = lanes.watch(lambda: kernel[(programs,)](x, y, count, BLOCK=block))
    problem = checks.diagnose(y, 2 * torch.arange(1.0, count + 1), 1e-6)
    return Run(count, block, programs, seen.loaded(x), seen.stored(y), problem)


def _reason(runs: list[Run]) -> str:
    """The name of the mistake that explains what all launches did; empty when there is none."""
    if all(run.stores(run.count) for run in runs):
        return _reason_of_loads(runs)
    if not any(len(run.stored) for run in runs):
        return "always-false"
    if all(run.stores(run.lanes) for run in runs):
        loads_right = all(np.array_equal(run.loaded, np.arange(run.count)) for run in runs)
        return "unmasked-store" if loads_right else "no-mask"
    explanations = {
        "off-by-one": all(run.stores(run.count + 1) for run in runs),
        "one-short": all(run.stores(run.count - 1) for run in runs),
        "one-block": all(run.stores(run.block) for run in runs),
        "literal": any(all(run.stores(size) for run in runs) for size in range(1, 128)),
        "whole-programs": all(_whole_programs(run) for run in runs),
        "inverted": all(_complement(run) for run in runs),
    }
    return next((reason for reason, explains in explanations.items() if explains), "other-places")


def _reason_of_loads(runs: list[Run]) -> str:
    if any((run.loaded >= run.count).any() for run in runs):
        return "unmasked-load"
    if any(run.problem or not np.array_equal(run.loaded, np.arange(run.count)) for run in runs):
        return "wrong-values"
    return ""


def _whole_programs(run: Run) -> bool:
    """Whether each block was stored whole or not at all."""
    per_block = np.bincount(run.stored[run.stored >= 0] // run.block, minlength=run.programs)
    return set(per_block.tolist()) <= {0, run.block}


def _complement(run: Run) -> bool:
    beyond = np.arange(run.count, run.lanes)
    return any(np.array_equal(run.stored, beyond[skipped:]) for skipped in (0, 1))


def _observed(runs: list[Run]) -> str:
    """A sentence on the first launch that went wrong."""

    def sentence(run: Run) -> str:
        size = f"With {some(run.count, 'element')}, BLOCK {run.block} and {some(run.programs, 'program')}"
        if stray := int((run.stored >= run.count).sum()):
            return f"{size}, {some(stray, 'place')} beyond the end of y got a value."
        if missing := run.count - len(np.unique(run.stored)):
            return f"{size}, {missing} of the {some(run.count, 'element')} of y got no value."
        if stray := int((run.loaded >= run.count).sum()):
            return f"{size}, {some(stray, 'place')} beyond the end of x got loaded."
        return f"{size}, y is wrong in {whereabouts(run.problem)}" if run.problem else ""

    return next(filter(None, map(sentence, runs)), "x is loaded more often than once for each element.")
