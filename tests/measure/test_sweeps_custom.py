"""What a lesson times itself: rows of the schema, on the tape while one is recorded."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from labkit.measure import lock, machine, rows, sweeps
from labkit.measure.rows import TAPE

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

    monkeypatch.setattr(lock, "gpu_lock", turn)
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    monkeypatch.setattr(machine, "row_columns", lambda: STAMP)
    monkeypatch.delenv(TAPE, raising=False)


def test_each_timer_is_called_once_has_the_gpu_to_itself_and_makes_a_row(said):
    timers = {"wrong": lambda: said.append("timed") or 3.0, "right": lambda: said.append("timed") or 40.0}
    found = sweeps.custom_times("museum/x", timers)
    assert said == ["turn", "timed", "over"] * 2
    assert found["contender"].tolist() == ["wrong", "right"] and found["median_us"].tolist() == [3.0, 40.0]
    assert found["device"].tolist() == ["a GPU"] * 2 and found["kind"].tolist() == ["live"] * 2
    assert set(found["clock"]) == set(found["cache"]) == {""}, "they are no clock's"
    with pytest.raises(ZeroDivisionError):
        sweeps.custom_times("museum/x", {"wrong": lambda: 1 / 0})


def test_rows_are_on_the_tape_once_and_shown_without_a_gpu(monkeypatch, tmp_path):
    tape = tmp_path / "tape.jsonl"
    monkeypatch.setenv(TAPE, str(tape))
    sweeps.custom_times("museum/x", {"wrong": lambda: 3.0})
    sweeps.custom_times("museum/x", {"wrong": lambda: 4.0, "right": lambda: 5.0})
    found = sweeps.custom_bytes("museum/y", {"pool": lambda: 4 * 2**20})
    assert found["peak_bytes"].tolist() == [4 * 2**20] and found["median_us"].isna().all()
    kept = [(row.contender, row.median_us, row.peak_bytes) for row in rows.read(tape)]
    assert kept == [("wrong", 4.0, None), ("right", 5.0, None), ("pool", None, 4 * 2**20)]
    swept = [replace(row, clock="host", median_us=9.0) for row in rows.read(tape)[:2]]
    monkeypatch.setattr(rows, "recorded_rows", lambda suite: [*swept, *rows.read(tape)[:2]])
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    shown = sweeps.custom_times("museum/x", {"wrong": lambda: pytest.fail("timed without a GPU")})
    assert shown["median_us"].tolist() == [4.0, 5.0], "not of a sweep of the same name"
    asked = []
    monkeypatch.setattr(rows, "recorded_rows", lambda suite: asked.append(suite) or [])
    found = sweeps.custom_times("museum/x", {})
    assert asked == ["museum/x"] and found.empty and "median_us" in found
