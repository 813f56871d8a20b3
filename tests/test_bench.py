"""Benchmarks in virtual time: rows, a stopped run that goes on, peers, files, what the command says."""

import contextlib
import csv
import errno
import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from simulated import DOUBLING, doubling, install
from taped import recorded

from labkit import (
    bench,
    bench_plan,
    bench_record,
    bench_report,
    bench_table,
    cli,
    device,
    machine,
    peers,
    places,
    rows,
    suites,
    sweeps,
)
from labkit.bench import Bench
from labkit.bench_plan import COMPILE_S, ROW_S, TUNE_S, Part
from labkit.sweeps import Contender

SHAPES = tuple({"batch": 2, "width": width} for width in (16, 32))


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(rows.TAPE, raising=False)
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(places, "BUILD", tmp_path / "build")
    monkeypatch.setattr(bench_table, "README", tmp_path / "README.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(f"before\n{bench_table.BEGIN}{bench_table.END}after\n")


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch.setattr)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)


class Toy:
    """Two suites: `affine` has ours, another and a peer; `linear` ours in two dtypes and directions."""

    def __init__(self, gpu):
        def missing(*_):
            raise peers.MissingError("a-peer")

        self.calls = []
        self.stop_at, self.stop_with = None, KeyboardInterrupt
        self.ours = self.counted(doubling(gpu))
        self.other = self.counted(doubling(gpu, "eager", 3.0))
        self.peer = Contender("Peer", missing, DOUBLING, peer="a-peer")

    def counted(self, one):
        def call(x):
            width = x.shape[1]
            if (one.name, width) not in self.calls:
                self.calls.append((one.name, width))
            if (one.name, width) == self.stop_at:
                raise self.stop_with
            return one.call(x)

        return Contender(one.name, call, one.work)

    def parts(self, name, *, peers):
        both = dict(dtypes=("float32", "float16"), directions=("forward", "forward_backward"))
        part = {
            "affine": Part((self.ours, self.other, self.peer), SHAPES, "bench/affine", ("float32",)),
            "linear": Part((self.ours,), SHAPES[:1], "bench/linear", **both),
        }[name]
        return [part if peers else part.without_peers()]


@pytest.fixture
def toy(gpu, monkeypatch):
    made = Toy(gpu)
    monkeypatch.setattr(suites, "NAMES", ("affine", "linear"))
    monkeypatch.setattr(suites, "parts", made.parts)
    return made


@pytest.fixture
def roofs(monkeypatch):
    found = machine.Roofs(
        kind="live", device="Simulated", date="2026-01-02", copy=((2**20, 2**20 / 10.0),),
        matmul=dict.fromkeys(("float32", "float16", "bfloat16", "tf32"), 1e12), node_us=1.0, host_us=5.0,
    )  # fmt: skip
    monkeypatch.setattr(machine, "roofs", lambda **_: found)
    return found


