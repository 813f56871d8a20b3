import io
import time

from rich.console import Console

from labkit import reports
from labkit.runner import Failure, Progress


def console(**options):
    return Console(file=io.StringIO(), width=100, **options)


def test_a_log_gets_a_line_at_the_start_and_then_a_heartbeat():
    log = console()
    with reports.LineReport(log, every_s=0.05) as report:
        report(Progress("01_a", 1, 9, "import [torch]", 2.0))
        report(Progress("01_a", 2, 9, "x = [red]", 3.0))
        time.sleep(0.2)
    time.sleep(0.1)
    printed = log.file.getvalue().splitlines()
    assert printed[0] == "01_a: cell 1 of 9"
    assert printed[1] == "01_a: cell 2 of 9, 3 s: x = [red]"
    assert 2 <= len(printed) <= 5, "nothing more after the end"


def test_a_terminal_gets_a_live_line_that_goes_away():
    terminal = console(force_terminal=True)
    with reports.report(terminal) as report:
        assert isinstance(report, reports.LiveReport)
        report(Progress("01_a", 2, 9, "x = [red]", 3.0))
    assert "x = [red]" in terminal.file.getvalue() and "2/9" in terminal.file.getvalue()
    assert isinstance(reports.report(console()), reports.LineReport)


def test_a_failure_shows_cell_source_and_error():
    log = console()
    reports.failure(log, "01_[a]", Failure(0, "N = [1]", "ValueError: why [b]", "line 3"))
    shown = log.file.getvalue()
    assert shown == "01_[a] failed in the given parameters:\n    N = [1]\nline 3\nValueError: why [b]\n"
