"""Lessons and suites on several GPUs of a machine, or on a cluster, through submitit.

A job runs the command for one lesson or suite as a process of its own, on one GPU. So a lesson that fails or
crashes ends no other. What has passed leaves a file under build/spread, which every machine of a cluster
sees; the next run of the same code leaves it out.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout
from rich.console import Console

from labkit import backend, paths
from labkit.lessons import notebooks
from labkit.runs.console import say

IN_JOB = "LABKIT_IN_JOB"
"""Set for the commands that a job starts: the command that submitted the job holds the lock for them."""
DEFAULT_MINUTES = 60
"""A job's time limit, unless `--slurm time` says otherwise."""
SLURM_OPTIONS = (
    "account", "cluster", "constraint", "container-image", "container-mounts",
    "cpus-per-task", "exclude", "gpus-per-node", "gres", "mem", "nodelist", "partition", "qos", "reservation",
    "time",
)  # fmt: skip
"""What `--slurm` takes: Slurm's own names, and ``cluster``, which is submitit's (slurm, local or debug)."""
SLURM_VALUE = re.compile(r"[\w.,:=/@+|&!*()\[\]#%-]+", re.ASCII)
TERMINATE_S = 10.0
"""Processes that have not ended this long after they were asked to are killed."""


Worker = tuple[Any, str | None]
"""Where a job runs: submitit's executor, and CUDA_VISIBLE_DEVICES of the job, None on a cluster."""


def workers_for(gpus: str | None, slurm: Sequence[str], count: int) -> list[Worker]:
    """One worker for each GPU that ``gpus`` names ("all" or "0,2"), or ``count`` jobs of a cluster.

    ``slurm`` holds assignments of SLURM_OPTIONS, as "partition=gpu".

    Raises:
        ValueError: for a GPU that is not there, or a wrong option or value of Slurm.
    """
    if gpus is not None and slurm:
        raise ValueError("--gpus is for this machine, --slurm for a cluster: give one of them")
    if gpus is None:
        cluster, parameters = slurm_parameters(slurm)
        return [(_executor(cluster, **parameters), None)] * count
    here = {str(number): gpu for number, gpu in enumerate(gpus_here())}
    if not here:
        raise ValueError("--gpus needs a GPU, and this session has none: see `labkit doctor`")
    numbers = list(here) if gpus == "all" else list(dict.fromkeys(gpus.split(",")))
    for number in numbers:
        if number not in here:
            raise ValueError(
                f"--gpus {gpus}: {number!r} is no GPU here; write all, or some of 0 to {len(here) - 1}"
            )
    local = _executor("local", timeout_min=7 * 24 * 60)
    return [(local, here[number]) for number in numbers]


def gpus_here() -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES where it is set, else the UUIDs of the GPUs Triton supports."""
    if backend.interpreting():
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed:
        return [name.strip() for name in listed.split(",")]
    found = backend.driver()
    return [g.uuid for g in (found.gpus if found else ()) if g.capability >= backend.OLDEST_CAPABILITY]


def slurm_parameters(assignments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The name of the cluster and the parameters that submitit takes, from assignments of SLURM_OPTIONS."""
    options = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or key not in SLURM_OPTIONS:
            raise ValueError(
                f"--slurm {assignment!r}: write key=value, with a key of {', '.join(SLURM_OPTIONS)}"
            )
        if not SLURM_VALUE.fullmatch(value) or (key == "time" and not re.fullmatch("[1-9][0-9]*", value)):
            raise ValueError(f"--slurm {assignment!r}: {value!r} is no value for {key}")
        options[key] = value
    cluster = options.pop("cluster", "slurm")
    containers = [key for key in ("container-image", "container-mounts") if key in options]
    parameters: dict[str, Any] = {
        "timeout_min": int(options.pop("time", DEFAULT_MINUTES)),
        "slurm_srun_args": [f"--{key}={options.pop(key)}" for key in containers],
        "slurm_job_name": "labkit",
        "slurm_additional_parameters": options,
    }
    if not {"gres", "gpus-per-node"} & set(options):
        parameters["gpus_per_node"] = 1
    return cluster, parameters


def _executor(cluster: str, **parameters: Any) -> Any:
    import submitit  # a run on one GPU does not need it

    try:
        executor = submitit.AutoExecutor(paths.BUILD / "logs" / "submitit", cluster=cluster)
    except (RuntimeError, ValueError) as error:  # there is no srun here
        raise ValueError(f"--slurm: {error}") from error
    executor.update_parameters(**parameters)
    return executor


