"""What `labkit bench` was asked to do, and the steps of doing it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from labkit import paths
from labkit.bench import recorded_benchmark, report, run, suites
from labkit.bench.suite_part import SuitePart
from labkit.measure import machine, roofline, rows
from labkit.measure.rows import Row
from labkit.runs import record
from labkit.runs.console import say


@dataclass
class BenchOptions:
    """Suites by name, or all; where the rows go; ``count`` sizes are drawn by ``seed``, none for the fixed
    ones."""

    wanted: tuple[str, ...] = ()
    json_path: Path | None = None
    peers: bool = False
    record: bool = False
    count: int | None = None
    seed: int = 0
    small: bool = False

    def check(self) -> None:
        """ValueError for what can be seen to fail before anything is measured."""
        suites.chosen(self.wanted, drawn=self.count is not None)
        if self.json_path and self.json_path.exists() and not self.json_path.is_file():
            raise ValueError(f"{self.json_path} is no plain file")  # it would take the place of /dev/null
        if self.small and self.count is None:
            raise ValueError("--small is for sizes that are drawn: add --random N")
        if self.record and (self.wanted or self.count or not self.peers):
            raise ValueError("--record keeps full runs only: name no suite, no --random, and add --peers")

    def parts(self) -> dict[str, list[SuitePart]]:
        """The parts of each suite; their contenders are made now. ValueError where that fails."""
        names = suites.chosen(self.wanted, drawn=self.count is not None)
        if self.count is None:
            return {name: suites.parts(name, peers=self.peers) for name in names}
        drawn: dict[str, Any] = dict(peers=self.peers, count=self.count, seed=self.seed, small=self.small)
        return {f"random-{name}": suites.random_parts(name, **drawn) for name in names}

    def measure(self, console: Console, parts: dict[str, list[SuitePart]], *, again: bool) -> None:
        """Measure, and finish; rows of a run that was stopped are written and kept, too."""
        roofline.roofs()  # measured first, where they are not known: without them there is no share
        measured: list[Row] = []
        if self.record and not again:
            recorded_benchmark.take_up(parts)
        try:
            kept = run.measure_suites(parts, console, measured, again=again)
            if kept:
                say(console, f"{kept} rows were measured before, with the same code, device and versions.")
            self.finish(console, measured)
        except BaseException:
            if measured:
                same = "the same command without --again" if again else "the same command"
                say(console, f"{len(measured)} rows are kept: {same} goes on.")
            self.write(measured)
            raise
        run.forget(parts)

    def finish(self, console: Console, measured: list[Row]) -> None:
        """Write what was asked for, print the report, keep a full run."""
        self.write(measured)
        report.show(console, measured)
        if self.record and roofline.cache_path().exists():
            record.record_roofs(roofline.cache_path(), machine.identity(), paths.RECORDED)
        for path in recorded_benchmark.keep(measured) if self.record else []:
            say(console, f"Recorded: {path.relative_to(paths.RECORDED.parent)}")

    def write(self, measured: list[Row]) -> None:
        """Write rows to the file asked for; a run that was stopped before its first row replaces no file."""
        if self.json_path and measured:
            rows.write(self.json_path, measured)
