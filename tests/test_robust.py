"""What goes wrong around the course, tried for real.

Nothing recorded is lost or half written, and the message says what to do. What a module can show by itself is
in its own file: a broken roof cache in test_machine, out of memory in test_sweeps, a hostile ticket in
measure/test_lock, Ctrl-C of `labkit run` in test_cli, a flood of output in runs/test_execute, JupyterLab
without a token in test_lab.
"""

import ast
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import simulated
import stage
from jupyter_client.manager import start_new_kernel
from taped import recorded

from labkit import bench, places, rows
from labkit.runs import record, spread

TESTS = Path(__file__).resolve().parent
STAGE = str(TESTS / "stage.py")


@pytest.fixture(autouse=True)
def clone(tmp_path, monkeypatch):
    """A toy clone with a simulated GPU, for this process and for those that it starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(rows.TAPE, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([places.python_path(), str(TESTS)]))
    stage.set_up(tmp_path, monkeypatch.setattr, monkeypatch.setenv)
    stage.set_up_gpu(monkeypatch.setattr)
    return tmp_path


def started(*arguments, pause_s=0.25, **options):
    """A process with a group of its own, as a command in a terminal has, that hears Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"STAGE_PAUSE": str(pause_s)}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **options,
    )  # fmt: skip


def until(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.02)


def lines(folder, pattern):
    return sum(path.read_text().count("\n") for path in folder.rglob(pattern))


# Ctrl-C, and a process that is killed


SLOW_LESSON = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
import os, time
from pathlib import Path
from labkit import rows
from taped import recorded
for width in range(8, 97, 8):
    rows.append(Path(os.environ["LABKIT_TAPE"]), recorded(width=width))
    time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("command", "kept", "codes", "says"),
    [
        # 1 where a library's exit handlers run Python code, which then forgets what ended it
        (["sweep"], "cache/sweeps/*/*.jsonl", {-signal.SIGINT, 1}, "KeyboardInterrupt"),
        (["record"], "build/record/*/toy@*.jsonl", {130}, "the same command, without --again, goes on."),
        (["bench", "--json", "out.jsonl"], "cache/bench/*/*.jsonl", {130}, "the same command goes on"),
    ],
    ids=["sweep", "record", "bench"],
)
def test_ctrl_c_keeps_what_was_measured(clone, monkeypatch, command, kept, codes, says):
    if command == ["record"]:
        stage.lesson(clone, SLOW_LESSON)
    lesson = (clone / "notebooks" / "01_toy.ipynb").read_bytes()
    process = started(STAGE, *command)
    until(lambda: lines(clone, kept) >= 3, "three rows")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode in codes and says in output, output
    assert command == ["sweep"] or "Traceback" not in output
    before = stage.whole(clone, kept)
    assert 3 <= len(before) < len(stage.POINTS)
    assert (clone / "notebooks" / "01_toy.ipynb").read_bytes() == lesson
    assert not (clone / "recorded").exists() or not list((clone / "recorded").rglob("01_toy*"))
    stage.measured()
    if command == ["record"]:
        return  # that the next recording starts from such a tape is tried in test_record
    if command == ["sweep"]:
        assert stage.sweep() == len(stage.POINTS)
    else:
        written = rows.read(clone / "out.jsonl")  # but the last row, if the signal came right behind it
        assert written == before[: len(written)] and len(written) >= len(before) - 1
        again = bench.Bench(["affine"])
        again.run()
        assert again.measured[: len(before)] == before and len(again.measured) == len(stage.POINTS)
    left = {point["width"] for point in stage.POINTS} - {row.shape["width"] for row in before}
    assert set(stage.measured()) == left, "only the rest is measured"


