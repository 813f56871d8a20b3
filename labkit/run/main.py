"""The command line: ``labkit run``, ``lab``, ``progress``, ``reset``, ``doctor``, ``record`` and others.

Commands themselves import what loads slowly: help appears at once, and doctor works where Jupyter, torch or
triton do not.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from labkit import __version__, backend, notebooks, paths

if TYPE_CHECKING:
    from labkit.run.execute import Failure, Result

PATH = click.Path(path_type=Path)
AT_ONCE = 2
"""So many lessons are executed at the same time where nothing is timed."""
AT_ONCE_ON_GPU, ROOM = 4, 2**34
"""On a GPU so many at most, each with so many bytes of its memory. They measure one after the other, and
judge and draw meanwhile: on an H200 all lessons take some 330 s, and over 600 s one by one."""


class UserError(click.ClickException):
    """Something the user can put right: one sentence, no traceback, exit code 2."""

    exit_code = 2


@contextmanager
def value_errors_as_messages() -> Iterator[None]:
    """Turns the ValueErrors of looking at what the user asked for into messages."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


class Group(click.Group):
    """Commands that end with 130 when interrupted."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nstopped", err=True)
            ctx.exit(130)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="labkit")
def cli() -> None:
    """A hands-on course in GPU performance."""


LESSONS = click.argument("names", metavar="[LESSON]...", nargs=-1)


def _chosen(names: tuple[str, ...]) -> list[Path]:
    """The lessons of these names, each once; all of them where none is named."""
    with value_errors_as_messages():
        return list(dict.fromkeys(map(notebooks.resolve, names))) if names else notebooks.find()


# ---- lessons -----------------------------------------------------------------------------------------------


@cli.command("run")
@LESSONS
@click.option(
    "limit_s", "--timeout", metavar="SECONDS", type=click.IntRange(min=1), default=600, show_default=True,
    help="Longest time for one cell.",
)  # fmt: skip
@click.option("--strict", is_flag=True, help="Fail also where a claim does not hold.")
def run_command(names: tuple[str, ...], limit_s: int, strict: bool) -> None:
    """Execute lessons (all of them, if none is named) and count what held."""
    from labkit import gpu
    from labkit.run.execute import execute

    at_once = min(AT_ONCE_ON_GPU, max(1, gpu.memory() // ROOM)) if gpu.available() else AT_ONCE

    def executed(path: Path) -> "Result":
        output = paths.BUILD / "lessons" / f"{notebooks.name_of(path)}.ipynb"
        return execute(path, output, limit_s, bar=at_once == 1)

    chosen = _chosen(names)
    click.echo(backend.sentence())
    results = _execute_each(chosen, executed, at_once)
    for result in results:
        if strict and result.not_held:
            click.echo(f"{result.lesson}, does not hold: {'; '.join(result.not_held)}")
    sys.exit(not all(result.passed and not (strict and result.not_held) for result in results))


def _execute_each(
    chosen: list[Path], execute: "Callable[[Path], Result]", at_once: int = 1
) -> "list[Result]":
    """Execute lessons, so many at the same time, saying what failed.

    However it ends, no lesson's process is left, and a table says what is finished and where it lies.
    """
    results: list[Result] = []
    others = psutil.Process().children()
    with ThreadPoolExecutor(at_once) as threads:
        coming = [threads.submit(execute, path) for path in chosen]
        try:
            for result in (each.result() for each in coming):
                results.append(result)
                if at_once > 1:  # each has no bar of its own then
                    click.echo(f"{result.lesson}: {result.seconds:.0f} s")
                if result.failure:
                    _print_failure(result.lesson, result.failure)
        except BaseException:
            done = [each for each in coming[len(results) :] if each.done() and not each.exception()]
            results += [each.result() for each in done]
            for each in coming:
                each.cancel()
            for kernel in psutil.Process().children():
                if kernel not in others:
                    kernel.kill()
            raise
        finally:
            finished = {result.lesson for result in results}
            _print_results(results, [name for name in map(notebooks.name_of, chosen) if name not in finished])
    return results


def _print_failure(lesson: str, failed: "Failure") -> None:
    """Print which cell failed, its source, and how."""
    where = f"cell {failed.cell}"
    Console().print(f"[bold red]{escape(lesson)} failed in {where}:[/]", highlight=False, soft_wrap=True)
    for line in failed.source.splitlines():
        click.echo(f"    {line}")
    click.echo(failed.traceback)
    if failed.message not in failed.traceback:
        click.echo(failed.message)


def _print_results(found: "list[Result]", unfinished: list[str]) -> None:
    """Print a line for each lesson, whether it passed, how long it took, what held; and where it is."""
    table = Table(Column("lesson", no_wrap=True), "result")
    for name in ("seconds", "checks\npassed", "claims\nheld", "claims\nnot held", "claims\nwant a GPU"):
        table.add_column(name, justify="right")
    for result in found:
        outcome = "[green]passed[/]" if result.passed else "[bold red]failed[/]"
        counts = (result.checks_passed, result.claims_held, len(result.not_held), result.claims_need_gpu)
        table.add_row(escape(result.lesson), outcome, f"{result.seconds:.1f}", *map(str, counts))
    for lesson in unfinished:
        table.add_row(escape(lesson), "unfinished")
    Console().print(table)
    for result in found:
        click.echo(f"  {os.path.relpath(result.path)}")


@cli.command("record")
@LESSONS
@click.option("--check", is_flag=True, help="Run nothing: list what is stale, and fail if anything is.")
def record_command(names: tuple[str, ...], check: bool) -> None:
    """Run lessons on a GPU and keep what they measure on tapes; what is on them stays."""
    from labkit import gpu
    from labkit.run import record

    if check:
        with value_errors_as_messages():  # a tape that is damaged
            found = list(record.stale())
        summary = "Record these again on a GPU: labkit record" if found else "Nothing is stale."
        click.echo("\n".join([*found, summary]))
        sys.exit(bool(found))
    chosen = _chosen(names)
    if not gpu.available():
        raise UserError("recording needs a GPU, and this session has none: see `labkit doctor`")
    try:
        results = _execute_each(chosen, record.record)
    except BaseException:
        click.echo("What was measured is kept: the same command goes on.")
        raise
    for result in results:
        for sentence in result.not_held:
            click.echo(f"{result.lesson}, does not hold: {sentence}")
    sys.exit(not all(result.passed and not result.not_held for result in results))


@cli.command("render")
@LESSONS
def render_command(names: tuple[str, ...]) -> None:
    """Execute lessons without a GPU, and save what they show, from the tapes, as their outputs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from labkit.run import record

    failed = False
    for path in _chosen(names):
        with value_errors_as_messages():
            result = record.render(path)
        click.echo(f"{result.lesson}: rendered in {result.seconds:.0f} s")
        if result.failure:
            failed = True
            _print_failure(result.lesson, result.failure)
    sys.exit(failed)


