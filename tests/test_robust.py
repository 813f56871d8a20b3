"""What goes wrong around the course, tried for real: nothing recorded is lost or half written.

What a module can show by itself is in its own file: a broken roof cache in test_machine, out of memory in
test_sweeps, a tape of another version in test_rows, a hostile ticket in measure/test_lock, a flood of output
in runs/test_execute, JupyterLab without a token in test_lab.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys

import processes
import pytest
import stage

from labkit import paths
from labkit.measure import rows

pytestmark = pytest.mark.usefixtures("clone")


@pytest.mark.parametrize(
    ("command", "kept", "number", "codes", "says"),
    [
        # 1 where a library's exit handlers run Python code, which then forgets what ended it
        ("sweep", "tape.jsonl", signal.SIGINT, {-signal.SIGINT, 1}, "KeyboardInterrupt"),
        ("sweep", "tape.jsonl", signal.SIGKILL, {-signal.SIGKILL}, ""),
        ("record", "build/record/*/toy@*.jsonl", signal.SIGINT, {130}, "without --again, goes on."),
    ],
)
def test_whatever_ends_it_what_was_measured_is_kept_and_the_rest_is_measured(
    clone, monkeypatch, command, kept, number, codes, says
):
    stage.set_up_gpu(monkeypatch.setattr)
    monkeypatch.setenv(rows.TAPE, str(clone / "tape.jsonl"))
    lesson = stage.lesson(clone, stage.IMPORT + "stage.tape()")
    before = lesson.read_bytes()
    process = processes.python(stage.__file__, command, env=os.environ | {"STAGE_PAUSE": "0.25"})
    lines = lambda: sum(path.read_text().count("\n") for path in clone.rglob(kept))  # noqa: E731
    processes.wait_for(lambda: lines() >= 3, "rows", 60)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode in codes and says in output, output
    assert command == "sweep" or "Traceback" not in output
    found = stage.whole(clone, kept)
    assert 3 <= len(found) < len(stage.POINTS)
    assert lesson.read_bytes() == before and not list(clone.rglob("recorded/*/toy*"))
    stage.measured()
    if command == "sweep":  # that the next recording starts from such a tape is tried in test_record
        assert stage.sweep() == len(stage.POINTS)
        left = {point["width"] for point in stage.POINTS} - {row.shape["width"] for row in found}
        assert set(stage.measured()) == left, "only the rest is measured"


FULL = """
import contextlib, subprocess, stage
from labkit import paths
from labkit.measure import rows
stage.set_up()
stage.set_up_gpu()
cache = paths.cache()
cache.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", cache], check=True)

def fill(done, total, row):
    if done == 3:
        with contextlib.suppress(OSError), (cache / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(512))

@contextlib.contextmanager
def fails_to_write():
    try:
        yield
        raise AssertionError("it could be written")
    except OSError as error:
        print("told", error, *error.__notes__)

with fails_to_write():
    stage.sweep(progress=fill, tape=cache / "tape.jsonl")
kept, path = stage.whole(cache, "tape.jsonl"), cache / "tape.jsonl"
assert 3 <= len(kept) < 12, len(kept)
before = path.read_bytes()
with fails_to_write():
    rows.write(path, kept * 99)
assert path.read_bytes() == before and not list(cache.rglob("*.part*"))
(cache / "filler").unlink()
stage.measured()
assert stage.sweep(tape=path) == 12 and len(stage.measured()) < 12
"""


def test_a_full_disk_loses_no_row_and_the_rest_is_measured_when_there_is_room():
    own = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
    if not shutil.which("unshare") or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody here mount a disk of its own")
    ran = subprocess.run([*own, sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = r"told .*No space left on device.* is not written; what was kept before is whole.* LABKIT_CACHE"
    assert len(re.findall(told, ran.stdout)) == 2, ran.stdout


# What was written by somebody else

UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "load", "read_pickle", "loads"}
ALLOWED = {
    "judge.py: exec": "the learner's own cell, in a process of its own",
    "child_process.py: ForkingPickler.loads": "a call and its result, between labkit's own processes",
}


def test_data_is_read_as_data():
    found = set()
    for path in (paths.CHECKOUT / "labkit").rglob("*.py"):
        if path.parent.name == "kernels":
            continue  # its loads are a GPU's
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            safe = call.startswith(("json.", "notebooks.", "codegen.")) or call in ("load", "tl.load")
            odd = [name for name in names if name.partition(".")[0] in UNSAFE]
            odd += [call] * (call.rpartition(".")[2] in CALLS and not safe)
            found |= {f"{path.name}: {each}" for each in odd}
    assert found <= set(ALLOWED)