PANEL = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
import stage
panel = stage.panel()
await panel.show()
panel.start()
"""


def test_a_kernel_that_is_killed_in_the_middle_of_a_panels_sweep_loses_no_row(clone, monkeypatch):
    """Another kernel, which is this process, shows what the killed one measured, and measures the rest."""
    monkeypatch.setenv("LABKIT_HEADLESS", "0")
    monkeypatch.setenv("STAGE_PAUSE", "0.25")
    kept = "cache/panels/stage-panel.jsonl"
    kernel, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(PANEL)
        until(lambda: lines(clone, kept) >= 3, "three rows")
        os.kill(kernel.provisioner.pid, signal.SIGKILL)
        until(lambda: not kernel.is_alive(), "the end of the kernel")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    before = stage.whole(clone, kept)
    assert 3 <= len(before) < len(stage.POINTS)
    with (clone / kept).open("a") as torn:  # as if it had been killed in the middle of a line
        torn.write(before[0].to_json()[:40])
    monkeypatch.setenv("STAGE_PAUSE", "0")

    async def go_on():
        panel = stage.panel()
        await panel.show()
        said = panel.controls._status.value
        panel.start()
        await panel.running
        return said, panel.controls._status.value, len(panel.table())

    said, ended, points = asyncio.run(go_on())
    assert f"{len(before)} of 12 points are measured already. Run goes on where this sweep was" in said
    assert "Done." in ended and points == len(stage.POINTS)
    assert (clone / kept).read_text().startswith("".join(row.to_json() + "\n" for row in before))


def test_a_recording_whose_kernel_is_killed_keeps_its_rows_and_leaves_the_tree_alone(clone):
    dies = (
        "import os, signal\nfrom pathlib import Path\nfrom labkit import rows\nfrom taped import recorded\n"
    )
    dies += (
        "tape = Path(os.environ['LABKIT_TAPE'])\n[rows.append(tape, recorded(width=w)) for w in (16, 32)]\n"
    )
    path = stage.lesson(
        clone, f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{dies}os.kill(os.getpid(), 9)"
    )
    rows.write(clone / "recorded" / "simulated" / "toy.jsonl", [recorded(width=8)])
    before = {file: file.read_bytes() for file in (path, *(clone / "recorded").rglob("*.jsonl"))}
    result = record.record(path, simulated.HERE, tapes=clone / "recorded", work=clone / "build" / "record")
    assert "the process of the lesson ended in the middle of this cell" in result.failure.message
    assert [row.shape["width"] for row in stage.whole(clone, "toy@*.jsonl")] == [16, 32]
    assert {file: file.read_bytes() for file in before} == before


# No room, no permission, no network


def namespace(*options):
    """A command that runs another in a part of the machine of its own; where none is had, a skip."""
    command = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), *options]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip(f"this machine lets nobody here have a namespace of its own ({' '.join(options)})")
    return command


def inside(command, script, **options):
    """What a Python script prints that runs there, in the toy clone."""
    head = "import os, subprocess, sys\nfrom pathlib import Path\n"
    head += "import stage\nfrom labkit import places, rows\nstage.set_up()\n"
    ran = subprocess.run(
        [*command, sys.executable, "-c", head + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_a_full_disk_loses_no_row_and_the_rest_is_measured_when_there_is_room(clone):
    printed = inside(
        namespace("--mount"),
        """
        from labkit import exercises
        cache = places.cache()
        stage.set_up_gpu()
        cache.mkdir()
        stage.mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs", cache)
        def progress(done, total, row):
            if done == 3:
                stage.fill(cache)
        with stage.fails_to_write() as told:
            stage.sweep(progress=progress)
        print("told", *told)
        kept = stage.whole(cache, "sweeps/*/*.jsonl")
        assert 3 <= len(kept) < 12, len(kept)
        (path,) = cache.glob("sweeps/*/*")
        before = path.read_bytes()
        with stage.fails_to_write():
            rows.write(path, kept * 99)
        assert path.read_bytes() == before and not list(cache.rglob("*.part"))
        with stage.fails_to_write() as told:
            exercises._keep(cache / "attempts" / "mask", "mask = at < count")
        print("attempt", *told)
        assert not list(cache.rglob("attempts/*/*")), "half of one would count as an attempt"
        (cache / "filler").unlink()
        stage.measured()
        assert stage.sweep() == 12
        print("went on", len(stage.measured()) < 12)
        """,
    )
    assert re.search(
        r"told .*No space left on device.* is not written; what was kept before is whole", printed
    )
    assert printed.count("Make room, or the folder writable, or let LABKIT_CACHE name another folder") == 2
    assert "went on True" in printed


def test_a_checkout_that_is_read_only_says_so_and_needs_no_other_folder_to_be_read(clone):
    stage.lesson(clone, "open('ran', 'w')")
    printed = inside(
        namespace("--mount"),
        """
        here = Path.cwd()
        (here / "cache").mkdir()
        stage.mounted("--bind", here, here)
        stage.mounted("-o", "remount,ro,bind", here, here)
        stage.mounted("-t", "tmpfs", "tmpfs", here / "cache")
        os.chdir(here)
        for command in (["run"], ["slides"]):
            result = stage.labkit(*command)
            print(result.exit_code, command[0], result.output.replace("\\n", " "))
        print(stage.labkit("record", "--check").output)
        with stage.fails_to_write() as told:
            rows.append(here / "tape.jsonl", stage.recorded())
        print("told", *told)
        """,
    )
    for command in ("run", "slides"):
        assert re.search(
            rf"^1 {command} .*Read-only file system.* What was finished is kept; make room, or the folder",
            printed, re.MULTILINE,
        ), printed  # fmt: skip
    assert "no outputs  01_toy" in printed and not (clone / "notebooks" / "ran").exists()
    assert re.search(
        r"told .*Read-only.* is not written; .*Make room, or the folder writable, and run", printed
    )


OFFLINE = """
import fcntl, socket, struct
with socket.socket() as s:  # the machine itself stays in reach, as it does where a cable is pulled
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))
try:
    socket.create_connection(("192.0.2.1", 80), 2)
