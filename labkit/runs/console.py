"""What the command line prints: sentences, tables, and about lessons which failed and how."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:  # these load slowly, and not every command needs them
    import pandas as pd

    from labkit.runs.execute import Failure, Result


def say(console: Console, text: str) -> None:
    """Print text as it is: nothing in it is markup, and lines are not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: "pd.DataFrame", title: str | None = None) -> None:
    """Print a table of strings, unless it has no rows; nothing in it is markup."""
    if len(table):
        printed = Table(*(Column(name, overflow="fold") for name in table), title=title)
        for row in table.itertuples(index=False):
            printed.add_row(*map(Text, row))
        console.print(printed, highlight=False)


def print_failure(console: Console, lesson: str, failed: "Failure") -> None:
    """Print which cell failed, its source, and how."""
    where = f"cell {failed.cell}" if failed.cell else "the given parameters"
    console.print(f"[bold red]{escape(lesson)} failed in {where}:[/]", highlight=False, soft_wrap=True)
    for line in failed.source.splitlines():
        say(console, f"    {line}")
    say(console, failed.traceback)
    if failed.message not in failed.traceback:
        say(console, failed.message)


def print_results(console: Console, found: Iterable["Result"], unfinished: Iterable[str] = ()) -> None:
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
    console.print(table)
    for result in found:
        say(console, f"  {os.path.relpath(result.html_path)}")
