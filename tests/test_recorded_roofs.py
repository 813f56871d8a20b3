"""The roofs beside the tapes: to a table belong those of the machine that it was measured on."""

from dataclasses import replace

import pytest
from taped import recorded

from labkit import places, recorded_roofs, rows

DEVICE = "NVIDIA H200"


def moment(hour):
    return f"2026-01-01T{hour:02d}:00:00+00:00"


def measured(hour, us, device=DEVICE):
    """A set of two rows, which take so long."""
    same = dict(device=device, date=moment(hour), median_us=us)
    return [recorded(suite="roofs/copy", **same), recorded(suite="roofs/launch", **same)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    folder = places.RECORDED / "nvidia-h200"
    folder.mkdir(parents=True)
    return folder


def tape(folder, name, hour):
    rows.write(folder / f"{name}.jsonl", [recorded(device=DEVICE, date=moment(hour))])


def chosen(hour, device=DEVICE):
    return [row.median_us for row in recorded_roofs.of(device, moment(hour))]


def test_to_rows_belongs_the_set_that_was_measured_last_before_them(folder):
    rows.write(folder / recorded_roofs.FILE, [*measured(12, 2.0), *measured(10, 1.0), *measured(14, 3.0)])
    assert [chosen(hour) for hour in (10, 11, 13, 23)] == [[1.0] * 2, [1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert chosen(9) == [1.0] * 2, "or the first that there is"
    assert [row.median_us for row in recorded_roofs.of(DEVICE, None)] == [3.0] * 2, "the newest"
    assert chosen(12, "somebody's") == []


def test_each_kind_of_device_has_its_own(folder):
    for name, us in ((DEVICE, 1.0), ("NVIDIA L4", 2.0)):
        kind = places.RECORDED / name.lower().replace(" ", "-")
        rows.write(kind / recorded_roofs.FILE, measured(10, us, name))
    assert chosen(11) == [1.0] * 2 and chosen(11, "NVIDIA L4") == [2.0] * 2


def test_sets_stay_as_long_as_a_tape_was_measured_with_them(folder):
    for hour, us in ((10, 1.0), (12, 2.0)):
        recorded_roofs.add(folder, measured(hour, us))
    assert chosen(11) == [2.0] * 2, "no tape needed the first"
    tape(folder, "01_a", 13)
    recorded_roofs.add(folder, measured(14, 3.0))
    assert chosen(13) == [2.0] * 2 and chosen(15) == [3.0] * 2
    tape(folder, "01_a", 15)
    recorded_roofs.add(folder, measured(16, 4.0))
    assert chosen(13) == [3.0] * 2 and chosen(17) == [4.0] * 2


def test_sets_stay_as_long_as_an_unfinished_tape_was_measured_with_them(folder, tmp_path):
    recorded_roofs.add(folder, measured(10, 1.0))
    (tmp_path / "work").mkdir()
    tape(tmp_path / "work", "01_a@0123456789ab", 11)
    recorded_roofs.add(folder, measured(12, 2.0), unfinished=tmp_path / "work")
    assert chosen(11) == [1.0] * 2 and chosen(13) == [2.0] * 2
    recorded_roofs.add(folder, measured(14, 3.0), unfinished=tmp_path / "gone")
    assert chosen(11) == [3.0] * 2


def test_a_card_has_its_own_also_where_another_was_measured_between(folder):
    first, second = ([replace(row, card=card) for row in measured(hour, us)] for hour, us, card in (
        (10, 1.0, "aaaa"), (11, 2.0, "bbbb"),
    ))  # fmt: skip
    recorded_roofs.add(folder, first, second)
    assert [row.median_us for row in recorded_roofs.of(DEVICE, moment(12), "aaaa")] == [1.0] * 2
    assert [row.median_us for row in recorded_roofs.of(DEVICE, moment(12), "bbbb")] == [2.0] * 2
    assert (
        chosen(12) == [2.0] * 2 == [row.median_us for row in recorded_roofs.of(DEVICE, moment(12), "unknown")]
    ), "as before cards were named"
    rows.write(folder / "a.jsonl", [recorded(device=DEVICE, date=moment(12), card="aaaa")])
    recorded_roofs.add(folder, measured(13, 3.0))
    assert [row.median_us for row in recorded_roofs.of(DEVICE, moment(12), "aaaa")] == [1.0] * 2


def test_a_tape_of_several_runs_keeps_the_set_of_each(folder):
    for hour, us in ((10, 1.0), (12, 2.0)):
        tape(folder, f"0{hour}", hour)
        recorded_roofs.add(folder, measured(hour, us))
    both = [recorded(device=DEVICE, date=moment(hour), contender=f"at {hour}") for hour in (11, 13)]
    (folder / "010.jsonl").unlink()
    (folder / "012.jsonl").unlink()
    rows.write(folder / "bench.jsonl", both)
    recorded_roofs.add(folder, measured(14, 3.0))
    assert chosen(11) == [1.0] * 2 and chosen(13) == [2.0] * 2 and chosen(15) == [3.0] * 2


def test_sets_of_one_run_stay_together_whatever_the_tapes_are(folder):
    tape(folder, "01_a", 2)
    recorded_roofs.add(folder, measured(10, 1.0), measured(12, 2.0))
    assert chosen(11) == [1.0] * 2 and chosen(13) == [2.0] * 2


def test_the_same_set_is_there_once(folder):
    for _ in range(2):
        tape(folder, "01_a", 11)
        recorded_roofs.add(folder, measured(10, 1.0))
    assert len(rows.read(folder / recorded_roofs.FILE)) == 2


def test_a_damaged_file_beside_is_no_hindrance(folder):
    (folder / recorded_roofs.FILE).write_text("no row\n\n")
    (folder / "a.jsonl").write_text("no row\n\n")
    recorded_roofs.add(folder, measured(10, 1.0))
    assert chosen(11) == [1.0] * 2


def test_a_damaged_file_that_is_asked_for_is_told(folder):
    (folder / recorded_roofs.FILE).write_text("no row\n\n")
    with pytest.raises(ValueError, match=r"roofs\.jsonl is damaged or of another version"):
        chosen(11)
