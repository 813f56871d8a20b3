"""Where the course keeps its files. It imports nothing of labkit."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
"""The clone, or the folder that an installed labkit lies in."""
IN_CLONE = (CHECKOUT / "notebooks").is_dir()
NOTEBOOKS = CHECKOUT / "notebooks" if IN_CLONE else PACKAGE / "course"
BUILD = (CHECKOUT if IN_CLONE else Path.cwd()) / "build"
DATA = PACKAGE / "data"
RECORDED = DATA / "recorded"
PUBLISHED = DATA / "published"
STATE = ".labkit"
"""The folder beside a learner's notebooks that keeps answers, verdicts and guesses."""
STATE_VARIABLE = "LABKIT_STATE"
"""Environment variable: another such folder, for a notebook that is nobody's."""


def cache() -> Path:
    """What labkit can make anew, no answers: ``LABKIT_CACHE``, else the platform's usual place."""
    chosen = os.environ.get("LABKIT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "labkit"


def state() -> Path:
    """Where this learner's answers are: the nearest ``.labkit`` at or above the notebook, else beside it."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    here = Path.cwd()
    found = (folder / STATE for folder in (here, *here.parents))
    return next((folder for folder in found if folder.is_dir()), here / STATE)


def python_path() -> str:
    """PYTHONPATH for a process that must import labkit: this checkout, then what the variable holds now."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, dict.fromkeys([str(CHECKOUT), *given])))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to, which takes its place when all went well; folders are made.

    Nobody ever sees half of a file, and what was there before stays whole where writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # not tempfile's, which are private whatever the umask says: these are the checkout's
    beside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.part{path.suffix}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        with suppress(OSError):  # it may not have come to be, or is in its place; the first error counts
            beside.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as beside, open(beside, "x", encoding="utf-8") as stream:
        stream.write(text)
