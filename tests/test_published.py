"""Published figures: they are what was published, and say whose they are."""

import pandas as pd
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
    kept = pd.read_csv(places.PUBLISHED / file)
    shown = table.loc[table["series"] == series, ["width", "speedup"]].reset_index(drop=True)
    pd.testing.assert_frame_equal(shown, kept)
    assert kept["width"].is_monotonic_increasing
    assert len(kept) >= 4
    assert (kept["speedup"] > 0).all()


def test_the_riddle_is_in_the_numbers(table):
    """N times fewer operations, and hardly a difference: the question of the first lesson."""
    at_1024 = table[table["width"] == 1024].set_index("series")["speedup"]
    assert at_1024["device A, eager"] == pytest.approx(1.133, abs=1e-3)
    assert at_1024.max() == at_1024["device B, graphed"] < 5
