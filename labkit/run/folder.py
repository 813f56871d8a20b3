"""A learner's own copy of the lessons: a folder to work in, which nothing writes over.

``labkit lab`` makes it. Beside the notebooks it has a folder ``.labkit``: the learner's answers, verdicts and
guesses, and in ``.labkit/handed_out`` each lesson as it was when the learner got it.
"""

import json
import os
import shutil
from datetime import datetime
from pathlib import Path

from labkit import notebooks, paths


def open_folder(folder: Path) -> list[str]:
    """Copy the lessons that are not there yet into a learner's folder; a sentence for each thing to know.

    A copy that the learner has not changed follows the published lesson. One that the learner has changed
    stays, and a sentence says how to get the new version. ValueError for a folder of the course itself.
    """
    if folder.resolve() in (paths.NOTEBOOKS.resolve(), paths.CHECKOUT.resolve()):
        raise ValueError(f"{folder}: the published lessons are there; name a folder of your own")
    added, said = [], []
    for lesson in notebooks.find():
        mine, before = _places(folder, lesson)
        text = handed_out(lesson)
        untouched = before.exists() and mine.exists() and before.read_bytes() == mine.read_bytes()
        if not mine.exists():
            added.append(notebooks.name_of(lesson))
        elif not untouched:
            if before.exists() and before.read_text(encoding="utf-8") != text:
                name = notebooks.name_of(lesson)
                said.append(
                    f"{name} has changed since you got it: `labkit reset {name}` gives you the new one."
                )
            continue
        paths.write_text(mine, text)
        paths.write_text(before, text)
        if (images := lesson.parent / "images").exists():
            shutil.copytree(images, mine.parent / "images", dirs_exist_ok=True)
    if added:
        said.insert(0, f"Copied into {os.path.relpath(folder)}: {', '.join(added)}.")
    return said


def _places(folder: Path, lesson: Path) -> tuple[Path, Path]:
    """Where a lesson lies in a learner's folder, and where it is kept as it was handed out."""
    name = f"{notebooks.name_of(lesson)}.ipynb"
    return folder / name, folder / paths.STATE / "handed_out" / name


def handed_out(lesson: Path) -> str:
    """A lesson as a learner gets it: the text of the notebook, without outputs."""
    notebook = json.loads(lesson.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def reset(folder: Path, lesson: str) -> tuple[Path, Path | None]:
    """Put a fresh copy of a lesson into a learner's folder, and forget the verdicts on its exercises.

    Returns the fresh file, and the name that the learner's own file has now, None where there was none.
    ValueError for an unknown lesson.
    """
    published = notebooks.resolve(lesson)
    (mine, before), aside = _places(folder, published), None
    if mine.exists():
        aside = mine.rename(mine.with_name(f"{mine.stem}.before-{datetime.now():%Y-%m-%d-%H%M%S-%f}.ipynb"))
    for path in (mine, before):
        paths.write_text(path, handed_out(published))
    verdicts = folder / paths.STATE / "attempts" / notebooks.key_of(published) / "verdicts.json"
    verdicts.unlink(missing_ok=True)
    return mine, aside
