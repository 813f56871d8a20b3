"""`--gpus`: toy workers on GPUs that are not there."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from crews import DIES, FAILS_FIRST, FOR_EVER, clone, labkit, two_models  # noqa: F401

from labkit import gather, gpus, jobs, lessons, places, record, rows, worker

VISIBLE = "import os\nopen(f'on {os.environ[\"CUDA_VISIBLE_DEVICES\"]}', 'w')\nimport time; time.sleep(0.3)"


def home(kind, name):
    return places.BUILD / "workers" / kind / name


def test_lessons_run_on_both_gpus_and_a_dead_worker_is_one_failed_lesson(clone):  # noqa: F811
    clone("01_a", VISIBLE)
    clone("02_b", DIES)
    clone("03_c", VISIBLE)
    clone("04_d", "1", "raise KeyError('lost [bold]')")
    result = labkit("run", "--gpus", "all")
    assert result.exit_code == 1
    assert {path.name for path in places.NOTEBOOKS.glob("on *")} <= {"on A", "on B"}
    assert re.search(r"^01_a: started on GPU [01]$", result.output, re.MULTILINE)
    assert re.search(r"^01_a: passed in 1.0 s on Toy [AB]$", result.output, re.MULTILINE)
    assert (
        "02_b: failed: its worker was ended by SIGKILL, as it is when memory runs out "
        "(at 1 of 1: import os, signal); see build/logs/run/02_b.log" in result.output
    )
    assert "04_d: failed: KeyError: 'lost [bold]'; see build/logs/run/04_d.log" in result.output
    table = dict(re.findall(r"(0\w+) +│ (\w+)", result.output))
    assert table == {"01_a": "passed", "02_b": "failed", "03_c": "passed", "04_d": "failed"}
    assert "KeyError: 'lost [bold]'" in (places.BUILD / "logs" / "run" / "04_d.log").read_text()


def test_the_next_run_continues_and_after_a_complete_one_all_is_new(clone):  # noqa: F811
    clone("01_a", "open('ran', 'a').write('a')")
    clone("02_b", FAILS_FIRST)
    assert labkit("run", "--gpus", "0").exit_code == 1
    again = labkit("run", "--gpus", "1")
    assert again.exit_code == 0
    assert "Continued: an earlier run finished 01_a; 1 to do. --again does all of it." in again.output
    assert again.output.count("│ passed") == 2
    assert (places.NOTEBOOKS / "ran").read_text() == "a"
    assert not list((places.BUILD / "workers" / "run").iterdir())
    assert "Continued" not in labkit("run", "--gpus", "0").output
    assert (places.NOTEBOOKS / "ran").read_text() == "aa"


def test_what_was_edited_or_is_wanted_again_is_not_continued(clone):  # noqa: F811
    clone("01_a", "open('ran', 'a').write('a')")
    clone("02_b", "raise ValueError")
    for arguments, ran in [([], "a"), (["--again"], "aa"), ([], "aa")]:
        assert labkit("run", "--gpus", "0", *arguments).exit_code == 1
        assert (places.NOTEBOOKS / "ran").read_text() == ran
    clone("01_a", "open('ran', 'a').write('b')")
    assert "Continued" not in labkit("run", "--gpus", "0").output
    assert (places.NOTEBOOKS / "ran").read_text() == "aab"


def test_a_lesson_is_run_again_when_one_that_it_loads_or_a_solution_was_edited(clone):  # noqa: F811
    path = clone("02_b", "load('01_a')")
    clone("01_a", "1")
    clone("03_c", "1")

    def key():
        return jobs.key(jobs.Job("run", str(path), {}))

    before = key()
    clone("03_c", "2")
    assert key() == before
    clone("01_a", "2")
    edited = key()
    places.write_text(places.NOTEBOOKS / "solutions" / "02_b.py", "x = 1")
    assert len({before, edited, key()}) == 3


def test_what_another_model_of_gpu_finished_is_not_taken(clone, two_models):  # noqa: F811
    clone("01_a", "open('ran', 'a').write('a')")
    clone("02_b", "raise ValueError")
    for number, said, ran in [("0", False, "a"), ("0", True, "a"), ("1", False, "aa")]:
        result = labkit("run", "--gpus", number)
        assert ("Continued" in result.output) == said and (places.NOTEBOOKS / "ran").read_text() == ran


def test_a_worker_may_have_other_versions_than_who_asked(clone, monkeypatch):  # noqa: F811
    clone("01_a", "1")
    monkeypatch.setattr(jobs, "installed", lambda: ["of the host", "not of the image"])
    assert labkit("run", "--gpus", "0").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--figure"], "--figure with --gpus: choose GPUs of one model"),
        (["--peers", "--record"], "--record with --gpus: choose GPUs of one model"),
    ],
)
def test_one_devices_page_or_full_run_is_not_begun_on_two_models(clone, two_models, arguments, says):  # noqa: F811
    result = labkit("bench", "--gpus", "all", *arguments)
    assert result.exit_code == 2 and says in result.output
    assert not places.BUILD.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--gpus", "2"], "there is no GPU 2"),
        (["record", "--gpus", "0,0"], "GPU 0 is named twice"),
        (["bench", "--gpus", "first"], "write all, or numbers"),
        (["run", "--gpus", "0", "--executor", "local"], "--gpus is for this machine"),
        (["run", "--slurm", "partition=a"], "add --executor slurm"),
        (["run", "--executor", "local", "--slurm", "partition=a"], "add --executor slurm"),
        (["run", "--gpus", "0", "--retries", "2"], "add --executor"),
        (["run", "--retries", "0"], "add --executor"),
        (["run", "--gpus", ""], "write all, or numbers"),
        (["record", "--check", "--gpus", "0"], "leave --gpus and --executor out"),
        (["bench", "--compare", "a", "b", "--gpus", "0"], "no suite or other option"),
        (["run", "07", "--gpus", "0"], "no lesson is called"),
        (["run", "--gpus", "0", "-p", "x=1"], "no parameter 'x'"),
        (["run", "--again"], "--again is for --gpus or --executor: a plain run keeps nothing"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(clone, arguments, says):  # noqa: F811
    clone("01_a", "open('ran', 'w')")
    result = labkit(*arguments)
    assert result.exit_code == 2 and says in result.output
    assert not places.BUILD.exists() and not (places.NOTEBOOKS / "ran").exists()


def test_without_gpus_the_option_is_refused_and_a_plain_run_needs_no_worker(clone, monkeypatch):  # noqa: F811
    clone("01_a", "1")
    monkeypatch.setattr(gpus, "found", lambda: [])
    refused = labkit("run", "--gpus", "all")
    assert refused.exit_code == 2 and "this session has none: see `labkit doctor`" in refused.output
    assert labkit("run").exit_code == 0
    assert not (places.BUILD / "workers").exists()


def test_a_real_worker_executes_a_lesson_and_leaves_its_page(clone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(worker, "COMMAND", ("-m", "labkit.worker"))
    source = "from labkit.claims import claim\nclaim('{value} bytes', 3, True)\nprint(width)"
    path = clone("01_a", "width: int = 1", source, "import os; os.environ['CUDA_VISIBLE_DEVICES']", "1 / 0")
    notebook = lessons.read(path)
    notebook.cells[1].metadata["tags"] = ["parameters"]
    places.write_text(path, json.dumps(notebook))
    result = labkit("run", "--gpus", "1", "-p", "width=21")
    assert result.exit_code == 1
    assert "01_a failed in cell 4:\n    1 / 0\n" in result.output
    assert re.search(r"01_a +│ failed +│ +\d+\.\d │ +0 │ +1 │ +0 │ +0 │", result.output)
    executed = lessons.read(places.BUILD / "lessons" / "01_a.ipynb")
    texts = [str(cell.outputs) for _, cell in lessons.code_cells(executed)]
    assert any("21" in text for text in texts) and any("'B'" in text for text in texts)
    assert (places.BUILD / "lessons" / "01_a.html").exists()
    log = (places.BUILD / "logs" / "run" / "01_a.log").read_text()
    assert "cell 4 of 4: 1 / 0" in log and "ZeroDivisionError" in log


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import os, crews
from labkit import cli
crews.set_up(Path.cwd(), setattr, os.environ.__setitem__)
sys.argv = ["labkit", "run", "--gpus", "0,1"]
cli.main()
"""


