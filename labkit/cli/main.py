"""The command line: ``labkit lab``, ``progress``, ``reset``, ``run``, ``doctor``, ``record`` and more.

Commands themselves import what loads slowly: help appears at once, and doctor works where Jupyter, torch or
triton do not.
"""

import errno
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from labkit import __version__, backend, paths
from labkit.cli import learner_commands
from labkit.cli.arguments import PATH, UserError, value_errors_as_messages
from labkit.lessons import notebooks, stamps
from labkit.runs.console import print_failure, print_results, say

if TYPE_CHECKING:
    from labkit.runs import execute


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


for command in (learner_commands.lab, learner_commands.progress, learner_commands.reset):
    cli.add_command(command)


@cli.command("run")
@click.argument("names", metavar="[LESSON]...", nargs=-1)
@click.option(
    "assignments", "-p", metavar="NAME=VALUE", multiple=True, help="A parameter that the lessons declare."
)
@click.option(
    "limit_s", "--timeout", metavar="SECONDS", type=click.IntRange(min=1), default=600, show_default=True,
    help="Longest time for one cell.",
)  # fmt: skip
@click.option(
    "jobs", "--jobs", metavar="N", type=click.IntRange(min=1),
    help="So many lessons at once; three where GPU and host have room for them, else one.",
)  # fmt: skip
@click.option("json_path", "--json", metavar="F", type=PATH, help="Write what came out to F.")
@click.option("junit_path", "--junit", metavar="F", type=PATH, help="The same as JUnit's XML, for a CI.")
@click.option("--strict", is_flag=True, help="Fail also where a claim does not hold.")
def run_command(
    names: tuple[str, ...],
    assignments: tuple[str, ...],
    limit_s: int,
    jobs: int | None,
    json_path: Path | None,
    junit_path: Path | None,
    strict: bool,
) -> None:
    """Execute lessons (all of them, if none is named) and count what held."""
    from labkit.runs import result_files

    with value_errors_as_messages():
        chosen = _chosen(names)
        for assignment in assignments:
            if "=" not in assignment:
                raise ValueError(f"-p {assignment!r}: write it as name=value")
        given = dict(assignment.split("=", 1) for assignment in assignments)
        for path in chosen:
            notebooks.check_parameters(path, given)
    console = Console()
    say(console, backend.sentence())
    results = _execute(console, chosen, given, limit_s, jobs or jobs_at_once())
    if json_path:
        result_files.write_json(json_path, results)
    if junit_path:
        result_files.write_junit(junit_path, results, strict)
    broken = [result for result in results if strict and result.not_held]
    for result in broken:
        say(console, f"{result.lesson}, does not hold: {'; '.join(result.not_held)}")
    sys.exit(bool(broken) or not all(result.passed for result in results))


def jobs_at_once() -> int:
    """Three lessons on a GPU of 40 GB and 12 CPUs: while one is timed, the others compile. Else one."""
    import torch

    from labkit import gpu

    if not gpu.available() or torch.cuda.get_device_properties(0).total_memory < 39 * 2**30:
        return 1
    return 3 if len(os.sched_getaffinity(0)) >= 12 else 1


def _execute(
    console: Console, chosen: list[Path], given: dict[str, str], limit_s: int, jobs: int
) -> "list[execute.Result]":
    """Execute lessons, ``jobs`` at once, into build/lessons, saying what failed.

    Of several at once the last one begins first, because later lessons take longer. However it ends, a
    table says what is finished and where it lies.
    """
    from labkit.runs import execute
    from labkit.runs.exclusive import exclusive

    def result_of(path: Path) -> execute.Result:
        output = paths.BUILD / "lessons" / path.name
        with exclusive(f"run-{path.stem}"):
            return execute.execute(path, output, given, cell_limit_s=limit_s, bar=True)

    results: list[execute.Result] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        running = [pool.submit(result_of, path) for path in chosen[::-1] if jobs > 1]
        for result in (one.result() for one in running[::-1]) if running else map(result_of, chosen):
            if result.failure:
                print_failure(console, result.lesson, result.failure)
            results.append(result)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for kernel in psutil.Process().children() if jobs > 1 else ():  # their threads end with them
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(kernel.pid, signal.SIGKILL)
        raise
    finally:
        print_results(console, results, [path.stem for path in chosen[len(results) :]])
    return results


@cli.command("slides")
@click.argument("names", metavar="[LESSON]...", nargs=-1)
def slides_command(names: tuple[str, ...]) -> None:
    """Make slides of lessons (all of them, if none is named), from the outputs that are saved."""
    from labkit.cli import slides

    with value_errors_as_messages():
        written = slides.write(_chosen(names), paths.BUILD / "slides")
    for path in written:
        say(Console(), os.path.relpath(path))


@cli.command("doctor")
@click.option("--measure", is_flag=True, help="Measure the roofs of this machine's GPU.")
def doctor_command(measure: bool) -> None:
    """Say what this machine is, and what to do."""
    from labkit.cli import doctor

    facts = doctor.collect()
    if measure:
        from labkit.measure import roofline

        if facts.device is None or facts.reason:
            raise UserError("measuring roofs needs a GPU: leave --measure out to see what is in the way")
        roofline.roofs(again=True)
        facts = doctor.collect()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, found in doctor.lines(facts):
        table.add_row(label, escape(found))
    console = Console()
    console.print(table, highlight=False)
    decided = doctor.advise(facts)
    console.print(f"\n{decided.sentence}", markup=False, highlight=False)
    sys.exit(not decided.ready)


