"""What exercises with a kernel share: properties of what it launches, touches and rounds; some mistakes."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.exercises import common_hints
from labkit.exercises.engine import ALTERNATING, Call, Mistake, Property, difference
from labkit.measure.correctness import DTYPES, dtype_name
from labkit.measure.launch_counts import elements

ROUNDED_TWICE = 0.02
"""Share of 16-bit results that may differ from the exact ones rounded once. With float32 arithmetic it is
far below a percent, with one intermediate result in float16 about a seventh."""
READ_AGAIN = 1.2
"""So often an element may be loaded on average: tiles that reach beyond the end may load the last one."""
FEW_TURNS = 1024
"""A loop of so many turns may be one that works a fixed part off, such as a block of steps or rows."""
FEWEST = 5
"""So many results may differ whatever their share is: of few results a share says little."""


def _outside(call: Call) -> str:
    if not call.stored_outside:
        return ""
    away = f"{call.stored_outside} element{'s' * (call.stored_outside != 1)}"
    return f"something was stored outside of its tensor, up to {away} away."


def _loads_outside(call: Call) -> str:
    count = call.loaded_outside
    return f"{count} places outside of the tensors were loaded." if count else ""


def _kernel(call: Call) -> str:
    if any(isinstance(each, Tensor) and not each.numel() for each in call.passed.values()):
        return ""  # nothing is launched for it on a GPU either
    operations = ", ".join(call.launches.names) or "nothing"
    return "" if call.launches.kernels else f"no Triton kernel was launched, but {operations}."


def _not_yours(call: Call) -> str:
    for kernel, _ in call.launches.kernels:
        function = getattr(kernel, "fn", kernel)
        if str(getattr(function, "__module__", "")).startswith("labkit.kernels"):
            return f"{function.__name__} is labkit's kernel."
    return ""


def _one_launch(call: Call) -> str:
    names = call.launches.names
    if not names:  # then nothing is stored, either
        return ""
    return _kernel(call) or (f"{len(names)} launches: {', '.join(names)}." if len(names) > 1 else "")


def large_reads(call: Call) -> list[str]:
    """PyTorch's operations that read as many bytes as the largest input has, in float32."""
    if call.dtype is not torch.float32 or call.layout != "contiguous":
        return []
    largest = max(each.nbytes for each in call.passed.values() if isinstance(each, Tensor))
    own = {kernel.__name__ for kernel, _ in call.launches.kernels}
    reads = zip(call.launches.names, call.launches.read, strict=True)
    return [name for name, size in reads if name not in own and size >= largest]


def _atomics(call: Call) -> str:
    said = "a kernel adds to memory atomically, so the order of the sum is another one in each run."
    return said if call.launches.atomics else ""


def _stored_parts(call: Call) -> list[tuple[int, Tensor, Tensor]]:
    """Of each contiguous result to which a kernel stores: how many elements it has, and those stored.

    The stored ones come with what they should be. A result to which none stores counts only where PyTorch
    does nothing that could have made it.
    """
    by_pytorch = len(call.launches.names) > len(call.launches.kernels)
    found = []
    for got, want in call.result_tensors():
        places = call.launches.stored(got) if got.is_contiguous() else np.zeros(0, np.int64)
        stored = torch.from_numpy(np.unique(places))
        if len(stored) or (got.is_contiguous() and not by_pytorch):
            found.append((got.numel(), got.flatten()[stored].double(), want.flatten()[stored].double()))
    return found


def _nothing_stored(call: Call) -> str:
    empty = any(size and not len(stored) for size, stored, _ in _stored_parts(call))
    return "nothing was stored to the result." if empty else ""


def _unwritten(call: Call) -> str:
    for size, stored, _ in _stored_parts(call):
        if 0 < len(stored) < size:
            return f"{size - len(stored)} of {size} elements were never stored."
    return ""


def _stored_over(call: Call) -> str:
    """Of a result some places of which were stored to again, and others never."""
    for got, _ in call.result_tensors():
        stored = call.launches.stored(got) if got.is_contiguous() else np.zeros(0)
        places = len(np.unique(stored))
        if places < min(len(stored), got.numel()):
            missing, again = got.numel() - places, len(stored) - places
            return f"{missing} of {got.numel()} elements were never stored, and {again} were stored again."
    return ""


