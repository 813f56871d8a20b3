"""Published figures: they are what was published, and say whose they are."""

import csv

import pytest

from labkit import places, published


@pytest.fixture(scope="module")
def table():
    return published.pseudo_linear()


def test_every_row_says_that_and_where_it_was_published(table):
    assert set(table["kind"]) == {"published"}
    assert table["source"].str.contains("PyTorch forum").all()
    assert list(table.columns) == ["width", "speedup", "series", "kind", "device", "source"]


def test_three_series_of_two_devices_are_told_apart(table):
    devices = table.groupby("series", sort=False)["device"].unique().map(list).to_dict()
    assert devices == {
        "device A, eager": ["device A"],
        "device B, eager": ["device B"],
        "device B, graphed": ["device B"],
    }


@pytest.mark.parametrize(
    ("series", "file"),
    [
        ("device A, eager", "pseudo_linear_device_a_eager.csv"),
        ("device B, eager", "pseudo_linear_device_b_eager.csv"),
        ("device B, graphed", "pseudo_linear_device_b_graphed.csv"),
    ],
)
def test_a_series_holds_its_file_unchanged(table, series, file):
    """To the last digit: no rounding on the way."""
    lines = csv.DictReader((places.PUBLISHED / file).open())
    kept = [(int(line["width"]), float(line["speedup"])) for line in lines]
    shown = table[table["series"] == series]
    assert list(zip(shown["width"], shown["speedup"], strict=True)) == kept
    assert kept == sorted(kept)
    assert len(kept) >= 4
    assert all(speedup > 0 for _, speedup in kept)


def test_the_riddle_is_in_the_numbers(table):
    """N times fewer operations, and hardly a difference: the question of the first lesson."""
    at_1024 = table[table["width"] == 1024].set_index("series")["speedup"]
    assert at_1024["device A, eager"] == pytest.approx(1.133, abs=1e-3)
    assert at_1024.max() == at_1024["device B, graphed"] < 5
