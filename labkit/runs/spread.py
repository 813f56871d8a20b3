"""Lessons and suites spread over the GPUs of a machine or the jobs of a cluster, through submitit.

Each job works through the list: it claims what no other job has, and does it with the same command for this
one lesson or suite, in a process of its own. So a lesson that fails or dies ends no other. What is claimed
and how it ended stands in files under build/spread, which every node sees; the next run leaves out what
passed.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout
from rich.console import Console

from labkit import backend, paths
from labkit.lessons import notebooks
from labkit.runs.report import say

PART = "LABKIT_PART"
"""Set in the commands of a spread run: the lock of that run is theirs."""
MINUTES = 60
"""A job's limit of time, unless `--slurm time` says otherwise."""
KEYS = (
    "account", "cluster", "constraint", "container-image", "container-mounts",
    "cpus-per-task", "exclude", "gpus-per-node", "gres", "mem", "nodelist", "partition", "qos", "reservation",
    "time",
)  # fmt: skip
"""What `--slurm` takes: Slurm's own names, and ``cluster``, which is submitit's (slurm, local or debug)."""
VALUE = re.compile(r"[\w.,:=/@+|&!*()\[\]#%-]+", re.ASCII)
SEEN_S = 30.0
"""A file that another machine has written is seen here after this at the latest."""
GRACE_S = 10.0
"""Processes that were asked to end, and have not, are killed after this."""


@dataclass(frozen=True)
class Place:
    """Where a job runs: an executor of submitit, its name in messages, and CUDA_VISIBLE_DEVICES there."""

    executor: Any
    name: str
    gpu: str | None = None


def places_for(gpus: str | None, slurm: Sequence[str], count: int) -> list[Place]:
    """The jobs to work with: one for each GPU that ``gpus`` names, or ``count`` of a cluster.

    Raises:
        ValueError: for a GPU or a key that is not there, a value with other signs, or without submitit.
    """
    if gpus is not None and slurm:
        raise ValueError("--gpus is for this machine, --slurm for a cluster: give one of them")
    if gpus is not None:
        local = _executor("local", timeout_min=7 * 24 * 60)
        return [Place(local, f"GPU {number}", gpu) for number, gpu in _chosen(gpus)]
    options = dict(_option(assignment) for assignment in slurm)
    executor = _executor(options.pop("cluster", "slurm"), **_parameters(options))
    return [Place(executor, "job")] * count


def _chosen(wanted: str) -> list[tuple[int, str]]:
    """GPUs by number, each with the value of CUDA_VISIBLE_DEVICES that leaves it alone."""
    here = gpus_here()
    if not here:
        raise ValueError("--gpus needs a GPU, and this session has none: see `labkit doctor`")
    numbers = list(map(str, range(len(here)))) if wanted == "all" else wanted.split(",")
    for number in numbers:
        if not (number.isascii() and number.isdigit()) or int(number) >= len(here):
            raise ValueError(
                f"--gpus {wanted}: {number!r} is no GPU here; write all, or some of 0 to {len(here) - 1}"
            )
    return [(int(number), here[int(number)]) for number in dict.fromkeys(numbers)]


def gpus_here() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists, as it calls them, else the UUIDs of those Triton supports."""
    if backend.interpreting():
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed:
        return [name.strip() for name in listed.split(",")]
    found = backend.driver()
    return [g.uuid for g in (found.gpus if found else ()) if g.capability >= backend.OLDEST_CAPABILITY]


def _option(assignment: str) -> tuple[str, str]:
    key, equals, value = assignment.partition("=")
    if not equals or key not in KEYS:
        raise ValueError(f"--slurm {assignment!r}: write key=value, with a key of {', '.join(KEYS)}")
    if not VALUE.fullmatch(value) or (key == "time" and not re.fullmatch("[1-9][0-9]*", value)):
        raise ValueError(f"--slurm {assignment!r}: {value!r} is no value for {key}")
    return key, value


def _parameters(options: dict[str, str]) -> dict[str, Any]:
    """Slurm's options as submitit takes them."""
    srun = [
        f"--{key}={options.pop(key)}" for key in ("container-image", "container-mounts") if key in options
    ]
    made: dict[str, Any] = {"timeout_min": int(options.pop("time", MINUTES)), "slurm_srun_args": srun}
    if not {"gres", "gpus-per-node"} & set(options):
        made["gpus_per_node"] = 1
    return {**made, "slurm_job_name": "labkit", "slurm_additional_parameters": options}


def _executor(cluster: str, **parameters: Any) -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ValueError("several GPUs need submitit: pip install submitit") from error
    try:
        executor = submitit.AutoExecutor(paths.BUILD / "logs" / "submitit", cluster=cluster)
    except (RuntimeError, ValueError) as error:  # there is no srun here
        raise ValueError(f"--slurm: {error}") from error
    executor.update_parameters(**parameters)
    return executor


@contextmanager
def alone(command: str) -> Iterator[None]:
    """ValueError while another run of this command works in this clone: both would write the same files."""
    folder = paths.BUILD / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / command, blocking=False)
    try:
        if PART not in os.environ:
            lock.acquire()
    except NotImplementedError:  # a file system without locks, as Lustre can be
        pass
    except Timeout as error:
        raise ValueError(
            f"another `labkit {command}` is running and writes the same files: wait until it has ended, "
            "or stop it"
        ) from error
    try:
        yield
    finally:
        lock.release()


def folder(command: str, name: str) -> Path:
    """Where the processes of a spread run leave what belongs to one lesson or suite."""
    return paths.BUILD / "spread" / command / name