def _unfilled(call: Call) -> str:
    if not call.launches.unfilled or call.stored_outside or call.loaded_outside:
        return ""
    for got, right in call.result_tensors():
        lost = got.isnan() & ~right.isnan()
        others = torch.isclose(got.double(), right.double(), 0.05, 0.05, equal_nan=True)[~lost]
        if lost.any() and others.all():
            count = int(lost.sum())
            said = "" if lost.all() else ", and the others are right"
            return f"{count} element{'s' * (count != 1)} came out as NaN{said}."
    return ""


def _reads_stored(call: Call) -> str:
    """Lanes and programs of a launch run in no order: what one has stored another one may not see."""
    made = call.launches
    ends = [*made.began, (len(made.loads), len(made.stores))]
    for (load, store), (next_load, next_store) in pairwise(ends):
        loads, stores = made.loads[load:next_load], made.stores[store:next_store]
        if loads and stores and (again := len(np.intersect1d(np.concatenate(loads), np.concatenate(stores)))):
            return f"{again} elements are stored and loaded again, or loaded where they are stored."
    return ""


def _stored_once(call: Call) -> str:
    for got, _ in call.result_tensors():
        stored = call.launches.stored(got) if got.is_contiguous() else np.zeros(0)
        if again := len(stored) - len(np.unique(stored)):
            return f"{again} stores went to elements of the result that already had their value."
    return ""


def _read_once(call: Call) -> str:
    """Of inputs as large as the result: those that are broadcast are read again and again.

    Lanes that a load clamps to the last element are one access; such an access more for each tile is allowed.
    """
    size = call.result_tensors()[0][0].shape
    accesses = [*map(np.unique, call.launches.loads)]
    for name, tensor in call.passed.items():
        if isinstance(tensor, Tensor) and tensor.shape == size and tensor.is_contiguous():
            loads = len(elements(accesses, tensor)) / max(1, tensor.numel())
            if loads > READ_AGAIN:
                return f"each element of {name} was loaded {loads:.3g} times."
    return ""


def _fixed_loop(call: Call) -> str:
    """A loop never needs more turns than the largest tensor has elements."""
    elements_of_largest = max(each.numel() for each in call.passed.values() if isinstance(each, Tensor))
    if call.launches.most_turns <= max(FEW_TURNS, elements_of_largest):
        return ""
    return (
        f"a loop takes {call.launches.most_turns:,} turns, where the largest tensor has "
        f"{elements_of_largest} elements."
    )


def _full_float32(call: Call) -> str:
    return "a product of float32 blocks was taken in TF32." if call.launches.tf32 else ""


def _half_products(call: Call) -> str:
    if call.dtype not in (torch.float16, torch.bfloat16) or not call.launches.float32_products:
        return ""
    return f"blocks were multiplied in float32, though the tensors are {dtype_name(call.dtype)}."


def _rounded_once(call: Call) -> str:
    if call.launches.half_sums:
        return "a product was summed up in float16."
    if call.dtype not in (torch.float16, torch.bfloat16):
        return ""
    for got, want in call.result_tensors():
        rounded = want.to(got.dtype)
        counted = want.abs() > 0.01 * want[want.isfinite()].square().mean().sqrt()  # no subnormals, no NaN
        differing = int(((got != rounded) & counted).sum())
        if differing > max(FEWEST, ROUNDED_TWICE * got.numel()):
            return f"{differing / got.numel():.0%} of the results are not the exact ones rounded once."
    return ""


