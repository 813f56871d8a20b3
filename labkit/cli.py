"""The command line: ``labkit run``, ``doctor``, ``record``, ``bench``, ``slides``, ``site`` and ``tally``.

Commands import what they need themselves: help appears at once, and doctor works where Jupyter, torch or
triton do not.
"""

import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from labkit import __version__, backend, places

if TYPE_CHECKING:  # commands import what they need themselves
    from labkit import runner
    from labkit.bench import Bench
    from labkit.many import Crew
    from labkit.rows import Row


class Mistake(click.ClickException):
    """Something the user can put right: one sentence, no traceback, exit code 2."""

    exit_code = 2


@contextmanager
def mistakes() -> Iterator[None]:
    """Turns the ValueErrors of looking at what the user asked for into messages."""
    try:
        yield
    except ValueError as error:
        raise Mistake(str(error)) from error


NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""A full disk, a folder that is closed to this user."""


class Group(click.Group):
    """Commands that end with 130 when interrupted, and with a sentence where nothing can be written."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nstopped", err=True)
            ctx.exit(130)
        except OSError as error:
            if error.errno not in NOT_WRITTEN:
                raise
            raise click.ClickException(
                f"{error}. What was finished is kept; make room, or the folder writable, and run it again."
            ) from error


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="labkit")
def cli() -> None:
    """A hands-on course in GPU performance."""


@dataclass(frozen=True)
class Workers:
    """What the command line says about who does the work; false when it says nothing."""

    gpus: str | None = None
    executor: str | None = None
    slurm: tuple[str, ...] = ()
    retries: int | None = None

    def __bool__(self) -> bool:
        return self != Workers()


def with_workers(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that name many GPUs or a cluster: the command gets them as its ``workers``."""

    @wraps(command)
    def collected(
        *, gpus: str | None, executor: str | None, slurm: tuple[str, ...], retries: int | None, **others: Any
    ) -> None:
        command(workers=Workers(gpus, executor, slurm, retries), **others)

    for option in (
        click.option(
            "--retries", metavar="N", type=click.IntRange(min=0),
            help="With --executor: how often a failed job is submitted again.  [default: 1]",
        ),
        click.option(
            "--slurm", metavar="KEY=VALUE", multiple=True,
            help="What a job needs, as partition=gpu; a key given twice is two kinds of device. "
            "See docs/CLUSTER.md.",
        ),
        click.option(
            "--executor", type=click.Choice(["slurm", "local"]),
            help="Submit a job for each; local does them here, one after the other.",
        ),
        click.option("--gpus", metavar="all|0,2", help="A worker on each of these GPUs of this machine."),
    ):  # fmt: skip
        collected = option(collected)
    return collected


def _crew(workers: Workers) -> "Crew | None":
    """Who does the work, if not this process."""
    if not workers:
        return None
    from labkit import many

    with mistakes():
        return many.crew(workers.gpus, workers.executor, workers.slurm, workers.retries)


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """click's range lets infinity and NaN pass."""
    if not math.isfinite(value):
        raise click.BadParameter("it has to be a number of seconds", context, parameter)
    return value


@cli.command("run")
@click.argument("names", metavar="[LESSON]...", nargs=-1)
@click.option(
    "assignments", "-p", metavar="NAME=VALUE", multiple=True, help="A parameter that the lessons declare."
)
@click.option(
    "limit_s", "--timeout", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), default=600.0,
    show_default=True, callback=_finite, help="Longest time for one cell.",
)  # fmt: skip
@click.option("--again", is_flag=True, help="With workers: also what an unfinished run has finished.")
@with_workers
def run_command(
    names: tuple[str, ...],
    assignments: tuple[str, ...],
    limit_s: float,
    again: bool,
    workers: Workers,
) -> None:
    """Execute lessons (all of them, if none is named) and count what held."""
    from labkit import lessons, reports

    if again and not workers:
        raise Mistake("--again is for --gpus or --executor: a plain run keeps nothing")
    with mistakes():
        paths = _chosen(names)
        given = dict(_split(assignment) for assignment in assignments)
        for path in paths:
            lessons.check_parameters(path, given)
    console = Console()
    if crew := _crew(workers):
        from labkit import many

        with mistakes():
            sys.exit(not many.run(console, crew, paths, given, limit_s, again))
    reports.say(console, backend.sentence())
    results = _execute(console, paths, given, limit_s)
    sys.exit(not all(result.passed for result in results))


