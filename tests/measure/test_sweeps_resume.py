"""Sweeps that were cut short, in virtual time: what counts when they go on, and what is measured again."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch
from simulated import DOUBLING, HERE, doubling, install, out_of_memory

from labkit import paths
from labkit.measure import clocks, machine, rows, sweeps
from labkit.measure.contender import Contender

POINTS = [{"batch": 2, "width": width} for width in (16, 32, 64)]


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(rows.TAPE, raising=False)
    return install(monkeypatch.setattr)


@pytest.fixture(params=["own file", "tape"])
def either(request, gpu, tmp_path, monkeypatch):
    """The file of a sweep, its own or the tape of a lesson that is being recorded."""
    if request.param == "own file":
        return paths.cache() / "sweeps" / "simulated" / "suite.jsonl"
    monkeypatch.setenv(rows.TAPE, str(tmp_path / "lesson.jsonl"))
    return tmp_path / "lesson.jsonl"


def files():
    return list((paths.cache() / "sweeps").rglob("*.jsonl"))


class Interrupted(BaseException):
    """Ends a sweep as a killed kernel would: no code of the sweep runs after it."""


def interrupt(contenders, count, **options):
    def progress(done, total, row):
        if done == count:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(contenders, progress=progress, **options)


def run(contenders, **options):
    return sweeps.run(**({"suite": "suite", "points": POINTS} | options), contenders=contenders)


class Counted:
    """A right contender, and the widths that it was called with since the last look."""

    def __init__(self, gpu, name="labkit", fails=lambda width: False):
        self.seen = []

        def call(x):
            self.seen.append(x.shape[1])
            gpu.launch(4.0, 50.0)
            return out_of_memory() if fails(x.shape[1]) else 2 * x

        self.contender = Contender(name, call, DOUBLING)

    def widths(self):
        found = sorted(set(self.seen))
        self.seen.clear()
        return found


def test_each_row_is_on_the_disk_as_json_when_progress_hears_of_it(gpu, either):
    """Also one without a number, which JSON does not have."""
    wrong = Contender("wrong", lambda x: x * torch.nan, DOUBLING)
    heard = []

    def progress(done, total, row):
        refuse = lambda name: pytest.fail(f"{name} is not JSON")  # noqa: E731
        lines = [json.loads(line, parse_constant=refuse) for line in either.read_text().splitlines()]
        heard.append((done, total, len(lines)))
        assert lines[-1] == json.loads(row.to_json())

    run([wrong, doubling(gpu)], progress=progress)
    assert heard == [(done, 6, done) for done in range(1, 7)]


def test_an_interrupted_sweep_measures_the_rest_and_tells_of_all(gpu, either):
    first, second = Counted(gpu, "first"), Counted(gpu, "second")
    interrupt([first.contender, second.contender], 3)
    assert (first.widths(), second.widths()) == ([16, 32], [16, 32])
    heard = []
    table = run([first.contender, second.contender], progress=lambda *each: heard.append(each[:2]))
    assert (first.widths(), second.widths()) == ([64], [32, 64])
    assert heard == [(done, 6) for done in range(1, 7)]
    assert table["width"].tolist() == [16, 16, 32, 32, 64, 64]
    assert table["median_us"].tolist() == pytest.approx([50.0] * 6)


@pytest.mark.parametrize("tape", [False, True])
def test_a_complete_or_disturbed_sweep_starts_afresh_but_on_a_tape_it_stays(gpu, tmp_path, monkeypatch, tape):
    one, noise, path = Counted(gpu), ["", *["somebody else"] * (1 + sweeps.REPEATS)], tmp_path / "tape.jsonl"
    watch = type("Watch", (), {"look": lambda _: None, "finish": lambda _: noise.pop(0) if noise else ""})
    monkeypatch.setattr(clocks.noise, "GpuWatch", watch)
    options = {"tape": path} if tape else {}
    interrupt([one.contender], 2, **options)
    one.widths(), noise.clear()
    table = run([one.contender], **options)
    assert one.widths() == ([64] if tape else [32, 64])
    assert [bool(each) for each in table["noise"]] == [False, tape, False]
    if tape:
        os.utime(path, (time.time() - 99 * rows.RESUME_WITHIN_S,) * 2)
    again = run([one.contender], **options)
    assert one.widths() == ([] if tape else [16, 32, 64]) and not files()
    assert not tape or again.equals(table)


def test_after_an_hour_all_of_a_sweep_is_measured(gpu):
    one = Counted(gpu)
    interrupt([one.contender], 2)
    for age_s, measured in ((0.9 * rows.RESUME_WITHIN_S, []), (1.1 * rows.RESUME_WITHIN_S, [16])):
        one.widths()
        os.utime(*files(), (time.time() - age_s,) * 2)
        interrupt([one.contender], 1)
        assert one.widths() == measured


@pytest.mark.parametrize("kept", [True, False])
def test_gaps_are_tried_again(gpu, either, kept):
    memory = [False]
    one = Counted(gpu, fails=lambda width: width == 16 and not memory[0])
    interrupt([one.contender, doubling(gpu, "other")], 5)
    assert [row.note for row in rows.read(either)] == ["out of memory", "", "", "", ""]
    memory[0] = kept
    one.widths()
    table = run([one.contender, doubling(gpu, "other")])
    assert one.widths() == [16] and (table["note"] == "").tolist() == [kept, *[True] * 5]
    on_disk = rows.read_valid(either)
    assert len({row.key for row in on_disk}) == len(on_disk), "one row of each"


@pytest.mark.parametrize("end", [lambda text: text[:-30], lambda text: text.rstrip("\n")])
def test_a_torn_last_line_is_measured_again_and_whole_lines_follow(gpu, either, end):
    one = Counted(gpu)
    interrupt([one.contender], 2)
    either.write_text(end(either.read_text()))
    stopped = [False]

    def progress(done, total, row):
        stopped[0] = done == 2

    table = run([one.contender], progress=progress, stop=lambda: stopped[0])
    assert table["width"].tolist() == [16, 32], "a stop returns what was measured, and keeps it"
    first, second = either.read_text().splitlines()
    one.widths()
    run([one.contender], stop=lambda: True)
    either.write_text(f"{{}}\n<<<<<<< HEAD\n{second[:-9]}\n{first}\n")
    assert len(run([one.contender])) == 3 and one.widths() == [32, 64], "a damaged line costs itself alone"


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"clock": "host"}, {"cache": "warm"}, {"direction": "backward"}, {"suite": "x"}],
)
def test_a_sweep_neither_takes_nor_removes_the_rows_of_another(gpu, either, change):
    one = Counted(gpu)
    interrupt([one.contender], 2)
    before = either.read_text()
    one.widths()
    run([one.contender], **change)
    assert one.widths() == [16, 32, 64]
    assert either.read_text().startswith(before)
    run([one.contender])
    assert one.widths() == [64]


@pytest.mark.parametrize("change", ["device", "driver", "torch", "triton", "code", "peer", ""])
def test_what_would_not_be_measured_so_now_is_measured_again(gpu, either, monkeypatch, change):
    """Beside it a contender that was not edited, which is measured again on another machine only."""
    one, other, versions = Counted(gpu), Counted(gpu, "other"), ["1", "2"]
    monkeypatch.setattr(sweeps, "version", lambda _: versions[0])
    ours = replace(one.contender, peer="a-peer")
    interrupt([ours, other.contender], 4)
    assert one.widths() == other.widths() == [16, 32]
    if change == "code":
        ours = replace(ours, call=lambda x: one.contender.call(x) + 0)
    elif change == "peer":
        versions.pop(0)
    elif change:
        monkeypatch.setattr(machine, "identity", lambda: replace(HERE, **{change: "Simulated, other"}))
    run([ours, other.contender])
    assert one.widths() == ([16, 32, 64] if change else [64])
    assert other.widths() == ([64] if change in ("code", "peer", "") else [16, 32, 64])


def test_what_a_graph_could_not_hold_counts_as_what_was_asked_for(gpu, either):
    one = Counted(gpu)
    waiting = replace(
        one.contender, call=lambda x: (gpu.launch(0.0, 50.0), gpu.wait(), one.contender.call(x))[2]
    )
    interrupt([waiting], 2)
    assert {row.clock for row in rows.read(either)} == {"events"}
    one.widths()
    run([waiting])
    assert one.widths() == [64]
