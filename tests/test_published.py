"""Published figures: they are what was published, and say whose they are."""

import csv

import pytest

from labkit import figures, places, published


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


def test_the_geglu_kernels_are_those_of_the_file_and_the_gemms_are_both_series():
    table = published.geglu_a100()
    names = ["series", "part", "us", "width", "batch", "hidden", "dtype", "kind", "device", "source"]
    assert list(table.columns) == names
    lines = list(csv.DictReader((places.PUBLISHED / "geglu_a100.csv").open()))
    for contender in ("torch.compile", "Liger"):
        own = table[table["series"] == f"{contender}, A100"]
        wanted = [(line["part"], float(line["us"])) for line in lines if line["by"] in ("cuBLAS", contender)]
        assert list(zip(own["part"], own["us"], strict=True)) == wanted
        assert len(wanted) == 4 and sum(part.endswith("GEMM") for part, _ in wanted) == 3
    assert len(table) == 8
    assert set(table["width"]) == {768} and set(table["batch"]) == {8192} and set(table["hidden"]) == {3072}
    assert set(table["dtype"]) == {"bfloat16"} and set(table["kind"]) == {"published"}
    assert table["source"].str.contains("Profiling in PyTorch").all()


def test_the_geglu_sums_are_sums_and_say_so():
    parts, sums = published.geglu_a100(), published.geglu_a100_sums().set_index("contender")
    assert list(sums.index) == ["torch.compile", "Liger"]
    for contender, row in sums.iterrows():
        assert row["series"] == f"{contender}, A100"
        assert row["median_us"] == pytest.approx(parts[parts["series"] == row["series"]]["us"].sum())
    assert sums["median_us"].tolist() == pytest.approx([639.4, 642.8])
    assert sums["source"].str.endswith("kernel times added up").all()
    assert set(sums["direction"]) == {"forward"}
    assert "hidden" not in sums, "a column that measured rows lack would be said of all of them"


def test_the_grouped_convolutions_times_are_those_of_the_file():
    table = published.grouped_conv_3080ti()
    assert list(table.columns) == ["series", "ms", "width", "groups", "kind", "device", "source"]
    lines = list(csv.DictReader((places.PUBLISHED / "grouped_conv_3080ti.csv").open()))
    kept = [(line["series"], float(line["ms"])) for line in lines]
    assert list(zip(table["series"], table["ms"], strict=True)) == kept
    assert kept == [("grouped Conv1d", 1924.0), ("batched matmul", 1263.0)]
    assert set(table["width"]) == {100} and set(table["groups"]) == {100}
    assert set(table["kind"]) == {"published"} and set(table["device"]) == {"RTX 3080 Ti"}
    assert table["source"].str.contains("PyTorch forum.*parallel nn.Linear.*mixed precision").all()


def test_the_grouped_convolutions_ratio_is_a_point_of_a_speedup_figure():
    point = published.grouped_conv_3080ti_speedup()
    assert list(point.columns) == ["series", "speedup", "width", "groups", "kind", "device", "source"]
    (row,) = point.to_dict("records")
    assert row["speedup"] == 1924 / 1263
    assert row["width"] == row["groups"] == 100
    alt = figures.speedup(point, title="Published").alt
    assert "batched matmul over Conv1d, RTX 3080 Ti" in alt
    assert "1.52× at width 100" in alt
    assert "mixed precision" in alt
