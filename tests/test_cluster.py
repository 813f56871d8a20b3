"""`--executor`: submitit's local executor, and array jobs of a Slurm that is not there."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from crews import DIES, FAILS_FIRST, FOR_EVER, clone, labkit  # noqa: F401
from processes import end, tree, wait_for
from taped import recorded

from labkit import cli, cluster, gather, jobs, lessons, many, places, record, rows, worker
from labkit.jobs import Job, Outcome

PAGE = Path(__file__).parent.parent / "docs" / "CLUSTER.md"


@pytest.fixture
def submitit():
    return pytest.importorskip("submitit", reason="submitit is not installed: pip install -e '.[cluster]'")


@pytest.fixture
def slurm(submitit, tmp_path, monkeypatch):
    """Slurm's commands as processes of this machine; gives the folder of their state."""
    programs, state = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    state.mkdir()
    fake = Path(__file__).with_name("fake_slurm.py")
    for name in ("sbatch", "srun", "sacct", "scancel"):
        (programs / name).write_text(
            f"#!{sys.executable}\nimport runpy, sys\nsys.argv = [{str(programs / name)!r}, *sys.argv[1:]]\n"
            f"globals_ = runpy.run_path({str(fake)!r})\nglobals_[{name!r}](*sys.argv[1:])\n"
        )
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    monkeypatch.setattr(cluster.Slurm, "poll_s", 0.2)
    submitit.SlurmJob.watcher.clear()
    submitit.SlurmJob.watcher._registered.clear()
    return state


# What the user says


@pytest.mark.parametrize(
    "assignment",
    [
        "partition",
        "partition=",
        "partition=gpu;touch ran",
        "partition=$(touch ran)",
        "partition=`touch ran`",
        "partition=gpu\ntouch ran",
        "partition=gpu\n",
        "partition=a b",
        "partition='a'",
        "gres=gpu:1 --wrap=x",
        "time=1:00:00",
        "time=0",
        "time=-1",
        "cpus-per-task=٣",
        "setup=touch ran",
        "additional-parameters=x",
        "srun-args=--x",
        "python=touch ran",
        "container-image=x;touch ran",
        "container-image=x|y",
        "apptainer=image.sif --bind /:/x",
        "constraint=a100|$(touch ran)",
        "PARTITION=a",
    ],
)
def test_hostile_or_unknown_options_are_refused_and_run_nothing(clone, tmp_path, assignment):  # noqa: F811
    clone("01_a", "open('ran', 'w')")
    result = labkit("run", "--executor", "slurm", "--slurm", assignment)
    assert result.exit_code == 2 and "--slurm" in result.output
    assert not places.BUILD.exists() and not list(tmp_path.rglob("ran"))


def test_a_key_that_is_given_twice_is_two_kinds_of_device():
    assert cluster.options([]) == {"": {}}
    given = ["partition=gpu", "gres=gpu:a100:1", "gres=gpu:h100:1"]
    assert cluster.options(given) == {
        "gres=gpu:a100:1": {"partition": "gpu", "gres": "gpu:a100:1"},
        "gres=gpu:h100:1": {"partition": "gpu", "gres": "gpu:h100:1"},
    }
    with pytest.raises(ValueError, match="given twice"):
        cluster.options(["qos=a", "qos=a"])
    with pytest.raises(ValueError, match="two containers"):
        cluster.options(["apptainer=a.sif", "container-image=b"])


def test_options_reach_submitit_under_its_names():
    (chosen,) = cluster.options(
        ["partition=gpu", "time=30", "constraint=a100|h100", "cpus-per-task=8", "reservation=course",
         "container-image=example.org#a/b:26.09-py3", "container-mounts=/clone:/clone"]
    ).values()  # fmt: skip
    assert cluster.parameters(chosen) == {
        "job_name": "labkit",
        "partition": "gpu",
        "time": 30,
        "constraint": "a100|h100",
        "cpus_per_task": 8,
        "gpus_per_node": 1,
        "srun_args": ["--container-image=example.org#a/b:26.09-py3", "--container-mounts=/clone:/clone"],
        "additional_parameters": {"reservation": "course"},
    }  # fmt: skip
    assert cluster.python(chosen) == "python3" and cluster.python({}) is None
    command = shlex.split(cluster.python({"apptainer": "course.sif"}))
    assert command[:3] == ["apptainer", "exec", "--nv"] and command[-2:] == ["course.sif", "python3"]