def _execute(
    console: Console, paths: list[Path], given: dict[str, str], limit_s: float
) -> "list[runner.Result]":
    """Execute lessons one after the other into build/lessons, saying at once what failed.

    However it ends, a table says what is finished and where it lies.
    """
    from labkit import reports, runner

    results: list[runner.Result] = []
    with _alone("run"):
        try:
            for path in paths:
                with reports.report(console) as report:
                    result = runner.execute(
                        path, places.BUILD / "lessons" / path.name, given, report, cell_limit_s=limit_s
                    )
                if result.failure:
                    reports.failure(console, result.lesson, result.failure)
                results.append(result)
        finally:
            console.print(reports.results(results, [path.stem for path in paths[len(results) :]]))
            for result in results:
                reports.say(console, f"  {os.path.relpath(result.html_path)}")
    return results


@contextmanager
def _alone(kind: str, folder: Path | None = None) -> Iterator[None]:
    """Two runs would write the same files: the second one ends with a sentence."""
    from labkit import fleet

    with ExitStack() as stack:
        with mistakes():
            stack.enter_context(fleet.alone(kind, folder))
        yield


@cli.command("slides")
@click.argument("names", metavar="[LESSON]...", nargs=-1)
def slides_command(names: tuple[str, ...]) -> None:
    """Make slides of lessons (all of them, if none is named), from the outputs that are saved."""
    from labkit import reports, slides

    with mistakes():
        written = slides.write(_chosen(names), places.BUILD / "slides")
    for path in written:
        reports.say(Console(), os.path.relpath(path))


@cli.command("site")
@click.option("--execute", is_flag=True, help="Execute the lessons first, in place of their saved outputs.")
def site_command(execute: bool) -> None:
    """Make the course a folder of pages to read, from the outputs that are saved."""
    from labkit import reports, runner, website

    console = Console()
    paths = _chosen(())
    if execute:
        results = _execute(console, paths, {}, runner.CELL_LIMIT_S)
        if not all(result.passed for result in results):
            raise click.ClickException("the pages are not made: a lesson failed")
        paths = [result.notebook_path for result in results]
    with mistakes():
        index, *_ = website.write(paths, places.BUILD / "site")
    reports.say(console, os.path.relpath(index))


@cli.command("doctor")
@click.option("--measure", is_flag=True, help="Measure the roofs of this machine's GPU.")
def doctor_command(measure: bool) -> None:
    """Say what this machine is, and what to do."""
    from labkit import doctor

    facts = doctor.collect()
    if measure:
        if facts.device is None or facts.reason:
            raise Mistake("measuring roofs needs a GPU: leave --measure out to see what is in the way")
        from labkit import machine

        machine.roofs(again=True)
        facts = doctor.collect()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, found in doctor.lines(facts):
        table.add_row(label, escape(found))
    console = Console()
    console.print(table, highlight=False)
    decided = doctor.verdict(facts)
    console.print(f"\n{decided.sentence}", markup=False, highlight=False)
    sys.exit(not decided.ready)


