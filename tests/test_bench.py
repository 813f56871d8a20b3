"""Benchmarks in virtual time: rows, a stopped run that goes on, peers, files, what the command says."""

import contextlib
import errno
import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
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
from labkit.bench_plan import Part
from labkit.sweeps import Contender

SHAPES = tuple({"batch": 2, "width": width} for width in (16, 32))
OUT = places.Path("out.jsonl")
LOST = "CUDA error: an illegal memory access was encountered"


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


class Toy:
    """Two suites: `affine` has ours, another and a peer; `linear` ours in two dtypes and directions."""

    def __init__(self, gpu):
        self.calls, self.stop_at = [], None
        self.ours, self.other = self.counted(doubling(gpu)), self.counted(doubling(gpu, "eager", 3.0))
        self.peer = Contender("Peer", self.missing, DOUBLING, peer="a-peer")

    def missing(self, *_):
        raise peers.MissingError("a-peer")

    def counted(self, one):
        def call(x):
            if (one.name, x.shape[1]) not in self.calls:
                self.calls.append((one.name, x.shape[1]))
            if (one.name, x.shape[1]) == self.stop_at:
                raise KeyboardInterrupt
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
def planned(monkeypatch):
    """A function that puts these parts in the place of the suites'."""
    return lambda *parts: monkeypatch.setattr(suites, "parts", lambda name, peers: list(parts))


@pytest.fixture
def roofs(monkeypatch):
    dtypes = ("float32", "float16", "bfloat16", "tf32")
    how = {"copy": ((2**20, 2**20 / 10.0),), "matmul": dict.fromkeys(dtypes, 1e12)}
    found = machine.Roofs(kind="live", device="Simulated", date="2026-01-02", node_us=1.0, host_us=5.0, **how)
    monkeypatch.setattr(machine, "roofs", lambda **_: found)
    return found


