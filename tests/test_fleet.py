import errno
import fcntl
import io
import os
import threading
import time
from dataclasses import dataclass, replace

import pytest
from rich.console import Console
from taped import recorded

from labkit import fleet, fleet_report, gather, jobs, places, rows
from labkit.fleet import Fleet
from labkit.jobs import Job, Outcome
from labkit.pool import Pool


@dataclass
class Task:
    end: str
    where: str = "GPU 0"

    def done(self):
        return self.end != "never"

    def error(self):
        return self.end


class Engine:
    """Ends each job at once, as its name says."""

    poll_s = 0.0

    def __init__(self, **ends):
        self.ends, self.started, self.stopped = ends, [], False

    def start(self, wanted):
        made = []
        for job in wanted:
            jobs.prepare(job)
            self.started.append(job.name)
            end = self.ends.get(job.name, [""]).pop(0) if self.ends.get(job.name) else ""
            if end == "stop":
                raise KeyboardInterrupt
            if not end:
                jobs.finish(Outcome(job, True, seconds=1.0))
            made.append(Task(end))
        return made

    def stop(self):
        self.stopped = True


@pytest.fixture
def wanted(tmp_path):
    return [Job("run", f"/x/{name}.ipynb", {}, "k", build=str(tmp_path)) for name in ("a", "b", "c")]


def run(fleet, **console):
    out = Console(file=io.StringIO(), width=120, **console)
    with fleet_report.report(out) as report:
        fleet.run(report)
    return out.file.getvalue()


def test_a_job_that_fails_is_tried_so_often_and_no_more(wanted):
    engine = Engine(a=["lost", "lost", ""], b=["lost"] * 9)
    fleet = Fleet(wanted, engine, retries=2)
    said = run(fleet)
    assert [engine.started.count(name) for name in "abc"] == [3, 3, 1] and engine.stopped
    assert [(one.job.name, one.passed) for one in fleet.ended] == [("a", True), ("b", False), ("c", True)]
    assert not fleet.complete and said.count("it is tried again") == 4
    assert [line for line in said.splitlines() if line.startswith("b: failed: lost; see ")]


def test_a_worker_that_left_no_result_has_failed(wanted):
    class Silent(Engine):
        def start(self, wanted):
            return [Task("") for _ in wanted]

    fleet = Fleet(wanted[:1], Silent())
    assert "a: failed: its worker left no result" in run(fleet)


def test_what_had_just_finished_when_the_run_was_stopped_counts(wanted):
    fleet = Fleet(wanted, Engine(b=["stop"]))
    with pytest.raises(KeyboardInterrupt):
        run(fleet)
    assert [outcome.job.name for outcome in fleet.ended] == ["a"] and fleet.engine.stopped
    said = run(Fleet(wanted, engine := Engine()))
    assert "Continued: an earlier run finished a; 2 to do." in said and engine.started == ["b", "c"]


def test_wanted_again_is_tried_anew_once(wanted):
    run(Fleet(wanted, Engine()))
    (wanted[0].home / "work").mkdir()
    engine = Engine(a=["lost"])
    fleet = Fleet([replace(job, again=True) for job in wanted], engine, retries=1)
    run(fleet)
    assert engine.started == ["a", "b", "c", "a"] and fleet.complete
    assert not (wanted[0].home / "work").exists()
    fleet.forget()
    assert not any(job.home.exists() for job in wanted)


def test_jobs_that_never_start_have_nothing_of_an_older_run(wanted):
    for job in wanted:
        jobs.finish(Outcome(job, True))
        rows.write(job.home / "rows.jsonl", [recorded()])
    started = threading.Event()

    def work(job, slot, stopped):
        started.set()
        while not stopped():
            time.sleep(0.01)
        return "stopped"

    engine = Pool(["one"], work)
    engine.start([replace(job, again=True) for job in wanted])
    assert started.wait(60)
    engine.stop()
    assert gather.measured(wanted) == [] and not any(map(jobs.kept, wanted))


def test_a_log_begins_with_a_run_and_goes_on_when_its_job_is_tried_again(wanted):
    class Logs(Engine):
        def start(self, wanted):
            made = super().start(wanted)
            for job in wanted:
                before = job.log.read_text() if job.log.exists() else ""
                places.write_text(job.log, f"{before}{job.name} {len(self.started)}\n")
            return made

    places.write_text(wanted[0].log, "an older run\n")
    run(Fleet(wanted[:1], Logs(a=["lost", ""]), retries=1))
    assert wanted[0].log.read_text() == "a 1\na 2\n"


def test_the_log_of_a_job_that_is_taken_over_stays(wanted):
    class TakesOver(Engine):
        def start(self, wanted):
            for job in wanted:
                jobs.finish(Outcome(job, True))
            return [Task("") for _ in wanted]

    places.write_text(wanted[0].log, "its worker writes here\n")
    run(Fleet(wanted[:1], TakesOver()))
    assert wanted[0].log.read_text() == "its worker writes here\n"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_where_a_file_system_has_no_locks_runs_go_on_without(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with fleet.alone("run", tmp_path):
        pass


def test_a_terminal_has_a_bar_for_all_and_one_for_each_that_runs(wanted):
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True)
    with fleet_report.report(terminal) as report:
        assert isinstance(report, fleet_report.LiveReport)
        report.begins(wanted, [])
        jobs.say_progress(wanted[0], 2, 9, "x = [red]")
        report.update([(wanted[0], "GPU 3"), (wanted[1], "")])
        report._bars.refresh()
        report.ended(Outcome(wanted[0], True, seconds=2.0, device="Toy"), False)
    said = terminal.file.getvalue()
    assert "a, GPU 3" in said and "2/9" in said and "x = [red]" in said and "0/3" in said
    assert "a: passed in 2.0 s on Toy" in said and "b, " not in said


def test_a_log_says_where_jobs_are_now_and_then(wanted):
    out = Console(file=io.StringIO(), width=100)
    report = fleet_report.LineReport(out, every_s=0.0)
    report.update([(wanted[0], "GPU 0")])
    jobs.say_progress(wanted[0], 1, 2, "first")
    report.update([(wanted[0], "GPU 0"), (wanted[1], "")])
    assert out.file.getvalue().splitlines() == ["a: started on GPU 0", "a on GPU 0: 1 of 2, first"]
