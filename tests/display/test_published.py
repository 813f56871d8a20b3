"""Published figures: every row says whose it is, and what was derived follows from what was published."""

import pytest

from labkit import paths
from labkit.display.numbers import published

NAMES = sorted(file.stem for file in paths.PUBLISHED.glob("*.csv"))


@pytest.mark.parametrize("name", NAMES)
def test_every_row_says_that_and_where_it_was_published(name):
    table = published(name)
    assert len(table) and {"series", "device", "source"} <= set(table.columns)
    assert set(table["kind"]) == {"published"} and not table.isna().any(axis=None)


def test_a_name_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"^name: .*'nowhere'; there are grouped_conv_3080ti, "):
        published("nowhere")


def test_only_the_series_that_are_asked_for():
    assert set(published("pseudo_linear", "eager")["series"]) == {"device A, eager", "device B, eager"}
    with pytest.raises(ValueError, match=r"^only: .*'fused'; it has device A, eager"):
        published("pseudo_linear", "fused")


def test_the_riddle_n_times_fewer_operations_and_hardly_a_difference():
    table = published("pseudo_linear")
    assert table.groupby("series")["width"].apply(lambda widths: widths.is_monotonic_increasing).all()
    at_1024 = table[table["width"] == 1024].set_index("series")["speedup"]
    assert at_1024["device A, eager"] == pytest.approx(1.133, abs=1e-3)
    assert at_1024.max() == at_1024["device B, graphed"] < 5


def test_the_norm_has_17_sizes_backward_16_of_them_forward_and_how_many_times_as_fast_each_became():
    table = published("rms_norm_l4")
    assert not table.duplicated(["direction", "batch", "time", "width"]).any()
    forward, backward = (
        set(
            table.loc[table["direction"] == way, ["batch", "time", "width"]].itertuples(
                index=False, name=None
            )
        )
        for way in ("forward", "backward")
    )
    assert len(forward) == 16 and len(backward) == 17 and len(table) == 33
    assert backward - forward == {(512, 128, 512)} and forward < backward
    # The times have three digits behind the point, and the ratio two.
    low = (table["old_ms"] - 0.0005) / (table["new_ms"] + 0.0005) - 0.005
    high = (table["old_ms"] + 0.0005) / (table["new_ms"] - 0.0005) + 0.005
    assert table["speedup"].between(low, high).all()