NOTHING_OUTSIDE = Property("stores-outside", _outside, *common_hints.STORES_OUTSIDE, before_values=True)
LOADS_INSIDE = Property("loads-outside", _loads_outside, *common_hints.LOADS_OUTSIDE)
KERNEL = Property("no-kernel", _kernel, *common_hints.NO_KERNEL, before_values=True)
OWN = Property("not-yours", _not_yours, *common_hints.NOT_YOURS, before_values=True)
ONE_LAUNCH = Property(
    "launches", _one_launch, *common_hints.LAUNCHES, before_values=True, contiguous_only=True
)
ATOMICS = Property(
    "atomics",
    _atomics,
    "In which order do the programs add, and is the sum's last digit the same each time?",
    "Store each part to a place of its own, such as a row of `parts`. PyTorch adds them up in one order.",
    before_values=True,
)
NOTHING_STORED = Property("nothing-stored", _nothing_stored, *common_hints.NOTHING_STORED, before_values=True)
STORED_OVER = Property("stored-over", _stored_over, *common_hints.STORED_OVER, before_values=True)
UNWRITTEN = Property("unwritten", _unwritten, *common_hints.UNWRITTEN, before_values=True)
NO_OTHER = Property("no-other", _unfilled, *common_hints.NO_OTHER, before_values=True)
READS_STORED = Property("reads-stored", _reads_stored, *common_hints.READS_STORED)
STORED_ONCE = Property("stored-twice", _stored_once, *common_hints.STORED_TWICE)
READ_ONCE = Property("read-again", _read_once, *common_hints.READ_AGAIN, contiguous_only=True)
FULL_FLOAT32 = Property("tf32", _full_float32, *common_hints.TF32, before_values=True)
FIXED_LOOP = Property("fixed-loop", _fixed_loop, *common_hints.FIXED_LOOP)
HALF_PRODUCTS = Property("wide-products", _half_products, *common_hints.WIDE_PRODUCTS)
ROUNDED_ONCE = Property("rounded-twice", _rounded_once, *common_hints.ROUNDED_TWICE, before_values=True)
KERNEL_CASES: dict[str, Any] = {
    "dtypes": DTYPES,
    "layouts": ("contiguous", "transposed", ALTERNATING, "strided"),  # the last one is called again
}
"""How the kernel of most exercises is tried."""
ALL_STORED = (STORED_OVER, UNWRITTEN, NOTHING_STORED, NO_OTHER)
"""Of a kernel that stores all elements of its results."""
POINTWISE = (
    ONE_LAUNCH,
    FULL_FLOAT32,
    OWN,
    NOTHING_OUTSIDE,
    *ALL_STORED,
    LOADS_INSIDE,
    STORED_ONCE,
    READS_STORED,
    FIXED_LOOP,
    ROUNDED_ONCE,
)
"""Of a kernel that stores each element of one result once."""
PRODUCT = (*POINTWISE, HALF_PRODUCTS)
"""Of a kernel with tl.dot."""


