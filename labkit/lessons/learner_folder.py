"""A learner's own copy of the lessons: a folder to work in, which a newer version never writes over.

``labkit lab`` makes it. Beside the notebooks it has a folder ``.labkit``, which holds the learner's answers,
verdicts and guesses, and says how each lesson looked when it was handed out.
"""

import hashlib
import json
import os
import shutil
import subprocess
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.lessons import notebooks

KEPT = ".labkit"
"""The folder, inside a learner's folder, of what is kept of the learner."""
FOLDER_VARIABLE = "LABKIT_FOLDER"
"""Names the learner's folder to the kernels of a JupyterLab that `labkit lab` has started."""
ANSWERS, GUESSES = "attempts", "predictions"
"""Folders below `kept`: one with a folder for each lesson, one with a file for each guess."""


def current() -> Path | None:
    """The learner's folder that this process works in: LABKIT_FOLDER, or the nearest one above.

    None where there is none, as in a notebook that is executed as it was published.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / KEPT).is_dir()), None)


def kept() -> Path:
    """Where this learner's answers, verdicts and guesses are kept: in their folder, else in labkit's cache."""
    folder = current()
    return paths.cache() if folder is None else folder / KEPT


def open_folder(folder: Path) -> list[str]:
    """Bring a learner's folder up to date, and return a sentence for each thing that happened.

    A lesson that is not there yet is copied into it. One that has changed since it was handed out is put
    beside the learner's, under a name with today's date; only a file that nobody has saved is replaced.
    Pictures are renewed. Answers and guesses from before there were such folders are moved into it.

    Raises:
        ValueError: for a folder that holds other people's notebooks: the published lessons, or a clone.
    """
    if folder.resolve() in (paths.NOTEBOOKS.resolve(), paths.NOTEBOOKS.parent.resolve()):
        raise ValueError(f"{folder}: the published lessons are there; name a folder of your own")
    known = _read_known(folder)
    said = _carry_over(folder)
    added = []
    for lesson in notebooks.find():
        text = handed_out(lesson)
        mine, version = folder / lesson.name, _digest(text)
        before = known.get(lesson.stem, {})
        if not mine.exists():
            paths.write_text(mine, text)
            added.append(lesson.stem)
        elif before.get("version") == version:
            continue
        elif before.get("file") == _digest(mine.read_text(encoding="utf-8")):
            paths.write_text(mine, text)
            said.append(f"{lesson.stem} was brought up to date; you had not changed it.")
        else:
            beside = _unused(folder, f"{lesson.stem}.{date.today()}")
            paths.write_text(beside, text)
            said.append(f"{lesson.stem} has changed: the new version is {beside.name}, yours is as it was.")
        known[lesson.stem] = {"version": version, "file": version}
    images = paths.NOTEBOOKS / "images"
    if images.is_dir():
        shutil.copytree(images, folder / images.name, dirs_exist_ok=True)
    paths.write_text(folder / KEPT / "lessons.json", json.dumps(known, indent=1) + "\n")
    if added:
        said.insert(0, f"Copied into {_shown(folder)}: {', '.join(added)}.")
    return said


def handed_out(lesson: Path) -> str:
    """A lesson as a learner gets it: the text of the notebook without its outputs."""
    notebook = json.loads(lesson.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    notebook["metadata"].pop("labkit", None)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def reset(folder: Path, lesson: str) -> tuple[Path, Path]:
    """Put a fresh copy of a lesson into a learner's folder, and forget the verdicts on its exercises.

    Returns the fresh file and the name that the learner's own file has now. ValueError for an unknown lesson.
    """
    published = notebooks.resolve(lesson)
    mine, text = folder / published.name, handed_out(published)
    aside = _unused(folder, f"{published.stem}.before-{datetime.now():%Y-%m-%d-%H%M}")
    if mine.exists():
        mine.rename(aside)
    paths.write_text(mine, text)
    known = _read_known(folder)
    known[published.stem] = {"version": _digest(text), "file": _digest(text)}
    paths.write_text(folder / KEPT / "lessons.json", json.dumps(known, indent=1) + "\n")
    verdicts = folder / KEPT / ANSWERS / notebooks.key(published.stem) / "verdicts.json"
    verdicts.unlink(missing_ok=True)
    return mine, aside


# ---- edits in the published notebooks ----------------------------------------------------------------------


def edited() -> list[Path]:
    """Published lessons whose cells differ from those that git has; empty outside a clone, or without git."""
    changed = _git("diff", "--name-only", "HEAD", "--", str(paths.NOTEBOOKS / "*.ipynb"))
    found = [paths.CHECKOUT / line for line in changed.splitlines()]
    return [path for path in found if path.exists() and _cells(path.read_text(encoding="utf-8")) != _at_head(path)]


def move_edits(folder: Path, lessons: list[Path]) -> list[str]:
    """Move edited notebooks into a learner's folder, and put the published ones back; a sentence for each."""
    said = []
    for lesson in lessons:
        mine = folder / lesson.name
        if mine.exists():
            mine = _unused(folder, f"{lesson.stem}.moved-{date.today()}")
        mine.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(lesson, mine)
        _git("checkout", "HEAD", "--", str(lesson))
        said.append(f"Your edits of {lesson.name} are in {_shown(mine)} now; the published one is as it was.")
    return said


def _git(*arguments: str) -> str:
    try:
        ran = subprocess.run(["git", *arguments], cwd=paths.CHECKOUT, capture_output=True, text=True)
    except OSError:  # no git: then nobody pulls here either
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def _at_head(path: Path) -> Any:
    text = _git("show", f"HEAD:./{path.relative_to(paths.CHECKOUT)}")
    return _cells(text) if text else None


def _cells(text: str) -> Any:
    """What a person writes in a notebook: kind and source of each cell."""
    with suppress(ValueError, KeyError, TypeError):  # a file that is no notebook has no cells
        return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return None


# ---- what the above share ----------------------------------------------------------------------------------


def _read_known(folder: Path) -> dict[str, dict[str, str]]:
    """By lesson: the version that was handed out last, and the file as it was written then."""
    with suppress(OSError, ValueError):  # not there, or damaged: then every lesson counts as changed
        found = json.loads((folder / KEPT / "lessons.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _carry_over(folder: Path) -> list[str]:
    said = []
    for name, what in ((ANSWERS, "answers"), (GUESSES, "guesses")):
        old, new = paths.cache() / name, folder / KEPT / name
        if old.is_dir() and not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(old, new)
            said.append(f"Your {what} from before were moved here from {old}.")
    return said


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unused(folder: Path, stem: str) -> Path:
    """A notebook's path in the folder that no file has yet."""
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 1000))
    return next(path for path in (folder / f"{name}.ipynb" for name in names) if not path.exists())


def _shown(path: Path) -> str:
    return os.path.relpath(path)