# ---- a learner's folder ------------------------------------------------------------------------------------


@cli.command("lab", context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="[FOLDER] [JUPYTER_OPTION]...", nargs=-1, type=click.UNPROCESSED)
def lab_command(words: tuple[str, ...]) -> None:
    """Open the lessons in JupyterLab, in a folder of your own: work/, if none is named."""
    from labkit.exercises import learner

    if importlib.util.find_spec("jupyterlab") is None:
        raise UserError("JupyterLab is missing: pip install 'gpu-labkit[course]'")
    named = bool(words) and not words[0].startswith("-")
    folder, options = Path(words[0] if named else "work"), words[named:]
    new = not folder.exists()
    with value_errors_as_messages():
        for sentence in learner.open_folder(folder):
            click.echo(sentence)
    # In most containers the user is root, and Jupyter wants to be told that this is meant.
    root = ["--allow-root"] if os.getuid() == 0 else []
    usual = ["--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder.resolve()}", *root]
    usual += ["--LabApp.default_url=/lab/tree/01_launch_overhead.ipynb"] if new else []
    # Our settings, where the learner has none: no question about news before the first lesson.
    ours, given = str(paths.DATA / "jupyter"), os.environ.get("JUPYTER_CONFIG_PATH")
    environment = os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, [ours, given]))}
    os.execve(sys.executable, [sys.executable, "-m", "jupyterlab", *usual, *options], environment)


def _learners_state(folder: Path | None) -> Path:
    """The ``.labkit`` of a learner's folder: of the one named, the one that this is, or work/."""
    near = [folder] if folder else [paths.state().parent, Path("work")]
    for each in near:
        if (each / paths.STATE).is_dir():
            return each / paths.STATE
    raise UserError(f"{near[-1]}: this is no learner's folder; `labkit lab` makes one")


@cli.command("progress")
@click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=PATH)
def progress_command(folders: tuple[Path, ...]) -> None:
    """Print a folder's exercises: open, tried or solved. Of several folders, a line for each learner."""
    from labkit.exercises.learner import STATES, table

    for folder in folders or (None,):
        exercises = table(state=_learners_state(folder))
        solved = f"{(exercises['state'] == STATES['solved']).sum()} of {len(exercises)} solved"
        if len(folders) > 1:
            tried = (exercises["state"] == STATES["tried"]).sum()
            click.echo(f"{folder}: {solved}, {tried} tried")
        else:
            click.echo(f"{exercises.to_string(index=False)}\n{solved}")


@cli.command("reset")
@click.argument("lesson")
@click.option("folder", "--folder", type=PATH, help="The learner's folder, if it is not this one or work/.")
def reset_command(lesson: str, folder: Path | None) -> None:
    """Begin a lesson anew: a fresh copy takes the place of yours, which is kept under another name."""
    from labkit.exercises import learner

    with value_errors_as_messages():
        fresh, aside = learner.reset(_learners_state(folder).parent, lesson)
    kept = f" Yours is {aside.name} now." if aside else ""
    click.echo(
        f"{fresh.name} is as published.{kept} If JupyterLab has it open: File > Reload Notebook from Disk."
    )


# ---- the machine -------------------------------------------------------------------------------------------


@cli.command("doctor")
def doctor_command() -> None:
    """Say what this machine is, and what to do."""
    from labkit.run import doctor

    facts = doctor.collect()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, found in doctor.lines(facts):
        table.add_row(label, escape(found))
    Console().print(table, highlight=False)
    ready, sentence = doctor.advise(facts)
    click.echo(f"\n{sentence}")
    sys.exit(not ready)


def main() -> None:
    """The entry point: a request to end ends the run, and its kernels, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # the second where a connection to the machine is lost
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    cli()
