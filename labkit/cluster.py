"""Jobs on a cluster, through submitit: array jobs of Slurm, or one after the other on this machine.

What the user says about partitions and devices gets into a script that a shell reads. Only known keys get
there, and only values made of letters, digits and a few signs.
"""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from labkit import jobs, places, worker
from labkit.jobs import Job
from labkit.pool import Pool

PLAIN = r"[\w.,:=/@+-]+"
KEYS = {
    "partition": PLAIN,
    "account": PLAIN,
    "qos": PLAIN,
    "gres": PLAIN,
    "constraint": r"[\w.,:=/@+|&!*()\[\]-]+",
    "exclude": r"[\w.,\[\]-]+",
    "nodelist": r"[\w.,\[\]-]+",
    "mem": r"\d+[KMGT]?B?",
    "time": r"[1-9]\d*",
    "cpus-per-task": r"[1-9]\d*",
    "gpus-per-node": r"[1-9]\d*",
    "array-parallelism": r"[1-9]\d*",
    "reservation": PLAIN,
    "container-image": r"[\w.,:=/@+#-]+",
    "container-mounts": PLAIN,
    "apptainer": PLAIN,
}
"""What `--slurm` takes, and how a value has to look: Slurm's own names, time in minutes."""
OF_THE_STEP = ("container-image", "container-mounts")
"""Options of srun, which Pyxis adds to it."""
OF_THE_BATCH = ("reservation",)
"""Options of sbatch that submitit has no parameter for."""
CHOOSING = ("partition", "gres", "constraint", "nodelist", "container-image", "apptainer")
"""Options that choose the device or the software: with another value of these, results are other results."""
NUMBERS = ("time", "cpus-per-task", "gpus-per-node", "array-parallelism")
TIME_MIN = 60
"""Minutes that a job gets unless `--slurm time` says otherwise."""
APPEARS_S = 30.0
"""A file that another machine has written is seen here after this at the latest."""
ASK_AGAIN_S: tuple[float, ...] = (1.0, 2.0, 4.0)
"""Waits before Slurm is asked again about a job that it does not know: its accounting may lag or be busy."""
UNFINISHED = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "UNKNOWN")
"""What Slurm may still say of a job that has just ended."""
TIMED_OUT = "not requeued because: timed-out"
"""In what submitit raises where Slurm warns of the limit: the job ends then, and its state becomes FAILED."""
CAUSES = {
    "TIMEOUT": "reached its time limit: ask for more with --slurm time=MINUTES, which is "
    f"{TIME_MIN} if not given",
    "NODE_FAIL": "lost its node",
    "OUT_OF_MEMORY": "used up its memory: ask for more with --slurm mem=SIZE, as mem=64G",
}
"""Why a job gave no result, by its state, and what helps."""


def options(assignments: Iterable[str]) -> dict[str, dict[str, str]]:
    """Options of Slurm by variant: a key that is given more than once makes a variant of each value.

    ValueError for a key that is not known or a value with signs that have no place in it.
    """
    given: dict[str, list[str]] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or key not in KEYS:
            raise ValueError(f"--slurm {assignment!r}: write key=value, with a key of {', '.join(KEYS)}")
        if not re.fullmatch(KEYS[key], value, flags=re.ASCII):
            raise ValueError(f"--slurm {assignment!r}: {value!r} is no value for {key}")
        if value in given.setdefault(key, []):
            raise ValueError(f"--slurm {assignment!r} is given twice")
        given[key].append(value)
    if "apptainer" in given and "container-image" in given:
        raise ValueError("--slurm apptainer and --slurm container-image name two containers: give one")
    several = [key for key, values in given.items() if len(values) > 1]
    made = {}
    for values in product(*given.values()):
        chosen = dict(zip(given, values, strict=True))
        made[",".join(f"{key}={chosen[key]}" for key in several)] = chosen
    return made


def parameters(chosen: Mapping[str, str]) -> dict[str, Any]:
    """A variant's options as submitit takes them."""
    plain = {
        key.replace("-", "_"): int(value) if key in NUMBERS else value
        for key, value in chosen.items()
        if key not in (*OF_THE_STEP, *OF_THE_BATCH, "apptainer")
    }
    made: dict[str, Any] = {"job_name": "labkit", "time": TIME_MIN, **plain}
    if not {"gres", "gpus-per-node"} & set(chosen):
        made["gpus_per_node"] = 1
    made["srun_args"] = [f"--{key}={chosen[key]}" for key in OF_THE_STEP if key in chosen]
    made["additional_parameters"] = {key: chosen[key] for key in OF_THE_BATCH if key in chosen}
    return made


