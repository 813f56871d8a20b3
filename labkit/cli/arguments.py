"""What commands share: the type of a path, and what the user can put right as one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

PATH = click.Path(path_type=Path)


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
