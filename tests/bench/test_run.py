"""Benchmarks in virtual time: rows, a stopped run that goes on, peers, files, what the command says."""

import errno
import io
import json
import os
from dataclasses import replace

import click
import pytest
import stage
from rich.console import Console
from simulated import DOUBLING, doubling
from taped import recorded

from labkit import paths
from labkit.bench import recorded_benchmark, report, run, suite_part, suites
from labkit.bench.suite_part import SuitePart
from labkit.measure import machine, roofline, rows, sweeps
from labkit.measure.contender import Contender
from labkit.workloads import peers

SHAPES = tuple({"batch": 2, "width": width} for width in (16, 32))
OUT = paths.Path("out.jsonl")
LOST = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def folders(own_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    monkeypatch.setattr(roofline, "roofs", lambda **_: None)
    monkeypatch.chdir(tmp_path)


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

    def affine(self):
        who = (self.ours, self.other, self.peer)
        ranges = {"batch": (1, 64, 1), "width": (64, 512, 1)}
        both = SuitePart(who[:2], (), "", ("float32",), ranges=ranges)
        return [SuitePart(who, SHAPES, "", ("float32",)), both]

    def linear(self):
        dtypes, directions = ("float32", "float16"), ("forward", "forward_backward")
        return [SuitePart((self.ours,), SHAPES[:1], "", dtypes, directions)]


@pytest.fixture
def toy(gpu, monkeypatch):
    made = Toy(gpu)
    monkeypatch.setattr(suites, "SUITES", {"affine": made.affine, "linear": made.linear})
    return made


def run_labkit(*arguments, code=0):
    result = stage.labkit("bench", *map(str, arguments))
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    return result.output


def measure(*names, with_peers=False, **options):
    """The rows of these suites, and how many of them an earlier run measured."""
    found = {name: suites.parts(name, peers=with_peers) for name in names or suites.SUITES}
    measured = []
    kept = run.measure_suites(found, Console(file=io.StringIO()), measured, **options)
    return measured, kept


def test_every_contender_shape_dtype_and_direction_is_a_row(toy):
    output = run_labkit("--json", OUT)
    assert "affine" in output and "0.333" in output and (paths.BUILD / "benchmark.png").exists()
    found = rows.read(OUT)
    affine = [(who, "forward", "float32", width) for width in (16, 32) for who in ("labkit", "eager")]
    ways = [(way, dtype) for dtype in ("float32", "float16") for way in ("forward", "forward_backward")]
    linear = [("labkit", *way, 16) for way in ways]
    assert [(r.contender, r.direction, r.dtype, r.shape["width"]) for r in found] == affine + linear
    assert [r.suite for r in found] == ["bench/affine"] * 4 + ["bench/linear"] * 4
    assert all(r.median_us and r.copy_us and r.kind == "live" and r.source.startswith("code ") for r in found)
    assert set(json.loads(OUT.read_text().splitlines()[0])) == {*rows.COLUMNS, "trace"}
    assert "affine" not in run_labkit("linear", "linear")


def test_sizes_that_are_drawn_are_measured_and_named_apart(toy, monkeypatch):
    monkeypatch.setattr(suite_part, "LEAST_BYTES", 4096)
    seen = []
    for arguments in (("--seed", 3), ("--seed", 3), (), ("--seed", 3, "--small")):
        run_labkit("affine", "--random", 4, *arguments, "--json", OUT)
        seen.append([(row.suite, row.contender, *row.shape.values()) for row in rows.read(OUT)])
    assert seen[0] == seen[1] != seen[2] and {row[0] for row in seen[0]} == {"random/affine"}
    assert len(seen[0]) == 8 and all(8 * batch * width >= 4096 for *_, batch, width in seen[0])
    assert {row[0] for row in seen[3]} == {"random/affine/small"}
    assert "no ranges to draw sizes from" in run_labkit("linear", "--random", 4, code=2)


# Peers


def test_peers_that_are_missing_are_named(toy):
    output = run_labkit("affine", "--peers", "--json", OUT)
    assert "no time: Peer, 2 of bench/affine: MissingError: a-peer is not installed" in output
    assert [(row.contender, row.median_us) for row in rows.read(OUT) if row.peer] == [("Peer", None)] * 2


def test_a_peer_tunes_itself_once_for_a_width_before_it_is_measured(toy, monkeypatch):
    told = []

    def tune(contenders, shapes):
        told.append(([one.name for one in contenders], list(shapes), list(toy.calls)))
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(peers, "tune", tune)
    monkeypatch.setattr(sweeps, "version", lambda package: "1.0")
    fla = replace(toy.ours, peer="fla-core", name="fla")
    shapes = (*SHAPES, {"batch": 4, "width": 16})
    monkeypatch.setitem(suites.SUITES, "affine", lambda: [SuitePart((fla,), shapes, "", ("float32",))])
    measured, _ = measure("affine", with_peers=True)
    assert len(measured) == 3 and told == [(["fla"], list(SHAPES), [])], "its failure is no error"


# A run that is stopped


def test_a_stop_keeps_the_rows_and_the_same_command_goes_on(toy):
    for at, kept in ((("labkit", 16), 0), (("eager", 32), 2)):
        toy.stop_at = at
        rows.write(OUT, [recorded()])
        output = run_labkit("--json", OUT, code=130)
        assert (f"{kept} rows are kept: the same command goes on." in output) == bool(kept)
        before = rows.read(OUT)
        assert len(before) == 2 if kept else before == [recorded()], "nothing takes no file's place"
    assert [(row.contender, row.shape["width"]) for row in before] == [("labkit", 16), ("eager", 16)]
    toy.stop_at = None
    toy.calls.clear()
    assert "2 rows were measured before, with the same code, device and versions" in run_labkit("--json", OUT)
    assert rows.read(OUT)[:2] == before and len(rows.read(OUT)) == 8
    assert ("eager", 16) not in toy.calls and ("eager", 32) in toy.calls
    assert not list((paths.cache() / "bench").rglob("*.jsonl")), "a complete run is forgotten"


@pytest.mark.parametrize("how", ["again", "machine", "damaged"])
def test_rows_that_would_not_be_measured_so_now_are_measured_again(toy, how, monkeypatch):
    measure("affine")
    if how == "machine":
        here = replace(machine.identity(), driver="571")
        monkeypatch.setattr(machine, "identity", lambda: here)
    elif how == "damaged":
        run.tape("affine").write_text("{}\n")
    assert measure("affine", again=how == "again")[1] == 0


def test_an_edit_during_the_run_ends_it_and_leaves_no_row_under_the_wrong_code(toy, monkeypatch):
    code, edited = sweeps.source_label, []
    label = lambda one: "code of the edit" if one.name in edited else code(one)  # noqa: E731
    monkeypatch.setattr(sweeps, "source_label", label)
    monkeypatch.setattr(run, "say", lambda *_: edited.append("eager"))  # at the first row
    output = run_labkit("affine", "--json", OUT, code=1)
    assert "bench/affine: the code of eager was edited while it was measured" in output
    for path in (run.tape("affine"), OUT):
        assert [row.contender for row in rows.read(path)] == ["labkit", "eager", "labkit"]
        assert all(row.source != "code of the edit" for row in rows.read(path))


# What fails


def test_a_lost_gpu_ends_the_run_and_any_other_error_is_shown(toy, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError(LOST)

    with monkeypatch.context() as patch:
        patch.setattr(sweeps.clocks, "measure", lost)
        with pytest.raises(RuntimeError, match=r"^CUDA error"):
            measure("affine")
        patch.setattr("labkit.gpu.synchronize", lost)
        with pytest.raises(click.ClickException, match=r"^bench/affine: the GPU is lost: CUDA error"):
            measure("affine")
    call = lambda x: monkeypatch.setattr("labkit.gpu.synchronize", lost) or lost()  # noqa: E731
    toy.ours = Contender("labkit", call, DOUBLING)
    output = run_labkit("--json", OUT, code=1)
    assert "bench/affine: the GPU is lost: labkit: RuntimeError: CUDA error: an illegal" in output
    assert [row.median_us for row in rows.read(OUT)] == [None]


@pytest.mark.parametrize("writes", [(recorded_benchmark, "keep"), (report, "show")])
def test_a_disk_that_is_full_in_the_end_loses_no_row(toy, monkeypatch, writes):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*writes, full)
        output = run_labkit("--peers", "--record", code=1)
    assert "No space left on device" in output and "10 rows are kept" in output
    assert measure(with_peers=True)[1] == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["afine"], "no suite is called 'afine'; there are: affine, linear"),
        *((["--json", at], f"{at} is no plain file") for at in (".", "/dev/null")),
        (["--record"], "--record keeps full runs only"),
        (["--record", "--peers", "--random", "3"], "--record keeps full runs only"),
        (["--small"], "add --random N"),
        (["--compare", "a", "b", "affine"], "leave the rest out"),
        (["--report", "a"], "there is no such file"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_measured(toy, arguments, says, tmp_path):
    assert says in run_labkit(*arguments, code=2)
    assert not toy.calls and not (tmp_path / "a").exists()


def test_what_cannot_be_loaded_is_said_before_anything_is_measured(toy, monkeypatch):
    def broken():
        raise ValueError("01_launch_overhead, cell 3: a cell tagged kernel has to be plain Python")

    monkeypatch.setitem(suites.SUITES, "affine", broken)
    assert "Error: 01_launch_overhead, cell 3" in run_labkit(code=2)
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    assert "nothing is timed: a benchmark needs a GPU" in run_labkit("--json", OUT, code=1)
    assert not OUT.exists() and not toy.calls


# Progress, and what is kept of a full run


def test_there_is_a_line_for_each_row(toy):
    lines = run_labkit().splitlines()
    assert lines[0] == "affine: row 1 of 8: labkit, forward, float32, 2 x 16: 16 µs"
    assert lines[7].startswith("linear: row 8 of 8: labkit, forward_backward, float16, 2 x 16: ")


def test_a_full_run_is_recorded(toy):
    rows.write(roofline.cache_path(), [recorded(suite="roofs/copy")])
    assert "Recorded: recorded/simulated/bench.jsonl" in run_labkit("--peers", "--record")
    assert (paths.RECORDED / "simulated" / "roofs.jsonl").exists()
    found = rows.read(paths.RECORDED / "simulated" / "bench.jsonl")
    assert len(found) == 10 and {row.kind for row in found} == {"recorded"}


def test_a_full_run_goes_on_from_the_one_that_is_kept(toy):
    """Which lacks a suite, and has ours by other code. Stopped, it goes on from its own rows."""
    run_labkit("--peers", "--record")
    kept = paths.RECORDED / "simulated" / "bench.jsonl"
    found = [row for row in rows.read(kept) if row.suite == "bench/affine"]
    rows.write(kept, [replace(row, source="code x") if row.contender == "labkit" else row for row in found])
    toy.calls.clear()
    toy.stop_at = ("labkit", 32)
    run_labkit("--peers", "--record", code=130)
    assert toy.calls == [("labkit", 16), toy.stop_at]
    toy.calls.clear()
    toy.stop_at = None
    assert "3 rows were measured before, with the same code" in run_labkit("--peers", "--record")
    assert toy.calls == [("labkit", 32), ("labkit", 16)] and len(rows.read(kept)) == 10
    assert "were measured before" not in run_labkit("--peers", "--record", "--again")
