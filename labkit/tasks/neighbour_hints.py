"""The hints of lesson 4's exercise "neighbour": of wrong answers by reason, and of errors."""

from labkit.tasks import grouped_hints

HINTS = grouped_hints.HINTS | {
    "no-mask": (
        "Try it with D = 16 and D = 20: how many columns has the tile, and whose are the last of them?",
        "Where d is D or more, x and y have the next group's columns. Nothing stops the tile at its own.",
        "Three accesses, three masks: x and y need a condition on d beside the one on rows, and weight needs "
        "one for each of its two dimensions.",
    ),
    "only-store": (
        "The right places are stored, but what went into the sums? How many products has each of them?",
        "BD products, and only D belong there: the others are the next group's columns of x by the next "
        "group's rows of weight.",
        "The loads need conditions on d as well: one for x, one for each dimension of weight.",
    ),
    "only-loads": (
        "The sums are right now. How many columns of them does each program store, and whose are they?",
        "The tile's last columns are zeros now, and they are stored over the next group's results.",
        "The store needs the same mask as the load of x.",
    ),
    "only-one": (
        "One of the three accesses keeps to its group. Which of the others reads beyond, which one writes?",
        "The load of x, the load of weight and the store: each stays inside its group by its own mask.",
    ),
    "x-unmasked": (
        "weight is zero beyond D, x isn't: there lies the next group. What is 0 times NaN?",
        "NaN. A number that is multiplied by zero still has to be a number.",
        "The load of x needs the condition on d too, the same as the store.",
    ),
    "weight-unmasked": (
        "x is zero beyond D. But what lies in weight after this group's rows, and what is 0 times infinity?",
        "The next group's matrix, and after the last group anything. 0 times infinity is NaN.",
        "The load of weight needs a mask, with a condition for its rows and one for its columns.",
    ),
    "weight-one-axis": (
        "The tile of weight has BD rows and BD columns. In which dimension is it still too large?",
        "d[:, None] runs along the rows and d[None, :] along the columns: each is compared with D.",
        "Join the two comparisons by &, each in parentheses.",
    ),
    "rows-of-weight": (
        "R counts the rows of x. How many rows has a group's weight?",
        "D rows and D columns: its mask has nothing to do with R.",
    ),
    "rows-unmasked": (
        "R is no multiple of the tile's height. What kept the rows beyond R out in the scaffold?",
        "The condition on rows has to stay: a place counts when its row and its column are inside.",
    ),
    "whole-row": (
        "Your condition holds up to the end of a whole row, or of all weights. Where does one group end?",
        "Only the last group ends there. Every group ends after D columns (in weight, after D rows too).",
        "d counts from the group's first column: compare d alone with D.",
    ),
    "first-group": (
        "Group 0 is right. From where does d count, and from where does group * D + d?",
        "group * D + d counts from the start of the row: beyond group 0 it's never below D. d alone is.",
    ),
    "tile-width": (
        "d is tl.arange(0, BD). For which of its places is d < BD false?",
        "For none: BD is how wide the tile is. How wide is the group?",
    ),
    "no-other": (
        "A masked load doesn't touch memory there. Which number does it give instead?",
        "None in particular, unless you say: the interpreter happens to give 0, a GPU whatever was in the "
        "register. tl.dot multiplies and sums all of it.",
        "Give each load whose block goes into tl.dot an `other` of 0.0, x as well as weight.",
    ),
    "off-by-one": (
        "Python counts from 0. Which d is the last one of a group of D columns?",
        "It is D - 1. Place D is the neighbour's first: compare with <, not with <=.",
    ),
    "one-short": (
        "Which column is missing? Try it with D = 1.",
        "A group's places are 0 to D - 1, and all of them count: compare with D itself.",
    ),
    "inverted": (
        "True means: this place is loaded, or stored. Which side of the comparison are they on?",
        "Turn the comparison round: the places below D are the group's own.",
    ),
    "wrong-axis": (
        "Rows of the tile are compared with R. What runs along its columns, and in which dimension?",
        "d does, as d[None, :], along the second one: that has to be compared with D, and row with R only.",
    ),
    "wrong-bound": (
        "R counts rows and G groups. Which argument knows how many columns a group has?",
        "D does. R belongs to row, and G only to the length of a whole row.",
    ),
    "literal": (
        "A number written into the kernel is right for one width. Which argument knows the width?",
        "D does: compare d with it.",
    ),
    "unmasked-store": (
        "List the columns that a program of group 0 stores to. Which of them are its own?",
        "A group's columns begin at group * D, and there are D of them. The address y + at was right.",
    ),
    "reads-outside": (
        "The numbers are right. But when are the values outside dropped: before or after they are loaded?",
        "On a GPU a load outside its tensor may end the program with an illegal memory access, even if what "
        "it brought is thrown away.",
        "The condition belongs into the load's mask, its second argument.",
    ),
    "several-launches": (
        "Copying, padding or converting a tensor is a launch too, and a pass over memory. What needs it?",
        "A mask does it without a copy: beyond the group loads give zeros, and nothing is stored.",
    ),
    "unfinished": (
        "Three dots stand where a value should. Which line is it?",
        "Everything in this kernel was complete as it was given: only the masks are missing something.",
    ),
    "wrong-values": (
        "Only the masks of the two loads and the store were wrong. What else is different now?",
        "Put the rest back, and let all three masks keep to the D columns of the group.",
    ),
}

SLIPS = grouped_hints.SLIPS
