"""Runs suites: every row is on the disk at once, so a run that was stopped goes on.

Until a run is complete its rows are in the user's cache, a file for each suite. The next run takes from
there what it would measure in the same way (labkit.measure.rows): the same code, device and versions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from labkit import gpu, paths
from labkit.bench.suite_part import SuitePart
from labkit.measure import lock, machine, rows, sweeps
from labkit.measure.rows import Row
from labkit.plots.formatting import format_duration
from labkit.runs.console import say
from labkit.runs.exclusive import exclusive
from labkit.workloads import peers


def measure_suites(
    suites: Mapping[str, Sequence[SuitePart]], console: Console, measured: list[Row], *, again: bool = False
) -> int:
    """Measure the parts of suites, by the suite's name, and append each row to ``measured``.

    Rows of an earlier run that was stopped are not measured again, unless ``again``; returns how many these
    are. Interrupted, the rows stay for the next run. A line is printed for each row. Raises ClickException
    where the GPU is lost or code was edited, OSError where rows cannot be written.
    """
    if again:
        forget(suites)
    before = {row.to_json() for name in suites for row in rows.read_valid(tape(name))}
    parts = [(name, part) for name, parts in suites.items() for part in parts]
    code = sources(part for _, part in parts)
    total = sum(len(part.planned()) for _, part in parts)

    def on_row(name: str, _done: int, _total: int, row: Row) -> None:
        if row.source != code[row.suite, row.contender]:
            rows.write(tape(name), (kept for kept in rows.read(tape(name)) if kept.key != row.key))
            edited = f"the code of {row.contender} was edited while it was measured"
            raise click.ClickException(f"{row.suite}: {edited}")
        measured.append(row)
        say(console, f"{name}: row {len(measured)} of {total}: {describe(row)}")
        if row.median_us is None and gpu.is_lost():
            raise RuntimeError(f"{row.contender}: {row.note}")

    for name, part in parts:
        with exclusive(f"bench-{name}"):
            measure(part, tape(name), partial(on_row, name))
    return sum(row.median_us is not None and row.to_json() in before for row in measured)


def forget(suites: Iterable[str]) -> None:
    """Remove the rows that an unfinished run of these suites left: the next run starts afresh."""
    for name in suites:
        tape(name).unlink(missing_ok=True)


def measure(part: SuitePart, tape: Path, on_row: Callable[[int, int, Row], None]) -> None:
    """Measure a part of a suite on a tape; peers that tune themselves do so first.

    ``on_row(done, total, row)`` is called with each row. ClickException where the GPU is lost.
    """
    contenders, shapes = part.tuning()
    for one in contenders:
        with lock.gpu_lock(), suppress(Exception):  # what fails here fails again in its row, and is its note
            peers.tune([one], shapes)
    for options in part.runs():
        try:
            sweeps.run(part.suite, part.contenders, part.shapes, progress=on_row, tape=tape, **options)
        except RuntimeError as error:
            if not gpu.is_lost():
                raise
            raise click.ClickException(f"{part.suite}: the GPU is lost: {error}") from error


def sources(parts: Iterable[SuitePart]) -> dict[tuple[str, str], str]:
    """The source that a row measured now would name, by suite and contender."""
    return {(part.suite, one.name): sweeps.source_label(one) for part in parts for one in part.contenders}


def tape(name: str) -> Path:
    """Where the rows of a suite are until the run is complete, in a folder for each kind of device."""
    return paths.cache() / "bench" / machine.identity().slug / f"{name}.jsonl"


def describe(row: Row) -> str:
    """A row in a few words: ``labkit, forward, float32, 2 x 16: 16 µs``."""
    spent = "no time" if row.median_us is None else format_duration(row.median_us)
    sizes = " x ".join(map(str, row.shape.values()))
    return f"{row.contender}, {row.direction}, {row.dtype}, {sizes}: {spent}"