def late_load(call: Call, ahead: int) -> str:
    """Which step of a or b (1, T, H) was loaded after the step so many before it was stored, or ""."""
    width = call.got.shape[-1]

    def steps_in(addresses: np.ndarray, tensor: Tensor) -> np.ndarray:
        places = (addresses.astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
        return places[(places >= 0) & (places < tensor.numel())] // width

    made, latest = call.launches, [-1]  # step that was stored so far, by the number of stores
    for store in made.stores:
        latest.append(max(latest[-1], *steps_in(store, call.got), -1))
    for addresses, before in zip(made.loads, made.stores_before, strict=True):
        for name in ("a", "b"):
            found, done = steps_in(addresses, call.passed[name]), latest[before]
            if done >= 0 and len(found) and found.min() < done + 1 + ahead:
                return f"step {found.min()} of {name} was loaded when step {done} had been stored already."
    return ""


def elements_at(tensor: Tensor, places: Tensor, beyond: float = math.nan) -> Tensor:
    """What loads bring from these places in memory of a contiguous tensor; ``beyond`` where they are not."""
    flat = tensor.flatten()
    return flat[places.clamp(max=len(flat) - 1)].where(places < len(flat), beyond)


def wrong_only_where(special: Callable[[Call], bool]) -> Callable[[Sequence[Call]], bool]:
    """Whether an answer is wrong in some of the special calls, and right in all others."""

    def when(calls: Sequence[Call]) -> bool:
        wrong = [call for call in calls if difference(call.got, call.want, 0.05)]
        return bool(wrong) and all(map(special, wrong))

    return when


def wrong_exactly_where(special: Callable[[Call], bool]) -> Callable[[Sequence[Call]], bool]:
    """Whether an answer is wrong in all of the special calls, and right in all others."""

    def when(calls: Sequence[Call]) -> bool:
        wrong = [bool(difference(call.got, call.want, 0.05)) for call in calls]
        return any(wrong) and wrong == [special(call) for call in calls]

    return when


def gives_where(
    special: Callable[[Call], bool], gives: Callable[..., Any]
) -> Callable[[Sequence[Call]], bool]:
    """Whether an answer is wrong, and returns what ``gives`` returns in all of the special calls."""

    def when(calls: Sequence[Call]) -> bool:
        def other(call: Call) -> Any:
            given = call.originals.values()
            return gives(*(each.double() if each.is_floating_point() else each for each in given))

        alike = not any(difference(call.got, other(call), 0.05) for call in calls if special(call))
        return alike and any(difference(call.got, call.want, 0.05) for call in calls if special(call))

    return when


def never_stored(calls: Sequence[Call]) -> bool:
    """Whether some elements of a contiguous result were never stored."""
    return any(
        len(np.unique(call.launches.stored(call.got))) < call.got.numel()
        for call in calls
        if call.got.is_contiguous()
    )


def lost_exactly_where(special: Callable[[Call], bool]) -> Callable[[Sequence[Call]], bool]:
    """Whether an answer is wrong in all of the special calls and in no other, and stored too little."""
    wrong = wrong_exactly_where(special)
    return lambda calls: never_stored(calls) and wrong(calls)


def stored_again(calls: Sequence[Call]) -> bool:
    """Whether some elements of a contiguous result were stored more than once."""
    stored = [call.launches.stored(call.got) for call in calls if call.got.is_contiguous()]
    return any(len(places) > len(np.unique(places)) for places in stored)


def last_steps_missing(calls: Sequence[Call]) -> bool:
    """Whether the last steps of some result (B, T, H) were never stored, and all others are right."""
    if not never_stored(calls):
        return False
    ended = False
    for call in calls:
        got, want = call.got, call.want
        lost = got.isnan().all(2).all(0) & ~want.isnan().all(2).all(0)  # (T,)
        first = int(lost.int().argmax()) if bool(lost.any()) else got.shape[1]
        if not bool(lost[first:].all()) or difference(got[:, :first], want[:, :first], 0.05):
            return False
        ended = ended or first < got.shape[1]
    return ended


def nan_where_large(of: Callable[[Call], Tensor], least: float = 4.0) -> Callable[[Sequence[Call]], bool]:
    """Whether an answer is NaN only where ``of(call)``, of the result's shape, is large, and else right."""

    def when(calls: Sequence[Call]) -> bool:
        lost = [(call.got.isnan() & ~call.want.isnan(), call) for call in calls]
        small = any(bool((of(call).abs()[nan] < least).any()) for nan, call in lost)
        others = any(difference(call.got[~nan], call.want[~nan], 0.05) for nan, call in lost)
        return any(bool(nan.any()) for nan, _ in lost) and not small and not others

    return when


def vectors_at(reference: Callable[..., Any], column: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    """What comes out when vectors, with an element for each column, are loaded at another place.

    ``column(at, width)`` is the place for element ``at`` of the matrices; beyond a vector's end lies NaN.
    """

    def gives(*given: Tensor) -> Any:
        shape = next(tensor.shape for tensor in given if tensor.dim() == 2)
        at = column(torch.arange(shape.numel()), shape[1]).view(shape)
        return reference(*(elements_at(each, at) if each.dim() == 1 else each for each in given))

    return gives


def column_mistakes(reference: Callable[..., Any]) -> dict[str, Mistake]:
    """What may happen to the column of vectors that are added to rows, or multiply them."""
    return {
        "element-for-column": Mistake(
            *common_hints.ELEMENT_FOR_COLUMN, gives=vectors_at(reference, lambda at, width: at)
        ),
        "row-for-column": Mistake(
            *common_hints.ROW_FOR_COLUMN, gives=vectors_at(reference, lambda at, width: at // width)
        ),
    }


def place_for_column(reference: Callable[..., Any]) -> Mistake:
    """The column is made of the place in the program's block, and not of the place in the matrix."""

    def column(size: int) -> Callable[[Tensor, int], Tensor]:
        return lambda at, width: at % size % width

    def place(size: int) -> Callable[[Tensor, int], Tensor]:
        return lambda at, width: at % size

    blocks = (128, 256, 512, 1024, 2048)
    columns = [make(size) for make in (column, place) for size in blocks]
    gives = tuple(vectors_at(reference, each) for each in columns)
    return Mistake(*common_hints.PLACE_FOR_COLUMN, gives=gives)