def labkit(*arguments, code=0):
    result = CliRunner().invoke(cli.cli, ["bench", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    return result.output


def run(*names, **options):
    made = Bench(names or suites.NAMES, **options)
    made.run()
    return made


def test_every_contender_shape_dtype_and_direction_is_a_row_in_both_files(toy):
    assert "bench/affine" in labkit("--json", OUT, "--csv", "out.csv")
    found = rows.read(OUT)
    affine = [(who, "forward", "float32", width) for width in (16, 32) for who in ("labkit", "eager")]
    ways = [(way, dtype) for dtype in ("float32", "float16") for way in ("forward", "forward_backward")]
    linear = [("labkit", *way, 16) for way in ways]
    assert [(r.contender, r.direction, r.dtype, r.shape["width"]) for r in found] == affine + linear
    assert [r.suite for r in found] == ["bench/affine"] * 4 + ["bench/linear"] * 4
    assert all(r.median_us and r.copy_us and r.kind == "live" and r.source.startswith("code ") for r in found)
    assert {(r.clock, r.cache, r.peer) for r in found} == {("graph", "cold", None)}
    assert set(json.loads(OUT.read_text().splitlines()[0])) == {*rows.COLUMNS} - {*rows.LATER}
    assert pd.read_csv("out.csv")["median_us"].tolist() == [row.median_us for row in found]
    assert "bench/affine" not in labkit("linear", "linear")


# Peers


def test_peers_that_are_missing_or_of_another_version_are_named(toy, monkeypatch):
    monkeypatch.setattr(peers, "EXPECTED", {"numpy": "0.1", "no-such-package-of-ours": "1.0"})
    output = labkit("affine", "--peers", "--json", OUT)
    why = "MissingError: a-peer is not installed: pip install -e '.[peers]'"
    assert f"no time: Peer, 2 rows of affine: {why}" in output
    assert [(row.contender, row.median_us) for row in rows.read(OUT) if row.peer] == [("Peer", None)] * 2
    assert f"numpy is version {machine.version('numpy')}: its contenders were tried with 0.1." in output
    assert "no-such-package-of-ours" not in output and "numpy is version" not in labkit("affine")


def test_a_peer_tunes_itself_before_it_is_measured_and_again_if_rows_of_it_are_left(
    toy, monkeypatch, planned
):
    told = []

    def tune(contenders, shapes):
        told.append(([one.name for one in contenders], list(shapes), list(toy.calls)))
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(peers, "tune", tune)
    planned(Part((toy.ours,), SHAPES, "bench/affine", ("float32",), tuning=("labkit",), tuned=SHAPES[:1]))
    measured = run("affine").measured
    assert len(measured) == 2 and told == [(["labkit"], [SHAPES[0]], [])], "its failure is no error"
    for left in (0, 1):
        rows.write(bench.tape("affine"), measured[: 2 - left])
        assert run("affine").kept == 2 - left and len(told) == 1 + left


# A run that is stopped


def test_a_stop_keeps_the_rows_and_the_same_command_goes_on(toy):
    for at, kept in ((("labkit", 16), 0), (("eager", 32), 2)):
        toy.stop_at = at
        rows.write(OUT, [recorded()])
        output = labkit("--json", OUT, code=130)
        assert (f"{kept} rows are kept: within an hour the same command goes on." in output) == bool(kept)
        before = rows.read(OUT)
        assert len(before) == 2 if kept else before == [recorded()], "nothing takes no file's place"
    assert [(row.contender, row.shape["width"]) for row in before] == [("labkit", 16), ("eager", 16)]
    toy.stop_at = None
    toy.calls.clear()
    assert "2 rows were measured before the last run was stopped." in labkit("--json", OUT)
    assert rows.read(OUT)[:2] == before and len(rows.read(OUT)) == 8
    assert ("eager", 16) not in toy.calls and ("eager", 32) in toy.calls
    assert not list((places.cache() / "bench").rglob("*.jsonl")), "a complete run is forgotten"


@pytest.mark.parametrize("how", ["again", "machine", "damaged"])
def test_rows_that_would_not_be_measured_so_now_are_measured_again(toy, how, monkeypatch):
    run("affine")
    if how == "machine":
        here = replace(machine.identity(), driver="571")
        monkeypatch.setattr(machine, "identity", lambda: here)
    elif how == "damaged":
        bench.tape("affine").write_text("{}\n")
    assert run("affine", again=how == "again").kept == 0


def aged(name, hours):
    """Make a suite's rows so old."""
    then = time.time() - hours * 3600
    os.utime(bench.tape(name), (then, then))


def test_rows_count_within_an_hour_after_the_last_of_any_suite_if_they_are_planned(toy, planned):
    run("affine", "linear")
    aged("affine", 9)
    aged("linear", 0.9)
    assert run("affine").kept == 4
    planned(Part((toy.ours,), SHAPES[:1], "bench/affine", ("float32",)))
    again = run("affine")
    assert (again.kept, len(again.measured)) == (1, 1)
    aged("affine", 9)
    aged("linear", 1.1)
    assert run("linear").kept == run("affine").kept == 0, "what is too old does not come back"


def test_an_edit_during_the_run_ends_it_and_leaves_no_row_under_the_wrong_code(toy, monkeypatch):
    code, edited = sweeps.code, []
    monkeypatch.setattr(sweeps, "code", lambda one: "code of the edit" if one.name in edited else code(one))
    report = lambda console: contextlib.nullcontext(lambda progress: edited.append("eager"))  # noqa: E731
    monkeypatch.setattr(bench_report, "report", report)
    output = labkit("affine", "--json", OUT, code=1)
    assert "bench/affine: the code of eager was edited while it was measured" in output
    for path in (bench.tape("affine"), OUT):
        assert [row.contender for row in rows.read(path)] == ["labkit", "eager", "labkit"]
        assert all(row.source != "code of the edit" for row in rows.read(path))


# What fails


def test_a_lost_gpu_ends_the_run_and_any_other_error_is_shown(toy, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError(LOST)

    with monkeypatch.context() as patch:
        patch.setattr(sweeps.clocks, "measure", lost)
        with pytest.raises(RuntimeError, match=r"^CUDA error"):
            run("affine")
        patch.setattr(device, "synchronize", lost)
        with pytest.raises(bench.LostError, match=r"^bench/affine: the GPU is lost: RuntimeError"):
            run("affine")
    call = lambda x: monkeypatch.setattr(device, "synchronize", lost) or lost()  # noqa: E731
    toy.ours = Contender("labkit", call, DOUBLING)
    output = labkit("--json", OUT, code=1)
    assert "bench/affine: the GPU is lost after labkit: RuntimeError: CUDA error: an illegal" in output
    assert [row.median_us for row in rows.read(OUT)] == [None]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("writes", [(bench, "write_csv"), (bench_record, "keep"), (cli, "_draw")])
def test_a_disk_that_is_full_in_the_end_loses_no_row(toy, roofs, monkeypatch, writes):
    monkeypatch.setattr(*writes, full)
    rows.write(machine.cache_path(), [recorded(suite="roofs/copy")])
    output = labkit("--csv", "out.csv", "--peers", "--record", "--figure", code=2)
    assert "No space left on device; 10 rows are kept" in output and run(with_peers=True).kept == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["afine"], "no suite is called 'afine'; there are: affine, linear"),
        (["--json", "nowhere/out.jsonl"], "nowhere/out.jsonl cannot be written: No such file or directory"),
        *((["--json", "a", "--csv", at], f"{at} cannot be written: it is no") for at in (".", "/dev/null")),
        (["--json", "a", "--csv", "./a"], "--json and --csv name one file"),
        (["--record"], "--record keeps full runs only"),
        (["--compare", "a", "./a"], "--compare names one file twice"),
        (["affine", "--figure"], "there are no roofs of the device"),
    ],
)
def test_mistakes_are_one_sentence(toy, arguments, says, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "roofs", lambda **_: None)
    assert says in labkit(*arguments, code=2)
    assert not toy.calls or "--figure" in arguments
    assert not (tmp_path / "a").exists(), "looking whether it can be written leaves nothing"


