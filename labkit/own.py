"""What a lesson measures in its own way: figures that are no clock's, on the tape like all others."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import clocks, device, machine, rows
from labkit.rows import TAPE, Row


def times(
    suite: str, timers: Mapping[str, Callable[[], float]], dtype: str = "float32", alone: bool = True
) -> pd.DataFrame:
    """A table as a sweep's, a row for each function: it is called once, and returns microseconds.

    Clock and cache stay empty, because it is the lesson's business how it times, and may be to show how not
    to. Each function has the GPU to itself (:func:`labkit.clocks.gpu_turn`), unless ``alone`` is false: for
    what mostly keeps the host busy, and for long. Without a GPU nothing is called: the rows are those of a
    recorded device, and there may be none.
    """
    return _measured(suite, timers, "median_us", dtype, clocks.gpu_turn if alone else nullcontext)


def sizes(suite: str, meters: Mapping[str, Callable[[], int]], dtype: str = "float32") -> pd.DataFrame:
    """The same for memory: each function returns bytes, and they are the row's ``peak_bytes``."""
    return _measured(suite, meters, "peak_bytes", dtype, nullcontext)


def _measured(
    suite: str,
    measures: Mapping[str, Callable[[], float]],
    column: str,
    dtype: str,
    turn: Callable[[], AbstractContextManager[None]],
) -> pd.DataFrame:
    if not device.has_gpu():
        # a sweep may have the same name: its rows have a clock
        return rows.table([row for row in rows.recorded(suite) if not row.clock], [])
    found = []
    for name, measure in measures.items():
        with turn():
            measured = measure()
        found.append(_noted(_row(suite, name, dtype, {column: measured})))
    return rows.table(found, [])


def _row(suite: str, name: str, dtype: str, measured: dict[str, Any]) -> Row:
    return Row(
        suite=suite,
        contender=name,
        direction="forward",
        dtype=dtype,
        shape={},
        clock="",
        cache="",
        runs=1,
        **(measured | machine.stamp()),
    )


def _noted(row: Row) -> Row:
    """On the tape, while one is recorded."""
    tape = os.environ.get(TAPE)
    if tape:
        rows.put(Path(tape), row)
    return row
