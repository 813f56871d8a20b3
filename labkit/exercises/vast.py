"""A kernel at sizes that this machine's memory does not hold: its programs at the corners of the grid alone.

A kernel that is right at small sizes can still compute an address in 32 bits, launch more programs on an axis
than a GPU has, or make room for as many parts as the small sizes need. At a size of more than 2**31 elements
each of these shows in the addresses that the first and the last programs use. Nothing but addresses is looked
at, and how many there are. So tensors are address space: memory that the system hands out when it is touched,
and few places are.

The kernels that are launched are compiled afterwards: at such sizes their blocks are as large as any.
"""

import math
import mmap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit import interpreter
from labkit.exercises import common_hints, symptoms
from labkit.exercises.engine import Call, Exercise, Finding
from labkit.measure.launch_counts import Recorded

LARGE_BYTES = 2**24
"""From so many bytes on a tensor is address space; PyTorch computes with smaller ones."""
PROGRAMS = (2**31 - 1, 65535, 65535)
"""At most so many programs on each axis of a grid (CUDA C++ Programming Guide, technical specifications)."""
BITS_32 = 2**31 - 1
"""The largest number that 32 bits hold."""
GUARD_BYTES = 2**34
"""Around each tensor lies nothing: an address that is off by 2**32 elements of 4 bytes is in no other."""
LIMIT_S = 1.0
"""Corners that still run after so long tell nothing; programs that share out all the work do that."""
NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux's mmap, which Python names since 3.13."""


def run(exercise: Exercise, answer: Any, file: Path) -> tuple[Finding | None, list[Call]]:
    """Run the corners of an exercise's vast cases, in its last dtype; the first case in the first one, too.

    Returns what they do that a GPU could not do, or that no tensor has, and the calls with their launches.
    Where a system hands out no such address space (``ulimit -v``, strict overcommit) nothing is run.
    """
    calls = []
    first, last = exercise.dtypes[0], exercise.dtypes[-1]
    tried = [(case, last) for case in exercise.vast] + [(case, first) for case in exercise.vast[:1]]
    for case, dtype in tried:
        space = _AddressSpace()
        with torch.device("meta"):
            inputs = exercise.inputs(*case)
        cast = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        call = Call(case, dtype, "contiguous", cast, cast, None)
        watch = _Corners(space, call)
        try:
            given = tree_map_only(Tensor, space.tensor, cast)
            with torch.no_grad(), interpreter.watching(watch), interpreter.corner_programs(), space:
                call.got = exercise.call(answer, *given.values())
            watch.end(given, call.got)
        except _NoAddressSpaceError:
            return None, []
        except Exception as error:
            if watch.finding:
                return watch.finding, []
            if not watch.took_too_long:
                return symptoms.of_exception(exercise, error, file, {}, str(call)), []
        calls.append(call)
    return None, calls


class _NoAddressSpaceError(Exception):
    """The system refuses memory that nobody touches."""


