"""One command at a time for each lesson, and for each suite of the benchmark."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click
from filelock import FileLock, Timeout

from labkit import paths


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """ClickException while another command in this clone works under this name: both write the same files."""
    folder = paths.BUILD / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / name, blocking=False)
    try:
        with suppress(NotImplementedError):  # a file system without locks, as Lustre can be
            lock.acquire()
    except Timeout as error:
        raise click.ClickException(
            f"{name}: another command is at work on it and writes the same files: wait for it, or stop it"
        ) from error
    try:
        yield
    finally:
        lock.release()
