"""Sweeps that were cut short, in virtual time: what counts when they go on, and what is measured again."""

import json
from dataclasses import replace

import pytest
import torch
from simulated import DOUBLING, HERE, doubling, out_of_memory

from labkit import paths
from labkit.measure import clocks, machine, rows, sweeps
from labkit.measure.contender import Contender

pytestmark = pytest.mark.usefixtures("own_folders")
POINTS = [{"batch": 2, "width": width} for width in (16, 32, 64)]


@pytest.fixture
def tape(own_folders, tmp_path, monkeypatch):
    """The tape of a lesson that is being recorded."""
    monkeypatch.setenv(rows.TAPE, str(tmp_path / "lesson.jsonl"))
    return tmp_path / "lesson.jsonl"


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


def test_each_row_is_on_the_disk_as_json_when_progress_hears_of_it(gpu, tape):
    """Also one without a number, which JSON does not have."""
    wrong = Contender("wrong", lambda x: x * torch.nan, DOUBLING)
    heard = []

    def progress(done, total, row):
        refuse = lambda name: pytest.fail(f"{name} is not JSON")  # noqa: E731
        lines = [json.loads(line, parse_constant=refuse) for line in tape.read_text().splitlines()]
        heard.append((done, total, len(lines)))
        assert lines[-1] == json.loads(row.to_json())

    run([wrong, doubling(gpu)], progress=progress)
    assert heard == [(done, 6, done) for done in range(1, 7)]


def test_an_interrupted_sweep_measures_the_rest_and_tells_of_all(gpu, tape):
    first, second = Counted(gpu, "first"), Counted(gpu, "second")
    interrupt([first.contender, second.contender], 3)
    assert (first.widths(), second.widths()) == ([16, 32], [16, 32])
    heard = []
    table = run([first.contender, second.contender], progress=lambda *each: heard.append(each[:2]))
    assert (first.widths(), second.widths()) == ([64], [32, 64])
    assert heard == [(done, 6) for done in range(1, 7)]
    assert table["width"].tolist() == [16, 16, 32, 32, 64, 64]
    assert table["median_us"].tolist() == pytest.approx([50.0] * 6)


def test_on_a_tape_a_complete_sweep_stays_and_disturbed_points_count(gpu, tape, monkeypatch):
    one, noise = Counted(gpu), ["", *["somebody else"] * (1 + sweeps.REPEATS)]
    watch = type("Watch", (), {"look": lambda _: None, "finish": lambda _: noise.pop(0) if noise else ""})
    monkeypatch.setattr(clocks.noise, "GpuWatch", watch)
    interrupt([one.contender], 2)
    one.widths()
    table = run([one.contender])
    assert one.widths() == [64] and [bool(each) for each in table["noise"]] == [False, True, False]
    assert run([one.contender]).equals(table) and one.widths() == []


def test_without_a_tape_nothing_is_kept(gpu):
    one = Counted(gpu)
    interrupt([one.contender], 2)
    one.widths()
    run([one.contender])
    assert one.widths() == [16, 32, 64] and not list(paths.cache().rglob("*.jsonl"))


@pytest.mark.parametrize("kept", [True, False])
def test_gaps_are_tried_again(gpu, tape, kept):
    memory = [False]
    one = Counted(gpu, fails=lambda width: width == 16 and not memory[0])
    interrupt([one.contender, doubling(gpu, "other")], 5)
    assert [row.note for row in rows.read(tape)] == ["out of memory", "", "", "", ""]
    memory[0] = kept
    one.widths()
    table = run([one.contender, doubling(gpu, "other")])
    assert one.widths() == [16] and (table["note"] == "").tolist() == [kept, *[True] * 5]
    on_disk = rows.read_valid(tape)
    assert len({row.key for row in on_disk}) == len(on_disk), "one row of each"


@pytest.mark.parametrize("end", [lambda text: text[:-30], lambda text: text.rstrip("\n")])
def test_a_torn_last_line_is_measured_again_and_whole_lines_follow(gpu, tape, end):
    one = Counted(gpu)
    interrupt([one.contender], 2)
    tape.write_text(end(tape.read_text()))
    stopped = [False]

    def progress(done, total, row):
        stopped[0] = done == 2

    table = run([one.contender], progress=progress, stop=lambda: stopped[0])
    assert table["width"].tolist() == [16, 32], "a stop returns what was measured, and keeps it"
    first, second = tape.read_text().splitlines()
    one.widths()
    run([one.contender], stop=lambda: True)
    tape.write_text(f"{{}}\n<<<<<<< HEAD\n{second[:-9]}\n{first}\n")
    assert len(run([one.contender])) == 3 and one.widths() == [32, 64], "a damaged line costs itself alone"


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"clock": "host"}, {"cache": "warm"}, {"direction": "backward"}, {"suite": "x"}],
)
def test_a_sweep_ntape_takes_nor_removes_the_rows_of_another(gpu, tape, change):
    one = Counted(gpu)
    interrupt([one.contender], 2)
    before = tape.read_text()
    one.widths()
    run([one.contender], **change)
    assert one.widths() == [16, 32, 64]
    assert tape.read_text().startswith(before)
    run([one.contender])
    assert one.widths() == [64]


@pytest.mark.parametrize("change", ["device", "driver", "torch", "triton", "code", "peer", ""])
def test_what_would_not_be_measured_so_now_is_measured_again(gpu, tape, monkeypatch, change):
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


def test_what_a_graph_could_not_hold_counts_as_what_was_asked_for(gpu, tape):
    one = Counted(gpu)
    waits = lambda x: gpu.launch(0.0, 50.0) or gpu.wait() or one.contender.call(x)  # noqa: E731
    waiting = replace(one.contender, call=waits)
    interrupt([waiting], 2)
    assert {row.clock for row in rows.read(tape)} == {"events"}
    one.widths()
    run([waiting])
    assert one.widths() == [64]
