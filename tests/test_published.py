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


# RMSNorm on an L4

FORWARD, BACKWARD = "rms_norm_l4_forward.csv", "rms_norm_l4_backward.csv"
SHAPE = ["batch", "time", "width"]


def lines_of(file):
    return list(csv.DictReader((places.PUBLISHED / file).open()))


def sizes(line):
    return int(line["B"]), int(line["T"]), int(line["H"])


@pytest.fixture(scope="module")
def norms():
    return published.rms_norm_l4()


def one_of(norms, direction, series):
    return norms[(norms["direction"] == direction) & (norms["series"] == series)]


@pytest.mark.parametrize(
    ("direction", "file", "count"), [("forward", FORWARD, 16), ("backward", BACKWARD, 17)]
)
@pytest.mark.parametrize(
    ("series", "column"), [("original, L4", "original_ms"), ("optimised, L4", "optimized_ms")]
)
def test_the_norms_times_are_those_of_the_file(norms, direction, file, count, series, column):
    """A row for each line, in its order, and no digit lost between milliseconds and microseconds."""
    found = one_of(norms, direction, series)
    wanted = [(*sizes(line), float(line[column].replace(".", ""))) for line in lines_of(file)]
    assert list(found[[*SHAPE, "median_us"]].itertuples(index=False, name=None)) == wanted
    assert len(wanted) == len(set(wanted)) == count


def test_the_norms_rows_say_what_they_are_and_whose(norms):
    columns = ["series", "direction", *SHAPE, "median_us", "kind", "device", "dtype", "source"]
    assert list(norms.columns) == columns
    assert len(norms) == 2 * (16 + 17) and list(norms.index) == list(range(66))
    assert not norms.duplicated(["series", "direction", *SHAPE]).any()
    assert set(norms["kind"]) == {"published"} and set(norms["device"]) == {"NVIDIA L4"}
    assert set(norms["dtype"]) == {"float32"}
    assert set(norms["source"]) == {'PufferLib pull request 466, "Optimize RMS forward/backward kernels"'}
    assert {norms[axis].dtype.kind for axis in SHAPE} == {"i"} and norms["median_us"].dtype.kind == "f"


def test_the_norms_shapes_are_points_and_one_has_no_forward_time(norms):
    points = published.rms_norm_shapes()
    assert [tuple(point.values()) for point in points] == [sizes(line) for line in lines_of(BACKWARD)]
    assert len(points) == 17 and all(list(point) == SHAPE for point in points)
    assert {type(size) for point in points for size in point.values()} == {int}
    timed = set(norms[norms["direction"] == "forward"][SHAPE].itertuples(index=False, name=None))
    assert [point for point in points if tuple(point.values()) not in timed] == [
        {"batch": 512, "time": 128, "width": 512}
    ]


@pytest.mark.parametrize(("direction", "file"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_the_norms_published_speedups_are_the_ratios_of_its_times(norms, direction, file):
    """Within what the rounding of both leaves open: the files were copied without a slip."""
    old, new = (one_of(norms, direction, f"{which}, L4")["median_us"] for which in ("original", "optimised"))
    for line, before, after in zip(lines_of(file), old, new, strict=True):
        said = float(line["speedup"])
        assert (before - 0.5) / (after + 0.5) <= said + 0.005, line
        assert (before + 0.5) / (after - 0.5) >= said - 0.005, line


def test_the_optimised_forward_runs_at_the_speed_of_memory_but_where_the_cache_holds_it(norms):
    """8 bytes an element, x read and y written once: the L4 has 300 GB/s, and 48 MB of L2."""
    found = one_of(norms, "forward", "optimised, L4")
    elements = found[SHAPE].prod(axis=1)
    speed = elements * 8 / found["median_us"] / 1e3  # GB/s
    small = elements == 512 * 64 * 128
    assert small.sum() == 1 and elements[small].item() * 8 < 48e6
    assert speed[small].item() == pytest.approx(559.2, abs=0.1)
    assert speed[~small].min() == pytest.approx(225.2, abs=0.1)
    assert speed[~small].max() == pytest.approx(235.9, abs=0.1)


def test_the_original_backward_takes_time_in_proportion_to_the_square_of_the_width(norms):
    """B T H H over the time is the same everywhere, though H differs fourfold."""
    found = one_of(norms, "backward", "original, L4")
    rate = found[SHAPE].prod(axis=1) * found["width"] / found["median_us"] / 1e3  # 10^9 a second
    assert rate.min() == pytest.approx(525.8, abs=0.1) and rate.max() == pytest.approx(578.6, abs=0.1)
    per_element = found["median_us"] / found[SHAPE].prod(axis=1)
    assert per_element.max() / per_element.min() > 3.5, "which the time for an element is not"


def test_the_norms_times_can_be_drawn(norms):
    """Where batch and time are one, a curve for each series over the width."""
    one = norms[(norms["batch"] == 1024) & (norms["time"] == 64)]
    alt = figures.sweep(one, "width", title="Published", facet="direction").alt
    for said in ("original, L4", "optimised, L4", "PufferLib pull request 466", "NVIDIA L4", "batch 1024"):
        assert said in alt
