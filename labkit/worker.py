"""The process that works on one job: ``python -m labkit.worker job.json``.

It writes its log, executed lessons and the job's folder, all of them under build. Whoever started it may be
on another machine: all that the two share are files. It takes its turns on the GPU that it sees.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit import backend, jobs
from labkit.jobs import Job, Outcome

COMMAND: tuple[str, ...] = ("-m", "labkit.worker")
"""What Python is given to start a worker, before the file of its job."""
KEPT_S = 7 * 24 * 3600.0
"""Rows of a suite that was cut short serve the next run so long: a queue may take days, and the job's key
says that the code is the same."""
GRACE_S = 10.0
"""A worker that was asked to end, and has not, is ended by force after this."""


def launch(
    arguments: tuple[str, ...], environment: Mapping[str, str | None], stopped: Callable[[], bool]
) -> int:
    """Run this Python with these arguments until it ends or ``stopped()``; gives its exit status.

    ``environment`` is what changes in this process's own; None removes a variable.
    """
    around = {**os.environ, **environment}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={name: value for name, value in around.items() if value is not None},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the one who asked: that one ends the workers in order
    )
    try:
        while process.poll() is None and not stopped():
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
    return process.wait()


def launch_far(arguments: tuple[str, ...], environment: Mapping[str, str | None], owner: int | None) -> int:
    """`launch` as a job of submitit; where ``owner`` is a process of this machine, it ends with that one."""
    return launch(arguments, environment, lambda: owner is not None and not _alive(owner))


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def how_it_ended(status: int) -> str:
    """What an exit status means, as the end of a sentence; empty for a worker that came to its end."""
    if 0 <= status <= 128:
        return "" if status in (0, 1) else f"its worker ended with status {status}"
    number = status - 128 if status > 0 else -status
    if number not in set(signal.Signals):
        return f"its worker ended with status {status}"
    name = signal.Signals(number).name
    hint = ", as it is when memory runs out" if name == "SIGKILL" else ""
    return f"its worker was ended by {name}{hint}"


def main() -> None:
    """Do the job that is named on the command line; the exit status says whether it passed."""
    job = Job.read(Path(sys.argv[1]))
    _write_to(job.log)
    end_when_asked()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.environ["LABKIT_CACHE"] = str(job.home / "cache")
    began = time.perf_counter()
    try:
        if jobs.key(job) != job.key:
            raise ValueError("its code was edited since it was asked for: the same command runs it again")
        _take_roofs(job)
        outcome = WORK[job.kind](job, began)
    except Exception as error:
        traceback.print_exc()
        message = str(error).partition("\n")[0]  # the log has all of it
        outcome = Outcome(job, False, f"{type(error).__name__}: {message}", seconds=_since(began))
    jobs.finish(outcome)
    sys.exit(not outcome.passed)


def end_when_asked() -> None:
    """From now on SIGTERM, or what a cluster sends before its limit, ends this process by SystemExit."""
    asks = (signal.SIGTERM, signal.SIGUSR2)

    def end(number: int, _: object) -> None:
        for each in asks:  # asked again it goes on ending: it may be about to write what it has
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in asks:
        signal.signal(each, end)


def _write_to(log: Path) -> None:
    """From now on everything that this process prints is in the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)


def _end_with(parent: int) -> None:
    """A worker whose parent is gone would be in the way of the next run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)  # the main thread hangs outside Python, where no handler runs


def _take_roofs(job: Job) -> None:
    """Take along what the user's machines have measured; their file names say of which device they are."""
    from labkit import places

    for path in sorted((Path(job.cache) / "roofs").glob("*.jsonl")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):  # `machine.roofs` counts it as absent, too; it may be of another card
            continue
        places.write_text(job.home / "cache" / "roofs" / path.name, text)


def _since(began: float) -> float:
    return time.perf_counter() - began


def _lesson(job: Job) -> Callable[[Any], None]:
    """Notes a lesson's progress, in its folder and its log."""

    def note(progress: Any) -> None:
        jobs.say_progress(job, progress.cell, progress.cells, progress.line)
        print(
            f"{progress.seconds:6.1f} s  cell {progress.cell} of {progress.cells}: {progress.line}",
            flush=True,
        )

    return note


def _ended(job: Job, result: Any, device: str) -> Outcome:
    """The outcome of an executed lesson."""
    if result.failure:
        print(f"{result.failure.traceback}\n{result.failure.message}", flush=True)
    detail = asdict(result)
    for name in ("notebook_path", "html_path"):
        detail[name] = str(detail[name])
    return Outcome(job, result.passed, device=device, seconds=result.seconds, detail=detail)


def _run(job: Job, began: float) -> Outcome:
    from labkit import runner

    output = Path(job.build) / "lessons" / f"{job.name}.ipynb"
    given, limit_s = job.options["parameters"], job.options["limit_s"]
    result = runner.execute(Path(job.subject), output, given, _lesson(job), cell_limit_s=limit_s)
    return _ended(job, result, _device())


def _device() -> str:
    """The name of the device; empty under the interpreter, without loading torch."""
    if backend.interpreting():
        return ""
    from labkit import machine

    return machine.identity().device


def _record(job: Job, began: float) -> Outcome:
    from labkit import device, machine, record

    if not device.has_gpu():
        raise ValueError("recording needs a GPU, and where the worker ran there is none")
    identity = machine.identity()
    path, tapes, work = Path(job.subject), job.home / "recorded", job.home / "work"
    machine.roofs()
    record.record_roofs(machine.cache_path(), identity, tapes, work)
    result = record.record(
        path, identity, _lesson(job), again=job.again, tapes=tapes, work=work,
        target=job.home / path.name,
    )  # fmt: skip
    if result is None:
        return Outcome(job, True, device=identity.device, seconds=_since(began))
    return _ended(job, result, identity.device)


def _bench(job: Job, began: float) -> Outcome:
    from labkit import bench, bench_report, device, machine, record, rows, turns

    if not device.has_gpu():
        raise ValueError("a benchmark needs a GPU, and where the worker ran there is none")
    if job.options["roofs"]:
        machine.roofs()
        record.record_roofs(machine.cache_path(), machine.identity(), job.home / "recorded")
    run = bench.Bench([job.subject], job.options["peers"], kept_s=KEPT_S)

    def note(progress: bench.Progress) -> None:
        said = bench_report.line(progress.row)
        jobs.say_progress(job, progress.done, progress.total, said)
        print(f"{_since(began):6.1f} s  row {progress.done} of {progress.total}: {said}", flush=True)

    def waits(said: str) -> None:
        if said:
            jobs.say_progress(job, len(run.measured), run.total, said)
            print(f"{_since(began):6.1f} s  {said}", flush=True)

    run.progress = note
    turns.TELL.set(waits)
    try:
        run.run()
    finally:  # also of a suite that is cut short
        if run.measured:
            rows.write(job.home / "rows.jsonl", run.measured)
    return Outcome(job, True, device=machine.identity().device, seconds=_since(began))


WORK: dict[str, Callable[[Job, float], Outcome]] = {"run": _run, "record": _record, "bench": _bench}

if __name__ == "__main__":
    main()
