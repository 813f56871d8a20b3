"""Published figures: they are what was published, to the last digit, and say whose they are."""

import csv

import pytest

from labkit import paths, plots
from labkit.workloads import published

NORM = ["batch", "time", "width"]
MLP = ["width", "batch", "dtype"]
POST, A100 = "PyTorch forum", "NVIDIA A100-SXM4-80GB"
TABLES = {
    "pseudo_linear": (["width", "speedup", "series"], 3, POST, ["device A", "device B"]),
    "geglu_a100": (["series", "part", "us", *MLP, "hidden"], 2, "Profiling in PyTorch", [A100]),
    "geglu_a100_sums": (
        ["series", "median_us", *MLP, "contender", "direction"], 2, "kernel times added up", [A100]
    ),
    "grouped_conv_3080ti": (["series", "ms", "width", "groups"], 2, POST, ["RTX 3080 Ti"]),
    "grouped_conv_3080ti_speedup": (["series", "speedup", "width", "groups"], 1, POST, ["RTX 3080 Ti"]),
    "rms_norm_l4": (
        ["series", "direction", *NORM, "median_us", "dtype"], 2, "PufferLib pull request 466", ["NVIDIA L4"]
    ),
}  # fmt: skip
"""Columns, how many series, part of the source's name, devices."""


def lines_of(file):
    return list(csv.DictReader((paths.PUBLISHED / file).open()))


@pytest.mark.parametrize("name", TABLES)
def test_every_row_says_that_and_where_it_was_published(name):
    table = getattr(published, name)()
    columns, series, source, devices = TABLES[name]
    assert set(table.columns) == {*columns, "kind", "device", "source"}
    assert set(table["kind"]) == {"published"} and table["source"].str.contains(source).all()
    assert sorted(set(table["device"])) == devices and table["series"].nunique() == series
    assert not table.isna().any(axis=None) and list(table.index) == list(range(len(table)))


@pytest.mark.parametrize("series", ["device A, eager", "device B, eager", "device B, graphed"])
def test_a_series_of_the_riddle_holds_its_file_unchanged(series):
    """N times fewer operations, and hardly a difference: the question of the first lesson."""
    table = published.pseudo_linear()
    shown = table[table["series"] == series]
    lines = lines_of(f"pseudo_linear_{series.replace(', ', '_').replace(' ', '_').lower()}.csv")
    kept = [(int(line["width"]), float(line["speedup"])) for line in lines]
    assert list(zip(shown["width"], shown["speedup"], strict=True)) == kept == sorted(kept)
    assert len(kept) >= 4 and set(shown["device"]) == {series.split(",")[0]}
    at_1024 = table[table["width"] == 1024].set_index("series")["speedup"]
    assert at_1024["device A, eager"] == pytest.approx(1.133, abs=1e-3)
    assert at_1024.max() == at_1024["device B, graphed"] < 5


def test_the_geglu_kernels_are_those_of_the_file_and_the_gemms_are_both_series():
    table, sums = published.geglu_a100(), published.geglu_a100_sums().set_index("contender")
    assert table[["width", "batch", "hidden", "dtype"]].drop_duplicates().to_numpy().tolist() == [
        [768, 8192, 3072, "bfloat16"]
    ]
    for contender in ("torch.compile", "Liger"):
        own = table[table["series"] == f"{contender}, A100"]
        lines = [line for line in lines_of("geglu_a100.csv") if line["by"] in ("cuBLAS", contender)]
        wanted = [(line["part"], float(line["us"])) for line in lines]
        assert list(zip(own["part"], own["us"], strict=True)) == wanted
        assert len(wanted) == 4 and sum(part.endswith("GEMM") for part, _ in wanted) == 3
        assert sums["median_us"][contender] == pytest.approx(own["us"].sum())


def test_the_grouped_convolutions_times_and_their_ratio():
    table, point = published.grouped_conv_3080ti(), published.grouped_conv_3080ti_speedup()
    kept = [(line["series"], float(line["ms"])) for line in lines_of("grouped_conv_3080ti.csv")]
    assert list(zip(table["series"], table["ms"], strict=True)) == kept
    assert kept == [("grouped Conv1d", 1924.0), ("batched matmul", 1263.0)]
    assert point["speedup"].tolist() == [1924 / 1263]
    assert {*table["width"], *table["groups"], *point["width"], *point["groups"]} == {100}
    alt = plots.speedups(point, title="Published").alt
    assert "batched matmul over Conv1d, RTX 3080 Ti" in alt and "1.52× at width 100" in alt


@pytest.mark.parametrize(("direction", "count"), [("forward", 16), ("backward", 17)])
def test_the_norms_times_are_those_of_the_file_and_its_speedups_their_ratios(direction, count):
    """No digit is lost between milliseconds and microseconds, and the file was copied without a slip."""
    norms, lines = published.rms_norm_l4(), lines_of(f"rms_norm_l4_{direction}.csv")
    norms = norms[norms["direction"] == direction]
    assert len(lines) == count and set(norms["dtype"]) == {"float32"}
    times = {}
    for which, column in (("original", "original_ms"), ("optimised", "optimized_ms")):
        found = norms[norms["series"] == f"{which}, L4"]
        sizes = [tuple(int(line[axis]) for axis in "BTH") for line in lines]
        assert list(found[NORM].itertuples(index=False, name=None)) == sizes
        times[which] = found["median_us"].tolist()
        assert times[which] == [float(line[column].replace(".", "")) for line in lines]
    for line, before, after in zip(lines, times["original"], times["optimised"], strict=True):
        said = float(line["speedup"])
        assert (before - 0.5) / (after + 0.5) <= said + 0.005, line
        assert (before + 0.5) / (after - 0.5) >= said - 0.005, line
    points = [tuple(point.values()) for point in published.rms_norm_shapes()]
    assert direction == "forward" or points == sizes
    assert set(points) - set(sizes) == ({(512, 128, 512)} if direction == "forward" else set())