@cli.command("record")
@click.argument("names", metavar="[LESSON]...", nargs=-1)
@click.option("--again", is_flag=True, help="Record also what is recorded, from the beginning.")
@click.option("--strip-stale", is_flag=True, help="Remove outputs and tapes of code that has changed.")
@click.option("--check", is_flag=True, help="List what is recorded; fail if anything is stale.")
@with_workers
def record_command(
    names: tuple[str, ...],
    again: bool,
    strip_stale: bool,
    check: bool,
    workers: Workers,
) -> None:
    """Run lessons at full size on a GPU and keep their outputs and measurements."""
    console = Console()
    if strip_stale or check:
        if names or again:
            raise Mistake("--strip-stale and --check look at all lessons: name none, and leave --again out")
        if workers:
            raise Mistake("--strip-stale and --check run nothing: leave --gpus and --executor out")
        _tidy(console, strip_stale, check)
        return
    with mistakes():
        paths = _chosen(names)
    if crew := _crew(workers):
        from labkit import many

        with mistakes():
            sys.exit(not many.record(console, crew, paths, again))
    from labkit import device, reports

    if not device.has_gpu():
        raise Mistake("recording needs a GPU, and this session has none: see `labkit doctor`")
    with _alone("record"):
        try:
            complete = _record_all(console, paths, again)
        except (KeyboardInterrupt, SystemExit, OSError):
            reports.say(console, "What was measured is kept: the same command, without --again, goes on.")
            raise
    sys.exit(not complete)


def _tidy(console: Console, strip_stale: bool, check: bool) -> None:
    from labkit import bench_record, lessons, record, reports

    if strip_stale:
        with mistakes():
            benchmarks = _strip_benchmarks()
        stripped = record.strip_stale(tapes=places.RECORDED) + benchmarks
        reports.say(console, f"Stripped: {', '.join(stripped) or 'nothing was stale'}")
    if not check:
        return
    states = [record.state(path) for path in lessons.find()]
    states += record.tape_states(tapes=places.RECORDED).values()
    with mistakes():
        states += bench_record.states(places.RECORDED).values()
    for state in states:
        reports.say(console, f"{state.status:<10}  {state.name}  {state.detail}".rstrip())
    if any(state.status == "stale" for state in states):
        reports.say(console, "Record again on a GPU, or run `labkit record --strip-stale`.")
        sys.exit(1)


def _strip_benchmarks() -> list[str]:
    """Remove full runs of other code, and the README's table of them; gives their names."""
    from labkit import bench_record

    found = bench_record.states(places.RECORDED)
    stale = {path: state.name for path, state in found.items() if state.status == "stale"}
    if stale:
        from labkit import bench_table  # which takes as long as a lesson to load

        bench_table.check()
        for path in stale:
            path.unlink()
        bench_table.write()
    return list(stale.values())


def _record_all(console: Console, paths: list[Path], again: bool) -> bool:
    """Record lessons one after the other; whether all of them are recorded now."""
    from labkit import machine, record, reports

    identity = machine.identity()
    machine.roofs()
    record.record_roofs(machine.cache_path(), identity, places.RECORDED)
    complete = True
    for path in paths:
        with reports.report(console) as report, mistakes():
            result = record.record(path, identity, report, again=again, tapes=places.RECORDED)
        if result is None:
            reports.say(console, f"{path.stem}: recorded already on {identity.device}")
        elif result.failure:
            complete = False
            reports.failure(console, path.stem, result.failure)
        else:
            reports.say(console, f"{path.stem}: recorded in {result.seconds:.0f} s")
    return complete


