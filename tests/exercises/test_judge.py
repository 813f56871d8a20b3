"""What is found in answers: in those of the table in answers/, and in those that do harm.

The table has answers to every exercise, a file a lesson, and says what is found in each.
"""

import os
import re
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
import triton
import triton.language as tl
from jupyter_client.manager import start_new_kernel
from processes import gone, wait_for

from labkit import backend, child_process, notebooks, paths
from labkit.exercises import judge
from labkit.exercises.engine import Exercise, RaceSpec
from labkit.exercises.properties import READS_STORED
from labkit.exercises.tasks import _not_handed_in

LESSONS = [notebooks.name_of(path) for path in notebooks.find() if path.parent.name != notebooks.ASIDES]
ANSWERS = Path(__file__).parent / "answers"
HARMED = "01_launch_overhead"
"""The lesson whose exercise ``mask`` the harmful answers answer."""


def answers(lesson):
    """Exercise, verdict, label and cell of each answer in a lesson's file.

    Lines that begin with - and + are text of the solution and what stands in its place.
    """
    solutions = notebooks.solution_cells(notebooks.resolve(lesson))
    text = (ANSWERS / f"{lesson}.txt").read_text()
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        head, _, body = entry.partition("\n")
        name, expected, label = head.split(" | ")
        cell = body.strip("\n")
        if re.match("[-+] ", cell):
            changes = re.findall(r"((?:^- .*\n)+)((?:^\+ .*(?:\n|\Z))+)", cell, re.MULTILINE)
            cell = f"{solutions[name]}\n"
            for change in changes:
                old, new = ("\n".join(line[2:] for line in part.splitlines()) for part in change)
                assert old in cell, f"{label}: the solution of {name} has no {old!r}"
                cell = cell.replace(old, new)
        yield name, expected, label, cell


TABLE = {lesson: list(answers(lesson)) for lesson in LESSONS if (ANSWERS / f"{lesson}.txt").exists()}


def written(lesson, name, source, folder):
    """The file of the cell that hands in an answer, as the lesson's own cell does."""
    cells = [cell["source"] for cell in notebooks.read_json(notebooks.resolve(lesson))["cells"]]
    (last,) = [line for cell in cells for line in cell.splitlines() if f'tasks.check("{name}",' in line]
    file = folder / "cell.py"
    file.write_text(f"{source}\n\n{last}\n")
    return file


def found(lesson, name, source, folder, seconds=60.0, memory=8 * 2**30, **limits):
    """The finding for a cell, from the process that judges."""
    file = written(lesson, name, source, folder)
    return judge.judge_in_child(lesson, name, file, seconds=seconds, memory=memory, **limits)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("lesson", "name", "expected", "source"),
    [
        pytest.param(
            lesson,
            name,
            expected,
            cell,
            id=f"{notebooks.key_of(notebooks.resolve(lesson))}-{name}-{expected}-{label}",
        )
        for lesson, table in TABLE.items()
        for name, expected, label, cell in table
    ],
)
def test_an_answer_gets_its_verdict(lesson, name, expected, source, tmp_path):
    finding = found(lesson, name, source, tmp_path)
    if expected in ("right", "error"):
        assert finding.status == expected, finding
    else:
        assert finding.status in ("wrong", "error") and (finding.mistake or "unknown") == expected, finding
        assert finding.hints or expected == "unknown"


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("lesson", LESSONS)
def test_solutions_are_right_and_untouched_cells_are_known(lesson, tmp_path):
    cells = [cell["source"] for cell in notebooks.read_json(notebooks.resolve(lesson))["cells"]]
    handed_in = {notebooks.exercise_of({"source": s, "id": ""}): s for s in cells if "tasks.check(" in s}
    solutions = notebooks.solution_cells(notebooks.resolve(lesson))
    assert set(handed_in) == set(judge.find(lesson)) == set(solutions)
    for name, exercise in judge.find(lesson).items():
        finding = found(lesson, name, solutions[name], tmp_path)
        assert finding.status == "right" and finding.checks, finding
        assert _not_handed_in(exercise, handed_in[name])
        assert not _not_handed_in(exercise, solutions[name])


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_mistake_is_told_by_the_table_and_has_hints(lesson):
    exercises, table = judge.find(lesson), TABLE.get(lesson, ())
    told = {exercises[name].mistakes.get(expected) for name, expected, _, _ in table}
    for name, exercise in exercises.items():
        assert set(exercise.mistakes.values()) <= told
        assert any(of == name and expected == "right" for of, expected, _, _ in table)
        assert all(1 <= len(each.hints) <= 3 for each in exercise.mistakes.values())


# ---- answers that do harm ----------------------------------------------------------------------------------


def harmful(code):
    """The solution of an exercise, after this code."""
    return f"{code}\n{notebooks.solution_cells(notebooks.resolve(HARMED))['mask']}"


def ended(pids):
    """Waits until these processes are gone."""
    for pid in pids:
        wait_for(lambda pid=pid: not psutil.pid_exists(pid) or gone(psutil.Process(pid)), f"end of {pid}", 5)


ODD = "class Odd(Exception):\n    def __reduce__(self):\n        return 1 / 0\n"
FORKS = """import os, time
for _ in range(300):
    if not os.fork():
        time.sleep(1234)
    print(_, end=" ")
"""


