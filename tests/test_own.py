"""What a lesson times itself: rows of the schema, on the tape while one is recorded."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from labkit import clocks, device, machine, own, rows
from labkit.rows import TAPE

STAMP = {"device": "a GPU", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-01T00:00:00+00:00"}


@pytest.fixture
def said():
    return []


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch, said):
    @contextmanager
    def turn():
        said.append("turn")
        yield
        said.append("over")

    monkeypatch.setattr(clocks, "gpu_turn", turn)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "stamp", lambda: STAMP)
    monkeypatch.delenv(TAPE, raising=False)


@pytest.mark.parametrize("alone", [True, False])
def test_each_timer_has_the_gpu_to_itself_unless_it_need_not(said, alone):
    own.times("museum/x", {name: lambda: said.append("timed") or 3.0 for name in "ab"}, alone=alone)
    assert said == (["turn", "timed", "over"] if alone else ["timed"]) * 2


def test_each_timer_is_called_once_and_makes_a_row():
    calls = []
    found = own.times("museum/x", {"wrong": lambda: calls.append(1) or 3.0, "right": lambda: 40.0})
    assert calls == [1]
    assert found["contender"].tolist() == ["wrong", "right"] and found["median_us"].tolist() == [3.0, 40.0]
    assert found["device"].tolist() == ["a GPU"] * 2 and found["kind"].tolist() == ["live"] * 2
    assert set(found["clock"]) == set(found["cache"]) == {""}, "they are no clock's"


def test_rows_are_on_the_tape_once(monkeypatch, tmp_path):
    tape = tmp_path / "tape.jsonl"
    monkeypatch.setenv(TAPE, str(tape))
    own.times("museum/x", {"wrong": lambda: 3.0})
    own.times("museum/x", {"wrong": lambda: 4.0, "right": lambda: 5.0})
    assert [(row.contender, row.median_us) for row in rows.read(tape)] == [("wrong", 4.0), ("right", 5.0)]


def test_a_timer_that_fails_is_the_lessons_failure():
    with pytest.raises(ZeroDivisionError):
        own.times("museum/x", {"wrong": lambda: 1 / 0})


def test_without_a_gpu_nothing_is_timed_and_the_tape_is_shown(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    asked = []
    monkeypatch.setattr(rows, "recorded", lambda suite: asked.append(suite) or [])
    found = own.times("museum/x", {"wrong": lambda: pytest.fail("timed without a GPU")})
    assert asked == ["museum/x"] and found.empty and "median_us" in found


def test_of_a_recorded_sweep_of_the_same_name_nothing_is_shown(monkeypatch, tmp_path):
    monkeypatch.setenv(TAPE, str(tmp_path / "tape.jsonl"))
    own.times("museum/x", {"wrong": lambda: 3.0})
    (row,) = rows.read(tmp_path / "tape.jsonl")
    monkeypatch.setattr(rows, "recorded", lambda suite: [replace(row, clock="host", median_us=9.0), row])
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert own.times("museum/x", {})["median_us"].tolist() == [3.0]


def test_sizes_are_bytes(monkeypatch, tmp_path):
    monkeypatch.setenv(TAPE, str(tmp_path / "tape.jsonl"))
    found = own.sizes("museum/y", {"pool": lambda: 4 * 2**20})
    assert found["peak_bytes"].tolist() == [4 * 2**20] and found["median_us"].isna().all()
    (row,) = rows.read(tmp_path / "tape.jsonl")
    assert row.peak_bytes == 4 * 2**20 and row.median_us is None
