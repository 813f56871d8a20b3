"""The hints of lesson 2's exercise "ragged": of wrong answers by reason, and of errors."""

from labkit.tasks import tiles_hints
from labkit.tasks.slips import Slip

HINTS = tiles_hints.HINTS | {
    "no-mask": (
        "Try it with K = 32, 64, 33: which come out right? What does the last tile of the others load?",
        "Where k is K or more, the load takes numbers of the next row. Nothing stops it along K.",
        "Both loads need one more condition in their masks: k[None, :] < K, joined by &.",
    ),
    "only-x": (
        "Where the result isn't NaN it's right. What is 0 times a finite number, and what is 0 * NaN?",
        "x is zero beyond K, the weight isn't: there lies its next row, and after the last row anything.",
        "The load of weight needs the same condition on k.",
    ),
    "only-weight": (
        "Where the result isn't NaN it's right. Which of the two factors is zero beyond K, and is 0 * NaN 0?",
        "The weight is zero beyond K, x isn't: there lies its next row, and after the last row anything.",
        "The load of x needs the same condition on k.",
    ),
    "no-other": (
        "A masked load doesn't touch memory there. Which number does it give instead?",
        "None in particular, unless you say: the interpreter happens to give 0, a GPU whatever was in the "
        "register. tl.dot multiplies and sums all of it.",
        "Give both loads other=0.0, as in the scaffold.",
    ),
    "off-by-one": (
        "Python counts from 0. Which k is the last one of a row of K elements?",
        "It is K - 1. Place K is the next row's first: compare with <, not with <=.",
    ),
    "one-short": (
        "Which product is missing from every sum? Try it with K = 1.",
        "A row's places are 0 to K - 1, and all of them count: compare with K itself.",
    ),
    "start-twice": (
        "The first tile is right. What are k and the bound in the second?",
        "k already has `start` in it. Either k < K, or tl.arange(0, BK) < K - start, not a mixture.",
    ),
    "place-in-tile": (
        "tl.arange(0, BK) is the same in every tile. Which name holds the place in the whole row?",
        "k = start + tl.arange(0, BK): compare k with K.",
    ),
    "whole-tiles": (
        "What happens to the last tile if K isn't a multiple of BK?",
        "Its part below K belongs into the sum. Let the loop run to K, and mask place by place.",
        "The condition has to look at each k by itself: k[None, :] < K.",
    ),
    "wrong-bound": (
        "M, N and K: which of them is the length of a row of x, and of a row of weight?",
        "Both rows have K elements; M and N count rows. k is compared with K.",
    ),
    "first-tile": (
        "BK is the depth of one tile. Which tiles are left if k has to be less than that?",
        "k counts through the whole row: compare with its length, K.",
    ),
    "inverted": (
        "True means: this place is loaded. Which side of the comparison are they on?",
        "Turn the comparison round: k[None, :] < K.",
    ),
    "wrong-axis": (
        "k[:, None] is a column: which dimension of the tile does it run along?",
        "The addresses have k along the second dimension, k[None, :]. The mask has to match them.",
    ),
    "not-a-condition": (
        "A mask needs true or false for each place. What does the second half of yours give?",
        "A comparison makes true and false: k[None, :] < K. & only joins two of them.",
    ),
    "literal": (
        "A number written into the kernel is right for one size. Which argument knows the length of a row?",
        "K does: k[None, :] < K.",
    ),
    "rows-unmasked": (
        "Here K is a multiple of the tile's depth. So which places outside are these, and what kept them "
        "from being loaded in the scaffold?",
        "The condition on rows has to stay: a place is loaded when its row and its k are inside.",
        "(row[:, None] < M) & (k[None, :] < K), and the same with col and N.",
    ),
    "reads-outside": (
        "The numbers are right. But when are the values outside dropped: before or after they are loaded?",
        "On a GPU a load outside its tensor may end the program with an illegal memory access, even if what "
        "it brought is thrown away.",
        "The condition belongs into the load's mask, its second argument.",
    ),
    "several-launches": (
        "Copying, padding or converting a tensor is a launch too, and a pass over memory. What needs it?",
        "A mask does it without a copy: in the last tile each load gives zeros beyond K.",
    ),
    "unfinished": (
        "Three dots stand where a value should. Which line is it?",
        "Everything in this kernel was complete as it was given: only the masks of two loads are wrong.",
    ),
    "wrong-values": (
        "Only the masks of the two loads were wrong. What else is different now?",
        "Put the rest back, and give both masks the same condition on k.",
    ),
}

SLIPS = (
    Slip(
        "other-without-mask",
        "`other` cannot be provided without `mask`",
        (
            "`other` is what masked places hold. Where is this load's mask?",
            "tl.load(address, mask, other=0.0), with the mask second.",
        ),
    ),
    Slip(
        "mask-of-numbers",
        "Mask must have boolean",
        (
            "A mask is a block of true and false. Which mask is a number here?",
            "A comparison makes it; two are joined by &, each in parentheses: "
            "(row[:, None] < M) & (k[None, :] < K).",
        ),
    ),
    *tiles_hints.SLIPS,
)