def start(folder):
    """`labkit run --gpus` in a process of its own, once its worker is at work; gives both."""
    pid = places.NOTEBOOKS / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(tests=str(Path(__file__).parent))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    done = home("run", "01_a") / "result.json"
    wait(lambda: done.exists() and pid.exists() and pid.read_text(), 60)
    return process, int(pid.read_text())


def wait(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_run_ends_its_workers_and_is_continued(clone, tmp_path, number, code):  # noqa: F811
    clone("01_a", "open('ran', 'a').write('a')")
    clone("02_b", FOR_EVER)
    process, pid = start(tmp_path)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == code, output
    assert "Traceback" not in output
    wait(lambda: ended(pid), 10)
    if number != signal.SIGKILL:
        assert "01_a: finished and kept; the same command goes on, without --again." in output
    (places.NOTEBOOKS / "02_b.ipynb").unlink()
    clone("02_b", "1")
    result = labkit("run", "--gpus", "0")
    assert result.exit_code == 0 and "an earlier run finished 01_a; 1 to do" in result.output
    assert (places.NOTEBOOKS / "ran").read_text() == "a"


def test_a_second_run_in_the_same_clone_is_refused(clone):  # noqa: F811
    clone("01_a", "1")
    from labkit.fleet import alone

    with alone("run"):
        result = labkit("run", "--gpus", "0")
    assert result.exit_code == 2 and "another `labkit run` is running" in result.output
    assert labkit("run", "--gpus", "0").exit_code == 0


def test_recordings_of_two_devices_are_two_tapes(clone):  # noqa: F811
    paths = [clone("01_a", "1"), clone("02_b", "2")]
    result = labkit("record", "--gpus", "0,1")
    assert result.exit_code == 0, result.output
    assert "Recorded: notebooks/01_a.ipynb" in result.output
    for path in paths:
        stamp = record.read_stamp(lessons.look(path))
        assert record.state(path).status == "recorded" and stamp.device in ("Toy A", "Toy B")
        folder = places.RECORDED / stamp.device.lower().replace(" ", "-")
        (row,) = rows.read(folder / f"{lessons.key(path.stem)}.jsonl")
        assert (row.device, row.kind, row.driver) == (stamp.device, "recorded", "1")
        assert row.source == f"{lessons.key(path.stem)}@{stamp.hash}"
        (roof,) = rows.read(folder / "roofs.jsonl")
        assert roof.device == stamp.device
    assert all(state.status == "recorded" for state in record.tape_states(tapes=places.RECORDED).values())
    assert labkit("record", "--check").exit_code == 0
    known = {path.name for path in (places.cache() / "roofs").iterdir()}
    assert known and all(re.fullmatch(r"toy-[ab]-1-2-3.jsonl", name) for name in known)


def test_an_edit_while_it_is_recorded_leaves_the_lesson_as_it_is(clone):  # noqa: F811
    path = clone("01_a", "1")
    job = jobs.keyed(jobs.Job("record", str(path), {}))
    jobs.prepare(job)
    clone("01_a", "2")
    before = path.read_bytes()
    ran = subprocess.run([sys.executable, *worker.COMMAND, str(job.file)])
    assert ran.returncode == 1
    assert "its code was edited since it was asked for" in jobs.result(job).error
    assert path.read_bytes() == before


def test_an_edit_after_it_was_recorded_leaves_the_lesson_out_and_says_so(clone, monkeypatch):  # noqa: F811
    path = clone("01_a", "1")
    clone("02_b", "2")
    gathering = gather.recordings

    def edit_and_gather(ended):
        clone("01_a", "3")
        return gathering(ended)

    monkeypatch.setattr(gather, "recordings", edit_and_gather)
    result = labkit("record", "--gpus", "0,1")
    assert result.exit_code == 1
    assert "01_a was edited while it was recorded: record it again" in result.output
    assert "Recorded: notebooks/02_b.ipynb" in result.output and record.state(path).status == "no outputs"
    assert home("record", "02_b").exists(), "the same command goes on from there"


def test_suites_on_two_gpus_are_one_file_in_their_order(clone, tmp_path):  # noqa: F811
    (tmp_path / "kill linear").touch()
    first = labkit("bench", "linear", "affine", "--gpus", "0,1", "--json", "out.jsonl")
    assert first.exit_code == 1
    assert "linear: failed: its worker was ended by SIGKILL" in first.output
    assert [row.suite for row in rows.read(tmp_path / "out.jsonl")] == ["bench/affine"]
    again = labkit("bench", "linear", "affine", "--gpus", "1", "--json", "out.jsonl", "--csv", "out.csv")
    assert again.exit_code == 0, again.output
    assert "an earlier run finished affine; 1 to do" in again.output
    assert [row.suite for row in rows.read(tmp_path / "out.jsonl")] == ["bench/affine", "bench/linear"]
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
    assert not home("bench", "linear").exists()


def test_a_suite_whose_next_worker_is_cut_short_too_keeps_its_rows_in_the_file(clone, tmp_path):  # noqa: F811
    from taped import recorded

    run = "bench", "linear", "affine", "--gpus", "0", "--json", "out.jsonl"
    for suites in (["bench/affine"], ["bench/affine", "bench/linear"]):
        (tmp_path / "kill linear").touch()
        assert labkit(*run).exit_code == 1
        assert [row.suite for row in rows.read(tmp_path / "out.jsonl")] == suites
        rows.write(home("bench", "linear") / "rows.jsonl", [recorded(suite="bench/linear")])


def test_a_full_run_needs_every_suite_of_each_device():
    from taped import recorded

    from labkit import gather

    both = [recorded(suite=suite, device=device) for device in ("A", "B") for suite in ("s", "t")]
    assert gather.lacking(both) == ""
    assert gather.lacking(both[:3]) == "B has no rows of t"


def test_workers_see_this_process_environment_but_for_their_gpu(clone, monkeypatch):  # noqa: F811
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    clone("01_a", VISIBLE)
    assert labkit("run", "--gpus", "1").exit_code == 0
    assert (places.NOTEBOOKS / "on B").exists()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