def test_what_cannot_be_recorded_or_loaded_is_said_before_anything_is_measured(toy, tmp_path, monkeypatch):
    def broken(name, *, peers):
        raise ValueError("01_launch_overhead, cell 3: a cell tagged kernel has to be plain Python")

    (tmp_path / "README.md").write_text("# no marks\n")
    assert "README.md" in labkit("--peers", "--record", code=2)
    monkeypatch.setattr(suites, "parts", broken)
    assert "Error: 01_launch_overhead, cell 3" in labkit(code=2)
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert "nothing is timed: a benchmark needs a GPU" in labkit("--json", OUT, code=1)
    assert "no full run is recorded" in labkit("--figure", code=1) and not OUT.exists() and not toy.calls


# Progress, and what is kept of a full run


def test_progress_counts_all_rows_and_what_is_left_falls_at_the_pace_of_what_was_measured(toy, monkeypatch):
    """As planned in the first ten seconds; what was kept does not count."""
    heard, now = [], [0.0]

    def progress(each):
        heard.append(each)
        now[0] += 18.0

    monkeypatch.setattr(bench_plan, "ROW_S", 6.0)
    run("affine")
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert run(progress=progress).kept == 4
    assert [(each.done, each.total) for each in heard] == [(n, 8) for n in range(1, 9)]
    assert [each.suite for each in heard] == ["affine"] * 4 + ["linear"] * 4
    left = [42.0, 36.0, 30.0, 24.0, 18.0, 12.0 * 90 / 12, 6.0 * 108 / 18, 0.0]
    assert [each.left_s for each in heard] == left


def test_a_full_run_is_recorded_and_the_readme_and_the_page_say_it(toy, roofs, tmp_path, monkeypatch):
    rows.write(machine.cache_path(), [recorded(suite="roofs/copy")])
    output = labkit("--peers", "--record", "--figure")
    assert "Recorded: recorded/simulated/bench.jsonl" in output and "Drawn: build/bench.png" in output
    assert (places.RECORDED / "simulated" / "roofs.jsonl").exists()
    found = rows.read(places.RECORDED / "simulated" / "bench.jsonl")
    assert len(found) == 10 and {row.kind for row in found} == {"recorded"}
    readme, page = (tmp_path / "README.md").read_text(), places.BUILD / "bench.png"
    assert readme == bench_table.renew(readme, found, {row.suite: roofs for row in found})
    assert "| affine | forward |" in readme and page.read_bytes().startswith(b"\x89PNG")
    page.unlink()
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert labkit("--figure") and page.exists(), "of the recorded one"