@contextmanager
def exclusive(command: str) -> Iterator[None]:
    """ValueError while another run of this command works in this clone: both would write the same files."""
    folder = paths.BUILD / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / command, blocking=False)
    try:
        if IN_JOB not in os.environ:
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


def result_folder(command: str, name: str) -> Path:
    """The folder for the results of one lesson or suite; a file ``passed`` in it says that it has passed."""
    return paths.BUILD / "spread" / command / name


def log_path(command: str, name: str) -> Path:
    """The file with what the command printed for one lesson or suite."""
    return paths.BUILD / "logs" / command / f"{name}.log"


def run(
    console: Console,
    command: str,
    names: Sequence[str],
    options: Sequence[str],
    workers: Sequence[Worker],
    again: bool,
) -> bool:
    """Run ``labkit COMMAND NAME OPTIONS`` for every name on the workers; returns whether all have passed.

    In an option ``{folder}`` stands for the :func:`result_folder` of the name. What an earlier run of the
    same code has finished is left out, unless ``again``. However it ends, no process is left behind, and what
    has finished is printed.
    """
    of_code, key = result_folder(command, "code"), _code_key([command, *options])
    if again or not of_code.exists() or of_code.read_text() != key:
        delete_results(command)
        paths.write_text(of_code, key)
    passed = [name for name in names if (result_folder(command, name) / "passed").exists()]
    if passed:
        say(console, f"Continued: an earlier run finished {', '.join(passed)}. --again does all of it.")
    todo = [name for name in names if name not in passed]
    os.environ["PYTHONPATH"] = paths.python_path()  # jobs inherit it, and find this checkout's labkit
    free, running = list(workers), dict[str, tuple[Any, Worker]]()
    failures = dict.fromkeys(todo, "stopped, or not begun")
    try:
        while todo or running:
            for name, worker in zip(todo[:], free[:], strict=False):
                todo.remove(name)
                free.remove(worker)
                job = worker[0].submit(run_one, paths.BUILD, command, name, list(options), worker[1])
                running[name] = job, worker
                say(console, f"{name}: begun")
            for name, (job, worker) in list(running.items()):
                if job.done():
                    del running[name]
                    free.append(worker)
                    failures[name] = _failure(job)
                    say(console, f"{name}: ended")
            time.sleep(0.5)
    finally:
        _cancel([job for job, _ in running.values()])
        passed += [name for name, failure in failures.items() if not failure]
        for name in (name for name in names if failures.get(name)):
            log = os.path.relpath(log_path(command, name))
            say(console, f"{name}: {failures[name]}; see {log}")
        if len(passed) < len(names):
            finished = ", ".join(name for name in names if name in passed) or "nothing"
            say(console, f"Finished: {finished}. The same command goes on with the others.")
    return len(passed) == len(names)


def delete_results(command: str) -> None:
    """Delete the results of a complete run, so that the next one starts from the beginning."""
    shutil.rmtree(paths.BUILD / "spread" / command, ignore_errors=True)


def run_one(build: Path, command: str, name: str, options: Sequence[str], gpu: str | None) -> int:
    """What submitit runs as a job: the command for one lesson or suite; returns its exit status."""
    paths.BUILD = build
    folder, log = result_folder(command, name), log_path(command, name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    # submitit's local executor hides every GPU, so the variable is always set for what it starts
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with log.open("wb") as stream:
        status = subprocess.run(
            [sys.executable, "-m", "labkit", command, name]
            + [option.replace("{folder}", str(folder)) for option in options],
            env={**os.environ, **visible, IN_JOB: "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        ).returncode
    if status == 0:
        (folder / "passed").touch()
    return status


def _code_key(command: Sequence[str]) -> str:
    """A hash of the command, the package and every lesson's code: a result of other code does not count."""
    code = [*command, *map(notebooks.code_hash, notebooks.find())]
    for folder in (paths.CHECKOUT / "labkit", paths.NOTEBOOKS / "solutions"):
        code += [file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def _failure(job: Any) -> str:
    """Why a job that has ended gave no result, as the end of a sentence; empty where it passed."""
    from submitit.core.utils import UncompletedJobError

    try:
        status = job.result()
    except UncompletedJobError:  # a lost node, a limit of time
        return f"its job ended without a result ({os.path.relpath(job.paths.stderr)})"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"failed with status {status}" if status else ""


def _cancel(jobs: Iterable[Any]) -> None:
    """Cancel the running jobs. submitit's local executor ends only its own process, not its children."""
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
    for process in psutil.wait_procs(family, TERMINATE_S)[1]:
        process.kill()
