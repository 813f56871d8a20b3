"""Rows, and files of rows: the schema, what is refused, what a recorded device shows."""

import json
from dataclasses import replace

import pytest
from taped import recorded

from labkit import paths
from labkit.measure import rows
from labkit.measure.rows import Row

GOOD = recorded(
    suite="lesson/sweep", shape={"batch": 256, "width": 160}, kind="live", driver="570.1", torch="2.13.0",
    triton="3.7.1", date="2026-01-02T03:04:05+00:00", relative_error=1e-8,
)  # fmt: skip
GAP = replace(GOOD, contender="eager", median_us=None, p20_us=None, p80_us=None, runs=0, note="out of memory")
NOISY = replace(GOOD, noise="another process worked on the GPU", card="0a1b2c3d")
PROFILE = replace(NOISY, suite="profile/eager", trace={"kernels": {"what": [], "when": []}})

SCHEMA = [
    "suite", "contender", "direction", "dtype", "shape", "clock", "cache", "median_us", "p20_us", "p80_us",
    "runs", "min_bytes", "flops", "copy_us", "relative_error", "kind", "device", "driver", "torch", "triton",
    "peer", "peer_version", "date", "source", "note", "peak_bytes", "noise", "card", "trace",
]  # fmt: skip
COLUMNS = [name for name in SCHEMA if name != "trace"]


@pytest.fixture
def tapes(own_folders):
    """An empty folder in the place of the recorded devices."""
    return paths.RECORDED


@pytest.mark.parametrize("row", [GOOD, GAP, NOISY, PROFILE], ids=["good", "gap", "noisy", "profile"])
def test_a_row_survives_its_line_of_json_and_has_all_columns_of_a_table(row):
    line = row.to_json()
    assert list(json.loads(line)) == SCHEMA and "\n" not in line
    assert Row.from_json(line) == row
    table = rows.as_results([row, replace(GAP, shape={"width": 320})])
    assert list(table.columns) == [*COLUMNS, "batch", "width"] and rows.COLUMNS == COLUMNS
    assert table["width"].tolist() == [160, 320] and table["batch"].isna().tolist() == [False, True]
    assert table["median_us"].isna().tolist() == [row is GAP, True]
    assert list(rows.as_results([], ["batch", "width"]).columns) == list(table.columns)


def edited(**values):
    return json.dumps(json.loads(GOOD.to_json()) | values)


def without(name):
    return json.dumps({key: value for key, value in json.loads(GOOD.to_json()).items() if key != name})


@pytest.mark.parametrize(
    "line",
    ["", "not json", "[]", GOOD.to_json()[:-5], without("shape"), edited(speed=3), edited(kind="guessed")],
)
def test_what_is_not_of_the_schema_is_a_value_error(line):
    with pytest.raises(ValueError):
        Row.from_json(line)


def test_old_lines_whole_numbers_and_gaps_are_of_the_schema():
    assert Row.from_json(without("peak_bytes")).peak_bytes is None
    assert Row.from_json(edited(median_us=3, p20_us=None, peak_bytes=2**33)).median_us == 3
    assert replace(GOOD, kind="published").kind == "published"
    with pytest.raises(ValueError, match="kind: 'guessed'"):
        replace(GOOD, kind="guessed")


def test_the_key_is_what_was_measured_not_where_or_when():
    elsewhere = replace(GOOD, device="NVIDIA L4", date="2027", median_us=9.0, kind="recorded")
    assert elsewhere.key == replace(GOOD, shape={"width": 160, "batch": 256}).key == GOOD.key
    other = {
        "suite": "s", "contender": "c", "direction": "backward", "dtype": "bfloat16", "shape": {"batch": 1},
        "clock": "host", "cache": "warm",
    }  # fmt: skip
    assert len({GOOD.key, *(replace(GOOD, **{name: value}).key for name, value in other.items())}) == 8
    fallback = replace(GOOD, clock="events", note="timed with events, a graph cannot hold it: ...")
    assert fallback.key == GOOD.key, "by the clock that was asked for"


@pytest.mark.parametrize("tape", sorted(paths.RECORDED.glob("*/old/*.jsonl")), ids=lambda tape: tape.name)
def test_a_tape_of_an_old_lesson_reads(tape):
    found = rows.read(tape)
    assert found and all(Row.from_json(row.to_json()) == row for row in found)


def test_a_file_is_written_in_one_step(tmp_path):
    path = tmp_path / "new" / "tape.jsonl"
    rows.write(path, [GOOD, GAP])
    assert path.read_text() == f"{GOOD.to_json()}\n{GAP.to_json()}\n" and rows.read(path) == [GOOD, GAP]

    def breaks():
        yield NOISY
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rows.write(path, breaks())
    assert rows.read(path) == [GOOD, GAP], "as it was"
    rows.write(path, [PROFILE])
    assert rows.read(path) == [PROFILE] and list(path.parent.iterdir()) == [path]


def test_recorded_takes_a_suite_and_those_below_it_of_one_device(tapes):
    names = "lesson/sweep/wide", "lesson/sweeping", "other"
    below, beside, other = (replace(GOOD, suite=suite) for suite in names)
    rows.write(tapes / "a100" / "old" / "01.jsonl", [GOOD, beside])
    rows.write(tapes / "a100" / "old" / "02.jsonl", [below])
    rows.write(tapes / "h200" / "old" / "01.jsonl", [replace(GOOD, device="another"), other])
    assert rows.recorded_rows("lesson/sweep") == [GOOD, below]
    assert rows.recorded_rows("lesson") == [GOOD, beside, below]
    assert rows.recorded_rows("other") == [other]
    rows.write(tapes / "a100" / "roofs.jsonl", [replace(GOOD, suite="roofs")])
    assert rows.recorded_rows("roofs") == []
    assert rows.recorded_rows("less") == [] == rows.read(tapes / "none.jsonl")


def test_recorded_is_what_the_file_holds_now(tapes, monkeypatch):
    tape, read, reads = tapes / "h200" / "old" / "01.jsonl", rows.read, []
    monkeypatch.setattr(rows, "read", lambda path: reads.append(path) or read(path))
    for held in ([GOOD], [GOOD, GAP], [GAP, GOOD]):
        rows.write(tape, held)
        rows.recorded_rows("lesson").clear()
        assert rows.recorded_rows("lesson") == held
    assert len(reads) == 3, "an unchanged one is read once"
    for damaged in (b"{}\n" * 2, edited(speed_of_light=1.0).encode() + b"\n", b"\x80\x04\x95\x00\x00."):
        tape.write_bytes(damaged)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"(?s)01\.jsonl is damaged or of another version.*git restore"
            ):
                rows.recorded_rows("lesson")
        assert tape.read_bytes() == damaged, "whoever has the other version wants it back"
    tape.unlink()
    assert rows.recorded_rows("lesson") == []
