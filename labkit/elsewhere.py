"""Runs a module of labkit in a process of its own, with other environment variables."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit import places
from labkit.profile_tapes import TAPE


def run(module: str, job: Mapping[str, Any], environment: Mapping[str, str], limit_s: float) -> Any:
    """The answer of ``python -m MODULE FOLDER``, which reads job.json and writes answer.json in the folder.

    ``environment`` is set on top of this process's own; a tape under way is not passed on. TimeoutError
    after ``limit_s``; RuntimeError for a process that ends without an answer, with what it said last.
    """
    around = {**os.environ, "PYTHONPATH": places.python_path(), **environment}
    around.pop(TAPE, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        # A file, not a pipe: what the process leaves running would hold a pipe open.
        with (folder / "said").open("wb") as said:
            status = _wait([sys.executable, "-P", "-m", module, name], around, said, limit_s)
        if not (folder / "answer.json").exists():
            last = (folder / "said").read_text(errors="replace").strip().rpartition("\n")[2]
            how = f"status {status}" if status >= 0 else signal.Signals(-status).name
            raise RuntimeError(f"its process ended by {how} without an answer{last and ': '}{last}")
        return json.loads((folder / "answer.json").read_text(encoding="utf-8"))


def _wait(command: list[str], environment: dict[str, str], said: Any, limit_s: float) -> int:
    """The status of the command, which does not outlive the limit, or an exception in here."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # the Jupyter stop button interrupts only the waiting parent
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"its process did not end within {limit_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # what it has started too
            process.wait()