except OSError as error:
    print("offline", error)
"""


def test_without_a_network_a_lesson_runs_and_becomes_a_page(clone):
    stage.lesson(clone, "print(6 * 7)")
    printed = inside(
        namespace("--net"),
        OFFLINE + 'print(stage.labkit("run").output)',
    )
    assert "offline" in printed and re.search(r"01_toy . passed", printed), printed
    assert "42" in (clone / "build" / "lessons" / "01_toy.html").read_text()


# Two at once, and what was written by somebody else


@pytest.mark.parametrize("kind", ["run", "record", "bench"])
def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(clone, monkeypatch, kind):
    stage.lesson(clone, "open('ran', 'w')")
    with spread.alone(kind):
        result = stage.labkit(kind)
    assert result.exit_code == 2
    assert f"another `labkit {kind}` is running and writes the same files: wait until it has" in result.output
    assert not (clone / "notebooks" / "ran").exists() and not stage.measured()
    if kind == "run":
        assert stage.labkit(kind).exit_code == 0, "the lock goes with whoever had it"


ATTACKS = (
    'Z=1;open("ran", "w");width', "x; import os", "width\nimport os", "__import__('os').system('touch ran')",
    "width=1;x", "", " width", "ｗidth", "width.__class__", "*", "../width", "$(touch ran)", "`touch ran`",
)  # fmt: skip
CODE = (
    "__import__('os')", "open('ran', 'w')", "1; open('ran', 'w')", '"; open("ran", "w"); "', "1e999", "nan",
    "1\nopen('ran', 'w')", "9" * 5000, "\\", "{0.__class__}", "%system touch ran", "!touch ran", "None",
)  # fmt: skip


def test_hostile_parameters_run_nothing(clone):
    declared = "width: int = 1\nshare: float = 1.0\nfast: bool = True"
    stage.lesson(clone, "open('began', 'w')", parameters=declared)
    for name in ATTACKS:
        result = stage.labkit("run", "-p", f"{name}=1")
        told = (
            "parameter width: '"
            if name.startswith("width=")
            else "declares: width (int), share (float), fast"
        )
        assert result.exit_code == 2 and told in result.output, name
    for parameter in ("width", "share", "fast"):
        for value in CODE:
            result = stage.labkit("run", "-p", f"{parameter}={value}")
            assert result.exit_code == 2 and f"parameter {parameter}: " in result.output, value
            assert len(result.output) < 300
    assert not list(clone.rglob("ran")) and not list(clone.rglob("began"))


def test_a_hostile_value_of_text_stays_text(clone):
    stage.lesson(clone, "print(repr(text))", parameters="text: str = 'a'")
    attacks = [value for value in CODE if value.isprintable() and not set(value) & set("\"'\\`")]
    attack = " ".join(value[:40] for value in attacks) + " {text} #"
    assert stage.labkit("run", "-p", f"text={attack}").exit_code == 0
    (cell,) = json.loads((clone / "build" / "lessons" / "01_toy.ipynb").read_text())["cells"][-1:]
    assert "".join(cell["outputs"][0]["text"]) == f"{attack!r}\n" and not list(clone.rglob("ran"))
    for refused in ('"; open("ran", "w"); "', "'", "\\", "a\nb", "`x`"):
        assert stage.labkit("run", "-p", f"text={refused}").exit_code == 2


UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "load", "read_pickle", "loads"}
ALLOWED = {
    "attempt.py: exec": "the learner's own cell, in a process of its own",
    "profiles.py: exec": "the lesson's own code, in a process of its own",
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
                safe = call.startswith(("json.", "lessons.")) or call in ("load", "tl.load")
                if call.rpartition(".")[2] in CALLS and not safe:
                    found.add(f"{path.name}: {call}")
    assert found == set(ALLOWED)


NEWER = {"speed_of_light": 1.0}
TAPES = {
    "of a newer version": lambda text: json.dumps(json.loads(text) | NEWER) + "\n",
    "of an older version": lambda text: json.dumps({"suite": "suite", "us": 3}) + "\n",
    "cut in the middle": lambda text: text[:60] + "\n" + text,
    "no text": lambda text: b"\x80\x04\x95\x00\x00.",
    "nested without end": lambda text: "[" * 100_000 + "\n" + text,
    "merged": lambda text: "<<<<<<< HEAD\n" + text,
}


@pytest.mark.parametrize("how", TAPES)
def test_a_tape_of_another_version_or_a_broken_one_is_named_with_the_remedy(clone, how):
    tape = clone / "recorded" / "h200" / "01.jsonl"
    made = TAPES[how](recorded().to_json() + "\n")
    tape.parent.mkdir(parents=True)
    tape.write_bytes(made if isinstance(made, bytes) else made.encode())
    before = tape.read_bytes()
    with pytest.raises(ValueError, match=r"01\.jsonl is damaged or of another version of labkit") as raised:
        rows.recorded("suite")
    assert "Put it back with `git restore`, or remove it" in str(raised.value)
    assert tape.read_bytes() == before, "whoever has the other version wants it back"


SCRIPT = "<script>alert(1)</script>"


def test_html_that_comes_from_data_is_escaped(clone, monkeypatch):
    """What a claim, a verdict, a guess, a figure and a sweep's page show is tried in their own files."""
    from labkit import panels, sweep_controls, website

    stamp = vars(record.Stamp("0", *[SCRIPT] * 5))
    monkeypatch.setenv(record.STAMP_VARIABLE, json.dumps(stamp))
    made = [record.banner("01_toy", clone / "notebooks").data]
    path = stage.lesson(clone, "1")
    notebook = json.loads(path.read_text())
    path.write_text(json.dumps(notebook | {"metadata": {"labkit": {"recorded": stamp}}}))
    made += [page.read_text() for page in website.write([path], clone / "site")[:1]]
    contender = replace(stage.contenders()[0], name=SCRIPT)
    sizes = dict(others={"batch": (2,)}, dtypes=("float32",), of=SCRIPT, over=SCRIPT, title=SCRIPT)
    controls = sweep_controls.Controls(panels.sweep(SCRIPT, [contender], (8,), **sizes).plan, counting=False)
    controls.say(SCRIPT)
    controls.list_noise([SCRIPT])
    made += [controls._status.value, controls._noise.value]
    for each in made:
        assert "<script>alert" not in each and "&lt;script&gt;alert" in each