def device(chosen: Mapping[str, str]) -> str:
    """What chooses a variant's device and software."""
    return " ".join(["slurm", *(f"{key}={chosen[key]}" for key in CHOOSING if key in chosen)])


def python(chosen: Mapping[str, str]) -> str | None:
    """What starts Python in a job, where that is not this Python: the one of the container."""
    if "apptainer" in chosen:  # the clone has to be there too: it may lie outside the home folder
        return shlex.join(
            ["apptainer", "exec", "--nv", "--bind", str(places.CHECKOUT), chosen["apptainer"], "python3"]
        )
    return "python3" if "container-image" in chosen else None


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ValueError("--executor needs submitit: pip install -e '.[cluster]'") from error
    return submitit


def folder() -> Path:
    """Where submitit keeps its scripts and logs, one for all jobs."""
    return places.BUILD / "logs" / "submitit"


def local() -> Pool[str]:
    """submitit's local executor, one job after the other: a rehearsal of a cluster on this machine.

    Stopped, it waits until submitit's processes have ended, which kill each other after a second: a worker
    that takes longer ends by itself. ValueError where submitit is not installed.
    """
    submitit = _submitit()
    submitit.local.local.subprocess = SimpleNamespace(Popen=_start_apart)  # there is no option for it
    # It would hide every GPU from a job that does not ask for numbers of its own: what this session sees is
    # given to the worker as it is.
    around = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}

    def work(job: Job, _slot: str, stopped: Callable[[], bool]) -> str:
        executor = submitit.LocalExecutor(folder())
        executor.update_parameters(timeout_min=7 * 24 * 60)
        _share_path()
        task = executor.submit(worker.launch_far, (*worker.COMMAND, str(job.file)), around, os.getpid())
        while not (task.done() or stopped()):
            time.sleep(0.1)
        if not task.done():
            task.cancel()  # the job's process ends its worker
            deadline = time.monotonic() + worker.GRACE_S
            while not task.done() and time.monotonic() < deadline:
                time.sleep(0.1)
            return "stopped"
        return _how_it_ended(job, task)

    return Pool(["this machine"], work)


