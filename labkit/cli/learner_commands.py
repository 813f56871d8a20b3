"""The learner's commands: ``labkit lab``, ``progress`` and ``reset``."""

import importlib.util
import os
import sys
from pathlib import Path

import click

from labkit.cli.arguments import PATH, UserError, value_errors_as_messages
from labkit.lessons import learner_folder


@click.command("lab", context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="[FOLDER] [JUPYTER_OPTION]...", nargs=-1, type=click.UNPROCESSED)
def lab(words: tuple[str, ...]) -> None:
    """Open the lessons in JupyterLab, in a folder of your own: work/, if none is named.

    The first time the lessons are copied into it. Later a lesson that has changed is put beside yours.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise UserError("JupyterLab is missing: pip install 'gpu-labkit[lab]'")
    named = bool(words) and not words[0].startswith("-")
    folder, options = Path(words[0] if named else "work"), words[named:]
    said = []
    if edited := learner_folder.edited():
        names = ", ".join(path.name for path in edited)
        question = f"You have edited published lessons, where the next `git pull` stops at them: {names}."
        if not is_somebody_there():
            said = [question]
        elif click.confirm(f"{question} Move your edits to {folder}, and put the published ones back?"):
            said = learner_folder.move_edits(folder, edited)
    with value_errors_as_messages():
        said += learner_folder.open_folder(folder)
    for sentence in said:
        click.echo(sentence)
    os.environ[learner_folder.FOLDER_VARIABLE] = str(folder.resolve())
    # In most containers the user is root, and Jupyter wants to be told that this is meant.
    root = ["--allow-root"] if os.getuid() == 0 else []
    usual = ["--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder.resolve()}", *root]
    os.execv(sys.executable, [sys.executable, "-m", "labkit.cli.lab_server", *usual, *options])


def is_somebody_there() -> bool:
    """Whether a question would be answered."""
    return sys.stdin.isatty()


IN_FOLDER = click.option(
    "folder", "--folder", type=PATH,
    help="The learner's folder: by default the one that you are in, or work/.",
)  # fmt: skip


def _choose_folder(folder: Path | None) -> Path:
    """The learner's folder that a command is about, from here on that of this process."""
    chosen = folder or learner_folder.current() or Path("work")
    if not (chosen / learner_folder.STATE_FOLDER).is_dir():
        raise UserError(f"{chosen}: this is no learner's folder; `labkit lab` makes one")
    os.environ[learner_folder.FOLDER_VARIABLE] = str(chosen.resolve())
    return chosen


@click.command("progress")
@IN_FOLDER
def progress(folder: Path | None) -> None:
    """Print all exercises: open, tried or solved, and after how many tries."""
    from labkit.exercises.progress import STATES, table

    _choose_folder(folder)
    exercises = table()
    click.echo(exercises.to_string(index=False))
    click.echo(f"{(exercises['state'] == STATES['solved']).sum()} of {len(exercises)} solved")


@click.command("reset")
@click.argument("lesson")
@IN_FOLDER
def reset(lesson: str, folder: Path | None) -> None:
    """Begin a lesson anew: a fresh copy takes the place of yours, which is kept under another name."""
    with value_errors_as_messages():
        fresh, aside = learner_folder.reset(_choose_folder(folder), lesson)
    kept = f" Yours is {aside.name} now." if aside else ""
    click.echo(
        f"{fresh.name} is as published.{kept} If JupyterLab has it open: File > Reload Notebook from Disk."
    )