@cli.command("bench")
@click.argument("wanted", metavar="[SUITE]...", nargs=-1)
@click.option(
    "json_path", "--json", metavar="F", type=click.Path(path_type=Path), help="Write the rows to F."
)
@click.option("csv_path", "--csv", metavar="F", type=click.Path(path_type=Path), help="The same as a table.")
@click.option("--peers", is_flag=True, help="Take along the contenders from other packages.")
@click.option("--again", is_flag=True, help="Measure also what a stopped run has measured.")
@click.option("--figure", is_flag=True, help="Draw one page: each suite as a share of its floor.")
@click.option(
    "--record", is_flag=True, help="Keep a full run beside the tapes, and renew the README's table."
)
@click.option(
    "compared", "--compare", metavar="A B", nargs=2, type=click.Path(path_type=Path),
    help="Measure nothing: say which rows moved beyond their spread from file A to file B.",
)  # fmt: skip
@with_workers
def bench_command(
    wanted: tuple[str, ...],
    json_path: Path | None,
    csv_path: Path | None,
    peers: bool,
    again: bool,
    figure: bool,
    record: bool,
    compared: tuple[Path, Path] | None,
    workers: Workers,
) -> None:
    """Measure suites (all of them, if none is named): ours beside the other contenders."""
    console = Console()
    if compared:
        if wanted or json_path or csv_path or peers or again or figure or record or workers:
            raise Mistake("--compare measures nothing: give it two files, and no suite or other option")
        _compare(console, *compared)
        return
    from labkit import bench, bench_table, device, suites

    with mistakes():
        chosen = suites.chosen(wanted)
        outputs = [path for path in (json_path, csv_path) if path]
        for path in outputs:
            bench.check_writable(path)
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise Mistake("--json and --csv name one file: give each its own")
    if record and (wanted or not peers):
        raise Mistake("--record keeps full runs only: name no suite, and add --peers")
    if record:
        with mistakes():
            bench_table.check()
    if crew := _crew(workers):
        options = {"peers": peers, "record": record, "figure": figure, "again": again}
        sys.exit(not _bench_with(console, crew, chosen, json_path, csv_path, options))
    if not device.has_gpu():
        if figure and not (wanted or outputs or peers or again or record):
            _draw_recorded(console)
            return
        raise click.ClickException(
            "nothing is timed: a benchmark needs a GPU, and this session has none: see `labkit doctor`"
        )
    with mistakes():
        run = bench.Bench(chosen, peers, again)
    try:
        with _alone("bench", places.cache() / "locks"):
            _measure(console, run, json_path, csv_path, roofs=figure or record)
            if record:
                _keep(console, run.measured)
            if figure:
                _draw(console, run.measured)
            run.forget()
    except OSError as error:
        kept = (
            _kept(run)
            if run.measured
            else f"rows are kept in {bench.folder()}; LABKIT_CACHE names another folder than {places.cache()}"
        )
        raise Mistake(f"{error}; {kept}") from error


def _measure(
    console: Console, run: "Bench", json_path: Path | None, csv_path: Path | None, *, roofs: bool
) -> None:
    """Measure, write what was asked for, say who has no time; rows of a stopped run are written too."""
    from labkit import bench, bench_report, reports
    from labkit import peers as packages

    for sentence in packages.unexpected() if run.with_peers else []:
        reports.say(console, sentence)
    if roofs:
        from labkit import machine

        machine.roofs()  # measured first, where they are not known: without them there is no floor
    try:
        with bench_report.report(console) as run.progress:
            run.run()
    except BaseException as error:
        _write(run.measured, json_path, csv_path)
        if run.measured and not isinstance(error, OSError):  # that ends with a sentence of its own
            reports.say(console, f"{_kept(run)}.")
        if isinstance(error, bench.LostError | bench.EditedError):
            raise click.ClickException(str(error)) from error
        raise
    _write(run.measured, json_path, csv_path)
    if run.kept:
        reports.say(console, f"{run.kept} rows were measured before the last run was stopped.")
    console.print(bench_report.results(run.measured))
    for gap in bench.gaps(run.measured):
        reports.say(console, f"no time: {gap}")


def _bench_with(
    console: Console,
    crew: "Crew",
    chosen: list[str],
    json_path: Path | None,
    csv_path: Path | None,
    options: dict[str, bool],
) -> bool:
    """Measure suites with workers; whether all of them were, and what was asked for is written."""
    from labkit import many

    def complete(measured: "list[Row]") -> None:
        if options["record"]:
            _keep_full(console, measured)
        if options["figure"]:
            _draw(console, measured)

    def write(measured: "list[Row]") -> None:
        _write(measured, json_path, csv_path)

    with mistakes():
        try:
            return many.bench(console, crew, chosen, **options, write=write, complete=complete)
        except OSError as error:
            raise Mistake(f"{error}; rows are kept: the same command without --again goes on") from error


def _write(measured: "list[Row]", json_path: Path | None, csv_path: Path | None) -> None:
    """Write rows to the files asked for; a run that was stopped before its first row replaces no file."""
    from labkit import bench, rows

    if json_path and measured:
        rows.write(json_path, measured)
    if csv_path and measured:
        bench.write_csv(csv_path, measured)