def _start_apart(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a job's process out of reach of the terminal's Ctrl-C, with a log for what it says.

    `Pool.stop` ends it by SIGINT, which it answers with a traceback.
    """
    with (folder() / "controller.log").open("ab") as log:
        return subprocess.Popen(command, **options, stderr=log, start_new_session=True)


def _share_path() -> None:
    """Jobs inherit the environment: they find this checkout's labkit, wherever it is installed."""
    if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != str(places.CHECKOUT):
        os.environ["PYTHONPATH"] = places.python_path()


def _how_it_ended(job: Job, task: Any) -> str:
    error = task.exception()
    if error is not None:
        state = "TIMEOUT" if TIMED_OUT in str(error) else _final_state(task)
        log = task.paths.stderr
        return _cause(task, state) or (
            f"job {task.job_id} gave no result ({state.lower()}); its own log is {log}"
        )
    ended = worker.how_it_ended(task.result())
    if ended:
        return _cause(task, _final_state(task)) or ended
    deadline = time.monotonic() + APPEARS_S
    while jobs.result(job) is None and time.monotonic() < deadline:
        _look_afresh(job.home)
        time.sleep(0.2)
    return ""


def _cause(task: Any, state: str) -> str:
    """Why a job in this state gave no result; empty where the state does not say it."""
    return f"job {task.job_id} {CAUSES[state]}" if state in CAUSES else ""


def _final_state(task: Any) -> str:
    """The state of a job that has ended: submitit may know an older one, and Slurm may take a while."""
    state = "UNKNOWN"
    for pause_s in (0.0, *ASK_AGAIN_S):
        time.sleep(pause_s)
        task.get_info(mode="force")
        state = task.state.partition(" ")[0]  # CANCELLED is followed by who did it
        if state not in UNFINISHED:
            break
    return state


def _look_afresh(folder: Path) -> None:
    """Make the listing of a folder on a network file system fresh."""
    folder.chmod(folder.stat().st_mode)


def _is_known(job: Job, task: Any) -> bool:
    """Whether Slurm, or what the job has written, says how it stands."""
    for pause_s in (0.0, *ASK_AGAIN_S):
        time.sleep(pause_s)
        state = task.watcher.get_state(task.job_id, mode="force")
        if state != "UNKNOWN" or task.done() or jobs.kept(job):
            return True
    return False


class SlurmTask:
    """A job of Slurm."""

    def __init__(self, job: Job, task: Any) -> None:
        self._job, self.task = job, task

    @property
    def where(self) -> str:
        """Its number, once it runs; empty as long as it waits."""
        running = self.task.watcher.get_state(self.task.job_id, mode="cache").startswith("RUNNING")
        return f"job {self.task.job_id}" if running or jobs.progress(self._job) else ""

    def done(self) -> bool:
        """Whether it has ended; Slurm is asked now and then."""
        return bool(self.task.done())

    def error(self) -> str:
        """Why it ended without a result, as the end of a sentence."""
        _submitted(self._job).unlink(missing_ok=True)
        return _how_it_ended(self._job, self.task)


class Slurm:
    """Array jobs, one for each variant. ValueError where submitit or Slurm is not there.

    A job's number stays in its folder, so that a run whose own process was lost finds its jobs again.
    """

    poll_s = 2.0

    def __init__(self, variants: Mapping[str, Mapping[str, str]]) -> None:
        submitit = _submitit()
        self._refusals = (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError)
        self._executors = {}
        for name, chosen in variants.items():
            try:
                executor = submitit.SlurmExecutor(folder(), python=python(chosen))
            except RuntimeError as error:
                raise ValueError(f"--executor slurm: {error}") from error
            executor.update_parameters(**parameters(chosen))
            self._executors[name] = executor
        self._tasks: list[SlurmTask] = []

    def start(self, wanted: Sequence[Job]) -> list[SlurmTask]:
        """Submit jobs; those of an earlier run that wait, run or have passed as wanted are taken over."""
        _share_path()
        tasks = {job.name: task for job in wanted if (task := self._earlier(job))}
        self._tasks += tasks.values()  # only now: where one of them is not known, `stop` lets the others run
        new = [job for job in wanted if job.name not in tasks]
        for job in new:
            jobs.prepare(job)
        for variant in self._executors:
            if array := [job for job in new if job.variant == variant]:
                made = self._submit(variant, array)
                tasks |= {job.name: task for job, task in zip(array, made, strict=True)}
        return [tasks[job.name] for job in wanted]

    def _submit(self, variant: str, array: Sequence[Job]) -> list[SlurmTask]:
        """Submit jobs of one variant as an array. ValueError with what Slurm says if it refuses them."""
        commands = [(*worker.COMMAND, str(job.file)) for job in array]
        nothing = [None] * len(array)
        try:
            given = self._executors[variant].map_array(
                worker.launch_far, commands, [{}] * len(array), nothing
            )
        except self._refusals as error:
            said = str(error).strip().rpartition("\n")[2]
            raise ValueError(f"Slurm takes no such job: {said}") from error
        made = [SlurmTask(job, task) for job, task in zip(array, given, strict=True)]
        self._tasks += made  # at once: whatever goes wrong from now on, `stop` cancels them
        for job, task in zip(array, given, strict=True):
            places.write_text(_submitted(job), f"{job.key} {task.job_id}")
        return made

    def _earlier(self, job: Job) -> SlurmTask | None:
        """The job's task of an earlier run, if it has not failed; one that is of no use is cancelled.

        ValueError where nothing says whether it still runs: two workers would write the same files.
        """
        note = _submitted(job)
        try:
            key, number = note.read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            return None
        task = self._executors[job.variant].job_class(folder(), number)
        if key != job.key or job.again:
            if not task.done():
                task.cancel(check=False)
            return None
        if not _is_known(job, task):
            raise ValueError(
                f"Slurm does not say whether job {number} runs: try again in a minute; once `squeue --job "
                f"{number}` shows that it has ended, delete {os.path.relpath(note)} and run the command again"
            )
        if not task.done():
            return SlurmTask(job, task)
        _look_afresh(job.home)
        return SlurmTask(job, task) if jobs.kept(job) else None  # it may have passed since the run began

    def stop(self) -> None:
        """Cancel what has not ended."""
        for running in self._tasks:
            if not running.done():
                running.task.cancel(check=False)


def _submitted(job: Job) -> Path:
    return job.home / "slurm"