def labkit(*arguments):
    result = CliRunner().invoke(cli.cli, ["bench", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def run(*names, **options):
    made = Bench(names or suites.NAMES, **options)
    made.run()
    return made


# Rows


def test_every_contender_shape_dtype_and_direction_is_a_row(toy):
    found = run().measured
    assert [(r.suite, r.contender, r.direction, r.dtype, r.shape["width"]) for r in found] == [
        *(
            ("bench/affine", who, "forward", "float32", width)
            for width in (16, 32)
            for who in ("labkit", "eager")
        ),
        *(
            ("bench/linear", "labkit", direction, dtype, 16)
            for dtype in ("float32", "float16")
            for direction in ("forward", "forward_backward")
        ),
    ]  # fmt: skip
    assert all(r.median_us and r.copy_us and r.kind == "live" and r.source.startswith("code ") for r in found)
    assert {(r.clock, r.cache) for r in found} == {("graph", "cold")}


def test_files_hold_the_rows_of_the_schema(toy, tmp_path):
    result = labkit("--json", "out.jsonl", "--csv", "out.csv")
    assert result.exit_code == 0
    found = rows.read(tmp_path / "out.jsonl")
    assert len(found) == 8
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert set(first) == {*rows.COLUMNS} - {*rows.LATER}, "a quiet row of no card"
    with open(tmp_path / "out.csv", newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [line["width"] for line in table] == [str(row.shape["width"]) for row in found]
    assert [float(line["median_us"]) for line in table] == [row.median_us for row in found]


def test_one_suite_can_be_named(toy):
    result = labkit("linear", "linear")
    assert result.exit_code == 0
    assert "bench/linear" in result.output and "bench/affine" not in result.output


# Peers


def test_without_the_word_no_peer_is_taken_along(toy):
    assert all(row.peer is None for row in run().measured)


def test_a_peer_that_is_missing_is_named_with_the_reason(toy):
    result = labkit("affine", "--peers", "--json", "out.jsonl")
    assert (
        "no time: Peer, 2 rows of affine: MissingError: a-peer is not installed: pip install -e '.[peers]'"
        in (result.output)
    )
    peer = [row for row in rows.read(places.Path("out.jsonl")) if row.peer]
    assert [(row.contender, row.median_us) for row in peer] == [("Peer", None)] * 2


def test_a_peer_of_another_version_is_named_and_measured(toy, monkeypatch):
    monkeypatch.setattr(peers, "EXPECTED", {"numpy": "0.1", "no-such-package-of-ours": "1.0"})
    result = labkit("affine", "--peers")
    assert (
        f"numpy is version {machine.version('numpy')}: its contenders were tried with 0.1." in result.output
    )
    assert "no-such-package-of-ours" not in result.output and result.exit_code == 0
    assert "numpy is version" not in labkit("affine").output


def test_a_build_of_the_expected_version_is_expected(monkeypatch):
    monkeypatch.setattr(peers, "EXPECTED", {"it": "1.0"})
    monkeypatch.setattr(peers, "installed", lambda package: "1.0+cu130")
    assert peers.unexpected() == []


def test_a_peer_tunes_itself_before_it_is_measured_and_its_failure_is_a_note(toy, monkeypatch):
    told = []

    def tune(contenders, shapes):
        told.append(([one.name for one in contenders], list(shapes), list(toy.calls)))
        raise RuntimeError("no kernel image")

    part = Part(
        (toy.ours, toy.peer), SHAPES, "bench/affine", ("float32",), tuning=("Peer",), tuned=SHAPES[:1]
    )
    monkeypatch.setattr(suites, "parts", lambda name, peers: [part])
    monkeypatch.setattr(peers, "tune", tune)
    assert len(run("affine", with_peers=True).measured) == 4
    assert told == [(["Peer"], [SHAPES[0]], [])]


@pytest.mark.parametrize(("left", "tuned"), [(0, 0), (1, 1)])
def test_a_peer_is_tuned_again_if_a_stopped_run_has_left_any_row_of_it(toy, monkeypatch, left, tuned):
    parts = [
        Part((toy.ours,), SHAPES, "bench/affine", ("float32",), tuning=("labkit",), tuned=SHAPES),
        Part((toy.ours,), SHAPES, "bench/affine", ("float32",), directions=("forward_backward",)),
    ]
    monkeypatch.setattr(suites, "parts", lambda name, peers: parts)
    measured = run("affine").measured
    rows.write(bench.tape("affine"), measured[: len(measured) - left])
    told = []
    monkeypatch.setattr(peers, "tune", lambda contenders, shapes: told.append(list(shapes)))
    assert run("affine").kept == 4 - left
    assert told == [list(SHAPES)] * tuned


# A run that is stopped


def stopped(toy, *at):
    toy.stop_at = at
    result = labkit("--json", "out.jsonl")
    toy.stop_at = None
    return result


def test_a_stop_keeps_the_rows_and_the_same_command_goes_on(toy):
    result = stopped(toy, "eager", 32)
    assert result.exit_code == 130
    assert "2 rows are kept: within an hour the same command goes on." in result.output
    before = rows.read(places.Path("out.jsonl"))
    assert [(row.contender, row.shape["width"]) for row in before] == [("labkit", 16), ("eager", 16)]

    toy.calls.clear()
    result = labkit("--json", "out.jsonl")
    assert "2 rows were measured before the last run was stopped." in result.output
    after = rows.read(places.Path("out.jsonl"))
    assert after[:2] == before and len(after) == 8
    assert ("eager", 16) not in toy.calls and ("eager", 32) in toy.calls


def test_a_stop_of_a_run_from_the_beginning_says_how_to_go_on(toy):
    run("affine")
    toy.stop_at = "eager", 32
    result = labkit("--again")
    assert "2 rows are kept: within an hour the same command without --again goes on." in result.output
    toy.stop_at = None
    assert run().kept == 2


def test_suites_that_were_complete_are_not_measured_again(toy):
    def stop(progress):
        if progress.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(progress=stop)
    toy.calls.clear()
    assert run().kept == 7
    assert toy.calls == [("labkit", 16)]


def test_a_complete_run_is_forgotten(toy):
    labkit()
    assert not list((places.cache() / "bench").rglob("*.jsonl"))
    assert "before the last run" not in labkit().output


@pytest.mark.parametrize("how", ["again", "later", "machine", "damaged"])
def test_rows_that_would_not_be_measured_so_now_are_measured_again(toy, how, monkeypatch):
    run("affine")
    if how == "later":
        aged("affine", 1.1)
    elif how == "machine":
        here = machine.identity()
        monkeypatch.setattr(machine, "identity", lambda: replace(here, driver="571"))
    elif how == "damaged":
        bench.tape("affine").write_text("{}\n")
    assert run("affine", again=how == "again").kept == 0


def aged(name, hours):
    """Make a suite's rows so old."""
    then = time.time() - hours * 3600
    os.utime(bench.tape(name), (then, then))


def test_rows_count_within_an_hour_after_the_last_of_any_suite(toy):
    for _ in range(2):  # the second time they are older than the first
        run("affine", "linear")
        aged("affine", 9)
        aged("linear", 0.9)
        assert run("affine").kept == 4
    aged("affine", 9)
    aged("linear", 1.1)
    assert run("linear").kept == 0
    assert run("affine").kept == 0, "what a run has found too old does not come back with it"


def test_an_edit_during_the_run_ends_it_and_leaves_no_row_under_the_wrong_code(toy, monkeypatch):
    code, edited = sweeps.code, []
    monkeypatch.setattr(sweeps, "code", lambda one: "code of the edit" if one.name in edited else code(one))

    def edit(progress):
        edited.append("eager")

    monkeypatch.setattr(bench_report, "report", lambda console: contextlib.nullcontext(edit))
    result = labkit("affine", "--json", "out.jsonl")
    assert result.exit_code == 1
    assert "bench/affine: the code of eager was edited while it was measured" in result.output
    for path in (bench.tape("affine"), places.Path("out.jsonl")):
        assert [row.contender for row in rows.read(path)] == ["labkit", "eager", "labkit"]
        assert all(row.source != "code of the edit" for row in rows.read(path))


def test_rows_that_are_not_planned_any_more_do_not_count(toy):
    run("affine", "linear", with_peers=True)
    part = Part((toy.ours,), SHAPES[:1], "bench/affine", ("float32",))
    toy.parts = lambda name, *, peers: [part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "parts", toy.parts)
        again = run("affine")
    assert (again.kept, len(again.measured)) == (1, 1)


# What fails


def test_a_contender_that_does_not_compile_is_a_gap_and_the_others_go_on(toy, monkeypatch):
    def failing(call, **options):
        def compiled(*inputs):
            raise torch._dynamo.exc.Unsupported("no such operator\nand a page more")

        return compiled

    monkeypatch.setattr(torch, "compile", failing)
    part = Part(
        (toy.ours, Contender("compiled", toy.ours.call, DOUBLING, compiled=True)), SHAPES, "bench/affine",
        ("float32",),
    )  # fmt: skip
    monkeypatch.setattr(suites, "parts", lambda name, peers: [part])
    result = labkit("affine")
    assert result.exit_code == 0
    assert "no time: compiled, 2 rows of affine: Unsupported: no such operator\n" in result.output


def lose(monkeypatch):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, "synchronize", synchronize)


def test_a_lost_gpu_ends_the_run_and_names_who_was_measured(toy, monkeypatch):
    def lost(x):
        lose(monkeypatch)
        device.synchronize()

    toy.ours = Contender("labkit", lost, DOUBLING)
    result = labkit("--json", "out.jsonl")
    assert result.exit_code == 1
    assert "bench/affine: the GPU is lost after labkit: RuntimeError: CUDA error: an illegal" in result.output
    assert [row.median_us for row in rows.read(places.Path("out.jsonl"))] == [None]


def test_a_gpu_lost_between_contenders_is_a_sentence_and_any_other_error_is_shown(toy, monkeypatch):
    def broken(*_, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sweeps.clocks, "measure", broken)
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        run("affine")
    lose(monkeypatch)
    with pytest.raises(bench.LostError, match=r"^bench/affine: the GPU is lost: RuntimeError: CUDA error"):
        run("affine")


def test_an_error_of_the_course_itself_keeps_the_rows_and_shows_its_place(toy, monkeypatch):
    def report(console):
        def fails(progress):
            if progress.done == 3:
                raise ZeroDivisionError

        return contextlib.nullcontext(fails)

    monkeypatch.setattr(bench_report, "report", report)
    result = CliRunner().invoke(cli.cli, ["bench", "--json", "out.jsonl"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert "3 rows are kept" in result.output and len(rows.read(places.Path("out.jsonl"))) == 3


# Progress


def test_progress_counts_all_rows_and_what_is_left_falls(toy):
    heard = []
    run(progress=heard.append)
    assert [(each.done, each.total) for each in heard] == [(n, 8) for n in range(1, 9)]
    assert [each.suite for each in heard] == ["affine"] * 4 + ["linear"] * 4
    left = [each.left_s for each in heard]
    assert left[0] == 7 * ROW_S and left[-1] == 0 and left == sorted(left, reverse=True)


def test_time_left_follows_the_pace_of_what_was_measured(toy, monkeypatch):
    """Of ten planned seconds and more; what was kept does not count."""
    monkeypatch.setattr(bench_plan, "ROW_S", 6.0)
    run("affine")
    now, heard = [0.0], []

    def progress(each):
        heard.append(each.left_s)
        now[0] += 18.0

    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert run(progress=progress).kept == 4
    assert heard[:4] == [42.0, 36.0, 30.0, 24.0], "as planned"
    assert heard[4:] == [18.0, 12.0 * 90 / 12, 6.0 * 108 / 18, 0.0]


def test_a_plan_counts_compiling_and_tuning(gpu):
    compiled = doubling(gpu, "compiled", compiled=True)
    part = Part((doubling(gpu), compiled), SHAPES, dtypes=("float32",), tuning=("labkit",), tuned=SHAPES)
    assert part.seconds() == 4 * ROW_S + 2 * COMPILE_S + 2 * TUNE_S


def test_without_a_terminal_each_suite_is_a_line(toy):
    output = labkit().output
    assert "affine: row 1 of 8, about 4 s left: labkit, forward, float32, 2 x 16: 16 µs" in output
    assert "linear: row 5 of 8" in output and "row 6 of 8" not in output


def test_a_terminal_gets_one_live_line(toy):
    console = bench_report.Console(force_terminal=True, width=120, record=True)
    with bench_report.report(console) as shown:
        assert isinstance(shown, bench_report.LiveReport)
        run(progress=shown)


@pytest.mark.parametrize(("seconds", "said"), [(40.2, "about 40 s left"), (200, "about 3 min left")])
def test_time_left_in_words(seconds, said):
    assert bench_report.left(seconds) == said


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["afine"], "no suite is called 'afine'; there are: affine, linear"),
        (["--json", "nowhere/out.jsonl"], "nowhere/out.jsonl cannot be written: No such file or directory"),
        (["--csv", "."], ". cannot be written: it is not a plain file"),
        (["--json", "/dev/null"], "/dev/null cannot be written: it is not a plain file"),
        (["--json", "a", "--csv", "./a"], "--json and --csv name one file"),
        (["--json", "a" * 300], "cannot be written: File name too long"),
        (["--record"], "--record keeps full runs only"),
        (["affine", "--record", "--peers"], "name no suite"),
        (["affine", "--compare", "a", "b"], "--compare measures nothing"),
        (["--compare", "a", "b"], "a: there is no such file"),
        (["--compare", "a", "./a"], "--compare names one file twice"),
    ],
)
def test_mistakes_are_one_sentence_and_measure_nothing(toy, arguments, says):
    result = labkit(*arguments)
    assert result.exit_code == 2 and says in result.output
    assert not toy.calls


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_a_mistake(toy, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "locked/x cannot be written: Permission denied" in labkit("--json", "locked/x").output


def test_looking_whether_a_file_can_be_written_leaves_nothing(tmp_path):
    bench.check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("writes", [(bench, "write_csv"), (bench_record, "keep"), (cli, "_draw")])
def test_a_disk_that_is_full_in_the_end_loses_no_row(toy, roofs, monkeypatch, writes):
    monkeypatch.setattr(*writes, full)
    rows.write(machine.cache_path(), [recorded(suite="roofs/copy")])
    result = labkit("--csv", "out.csv", "--peers", "--record", "--figure")
    assert result.exit_code == 2
    assert "No space left on device; 10 rows are kept: within an hour" in result.output
    assert run(with_peers=True).kept == 8


def test_a_disk_that_is_full_in_the_middle_keeps_the_rows_before(toy, monkeypatch):
    append = rows.append
    monkeypatch.setattr(
        rows, "append", lambda path, row: full() if row.shape["width"] == 32 else append(path, row)
    )
    result = labkit("--json", "out.jsonl")
    assert result.exit_code == 2
    assert "No space left on device; 2 rows are kept: within an hour" in result.output
    assert len(rows.read(places.Path("out.jsonl"))) == 2
    monkeypatch.setattr(rows, "append", append)
    assert run().kept == 2


def test_where_no_row_can_be_kept_a_sentence_names_the_folder(toy, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    result = labkit()
    assert result.exit_code == 2
    assert f"rows are kept in {tmp_path}/cache/bench; LABKIT_CACHE names another folder" in result.output


def test_a_run_that_stops_before_its_first_row_takes_no_files_place(toy, tmp_path):
    (tmp_path / "out.jsonl").write_text(recorded().to_json() + "\n")
    result = stopped(toy, "labkit", 16)
    assert result.exit_code == 130 and "are kept" not in result.output
    assert rows.read(tmp_path / "out.jsonl") == [recorded()]


@pytest.mark.parametrize("text", ["", "# no marks\n", None])
def test_a_readme_without_a_place_for_the_table_is_a_mistake_before_anything_is_measured(toy, tmp_path, text):
    readme = tmp_path / "README.md"
    readme.unlink() if text is None else readme.write_text(text)
    result = labkit("--peers", "--record")
    assert result.exit_code == 2 and "README.md" in result.output and not toy.calls


def test_a_lesson_that_does_not_load_is_a_sentence(toy, monkeypatch):
    def broken(name, *, peers):
        raise ValueError("01_launch_overhead, cell 3: a cell tagged kernel has to be plain Python")

    monkeypatch.setattr(suites, "parts", broken)
    result = labkit()
    assert result.exit_code == 2 and "Error: 01_launch_overhead, cell 3" in result.output


def test_without_a_gpu_nothing_is_timed_and_a_sentence_says_so(no_gpu, tmp_path):
    result = labkit("--json", "out.jsonl")
    assert result.exit_code == 1
    assert (
        "nothing is timed: a benchmark needs a GPU" in result.output and len(result.output.splitlines()) == 1
    )
    assert not (tmp_path / "out.jsonl").exists()
    result = labkit("--figure")
    assert result.exit_code == 1 and "no full run is recorded" in result.output


# What is kept of a full run


def test_a_full_run_is_recorded_and_the_readme_says_it(toy, roofs, tmp_path, monkeypatch):
    kept = recorded(suite="roofs/copy")
    rows.write(machine.cache_path(), [kept])
    result = labkit("--peers", "--record")
    assert result.exit_code == 0, result.output
    assert "Recorded: recorded/simulated/bench.jsonl" in result.output
    assert (places.RECORDED / "simulated" / "roofs.jsonl").exists()
    found = rows.read(places.RECORDED / "simulated" / "bench.jsonl")
    assert len(found) == 10 and {row.kind for row in found} == {"recorded"}
    readme = (tmp_path / "README.md").read_text()
    assert (
        readme == bench_table.renew(readme, found, {row.suite: roofs for row in found})
        and "| affine | forward |" in readme
    )


def test_the_page_is_drawn_of_this_run_or_of_the_recorded_one(toy, roofs, monkeypatch):
    result = labkit("affine", "--figure")
    assert result.exit_code == 0 and "Drawn: build/bench.png" in result.output
    assert (places.BUILD / "bench.png").read_bytes().startswith(b"\x89PNG")
    bench_record.keep(run("affine").measured)
    (places.BUILD / "bench.png").unlink()
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert labkit("--figure").exit_code == 0
    assert (places.BUILD / "bench.png").exists()


def test_a_page_without_the_roofs_of_its_device_is_a_mistake(toy, monkeypatch):
    monkeypatch.setattr(machine, "roofs", lambda **_: None)
    result = labkit("affine", "--figure")
    assert result.exit_code == 2 and "there are no roofs of the device" in result.output