@pytest.mark.parametrize(
    ("code", "status", "observed", "where"),
    [
        ("x = 0\nwhile x == 0:\n    pass", "stopped", "still running after 2 s", r"line [23]: "),
        ("x = 9\nx ** x ** x", "stopped", "still running after 2 s", r"line 2: x \*\* x"),
        ("x = bytearray(2 * 10**9)", "error", "more memory than an answer may have", "line 1: x = byte"),
        ("while True:\n    print('x' * 999)", "stopped", "still running", r"line 2: print\("),
        ("import os\nos._exit(3)", "crashed", "it ended with status 3", "^$"),
        ("import ctypes\nctypes.string_at(0)", "crashed", "SIGSEGV", r"line 2: ctypes\.string_at\(0\)"),
        ("import os\nos.kill(os.getpid(), 9)", "crashed", "SIGKILL", "^$"),
        ("import os\nos.kill(os.getppid(), 9)", "crashed", "together with the process that watched", "^$"),
        ("import sys\nsys.exit('enough')", "error", "SystemExit: enough", "line 2: sys.exit"),
        (ODD + "raise Odd", "error", "Odd", "line 4: raise Odd"),
        ("import os\nos.fork()", "right", "", "^$"),
    ],
    ids=["endless", "deaf", "memory", "flood", "exit", "segfault", "killed", "watcher killed", "sys.exit",
         "odd exception", "twice"],
)  # fmt: skip
def test_harm_is_a_finding_with_the_line_and_the_next_answer_is_judged(
    code, status, observed, where, tmp_path
):
    said = []
    limits = dict(seconds=2.0, memory=2**31, show=said.append)
    finding = found(HARMED, "mask", harmful(code), tmp_path, **limits)
    assert finding.status == status and observed in finding.observed, finding
    assert re.match(where, finding.where), finding
    assert len("".join(said)) <= child_process.OUTPUT_LIMIT + len(child_process.LEFT_OUT)
    assert ("x" * 999 in "".join(said)) == ("print" in code)
    finding = found(HARMED, "mask", harmful("print('judged', end='')"), tmp_path, show=said.append)
    assert finding.status == "right" and said[-1] == "judged"


def test_300_forks_of_an_answer_are_gone_when_it_is_judged(tmp_path):
    said, kept = [], tmp_path / "group"
    forks = FORKS + f"open({str(kept)!r}, 'w').write(str(os.getpid()))"
    assert found(HARMED, "mask", harmful(forks), tmp_path, show=said.append).status == "right"
    assert "".join(said).split()[-1] == "299"
    group = int(kept.read_text())
    ended(each.pid for each in psutil.process_iter() if os.getpgid(each.pid) == group)


@pytest.fixture
def hears_interrupts():
    """Also where the tests are a job in the background, which a shell starts deaf to them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_ctrl_c_is_a_finding_with_the_line_also_before_the_process_is_ready(tmp_path):
    def interrupt():
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    endless = harmful("x = 0\nwhile True:\n    x += 1")
    found(HARMED, "mask", harmful(""), tmp_path)
    interrupt()
    finding = found(HARMED, "mask", endless, tmp_path)
    assert finding.status == "interrupted" and re.match("line [23]: ", finding.where)
    judge.process(HARMED).close()
    interrupt()
    assert found(HARMED, "mask", endless, tmp_path).status == "interrupted"
    assert found(HARMED, "mask", harmful(""), tmp_path).status == "right"


def test_in_a_notebook_its_stop_button_and_its_end_reach_the_answer(tmp_path):
    pids = tmp_path / "pids"
    endless = f"""import os, subprocess
started = subprocess.Popen(["sleep", "1234"]).pid
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{started}} .")
while True:
    pass"""
    file = written(HARMED, "mask", harmful(endless), tmp_path)
    asked = f"""
from pathlib import Path
from labkit.exercises import judge
print(judge.judge_in_child({HARMED!r}, "mask", Path({str(file)!r}), seconds=60.0))
"""
    manager, client = start_new_kernel(env=os.environ | {"PYTHONPATH": paths.python_path()})
    try:
        said = []
        for act in (manager.interrupt_kernel, lambda: manager.shutdown_kernel(now=True)):
            pids.unlink(missing_ok=True)
            client.execute(asked)
            wait_for(lambda: pids.exists() and pids.read_text().endswith("."), "the answer", 60)
            act()
            ended(map(int, pids.read_text().split()[:-1]))
            while not said or said[-1] != "idle":
                message = client.get_iopub_msg(timeout=20)["content"]
                said.append(message.get("text") or message.get("execution_state"))
        shown = "".join(filter(None, said))
        assert "You stopped it" in shown and re.search("line (4: while True|5: pass)", shown)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# ---- what other programs have stored -----------------------------------------------------------------------


@triton.jit
def chained_kernel(x, y, count):
    """Each program needs what the one before it has stored."""
    at = tl.program_id(0)
    before = tl.load(y + at - 1, mask=at > 0, other=0.0)
    tl.store(y + at, before + tl.load(x + at))


@triton.jit
def summed_kernel(x, y, count):
    total = 0.0
    for at in range(tl.program_id(0) + 1):
        total += tl.load(x + at)
    tl.store(y + tl.program_id(0), total)


@pytest.mark.skipif(not backend.interpreting(), reason="programs are watched where they are interpreted")
@pytest.mark.parametrize(("kernel", "mistake"), [(chained_kernel, "reads-stored"), (summed_kernel, "")])
def test_a_kernel_that_reads_what_other_programs_have_stored_is_refused(kernel, mistake, tmp_path):
    def answer(x):
        y = torch.empty_like(x)
        kernel[(len(x),)](x, y, len(x))
        return y

    race = RaceSpec(None, {}, ())
    sums = Exercise(
        "sums", "answer", lambda x: x.cumsum(0), ((1,), (9,)), lambda n: {"x": torch.randn(n)},
        dtypes=(torch.float32,), race=race, properties=(READS_STORED,),
    )  # fmt: skip
    finding, _ = judge.judge(sums, answer, tmp_path / "cell.py")
    assert (finding.status, finding.mistake) == (("wrong", mistake) if mistake else ("right", "")), finding