def test_without_submitit_or_slurm_a_sentence_says_what_to_do(clone, monkeypatch):  # noqa: F811
    clone("01_a", "open('ran', 'w')")
    monkeypatch.setitem(sys.modules, "submitit", None)
    for executor in ("local", "slurm"):
        result = labkit("run", "--executor", executor)
        assert result.exit_code == 2 and "pip install -e '.[cluster]'" in result.output
    assert not places.BUILD.exists()


def test_where_there_is_no_slurm_nothing_is_submitted(submitit, clone, monkeypatch):  # noqa: F811
    clone("01_a", "1")
    monkeypatch.setenv("PATH", "/nowhere")
    result = labkit("run", "--executor", "slurm")
    assert result.exit_code == 2 and "are you indeed on a slurm cluster?" in result.output


def commands():
    """The `labkit` commands of the page."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("labkit ")]


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_page_are_understood(line):
    _, name, *arguments = shlex.split(line, comments=True)
    context = cli.cli.commands[name].make_context(name, arguments)
    assert cluster.options(context.params["slurm"])
    assert not context.params["slurm"] or context.params["executor"] == "slurm"


def test_the_page_names_every_key():
    assert len(commands()) >= 8
    assert all(f"`{key}`" in PAGE.read_text() for key in cluster.KEYS)


def test_the_links_of_the_page_lead_to_sections():
    found = re.findall(r"\]\(([^)#]+)#([^)]+)\)", PAGE.read_text())
    assert found
    for file, section in found:
        headings = re.findall(r"^#+ (.+)$", (PAGE.parent / file).read_text(), re.MULTILINE)
        assert section in {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in headings}


def test_two_kinds_of_device_that_would_share_a_folder_are_refused(slurm, clone):  # noqa: F811
    clone("01_a", "open('ran', 'w')")
    kinds = ["--slurm", "constraint=a|b", "--slurm", "constraint=a&b"]
    result = labkit("run", "--executor", "slurm", *kinds)
    assert (
        result.exit_code == 2
        and "two kinds of device would both be called 01_a@constraint=a-b" in result.output
    )
    assert not list(slurm.iterdir()) and not (places.NOTEBOOKS / "ran").exists()


# Local


def test_a_job_that_fails_first_passes_when_it_is_submitted_again(submitit, clone, monkeypatch):  # noqa: F811
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    clone("01_a", "import os\nopen(os.environ['CUDA_VISIBLE_DEVICES'], 'a').write('a')")
    clone("02_b", FAILS_FIRST)
    result = labkit("run", "--executor", "local")
    assert result.exit_code == 0, result.output
    assert "02_b: failed: RuntimeError: once; see build/logs/run/02_b.log; it is tried again" in result.output
    assert result.output.count("│ passed") == 2
    assert (places.NOTEBOOKS / "7").read_text() == "a", "jobs see the GPUs of this session"


def test_a_killed_worker_is_one_failed_lesson_and_the_next_run_continues(submitit, clone):  # noqa: F811
    clone("01_a", DIES)
    clone("02_b", "open('ran', 'a').write('b')")
    result = labkit("run", "--executor", "local", "--retries", "0")
    assert result.exit_code == 1
    assert "01_a: failed: its worker was ended by SIGKILL" in result.output
    assert "02_b: passed" in result.output
    again = labkit("run", "--executor", "local", "--retries", "0")
    assert "an earlier run finished 02_b; 1 to do" in again.output
    assert (places.NOTEBOOKS / "ran").read_text() == "b"


def test_stopped_it_gives_back_when_the_jobs_process_has_ended(submitit, clone, monkeypatch):  # noqa: F811
    job = jobs.keyed(Job("run", str(clone("01_a", FOR_EVER)), {}))
    made = []
    submit = submitit.LocalExecutor.submit

    def note(*given):
        made.append(submit(*given))
        return made[0]

    monkeypatch.setattr(submitit.LocalExecutor, "submit", note)
    monkeypatch.setattr(worker, "GRACE_S", 60.0)
    engine = cluster.local()
    engine.start([job])
    wait_for((places.NOTEBOOKS / "pid").exists, "the worker", 60)
    engine.stop()
    assert made[0].done()


SCRIPT = """
import os, sys
from pathlib import Path
import crews
from labkit import cli
crews.set_up(Path.cwd(), setattr, os.environ.__setitem__)
sys.argv = ["labkit", "run", "--executor", "local"]
cli.main()
"""


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGINT, 130), (os.kill, signal.SIGKILL, -9)],
    ids=["ctrl-c", "interrupt", "kill"],
)
def test_interrupted_it_shows_no_traceback_and_leaves_no_process(submitit, clone, send, number, code):  # noqa: F811
    clone("01_a", FOR_EVER)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,  # a group of its own, as a command in a terminal has, that hears Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        wait_for((places.NOTEBOOKS / "pid").exists, "the worker", 60)
        started = tree(process)
        assert len(started) == 4, "the command, two processes of submitit and the worker"
        send(process.pid, number)
        assert process.wait(60) == code
    finally:
        end(process, 10)
    output = process.stdout.read()  # until submitit's processes, which share it, have ended
    assert "Traceback" not in output
    assert number == signal.SIGKILL or "the same command goes on" in output
    wait_for(lambda: not any(map(runs, started)), "their end", 60)


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Slurm


def test_recordings_of_two_kinds_of_device_are_gathered(slurm, clone):  # noqa: F811
    path = clone("01_a", "1")
    variants = ["--slurm", "constraint=a100", "--slurm", "constraint=h100"]
    result = labkit("record", "--executor", "slurm", "--slurm", "partition=gpu", *variants)
    assert result.exit_code == 0, result.output
    assert "01_a@constraint=a100: passed" in result.output
    assert record.read_stamp(lessons.look(path)).device == "Toy constraint=a100", "the first that was named"
    for kind in ("a100", "h100"):
        (row,) = rows.read(places.RECORDED / f"toy-constraint-{kind}" / f"{lessons.key(path.stem)}.jsonl")
        assert row.device == f"Toy constraint={kind}" and row.kind == "recorded"
    assert labkit("record", "--check").exit_code == 0
    assert len(list(places.RECORDED.glob("*/roofs.jsonl"))) == 2


def test_rows_of_two_kinds_of_device_are_two_full_runs(slurm, clone, monkeypatch, tmp_path):  # noqa: F811
    from labkit import bench_table

    monkeypatch.setattr(bench_table, "check", lambda: None)
    monkeypatch.setattr(bench_table, "write", lambda: None)
    monkeypatch.setattr("labkit.suites.NAMES", ("affine", "linear"))
    variants = ["--slurm", "gres=gpu:a100:1", "--slurm", "gres=gpu:h100:1"]
    result = labkit(
        "bench", "--peers", "--record", "--executor", "slurm", "--slurm", "partition=gpu", *variants
    )
    assert result.exit_code == 0, result.output
    scripts = [path.read_text() for path in sorted(slurm.glob("*.sh"))]
    for script, kind in zip(scripts, ("a100", "h100"), strict=True):
        assert f"#SBATCH --gres=gpu:{kind}:1\n" in script and "#SBATCH --partition=gpu\n" in script
        assert "#SBATCH --array=0-1%2\n" in script and "#SBATCH --time=60\n" in script
    for kind in ("a100", "h100"):
        folder = places.RECORDED / f"toy-gres-gpu-{kind}-1"
        found = rows.read(folder / "bench.jsonl")
        assert [row.suite for row in found] == ["bench/affine", "bench/linear"]
        assert {(row.device, row.kind) for row in found} == {(f"Toy gres=gpu:{kind}:1", "recorded")}
        assert gather.lacking(found) == "" and (folder / "roofs.jsonl").exists()


def test_what_slurm_refuses_is_a_sentence(slurm, clone):  # noqa: F811
    clone("01_a", "1")
    clone("02_b", "1")
    result = labkit("run", "--executor", "slurm", "--slurm", "partition=none")
    assert result.exit_code == 2 and "Slurm takes no such job: " in result.output
    assert "invalid partition specified: none" in result.output and "Traceback" not in result.output
    assert "the same command goes on" not in result.output


LOST = "import os\nif not os.path.exists('mark'):\n    open('mark', 'w')\n    import fake_slurm\n    "


@pytest.mark.parametrize(
    ("how", "minutes", "says"),
    [
        ("lose('TIMEOUT')", 5, "reached its time limit: ask for more with --slurm time=MINUTES, which is 60"),
        ("warn()", 5, "reached its time limit: ask for more with --slurm time=MINUTES, which is 60"),
        ("lose('NODE_FAIL')", 5, "lost its node"),
        (
            "lose('OUT_OF_MEMORY', all_of_it=False)",
            5,
            "used up its memory: ask for more with --slurm mem=SIZE",
        ),
        ("warn()", 60, "gave no result (failed); its own log is"),
    ],
    ids=["limit", "before the limit", "node", "memory", "preempted"],
)
def test_what_slurm_ended_is_said_and_done_again(slurm, clone, monkeypatch, how, minutes, says):  # noqa: F811
    import submitit

    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0)
    clone("01_a", "open('ran', 'a').write('a')")
    clone("02_b", LOST + f"fake_slurm.{how}")
    result = labkit("run", "--executor", "slurm", "--slurm", f"time={minutes}")
    assert result.exit_code == 0, result.output
    assert f"02_b: failed: job 1_1 {says}" in result.output and "it is tried again" in result.output
    assert result.output.count("│ passed") == 2
    assert (places.NOTEBOOKS / "ran").read_text() == "a" and len(list(slurm.glob("*.sh"))) == 2


def test_jobs_of_a_run_that_was_lost_are_taken_over(slurm, clone):  # noqa: F811
    paths = [clone("01_a", FOR_EVER), clone("02_b", "1")]
    wanted = [jobs.keyed(Job("run", str(path), {})) for path in paths]
    lost = cluster.Slurm({"": {}}).start(wanted)
    pid = places.NOTEBOOKS / "pid"
    wait_for(lambda: pid.exists() and jobs.result(wanted[1]), "the workers", 60)
    found = cluster.Slurm({"": {}})
    (task,) = found.start(wanted[:1])
    assert task.task.job_id == lost[0].task.job_id and len(list(slurm.glob("*.sh"))) == 1
    found.stop()
    wait_for(lambda: task.task.done(force_check=True), "its end", 60)
    assert (slurm / f"{task.task.job_id}.state").read_text() == "CANCELLED"
    assert jobs.kept(wanted[1]).passed


def noted(path, number, *, again=False):
    """A job that an earlier run submitted under this number."""
    job = jobs.keyed(Job("run", str(path), {}, again=again))
    jobs.prepare(job)
    places.write_text(cluster._submitted(job), f"{job.key} {number}")
    return job


def test_a_job_that_passes_after_the_run_has_looked_keeps_its_result(slurm, clone):  # noqa: F811
    job = noted(clone("01_a", "1"), "7_0")
    jobs.finish(Outcome(job, True, seconds=400.0))
    (slurm / "7_0.state").write_text("COMPLETED")
    (task,) = cluster.Slurm({"": {}}).start([job])
    assert task.done() and jobs.kept(job).seconds == 400.0
    assert not list(slurm.glob("*.sh"))


def test_where_slurm_does_not_say_whether_a_job_runs_nothing_is_touched(slurm, clone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cluster, "ASK_AGAIN_S", (0.01,))
    runs, unknown = noted(clone("01_a", "1"), "7_0"), noted(clone("02_b", "1"), "7_1")
    (slurm / "7_0.state").write_text("RUNNING")
    jobs.say_progress(unknown, 5, 20, "goes on")
    engine = cluster.Slurm({"": {}})
    with pytest.raises(ValueError, match=r"whether job 7_1 runs: .* delete build/workers/run/02_b/slurm"):
        engine.start([runs, unknown])
    engine.stop()
    assert (slurm / "7_0.state").read_text() == "RUNNING"
    assert jobs.progress(unknown) == (5, 20, "goes on") and not list(slurm.glob("*.sh"))


def test_slurm_is_asked_again_about_a_job_that_it_does_not_know_yet(slurm, clone, monkeypatch):  # noqa: F811
    job = noted(clone("01_a", "1"), "7_0")

    def lagging(pause_s):
        time.sleep(0.01)  # submitit does not ask twice within a millisecond
        if pause_s:
            (slurm / "7_0.state").write_text("RUNNING")

    monkeypatch.setattr(cluster, "time", SimpleNamespace(sleep=lagging))
    (task,) = cluster.Slurm({"": {}}).start([job])
    assert task.task.job_id == "7_0" and not list(slurm.glob("*.sh"))


def test_a_job_that_is_wanted_anew_is_cancelled_also_where_slurm_does_not_know_it(slurm, clone):  # noqa: F811
    job = noted(clone("01_a", "1"), "7_0", again=True)
    (slurm / "7_0.pid").write_text(str(2**22 + 1))
    assert cluster.Slurm({"": {}})._earlier(job) is None
    assert (slurm / "7_0.state").read_text() == "CANCELLED"


def keys(*assignments):
    """The key of each job of `labkit run --executor slurm` with these options."""
    crew = many.crew(None, "slurm", assignments, None)
    paths = [str(places.NOTEBOOKS / "01_a.ipynb")]
    return [job.key for job in many._fleet(crew, "run", paths, {}, False).wanted]


def test_what_chooses_a_device_or_its_software_changes_the_key_and_nothing_else_does(slurm, clone):  # noqa: F811
    clone("01_a", "1")
    plain = keys()
    assert keys("time=5", "mem=1G", "cpus-per-task=2", "exclude=a", "account=b", "qos=c") == plain
    choosing = [
        "gres=gpu:a100:1", "gres=gpu:h100:1", "partition=fast", "partition=slow", "constraint=a100",
        "nodelist=a", "container-image=a", "container-image=b", "apptainer=a.sif",
    ]  # fmt: skip
    assert len({*plain, *(key for choice in choosing for key in keys(choice))}) == len(choosing) + 1
    assert keys("gres=gpu:a100:1", "gres=gpu:h100:1") == keys(choosing[0]) + keys(choosing[1])


def test_a_page_of_two_kinds_of_device_is_not_begun(slurm, clone):  # noqa: F811
    kinds = ["--slurm", "constraint=a100", "--slurm", "constraint=h100"]
    result = labkit("bench", "--figure", "--executor", "slurm", *kinds)
    assert result.exit_code == 2 and "--figure draws one device: name one kind" in result.output
    assert not list(slurm.iterdir())


@pytest.mark.parametrize(("kinds", "submitted"), [(("gpu", "none"), "CANCELLED"), (("none", "gpu"), None)])
def test_of_a_submission_that_is_refused_half_way_nothing_is_left(slurm, clone, kinds, submitted):  # noqa: F811
    path = clone("01_a", FOR_EVER)
    crew = many.crew(None, "slurm", [f"partition={kind}" for kind in kinds], None)
    wanted = many._fleet(crew, "run", [str(path)], {}, False).wanted
    rows.write(wanted[1].home / "rows.jsonl", [recorded()])
    with pytest.raises(ValueError, match="Slurm takes no such job"):
        crew.engine.start(wanted)
    crew.engine.stop()
    assert gather.measured(wanted) == []
    states = [file.read_text() for file in slurm.glob("*.state")]
    assert states == ([submitted] if submitted else [])
