"""A learner's own copy of the lessons: a folder to work in, which a newer version never writes over.

``labkit lab`` makes it. Beside the notebooks it has a folder ``.labkit``: the learner's answers, verdicts and
guesses, and in ``.labkit/handed_out`` each lesson as it was when the learner last got it.
"""

import json
import os
import shutil
import subprocess
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.lessons import notebooks

STATE_FOLDER = ".labkit"
"""The folder inside a learner's folder for attempts, verdicts and guesses."""
FOLDER_VARIABLE = "LABKIT_FOLDER"
"""Names the learner's folder to the kernels of a JupyterLab that `labkit lab` has started."""
ATTEMPTS, GUESSES = "attempts", "predictions"
"""Folders below `state_folder()`: one with a folder for each lesson, one with a file for each guess.

"predictions" is an old name, which learners' files have kept.
"""


def current() -> Path | None:
    """The learner's folder that this process works in: LABKIT_FOLDER, or the nearest one above.

    None where there is none, as in a notebook that is executed as it was published.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / STATE_FOLDER).is_dir()), None)


def state_folder() -> Path:
    """Where answers, verdicts and guesses are kept: in the learner's folder, else in the cache."""
    folder = current()
    return paths.cache() if folder is None else folder / STATE_FOLDER


def open_folder(folder: Path) -> list[str]:
    """Bring a learner's folder up to date, and return a sentence for each thing that happened.

    A lesson that is not there yet is copied into it. One that has changed upstream since is put beside the
    learner's, under a name with today's date; a file that nobody has saved since is replaced. Pictures are
    renewed. Answers and guesses from before there were such folders are moved into it.

    Raises ValueError for a folder that holds the published lessons, and for a clone of the course.
    """
    if folder.resolve() in (paths.NOTEBOOKS.resolve(), paths.CHECKOUT.resolve()):
        raise ValueError(f"{folder}: the published lessons are there; name a folder of your own")
    added, said = [], _carry_over(folder)
    for lesson in notebooks.find():
        mine, before = folder / lesson.name, folder / STATE_FOLDER / "handed_out" / lesson.name
        text = handed_out(lesson)
        if not mine.exists():
            paths.write_text(mine, text)
            added.append(lesson.stem)
        elif before.exists() and before.read_text(encoding="utf-8") == text:
            continue
        elif before.exists() and before.read_bytes() == mine.read_bytes():
            paths.write_text(mine, text)
            said.append(f"{lesson.stem} was brought up to date; you had not changed it.")
        else:
            beside = _unused(folder, f"{lesson.stem}.{datetime.now():%Y-%m-%d}")
            paths.write_text(beside, text)
            said.append(f"{lesson.stem} has changed: the new version is {beside.name}, yours is as it was.")
        paths.write_text(before, text)
    shutil.copytree(paths.NOTEBOOKS / "images", folder / "images", dirs_exist_ok=True)
    if added:
        said.insert(0, f"Copied into {os.path.relpath(folder)}: {', '.join(added)}.")
    return said


def handed_out(lesson: Path) -> str:
    """A lesson as a learner gets it: the text of the notebook, without outputs and the cell for Colab."""
    notebook = json.loads(lesson.read_text(encoding="utf-8"))
    notebook["cells"] = [cell for cell in notebook["cells"] if notebooks.COLAB not in notebooks.tags(cell)]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    notebook["metadata"].pop("labkit", None)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def reset(folder: Path, lesson: str) -> tuple[Path, Path | None]:
    """Put a fresh copy of a lesson into a learner's folder, and forget the verdicts on its exercises.

    Returns the fresh file, and the name that the learner's own file has now, None where there was none.
    ValueError for an unknown lesson.
    """
    published = notebooks.resolve(lesson)
    mine, aside, text = folder / published.name, None, handed_out(published)
    if mine.exists():
        aside = mine.rename(_unused(folder, f"{published.stem}.before-{datetime.now():%Y-%m-%d-%H%M}"))
    paths.write_text(mine, text)
    paths.write_text(folder / STATE_FOLDER / "handed_out" / published.name, text)
    verdicts = folder / STATE_FOLDER / ATTEMPTS / notebooks.lesson_key(published.stem) / "verdicts.json"
    verdicts.unlink(missing_ok=True)
    return mine, aside


def _carry_over(folder: Path) -> list[str]:
    """Move answers and guesses out of the cache, where they were kept before there were learners' folders."""
    said = []
    for name, what in ((ATTEMPTS, "answers"), (GUESSES, "guesses")):
        old, new = paths.cache() / name, folder / STATE_FOLDER / name
        if old.is_dir() and not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(old, new)
            said.append(f"Your {what} from before were moved here from {old}.")
    return said


def _unused(folder: Path, stem: str) -> Path:
    """A notebook's path in the folder that no file has yet."""
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for path in (folder / f"{name}.ipynb" for name in names) if not path.exists())


# ---- edits in the published notebooks of a clone -----------------------------------------------------------


def edited() -> list[Path]:
    """Published lessons whose cells are not as git has them; empty outside a clone, or without git."""
    changed = _git("diff", "--name-only", "--relative", "HEAD", "--", "notebooks/*.ipynb").splitlines()
    found = [paths.CHECKOUT / line for line in changed if (paths.CHECKOUT / line).exists()]
    return [path for path in found if _cells(path.read_text(encoding="utf-8")) != _cells(_at_head(path))]


def move_edits(folder: Path, lessons: list[Path]) -> list[str]:
    """Move edited notebooks into a learner's folder, and put the published ones back; a sentence for each."""
    said = []
    for lesson in lessons:
        mine = folder / lesson.name
        if mine.exists():
            mine = _unused(folder, f"{lesson.stem}.moved-{datetime.now():%Y-%m-%d}")
        original, before = _at_head(lesson), folder / STATE_FOLDER / "handed_out" / lesson.name
        paths.write_text(mine, lesson.read_text(encoding="utf-8"))
        paths.write_text(lesson, original)
        if not before.exists():  # the edits began from the published lesson: only a later one is news
            paths.write_text(before, handed_out(lesson))
        said.append(f"Your edits of {lesson.name} are in {os.path.relpath(mine)} now.")
    return said


def _git(*arguments: str) -> str:
    try:
        ran = subprocess.run(["git", *arguments], cwd=paths.CHECKOUT, capture_output=True, text=True)
    except OSError:  # without git nobody pulls here either
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def _at_head(path: Path) -> str:
    return _git("show", f"HEAD:./{path.relative_to(paths.CHECKOUT)}")


def _cells(text: str) -> Any:
    """What a person writes in a notebook: kind and source of each cell. None for a text that is none."""
    with suppress(ValueError, KeyError, TypeError):
        return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return None
