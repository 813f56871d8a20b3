"""The roofs beside the tapes: to a table belong those of the machine that it was measured on."""

import pytest
from taped import recorded

from labkit import paths
from labkit.measure import roofline, rows

DEVICE = "NVIDIA H200"


def moment(hour):
    return f"2026-01-01T{hour:02d}:00:00+00:00"


def measured(hour, us, device=DEVICE, card=""):
    """A set of two rows, which take so long."""
    same = dict(device=device, date=moment(hour), median_us=us, card=card)
    return [recorded(suite="roofs/copy", **same), recorded(suite="roofs/launch", **same)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")
    folder = paths.RECORDED / "nvidia-h200"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def add(folder, tmp_path):
    return lambda *given, **named: roofline.add_recorded(folder, measured(*given, **named), tmp_path / "work")


def tape(folder, *hours, name="a", card=""):
    made = [recorded(device=DEVICE, date=moment(hour), width=hour, card=card) for hour in hours]
    rows.write(folder / f"{name}.jsonl", made)


def chosen(*hours, device=DEVICE, card=""):
    """What the sets took that belong to rows of these hours."""
    found = [roofline.recorded_set(device, moment(hour) if hour else None, card) for hour in hours]
    assert all(len(one) in (0, 2) for one in found)
    return [one[0].median_us if one else None for one in found]


def test_to_rows_belongs_the_set_that_was_measured_last_before_them(folder):
    rows.write(folder / roofline.FILE, [*measured(12, 2.0), *measured(10, 1.0), *measured(14, 3.0)])
    other = measured(10, 9.0, "NVIDIA L4")
    rows.write(paths.RECORDED / "nvidia-l4" / roofline.FILE, other)
    assert chosen(10, 11, 13, 23) == [1.0, 1.0, 2.0, 3.0]
    assert chosen(9, None) == [1.0, 3.0], "or the first that there is, and the newest of an unknown date"
    assert chosen(12, device="NVIDIA L4") == [9.0] and chosen(12, device="somebody's") == [None]


def test_a_card_has_its_own_also_where_another_was_measured_between(folder, add):
    tape(folder, 12, card="aaaa")
    for hour, us, card in ((10, 1.0, "aaaa"), (11, 2.0, "bbbb")):
        add(hour, us, card=card)
    assert chosen(12, card="aaaa") == [1.0] and chosen(12, card="bbbb") == [2.0]
    assert chosen(12) == chosen(12, card="unknown") == [2.0], "as before cards were named"
    add(13, 3.0)
    assert chosen(12, card="aaaa") == [1.0]


@pytest.mark.parametrize("where", ["", "../../work"])
def test_sets_stay_as_long_as_a_tape_was_measured_with_them_finished_or_not(folder, add, where):
    add(10, 1.0)
    add(12, 2.0)
    assert chosen(11) == [2.0], "no tape needed the first"
    tape(folder / where, 13)
    add(14, 3.0)
    assert chosen(13, 15) == [2.0, 3.0]
    tape(folder / where, 13, 15)
    add(14, 3.0)
    assert len(rows.read(folder / roofline.FILE)) == 4, "the same set is there once"
    add(16, 4.0)
    assert chosen(13, 15, 17) == [2.0, 3.0, 4.0], "each run of a tape has its own"
    tape(folder / where, 15)
    add(18, 5.0)
    assert chosen(13, 17) == [3.0, 3.0]


def test_a_damaged_file_is_no_hindrance_and_is_told_when_it_is_asked_for(folder, add):
    for name in (roofline.FILE, "a.jsonl"):
        (folder / name).write_text("no row\n\n")
    with pytest.raises(ValueError, match=r"roofs\.jsonl is damaged or of another version"):
        chosen(11)
    add(10, 1.0)
    (folder / "a.jsonl").unlink()
    assert chosen(11) == [1.0]
