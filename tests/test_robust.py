"""What goes wrong around the course, tried for real: nothing recorded is lost or half written.

What a module can show by itself is in its own file: a broken roof cache in test_machine, out of memory in
test_sweeps, a hostile ticket in measure/test_lock, a flood of output in runs/test_execute, JupyterLab
without a token in test_lab.
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
from taped import recorded

from labkit import bench, places, rows

pytestmark = pytest.mark.usefixtures("clone")


@pytest.mark.parametrize(
    ("command", "kept", "number", "codes", "says"),
    [
        # 1 where a library's exit handlers run Python code, which then forgets what ended it
        ("sweep", "cache/sweeps/*/*.jsonl", signal.SIGINT, {-signal.SIGINT, 1}, "KeyboardInterrupt"),
        ("sweep", "cache/sweeps/*/*.jsonl", signal.SIGKILL, {-signal.SIGKILL}, ""),
        (
            "record",
            "build/record/*/toy@*.jsonl",
            signal.SIGINT,
            {130},
            "the same command, without --again, goes on.",
        ),
        ("bench --json out.jsonl", "cache/bench/*/*.jsonl", signal.SIGINT, {130}, "the same command goes on"),
    ],
)
def test_whatever_ends_it_what_was_measured_is_kept_and_the_rest_is_measured(
    clone, monkeypatch, command, kept, number, codes, says
):
    stage.set_up_gpu(monkeypatch.setattr)
    lesson = stage.lesson(clone, stage.IMPORT + "stage.tape()")
    before = lesson.read_bytes()
    process = processes.python(stage.__file__, *command.split(), env=os.environ | {"STAGE_PAUSE": "0.25"})
    processes.wait_for(
        lambda: sum(path.read_text().count("\n") for path in clone.rglob(kept)) >= 3, "rows", 60
    )
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode in codes and says in output, output
    assert command == "sweep" or "Traceback" not in output
    found = stage.whole(clone, kept)
    assert 3 <= len(found) < len(stage.POINTS)
    assert lesson.read_bytes() == before and not list(clone.rglob("recorded/*/toy*"))
    stage.measured()
    if command == "record":
        return  # that the next recording starts from such a tape is tried in test_record
    if command == "sweep":
        assert stage.sweep() == len(stage.POINTS)
    else:
        written = rows.read(clone / "out.jsonl")  # but the last row, if the signal came right behind it
        assert written == found[: len(written)] and len(written) >= len(found) - 1
        again = bench.Bench(["affine"])
        again.run()
        assert again.measured[: len(found)] == found and len(again.measured) == len(stage.POINTS)
    left = {point["width"] for point in stage.POINTS} - {row.shape["width"] for row in found}
    assert set(stage.measured()) == left, "only the rest is measured"


FULL = """
import contextlib, subprocess, stage
from labkit import places, rows
stage.set_up()
stage.set_up_gpu()
cache = places.cache()
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
    stage.sweep(progress=fill)
kept = stage.whole(cache, "sweeps/*/*.jsonl")
assert 3 <= len(kept) < 12, len(kept)
(path,) = cache.glob("sweeps/*/*")
before = path.read_bytes()
with fails_to_write():
    rows.write(path, kept * 99)
assert path.read_bytes() == before and not list(cache.rglob("*.part*"))
(cache / "filler").unlink()
stage.measured()
assert stage.sweep() == 12 and len(stage.measured()) < 12
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
    "attempt.py: exec": "the learner's own cell, in a process of its own",
    "profiles.py: exec": "the lesson's own code, in a process of its own",
    "judge.py: exec": "the learner's own cell, in a process of its own",
    "child.py: ForkingPickler.loads": "a call and its result, between labkit's own processes",
}


def test_data_is_read_as_data():
    found = set()
    for path in sorted((places.CHECKOUT / "labkit").rglob("*.py")):
        if path.parent.name == "kernels":
            continue  # its loads are a GPU's
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {f"{path.name}: {name}" for name in names if name.partition(".")[0] in UNSAFE}
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                safe = call.startswith(("json.", "lessons.", "codegen.")) or call in ("load", "tl.load")
                if call.rpartition(".")[2] in CALLS and not safe:
                    found.add(f"{path.name}: {call}")
    assert found <= set(ALLOWED)


LINE = recorded().to_json() + "\n"
TAPES = {
    "newer": LINE.replace("{", '{"speed_of_light": 1.0, ', 1),
    "older": '{"suite": "suite", "us": 3}\n',
    "cut": LINE[:60] + "\n" + LINE,
    "no text": b"\x80\x04\x95\x00\x00.",
    "nested": "[" * 100_000 + "\n" + LINE,
    "merged": "<<<<<<< HEAD\n" + LINE,
}


@pytest.mark.parametrize("how", TAPES)
def test_a_tape_of_another_version_or_a_broken_one_is_named_with_the_remedy(clone, how):
    tape, made = clone / "recorded" / "h200" / "01.jsonl", TAPES[how]
    tape.parent.mkdir(parents=True)
    tape.write_bytes(made if isinstance(made, bytes) else made.encode())
    before = tape.read_bytes()
    with pytest.raises(ValueError, match=r"01\.jsonl is damaged or of another version[\s\S]*git restore"):
        rows.recorded("suite")
    assert tape.read_bytes() == before, "whoever has the other version wants it back"
