"""Which masks explain the places that a grouped kernel touched: lesson 4, exercise "neighbour"."""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.tasks.grouped import Grouped
from labkit.tasks.tiles import misread


@dataclass(frozen=True)
class _Places:
    """The places along a side of all programs' tiles, and what a mask may compare them with."""

    row: Tensor
    """Of x; what is masked by it in a tile of weight has its rows there."""
    group: Tensor
    d: Tensor
    height: int
    """BM, the rows of a tile of x."""
    R: int
    G: int
    D: int


Condition = Callable[[_Places], Tensor]


def _below(number: int) -> Condition:
    return lambda at: at.d < number


_INSIDE: Condition = lambda at: at.d < at.D  # noqa: E731  # a table of conditions reads best in one form
_ALL: Condition = lambda at: at.d >= 0  # noqa: E731
_ROWS: Condition = lambda at: at.row < at.R  # noqa: E731
_CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "off-by-one": (lambda at: at.d <= at.D,),
    "one-short": (lambda at: at.d < at.D - 1,),
    "whole-row": (lambda at: at.group * at.D + at.d < at.G * at.D, lambda at: at.d < at.G * at.D),
    "first-group": (lambda at: at.group * at.D + at.d < at.D,),
    "inverted": (lambda at: at.d >= at.D, lambda at: at.d > at.D),
    "wrong-axis": (lambda at: at.row < at.D, lambda at: at.row % at.height < at.D),
    "wrong-bound": (lambda at: at.d < at.R, lambda at: at.d < at.G),
    "literal": tuple(map(_below, range(1, 128))),
}
"""What a learner's condition on columns may be in place of the right one, by reason."""


def mistake(calls: list[Grouped], otherwise: str) -> str:
    """The reason for which masks like these are wrong; ``otherwise`` where no mask is known to be."""
    kernel = calls[0].kernel[0]
    misreading = misread(kernel)
    if misreading in ("python-and", "chained"):  # what the mask is then is not what it says
        return misreading
    masks = {name: mask(calls, name) for name in ("y", "x", "weight")}
    known = [reason for reason in masks.values() if reason not in ("right", "none", "unknown")]
    if known:
        return known[0]
    bare = frozenset(name for name, reason in masks.items() if reason == "none")
    if bare and _compares_with(kernel, "BD"):
        return "tile-width"
    return misreading or _BARE.get(bare, otherwise)


_BARE = {
    frozenset(("x", "weight", "y")): "no-mask",
    frozenset(("x", "weight")): "only-store",
    frozenset(("y",)): "only-loads",
    frozenset(("x",)): "x-unmasked",
    frozenset(("weight",)): "weight-unmasked",
    frozenset(("x", "y")): "only-one",
    frozenset(("weight", "y")): "only-one",
}
"""By the accesses that have no condition on columns."""


def mask(calls: list[Grouped], name: str) -> str:
    """What the mask of the loads of x or weight, or of the stores to y, is in all calls.

    "right", "none" (no condition on columns), "unknown", or what is wrong with it.
    """
    seen = [_touched(call, name) for call in calls]
    for reason, expected in _tiles_of_weight() if name == "weight" else _tiles_of_rows():
        if all(np.array_equal(places, expected(call)) for call, places in zip(calls, seen, strict=True)):
            return reason
    return "unknown"


def _touched(call: Grouped, name: str) -> np.ndarray:
    return call.seen.stored(call.got) if name == "y" else call.seen.loaded(call.inputs[name])


Expected = Callable[[Grouped], np.ndarray]


def _tiles_of_rows() -> Iterator[tuple[str, Expected]]:
    """What a mask of x or y may be, and the places that it lets through."""
    yield "right", _rows(_ROWS, _INSIDE)
    yield "none", _rows(_ROWS, _ALL)
    yield "rows-unmasked", _rows(_INSIDE, _INSIDE)
    yield "rows-unmasked", _rows(_ALL, _ALL)
    for reason, conditions in _CONDITIONS.items():
        for condition in conditions:
            yield reason, _rows(_ROWS, condition)
            yield reason, _rows(condition, condition)


def _tiles_of_weight() -> Iterator[tuple[str, Expected]]:
    """What a mask of weight may be, and the places that it lets through."""
    yield "right", _square(_INSIDE, _INSIDE)
    yield "none", _square(_ALL, _ALL)
    yield "weight-one-axis", _square(_INSIDE, _ALL)
    yield "weight-one-axis", _square(_ALL, _INSIDE)
    yield "rows-of-weight", _square(_ROWS, _INSIDE)
    yield "rows-of-weight", _square(_ROWS, _ALL)
    for reason, conditions in _CONDITIONS.items():
        for condition in conditions if reason != "wrong-axis" else ():  # a tile of weight has rows of d too
            yield from ((reason, _square(*pair)) for pair in ((condition, condition), (condition, _INSIDE)))
            yield reason, _square(_INSIDE, condition)
    yield "whole-row", _square(_ALL, _ALL, whole=True)


def _rows(first: Condition, second: Condition) -> Expected:
    def expected(call: Grouped) -> np.ndarray:
        group = torch.arange(call.groups)[:, None, None]
        row = torch.arange(_tiles(call) * call.given("BM"))[:, None]
        at = _places(call, row, group, torch.arange(call.given("BD")))
        return _sorted(row * at.G * at.D + group * at.D + at.d, first(at) & second(at))

    return expected


def _square(first: Condition, second: Condition, whole: bool = False) -> Expected:
    """With ``whole`` the places beyond the end of the whole tensor are masked."""

    def expected(call: Grouped) -> np.ndarray:
        group = torch.arange(call.groups)[:, None, None, None]
        tile = torch.arange(_tiles(call))[:, None, None]
        side = torch.arange(call.given("BD"))
        row = tile * call.given("BM") + side[:, None]
        down, across = (_places(call, row, group, d) for d in (side[:, None], side))
        element = ((group * down.D + down.d) * down.D + across.d).expand(-1, _tiles(call), -1, -1)
        end = call.values["weight"].numel() if whole else math.inf
        return _sorted(element, first(down) & second(across) & (element < end))

    return expected


def _places(call: Grouped, row: Tensor, group: Tensor, d: Tensor) -> _Places:
    return _Places(row, group, d, call.given("BM"), call.rows, call.groups, call.width)


def _tiles(call: Grouped) -> int:
    """Tiles of rows."""
    return -(-call.rows // call.given("BM"))


def _sorted(elements: Tensor, let_through: Tensor) -> np.ndarray:
    elements, let_through = torch.broadcast_tensors(elements, let_through)
    return elements[let_through].sort().values.numpy()


def _compares_with(kernel: Any, name: str) -> bool:
    """Whether a comparison in the kernel has this name on either side."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    sides = (side for node in ast.walk(tree) if isinstance(node, ast.Compare) for side in ast.walk(node))
    return any(isinstance(side, ast.Name) and side.id == name for side in sides)