@cli.command("record")
@click.argument("names", metavar="[LESSON]...", nargs=-1)
@click.option("--strip-stale", is_flag=True, help="Remove outputs and tapes of code that has changed.")
@click.option("--check", is_flag=True, help="List what is recorded; fail if anything is stale.")
@click.option("--again", is_flag=True, help="Do also what is recorded, or kept of an unfinished run.")
def record_command(names: tuple[str, ...], strip_stale: bool, check: bool, again: bool) -> None:
    """Run lessons at full size on a GPU and keep their outputs and measurements."""
    console = Console()
    if strip_stale or check:
        if names or again:
            raise UserError(
                "--strip-stale and --check look at all lessons and run nothing: leave the rest out"
            )
        _tidy(console, strip_stale, check)
        return
    with value_errors_as_messages():
        chosen = _chosen(names)
    from labkit import gpu

    if not gpu.available():
        raise UserError("recording needs a GPU, and this session has none: see `labkit doctor`")
    try:
        complete = _record_all(console, chosen, again)
    except (KeyboardInterrupt, SystemExit, OSError):
        say(console, "What was measured is kept: the same command, without --again, goes on.")
        raise
    sys.exit(not complete)


def _tidy(console: Console, strip_stale: bool, check: bool) -> None:
    from labkit.bench import recorded_benchmark
    from labkit.runs import record

    if strip_stale:
        with value_errors_as_messages():
            benchmarks = recorded_benchmark.states(paths.RECORDED)
        stripped = record.strip_stale(paths.RECORDED, benchmarks)
        say(console, f"Stripped: {', '.join(stripped) or 'nothing was stale'}")
    if not check:
        return
    states = [stamps.recording_state(path) for path in notebooks.find()]
    states += record.tape_states(tapes=paths.RECORDED).values()
    with value_errors_as_messages():
        states += recorded_benchmark.states(paths.RECORDED).values()
    for state in states:
        say(console, f"{state.status:<10}  {state.name}  {state.detail}".rstrip())
    if any(state.status == "stale" for state in states):
        say(console, "Record again on a GPU, or run `labkit record --strip-stale`.")
        sys.exit(1)


def _record_all(console: Console, chosen: list[Path], again: bool) -> bool:
    """Record lessons one after the other; whether all of them are recorded now."""
    from labkit.measure import machine, roofline
    from labkit.runs import record

    identity = machine.identity()
    roofline.roofs()
    record.record_roofs(roofline.cache_path(), identity, paths.RECORDED)
    complete = True
    for path in chosen:
        with value_errors_as_messages():
            result = record.record(path, identity, again=again, bar=True, tapes=paths.RECORDED)
        if result is None:
            say(console, f"{path.stem}: recorded already on {identity.device}")
        elif result.failure:
            complete = False
            print_failure(console, path.stem, result.failure)
        else:
            say(console, f"{path.stem}: recorded in {result.seconds:.0f} s")
    return complete


@cli.command("bench")
@click.argument("wanted", metavar="[SUITE]...", nargs=-1)
@click.option("json_path", "--json", metavar="F", type=PATH, help="Write the rows to F.")
@click.option("--peers", is_flag=True, help="Take along the contenders from other packages.")
@click.option("--record", is_flag=True, help="Keep a full run beside the tapes.")
@click.option(
    "count", "--random", metavar="N", type=click.IntRange(min=1),
    help="N sizes drawn from each suite's ranges.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Of --random: the same seed, the same sizes."
)
@click.option("--small", is_flag=True, help="With --random: tensors of less than 16 MB.")
@click.option("reported", "--report", metavar="F", type=PATH, help="Measure nothing: report the rows in F.")
@click.option(
    "compared", "--compare", metavar="A B", nargs=2, type=PATH,
    help="Measure nothing: say which rows moved beyond their spread from file A to file B.",
)  # fmt: skip
@click.option("--again", is_flag=True, help="Do also what is recorded, or kept of an unfinished run.")
def bench_command(
    compared: tuple[Path, Path] | None, reported: Path | None, again: bool, **given: Any
) -> None:
    """Measure suites (all of them, if none is named): ours beside the other contenders."""
    from labkit import gpu
    from labkit.bench import compare, options, report

    console = Console()
    with value_errors_as_messages():
        if compared or reported:
            if sum(map(bool, (compared, reported, again, *given.values()))) > 1:
                raise ValueError("--compare and --report measure nothing: leave the rest out")
            if compared:
                compare.show(console, *compared)
            if reported:
                report.show(console, report.read(reported))
            return
        order = options.BenchOptions(**given)
        order.check()
        if not gpu.available():
            raise click.ClickException(
                "nothing is timed: a benchmark needs a GPU, and this session has none: see `labkit doctor`"
            )
        parts = order.parts()
    order.measure(console, parts, again=again)


@cli.command("tally")
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=PATH)
def tally_command(folders: tuple[Path, ...]) -> None:
    """Print what a class guessed, a line for each question, and how it did, a line for each exercise.

    Learners' files are predictions/*.json and attempts/*/, anywhere in a folder. Unpack archives first:
    `tar xzf FILE -C FOLDER`. docs/jupyterhub.md says how to collect.

    The median, and the middle of the guesses (20th to 80th percentile), leave out guesses that were sealed
    after the answer had been seen. Files that cannot be read are named and not counted. No link is followed.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
    from labkit.cli import tally

    if not tally.print_tables(Console(), tally.read(folders)):
        raise click.ClickException(tally.NOTHING)


def _chosen(names: tuple[str, ...]) -> list[Path]:
    if names:
        return list(dict.fromkeys(notebooks.resolve(name) for name in names))
    found = notebooks.find()
    if not found:
        click.echo(f"There are no lessons in {os.path.relpath(paths.NOTEBOOKS)}/", err=True)
        sys.exit(1)
    return found


def main() -> None:
    """The entry point: a request to end ends the run, and its kernels, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # the second where a connection to the machine is lost
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    cli()
