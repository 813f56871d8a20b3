"""`labkit run`, `record` and `bench` with a worker for each lesson or suite, on many GPUs or a cluster."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from labkit import cluster, fleet_report, gather, gpus, jobs, places, pool, reports, runner
from labkit.fleet import Engine, Fleet, alone
from labkit.jobs import Job, Outcome
from labkit.reports import say
from labkit.rows import Row

RETRIES = 1
"""How often a job of a cluster is submitted again, unless the user says otherwise."""


@dataclass(frozen=True)
class Crew:
    """Who does the jobs."""

    engine: Engine
    kinds: Mapping[str, str]
    """What chooses the device, for each kind of device that a job is done on, by variant."""
    retries: int = 0
    """How often a job that fails is done once more."""
    mixed: bool = False
    """Jobs of one kind go to GPUs of several models."""


def crew(numbers: str | None, executor: str | None, slurm: Sequence[str], retries: int | None) -> Crew | None:
    """What the options of the command line name; None when they name nothing of it.

    ValueError for options that do not go together, and for GPUs, keys or tools that are not there.
    """
    if slurm and executor != "slurm":
        raise ValueError("--slurm says what a job needs: add --executor slurm")
    if retries is not None and not executor:
        raise ValueError("--retries is for jobs of a cluster: add --executor")
    if numbers is not None and executor:
        raise ValueError("--gpus is for this machine; with --executor the cluster gives each job its GPU")
    if numbers is not None:
        chosen = gpus.chosen(numbers, gpus.found())
        models = sorted({gpu.name for gpu in chosen})
        return Crew(pool.on_gpus(chosen), {"": ", ".join(models)}, mixed=len(models) > 1)
    tries = RETRIES if retries is None else retries
    if executor == "local":
        engine = cluster.local()
        first = gpus.found()[:1]  # a job sees all GPUs of this session, and takes the first
        return Crew(engine, {"": "".join(gpu.name for gpu in first)}, tries)
    if executor == "slurm":
        variants = cluster.options(slurm)
        kinds = {name: cluster.device(chosen) for name, chosen in variants.items()}
        return Crew(cluster.Slurm(variants), kinds, tries)
    return None


def run(
    console: Console, made: Crew, paths: Sequence[Path], given: Mapping[str, str], limit_s: float, again: bool
) -> bool:
    """Execute lessons; whether all passed. ValueError while another run with workers goes on here."""
    options = {"parameters": dict(given), "limit_s": limit_s}
    with alone("run"):
        fleet = _fleet(made, "run", list(map(str, paths)), options, again)
        _drive(console, fleet)
        _show(console, fleet)
        say(console, f"Executed notebooks and pages: {os.path.relpath(places.BUILD / 'lessons')}/")
        return _end(fleet)


def record(console: Console, made: Crew, paths: Sequence[Path], again: bool) -> bool:
    """Record lessons; whether all of them are recorded now. ValueError as in `run`."""
    with alone("record"):
        fleet = _fleet(made, "record", list(map(str, paths)), {}, again)
        try:
            _drive(console, fleet)
        finally:  # what is finished is recorded, also when the run was interrupted
            shown, edited = gather.recordings(fleet.ended)
            for path in shown:
                say(console, f"Recorded: {os.path.relpath(path)}")
            for path in edited:
                say(console, f"{path.stem} was edited while it was recorded: record it again")
        _show(console, fleet)
        return not edited and _end(fleet)


def bench(
    console: Console,
    made: Crew,
    suites: Sequence[str],
    *,
    peers: bool,
    record: bool,
    figure: bool,
    again: bool,
    write: Callable[[list[Row]], None],
    complete: Callable[[list[Row]], None],
) -> bool:
    """Measure suites; whether all of them were, and are kept with ``record``. ValueError as in `run`.

    ``write`` gets the rows in any case, ``complete`` those of a run in which nothing failed.
    """
    from labkit import bench, bench_report

    _check_models(made, record=record, figure=figure)
    options = {"peers": peers, "roofs": record or figure, "notebooks": str(places.NOTEBOOKS)}
    with alone("bench"):
        fleet = _fleet(made, "bench", suites, options, again)
        try:
            _drive(console, fleet)
        finally:
            write(gather.measured(fleet.wanted))
        measured = gather.measured(fleet.wanted)
        console.print(bench_report.results(measured))
        for gap in bench.gaps(measured):
            say(console, f"no time: {gap}")
        if not fleet.complete:
            return False
        if record and (lacking := gather.lacking(measured)):
            raise ValueError(
                f"nothing is recorded: {lacking}; a full run has every suite of each kind of device, and "
                "--slurm gres=... or constraint=... names the kinds"
            )
        if record:
            gather.roofs(fleet.wanted)
        complete(measured)
        return _end(fleet)


def _check_models(made: Crew, *, record: bool, figure: bool) -> None:
    """ValueError for rows of several devices where one has to have all: before they take hours."""
    if figure and len(made.kinds) > 1:
        raise ValueError("--figure draws one device: name one kind")
    if made.mixed and (record or figure):
        raise ValueError(f"--{'record' if record else 'figure'} with --gpus: choose GPUs of one model")


def _fleet(made: Crew, kind: str, subjects: Sequence[str], options: dict[str, Any], again: bool) -> Fleet:
    """ValueError where two jobs would have one name, and so one folder."""
    here = jobs.installed()
    wanted = [
        jobs.keyed(Job(kind, subject, options, variant=variant, device=device, installed=here, again=again))
        for variant, device in made.kinds.items()
        for subject in subjects
    ]
    names = [job.name for job in wanted]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--slurm: two kinds of device would both be called {', '.join(sorted(twice))}")
    return Fleet(wanted, made.engine, made.retries)


def _drive(console: Console, fleet: Fleet) -> None:
    try:
        with fleet_report.report(console) as report:
            fleet.run(report)
    except (KeyboardInterrupt, SystemExit, OSError):
        finished = [outcome.job.name for outcome in fleet.ended if outcome.passed]
        names = f"{', '.join(finished)}: finished and kept; " if finished else ""
        say(console, f"{names}the same command goes on, without --again.")
        raise


def _show(console: Console, fleet: Fleet) -> None:
    """How lessons failed, and the table of all of them."""
    results = [_result(outcome) for outcome in fleet.ended]
    for outcome, result in zip(fleet.ended, results, strict=True):
        if result.failure and not outcome.error:
            reports.failure(console, outcome.job.name, result.failure)
    console.print(reports.results(results))


def _result(outcome: Outcome) -> runner.Result:
    """The result of a lesson for the table, also of one that has none."""
    empty = runner.Result(outcome.job.name, outcome.seconds, 0, 0, 0, 0, None, Path(), Path())
    found = {**vars(empty), **outcome.detail, "lesson": outcome.job.name}
    failure = found["failure"]
    if not outcome.passed:
        failure = failure or {"cell": 0, "source": "", "message": outcome.error, "traceback": ""}
        found["failure"] = runner.Failure(**failure)
    return runner.Result(**found)


def _end(fleet: Fleet) -> bool:
    if fleet.complete:
        fleet.forget()
    return fleet.complete