def log(command: str, name: str) -> Path:
    """What the process of one lesson or suite prints."""
    return paths.BUILD / "logs" / command / f"{name}.log"


def run(
    console: Console,
    command: str,
    names: Sequence[str],
    options: Sequence[str],
    given: Sequence[Place],
    again: bool,
) -> bool:
    """Do ``labkit COMMAND NAME OPTIONS`` for every name; whether all of them have passed.

    In an option ``{folder}`` stands for :func:`folder` of the name. What an earlier run of the same code has
    finished is left out, unless ``again``. However it ends, no process is left, and what is finished is said.
    """
    key = _key([command, *options])
    kept = [] if again else [name for name in names if _status(command, name, key) == 0]
    if kept:
        say(console, f"Continued: an earlier run finished {', '.join(kept)}. --again does all of it.")
    todo = [name for name in names if name not in kept]
    for name in todo:
        shutil.rmtree(folder(command, name), ignore_errors=True)
        log(command, name).unlink(missing_ok=True)
    os.environ["PYTHONPATH"] = paths.python_path()  # jobs inherit it, and find this checkout's labkit
    jobs: dict[str, Any] = {}
    said: set[tuple[str, str]] = set()
    try:
        for place in given[: len(todo)]:
            job = place.executor.submit(work, str(paths.BUILD), command, todo, list(options), key, place.gpu)
            jobs[f"{place.name} {job.job_id}" if place.gpu is None else place.name] = job
        while not all(job.done() for job in jobs.values()):
            _tell(console, command, todo, said)
            time.sleep(0.5)
        until = time.monotonic() + SEEN_S * any(place.gpu is None for place in given)
        while time.monotonic() < until and any(_status(command, name, key) is None for name in todo):
            time.sleep(0.5)
        _tell(console, command, todo, said)
    finally:
        _end(jobs.values())
        passed = [name for name in names if _status(command, name, key) == 0]
        for name in names:
            if name not in passed:
                say(
                    console,
                    f"{name}: {_why(command, name, key, jobs)}; see {os.path.relpath(log(command, name))}",
                )
        if passed != list(names):
            say(
                console,
                f"Finished: {', '.join(passed) or 'nothing'}. The same command goes on with the others.",
            )
    return passed == list(names)


def forget(command: str) -> None:
    """The run is complete: the next one does everything anew."""
    shutil.rmtree(paths.BUILD / "spread" / command, ignore_errors=True)


def work(
    build: str, command: str, names: Sequence[str], options: Sequence[str], key: str, gpu: str | None
) -> None:
    """A job of submitit: one command after the other, for the names that no other job has claimed."""
    paths.BUILD = Path(build)
    # submitit's local executor hides every GPU, so the variable is always set for what it starts
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    for name in names:
        home, output = folder(command, name), log(command, name)
        try:
            home.mkdir(parents=True)
        except FileExistsError:
            continue
        output.parent.mkdir(parents=True, exist_ok=True)
        filled = [option.replace("{folder}", str(home)) for option in options]
        with output.open("ab") as stream:
            status = subprocess.run(
                [sys.executable, "-m", "labkit", command, name, *filled],
                env={**os.environ, **visible, PART: "1"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            ).returncode
        paths.write_text(home / "status.json", json.dumps([key, status, gpu or os.uname().nodename]))


def _key(command: Sequence[str]) -> str:
    """Changes with the command, the package and every lesson's code: results of other code are not taken."""
    files = sorted(
        [*(paths.CHECKOUT / "labkit").rglob("*.py"), *(paths.NOTEBOOKS / "solutions").glob("*.py")]
    )
    codes = [notebooks.code_hash(path) for path in notebooks.find()]
    text = json.dumps([list(command), codes, [file.read_text(encoding="utf-8") for file in files]])
    return hashlib.sha256(text.encode()).hexdigest()


def _status(command: str, name: str, key: str) -> int | None:
    """The exit status of the command for this name; None where it has not ended, or is of other code."""
    try:
        made, status, _ = json.loads((folder(command, name) / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(status) if made == key else None


def _tell(console: Console, command: str, names: Sequence[str], said: set[tuple[str, str]]) -> None:
    """Say what has begun or ended since the last time."""
    for name in names:
        home = folder(command, name)
        ended = home / "status.json"
        news = "ended" if ended.exists() else "begun" if home.exists() else ""
        if news and (name, news) not in said:
            said.add((name, news))
            say(console, f"{name}: {news}")


def _why(command: str, name: str, key: str, jobs: dict[str, Any]) -> str:
    """Why a name has no result."""
    status = _status(command, name, key)
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return "stopped"
    if status is not None:
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
    if not folder(command, name).exists():
        return "not begun"
    states = {
        where: job.state
        for where, job in jobs.items()
        if job.done() and job.state not in ("COMPLETED", "DONE")
    }
    ends = ", ".join(f"{where} ended ({state.lower()})" for where, state in states.items())
    return f"no result: {ends}" if ends else "stopped"


def _end(jobs: Iterable[Any]) -> None:
    """Cancel what runs. submitit's local executor ends its own process only: descendants are ended here."""
    family: list[psutil.Process] = []
    for job in jobs:
        process = getattr(job, "_process", None)  # of the local executor
        if process is not None and process.poll() is None:
            controller = psutil.Process(process.pid)
            family += [controller, *controller.children(recursive=True)]
        elif not job.done():
            job.cancel()
    for process in family:
        if process.is_running():
            process.terminate()
    for process in psutil.wait_procs(family, GRACE_S)[1]:
        process.kill()
