"""The benchmark's table in the README and its page: made from rows, and equal to what stands in the tree."""

from dataclasses import replace

import pytest
from taped import recorded

from labkit import bench_figure, bench_shares, bench_table, places, rows
from labkit.machine import Roofs

ROOFS = Roofs(
    kind="recorded", device="NVIDIA H200", date="2026-01-02", copy=((2**30, 2**30 / 100.0),),
    matmul={"float32": 1e9, "tf32": 2e9, "bfloat16": 4e9}, node_us=1.0, host_us=5.0,
)  # fmt: skip
"""100 bytes a microsecond; 1000 operations a microsecond in float32."""


def of(us, contender="labkit", **columns):
    given = {"suite": "bench/affine", "min_bytes": 500, "flops": 10, **columns}
    return recorded(contender, us=us, **given)


def gap(contender="labkit", **columns):
    return of(1.0, contender, **{"median_us": None, "p20_us": None, "p80_us": None, "note": "why", **columns})


MEASURED = [
    of(10.0),
    of(20.0, "eager"),
    of(15.0, "Liger", peer="liger-kernel", peer_version="0.8.5"),
    of(1.0, "nn.Linear", flops=10**6),
    of(5.0, width=32),
    of(4.0, "eager", width=32),
    gap(width=64),
    of(30.0, "labkit, one launch", suite="bench/graphs/host", clock="host", cache="warm"),
    of(60.0, "a*b | c", suite="bench/graphs/host", clock="host", cache="warm"),
]


def each(measured, roofs=ROOFS):
    """The same roofs for each suite."""
    return {row.suite: roofs for row in measured}


def lines(measured, roofs=None):
    table = bench_table.block(measured, each(measured) if roofs is None else roofs)
    return [line for line in table.splitlines() if line.startswith("| ") and "Suite" not in line]


def test_the_readme_holds_the_table_of_the_last_full_run():
    measured = bench_table.recorded()
    readme = bench_table.README.read_text(encoding="utf-8")
    said = "README.md is not what bench.jsonl says: run `python -m labkit.bench_table`"
    assert bench_table.renew(readme, measured, bench_table.roofs_of(measured)) == readme, said


def test_a_line_says_shapes_shares_and_who_was_best_and_the_first_where_it_is_from():
    first = "| affine | forward | float32 | graph | 2 of 3 | 0.5 to 1 | 0.8× to 1.5× | Liger, eager |"
    host = "| graphs, host | forward | float32 | host | 1 |  | 2× | a\\*b / c |"
    assert lines(MEASURED)[:2] == [first, host]
    assert "| 2 of 3 |  | 0.8×" in lines(MEASURED, {})[0], "without roofs there is no share"
    measured = [MEASURED[2], of(1.0, date="2026-01-03"), of(10.0, torch="2.13.0+cu130", triton="3.7.1")]
    dates, versions = "2026-01-02 to 2026-01-03", "torch 2.13.0, triton 3.7.1, liger-kernel 0.8.5"
    said = f"Recorded on an NVIDIA H200 ({dates}, {versions}), 3 rows."
    assert bench_table.block(measured, each(measured)).splitlines()[0] == said


def test_each_suite_has_the_roofs_of_its_machine():
    other = [of(10.0, suite="bench/linear"), of(20.0, "eager", suite="bench/linear")]
    faster = replace(ROOFS, copy=tuple((size, us / 2) for size, us in ROOFS.copy))
    roofs = each(MEASURED) | {"bench/linear": faster}
    assert "| 0.25 | 2× |" in lines([*MEASURED, *other], roofs)[2]
    assert bench_figure.table([*MEASURED, *other], roofs)["share_of_floor"].tolist()[-2:] == [0.25, 0.125]


BEGIN, END = bench_table.BEGIN, bench_table.END


@pytest.mark.parametrize(
    "page", [BEGIN, END + BEGIN, BEGIN * 2 + END, BEGIN + END * 2, f"{BEGIN[:-1]} x\n{END}"]
)
def test_a_page_without_both_marks_once_and_in_order_is_refused(page, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"README.md has not one line <!-- made by"):
        bench_table.renew(page, [], None)
    monkeypatch.setattr(bench_table, "README", tmp_path / "README.md")
    bench_table.README.write_text(page)
    with pytest.raises(ValueError, match=r"README.md has not one line"):
        bench_table.check()
    assert bench_table.README.read_text() == page


def test_the_readme_is_made_from_the_file_or_says_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "RECORDED", tmp_path)
    monkeypatch.setattr(bench_table, "README", tmp_path / "README.md")
    bench_table.README.write_text(f"a\n{BEGIN}old\n{END}b\n")
    rows.write(tmp_path / "nvidia-h200" / "bench.jsonl", MEASURED)
    bench_table.write()
    assert "| affine | forward |" in bench_table.README.read_text()
    (tmp_path / "nvidia-h200" / "bench.jsonl").unlink()
    bench_table.write()
    assert bench_table.README.read_text() == f"a\n{BEGIN}{bench_table.NOTHING}{END}b\n"


# Shares, and the page


def test_the_floor_is_that_of_bytes_operations_or_a_launch():
    assert bench_shares.share(of(10.0), ROOFS) == 0.5
    assert bench_shares.share(of(10.0, flops=8000), ROOFS) == 0.8
    assert bench_shares.share(of(10.0, "Linear TF32", flops=16000), ROOFS) == 0.8
    assert bench_shares.share(of(10.0, min_bytes=1), ROOFS) == 0.1
    with pytest.raises(ValueError, match="has no time"):
        bench_shares.share(gap(), ROOFS)


def test_only_the_same_work_measured_in_the_same_way_stands_beside_ours():
    (group,) = bench_shares.groups(MEASURED[:4])
    (case,) = group.cases
    assert case.best and case.best.contender == "Liger"
    (alone,) = bench_shares.groups([MEASURED[0], MEASURED[3]])[0].cases
    assert alone.best is None and alone.times_as_fast is None
    ways = ({}, {"direction": "backward"}, {"dtype": "bfloat16"}, {"clock": "events"})
    strange = of(1.0, "eager", suite="bench/other")
    assert len(bench_shares.groups([*(of(1.0, **way) for way in ways), strange])) == 4


def test_the_page_has_a_bar_for_ours_each_peer_and_the_best_of_the_others_and_says_it_in_words():
    measured = [*MEASURED, gap("fla", peer="fla-core"), of(40.0, "vmap")]
    table = bench_figure.table(measured, each(measured))
    assert table["suite"].unique().tolist() == ["affine, forward"]
    assert table["contender"].tolist() == ["labkit", "Liger", "fla", "eager"]
    assert table["share_of_floor"].tolist()[:2] == pytest.approx([0.75, 1 / 3])
    assert table["note"].tolist() == ["", "", "why", ""]
    for others, shares in (([of(20.0, "eager")], [0.5, 0.25]), ([], [0.3])):
        found = bench_figure.table([of(10.0), *others, of(50.0, width=32)], each(MEASURED))
        assert found["share_of_floor"].tolist() == shares, "what only ours did counts only where it is alone"
    alt = bench_figure.page(measured, each(measured)).alt
    assert " affine, forward: labkit 0.75, Liger 0.333, fla none (why), eager" in alt
    assert "suite affine" not in alt and "ecorded on NVIDIA H200" in alt
    assert "nothing measured yet" in bench_figure.page([], {}).alt
