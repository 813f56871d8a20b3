"""Takes the place of Slurm's sbatch, srun, sacct and scancel: jobs are processes of this machine.

It is called by those names, and keeps its state in the folder that FAKE_SLURM names.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_SLURM"])


def sbatch(script):
    text = Path(script).read_text()
    if "--partition=none\n" in text:
        sys.exit("sbatch: error: invalid partition specified: none")
    number = len(list(STATE.glob("*.sh"))) + 1
    kept = STATE / f"{number}.sh"
    kept.write_text(text)
    array = re.search(r"^#SBATCH --array=0-(\d+)", text, re.MULTILINE)
    tasks = [f"{number}_{task}" for task in range(int(array[1]) + 1)] if array else [str(number)]
    for task in tasks:
        main, _, index = task.partition("_")
        one = {"SLURM_JOB_ID": task.replace("_", "0"), "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
        one |= dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0")
        one |= {"SLURM_ARRAY_JOB_ID": main, "SLURM_ARRAY_TASK_ID": index} if index else {}
        (STATE / f"{task}.state").write_text("RUNNING")
        subprocess.Popen(
            [sys.executable, __file__, "job", task, str(kept)],
            env={**os.environ, **one},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    print(f"Submitted batch job {number}")


def job(task, script):
    process = subprocess.Popen(["bash", script], start_new_session=True)
    (STATE / f"{task}.pid").write_text(str(process.pid))
    state = "FAILED" if process.wait() else "COMPLETED"
    if (STATE / f"{task}.state").read_text() == "RUNNING":
        (STATE / f"{task}.state").write_text(state)


def lose(state, *, all_of_it=True):
    """End the job of an array that this worker belongs to, as Slurm does; or the worker alone."""
    task = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    (STATE / f"{task}.state").write_text(state)
    if all_of_it:
        os.killpg(_group(task), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def warn():
    """Send the job that this worker belongs to what Slurm sends before the limit, and wait to be ended."""
    os.kill(os.getppid(), signal.SIGUSR2)
    time.sleep(600)


def srun(*arguments):
    rest = list(arguments)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            rest.pop(0)
    os.execvp(rest[0], rest)


def sacct(*_):
    print("JobID|State|NodeList")
    for path in STATE.glob("*.state"):
        print(f"{path.stem}|{path.read_text()}|here")


def scancel(task):
    (STATE / f"{task}.state").write_text("CANCELLED")
    group = _group(task)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        time.sleep(0.2)


def _group(task):
    """The job's process group, once it has started."""
    started = STATE / f"{task}.pid"
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(started.read_text())


if __name__ == "__main__":
    name, *given = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if name == Path(__file__).name:
        name, *given = given
    globals()[name](*given)
