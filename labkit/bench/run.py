"""Runs suites: every row is on the disk at once, so a run that was stopped goes on.

Until a run is complete its rows are in the user's cache, a file for each suite. The next run takes from
there what it would measure in the same way (labkit.measure.rows), if it starts within an hour after the
last row of any suite.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from labkit import gpu, paths
from labkit.bench.benchmark import Benchmark
from labkit.measure import lock, machine, rows, sweeps
from labkit.measure.rows import Row
from labkit.plots.formatting import format_duration
from labkit.runs.console import say
from labkit.runs.exclusive import exclusive
from labkit.workloads import peers


@dataclass
class Run:
    """A run of the parts of some suites, by the suite's name. ``measured`` holds the rows so far, in order,
    also when the run was stopped."""

    suites: Mapping[str, Sequence[Benchmark]]
    again: bool = False
    measured: list[Row] = field(default_factory=list)
    kept: int = 0
    """How many of the rows an earlier run measured, once this one is complete."""

    def run(self, console: Console) -> None:
        """Measure what is not kept of an earlier run. Interrupted, the rows stay for the next one.

        On a terminal a line shows the progress; a log gets a line for each row. Raises ClickException where
        the GPU is lost or code was edited, OSError where rows cannot be written; the rows before stay.
        """
        if self.again:
            self.forget()
        rows.drop_expired((paths.cache() / "bench").glob("*/*.jsonl"))
        before = {row.to_json() for name in self.suites for row in rows.read_valid(tape(name))}
        parts = [(name, part) for name, parts in self.suites.items() for part in parts]
        code = sources(part for _, part in parts)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[row]}"))
        total = sum(len(part.planned()) for _, part in parts)
        bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        task = bar.add_task("starting", total=total, row="")

        def on_row(name: str, _done: int, _total: int, row: Row) -> None:
            if row.source != code[row.suite, row.contender]:
                rows.write(tape(name), (kept for kept in rows.read(tape(name)) if kept.key != row.key))
                raise click.ClickException(
                    f"{row.suite}: the code of {row.contender} was edited while it was measured"
                )
            self.measured.append(row)
            bar.update(task, advance=1, description=name, row=describe(row))
            if not console.is_terminal:
                say(console, f"{name}: row {len(self.measured)} of {total}: {describe(row)}")
            if row.median_us is None and gpu.is_lost():
                raise RuntimeError(f"{row.contender}: {row.note}")

        with bar:
            for name, part in parts:
                with exclusive(f"bench-{name}"):
                    measure(part, tape(name), partial(on_row, name))
        self.kept = sum(row.median_us is not None and row.to_json() in before for row in self.measured)

    def forget(self) -> None:
        """The run is complete and its rows are where they should be: the next one starts afresh."""
        for name in self.suites:
            tape(name).unlink(missing_ok=True)


def measure(part: Benchmark, tape: Path, on_row: Callable[[int, int, Row], None]) -> None:
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


def sources(parts: Iterable[Benchmark]) -> dict[tuple[str, str], str]:
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
