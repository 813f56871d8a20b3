"""Rows on disk that a run which was cut short goes on from: of sweeps, panels, benchmarks and recordings.

A row is taken instead of measuring if it would be measured again in the same way: the same measurement, by
the clock that was asked for, of the same code with the same device, driver and versions. It has to have a
time, and to be undisturbed: but not on a tape or in a benchmark, which measured it several times already.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.measure import machine, rows
from labkit.measure.rows import Row

RESUME_WITHIN_S = 3600
"""What was measured counts for an hour after the last row; later the machine may be in another state."""

Key = tuple[Any, ...]
"""A :attr:`labkit.measure.rows.Row.key`."""
Way = tuple[str | None, ...]
"""Code, device and versions of a measurement."""


def asked_clock(row: Row) -> str:
    """The clock that was asked for: a call that a graph cannot hold is timed with events, and says so."""
    return "graph" if row.clock == "events" and row.note and row.median_us is not None else row.clock


def asked_key(row: Row) -> Key:
    """The row's key by the clock that was asked for."""
    return replace(row, clock=asked_clock(row)).key


def way(source: str, peer_version: str | None) -> Way:
    """How code would be measured now, on this machine."""
    here = machine.identity()
    return source, peer_version, here.device, here.driver, here.torch, here.triton


def way_of(row: Row) -> Way:
    """How a row was measured."""
    return row.source, row.peer_version, row.device, row.driver, row.torch, row.triton


def drop_expired(paths: Iterable[Path]) -> None:
    """Remove files of rows if all of them were written last more than RESUME_WITHIN_S ago."""
    written = {path: path.stat().st_mtime for path in paths if path.exists()}
    if time.time() - max(written.values(), default=0.0) > RESUME_WITHIN_S:
        for path in written:
            path.unlink(missing_ok=True)


class Journal:
    """The rows of a run in a file, which may hold rows of others, too.

    ``wanted`` says for each key that the run will measure in which way. With ``tape`` the rows stay when the
    run is complete, and disturbed ones count.
    """

    def __init__(self, path: Path, wanted: Mapping[Key, Way], *, tape: bool) -> None:
        self.path, self.tape, self._wanted = path, tape, wanted
        found = [(asked_key(row), row) for row in rows.readable(path)]
        self.kept = {key: row for key, row in found if self._counts(key, row)}
        """The rows that need not be measured, by their key."""
        # What is measured again, and a torn last line, are not in the file any more.
        rows.write(path, [row for key, row in found if self.kept.get(key) is row or key not in wanted])

    def _counts(self, key: Key, row: Row) -> bool:
        measured = row.median_us is not None and (self.tape or not row.noise)
        return measured and way_of(row) == self._wanted.get(key)

    def add(self, row: Row) -> None:
        """Put a row on the disk before this returns."""
        rows.append(self.path, row)

    def close(self) -> None:
        """The run is complete: its rows leave the file, so that the next one starts afresh; not of a tape."""
        if self.tape:
            return
        others = [row for row in rows.readable(self.path) if asked_key(row) not in self._wanted]
        if others:
            rows.write(self.path, others)
        else:
            self.path.unlink(missing_ok=True)