class _AddressSpace(TorchDispatchMode):
    """Makes large tensors of address space, and knows where all tensors lie that are made inside.

    An operation of PyTorch on a large tensor computes nothing: its result has the right form, and zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[int, int]] = []
        """First address of each tensor's memory, and the one behind its end."""
        self._tensors: list[Tensor] = []  # nobody else gets memory in which an address would be theirs

    def tensor(self, form: Tensor) -> Tensor:
        """A tensor of zeros with the form of one on the device meta."""
        count = 1 + sum((n - 1) * step for n, step in zip(form.shape, form.stride(), strict=True))
        count = count if form.numel() else 0
        size = 2 * GUARD_BYTES + count * form.itemsize
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | NO_RESERVE)
        except OSError as error:
            raise _NoAddressSpaceError from error
        flat = torch.empty(0, dtype=form.dtype)
        if count:
            flat = torch.frombuffer(memory, dtype=form.dtype, count=count, offset=GUARD_BYTES)
        return self._known(flat.as_strided(form.shape, form.stride()), count)

    def _known(self, made: Tensor, count: int = 0) -> Tensor:
        end = count * made.itemsize if count else made.untyped_storage().nbytes()
        self.spans.append((made.data_ptr(), made.data_ptr() + end))
        self._tensors.append(made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        large = any(each.numel() * each.itemsize >= LARGE_BYTES for each in tensors)
        aliases = [value.alias_info for value in func._schema.returns]
        if any(aliases):
            in_place = any(each is not None and each.is_write for each in aliases)
            return args[0] if large and in_place else func(*args, **kwargs)
        if not large and (tensors or "device" not in kwargs):
            made = func(*args, **kwargs)
            return tree_map_only(Tensor, self._known, made)
        on_meta = {**kwargs, "device": torch.device("meta")} if kwargs.get("device") else kwargs
        forms = func(*tree_map_only(Tensor, _form, args), **tree_map_only(Tensor, _form, on_meta))
        return tree_map_only(Tensor, self.tensor, forms)


def _form(tensor: Tensor) -> Tensor:
    """The same tensor on the device meta, where nothing has memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _FoundError(Exception):
    """Ends a launch whose problem is known, or that takes too long."""


class _Corners(Recorded):
    """Ends the call at the first program that a GPU has not, or at the first address that no tensor has."""

    def __init__(self, space: _AddressSpace, call: Call) -> None:
        super().__init__()
        call.launches = self
        self.finding: Finding | None = None
        self.took_too_long = False
        self._space, self._call, self._until = space, call, time.monotonic() + LIMIT_S
        self._sizes: tuple[int, ...] = ()
        self._loaded: list[tuple[int, int]] = []
        """Of each load: its first address, and its elements times the programs of the grid."""
        self._stored: list[tuple[int, int]] = []

    def _end(self, observed: str, mistake: str, hints: tuple[str, ...]) -> None:
        self.finding = Finding("wrong", f"{self._call}: {observed}", mistake, hints=hints)
        raise _FoundError(observed)

    def end(self, given: Any, got: Any) -> None:
        """Say what the kernels cannot have loaded, or stored, as a whole.

        Each program is counted as if it did what all that ran did together: they have ragged edges.
        """
        for tensors, touched, does in ((given, self._loaded, "load"), (got, self._stored, "store")):
            for tensor in tree_leaves(tensors):
                if not isinstance(tensor, Tensor) or not tensor.is_contiguous():
                    continue
                first, behind = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                most = sum(count for at, count in touched if first <= at < behind)
                # A first step may need a part of its inputs only, and there are two steps.
                needed = tensor.numel() // 2 if does == "load" else tensor.numel()
                if 0 < most < needed:
                    which = "A result" if does == "store" else "An input"
                    said = f"all programs together {does} {most:,} elements at most. {which} has "
                    self._end(f"{said}{tensor.numel():,}.", "left-out-at-size", common_hints.LEFT_OUT_AT_SIZE)

    def grid(self, *sizes: int) -> None:
        self._sizes = sizes
        for axis, (size, most) in enumerate(zip(sizes, PROGRAMS, strict=True)):
            if size > most:
                said = f"the launch has {size:,} programs on axis {axis}, and a GPU takes {most:,} at most."
                self._end(said, "programs-on-axis", common_hints.PROGRAMS_ON_AXIS)

    def load(self, addresses: np.ndarray, size: int, unfilled: bool) -> None:
        self._see(addresses, size, "loads from")
        self._loaded += self._counted(addresses)

    def store(self, addresses: np.ndarray, size: int) -> None:
        self._see(addresses, size, "stores to")
        self._stored += self._counted(addresses)

    def _counted(self, addresses: np.ndarray) -> list[tuple[int, int]]:
        return [(int(addresses[0]), len(addresses) * math.prod(self._sizes))] if len(addresses) else []

    def atomic(self, addresses: np.ndarray, size: int) -> None:
        self._see(addresses, size, "adds to")

    def _see(self, addresses: np.ndarray, size: int, does: str) -> None:
        if time.monotonic() > self._until:
            self.took_too_long = True
            raise _FoundError("it takes too long")
        if not len(addresses):
            return
        first, behind = np.array(self._space.spans).T
        outside = addresses[~((addresses[:, None] >= first) & (addresses[:, None] < behind)).any(1)]
        if not len(outside):
            return
        away = np.abs(np.concatenate([first - outside[0], outside[0] - behind + size])).min() // size
        said = f"a program {does} an address {away:,} elements away from any tensor"
        if max(behind - first) // size > BITS_32:
            said += ". A tensor has more than 2,147,483,647 elements, the largest number in 32 bits."
            self._end(said, "32-bits", common_hints.BITS_32)
        self._end(f"{said}.", "at-size", common_hints.AT_SIZE)