def _kept(run: "Bench") -> str:
    without = " without --again" if run.again else ""
    return f"{len(run.measured)} rows are kept: within an hour the same command{without} goes on"


def _keep(console: Console, measured: "list[Row]") -> None:
    from labkit import machine, record

    record.record_roofs(machine.cache_path(), machine.identity(), places.RECORDED)
    _keep_full(console, measured)


def _keep_full(console: Console, measured: "list[Row]") -> None:
    from labkit import bench_record, bench_table, reports

    for path in bench_record.keep(measured):
        reports.say(console, f"Recorded: {os.path.relpath(path)}")
    with mistakes():
        bench_table.write()


def _draw(console: Console, measured: "list[Row]") -> None:
    from labkit import bench_figure, bench_table, reports

    if len({row.device for row in measured}) > 1:
        raise Mistake("a page shows one device, and the rows are of several")
    roofs = bench_table.roofs_of(measured)
    if {row.suite for row in measured} - roofs.keys():
        raise Mistake("there are no roofs of the device that the rows are from, so no floor to draw")
    places.BUILD.mkdir(parents=True, exist_ok=True)
    path = bench_figure.page(measured, roofs).save(places.BUILD / "bench.png")
    reports.say(console, f"Drawn: {os.path.relpath(path)}")


def _draw_recorded(console: Console) -> None:
    """Without a GPU: the page of the last full run of a recorded device."""
    from labkit import bench_table

    with mistakes():
        measured = bench_table.recorded()
    if not measured:
        raise click.ClickException(
            "nothing is timed or drawn: there is no GPU in this session, and no full run is recorded"
        )
    _draw(console, measured)


def _compare(console: Console, before: Path, after: Path) -> None:
    from labkit import bench_compare, reports

    if before.resolve() == after.resolve():
        raise Mistake("--compare names one file twice: give it two")
    with mistakes():
        files = [bench_compare.read(path) for path in (before, after)]
    found = bench_compare.compare(*files)
    for path, measured in zip((before, after), files, strict=True):
        reports.say(console, f"{path}: {bench_compare.machines(measured)}")
    if found.moved:
        console.print(bench_compare.table(found), highlight=False)
    for sentence in bench_compare.summary(found):
        reports.say(console, sentence)


@cli.command("tally")
@click.argument(
    "sources", metavar="FOLDER_OR_ARCHIVE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
def tally_command(sources: tuple[Path, ...]) -> None:
    """Print what a class guessed: a line for each question, in the order in which they were met.

    A learner's sealed guesses are the files predictions/*.json, anywhere in a folder or in an archive (tar
    or tar.gz). Archives within a folder are not opened: name them. docs/JUPYTERHUB.md says how to collect.

    The median, and the middle of the guesses (20th to 80th percentile), leave out guesses that were sealed
    after the answer had been seen. Files that hold no guess are named and not counted. Nothing is unpacked,
    and no link is followed.
    """
    for source in sources:
        if not os.path.exists(source):
            raise Mistake(f"{source}: there is no such folder or archive")
    from labkit import reports, tally

    found = tally.read(sources)
    console = Console()
    if found.guesses:
        console.print(tally.table(found), highlight=False)
    for sentence in tally.summary(found):
        reports.say(console, sentence)
    if not found.guesses:
        raise click.ClickException(tally.NOTHING)


def _chosen(names: tuple[str, ...]) -> list[Path]:
    from labkit import lessons

    if names:
        return list(dict.fromkeys(lessons.resolve(name) for name in names))
    found = lessons.find()
    if not found:
        click.echo(f"There are no lessons in {os.path.relpath(places.NOTEBOOKS)}/", err=True)
        sys.exit(1)
    return found


def _split(assignment: str) -> tuple[str, str]:
    name, equals, value = assignment.partition("=")
    if not equals:
        raise ValueError(f"-p {assignment!r}: write it as name=value")
    return name, value


def main() -> None:
    """The entry point: a request to end ends the run, and its kernels, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cli()
