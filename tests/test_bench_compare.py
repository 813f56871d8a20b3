"""Two files of rows: what moved beyond its spread, and what is only in one."""

import io
import re

import pytest
from click.testing import CliRunner
from rich.console import Console
from taped import recorded

from labkit import bench_compare, cli, rows
from labkit.bench_compare import compare


def of(us, spread=1.0, **columns):
    return recorded(us=us, p20_us=us - spread / 2, p80_us=us + spread / 2, **columns)


def gap(**columns):
    return recorded(median_us=None, p20_us=None, p80_us=None, note="CUDA out of memory", **columns)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(before, after):
        rows.write(tmp_path / "a.jsonl", before)
        rows.write(tmp_path / "b.jsonl", after)

    return write


def labkit(*arguments):
    result = CliRunner().invoke(cli.cli, ["bench", "--compare", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        (of(10.0), of(11.0), False),
        (of(10.0), of(11.1), True),
        (of(10.0), of(8.9), True),
        (of(10.0, 3.0), of(12.0), False),
        (of(10.0), of(12.0, 3.0), False),
        (recorded(us=10.0, p20_us=None, p80_us=None), recorded(us=10.1, p20_us=None, p80_us=None), True),
    ],
)
def test_a_row_moves_when_the_medians_differ_by_more_than_the_larger_spread(before, after, moved):
    found = compare([before], [after])
    assert (len(found.moved), found.within) == (moved, not moved)


def test_the_slowest_comes_first():
    before = [of(10.0, width=width) for width in (16, 32, 64)]
    after = [of(us, width=width) for us, width in ((5.0, 16), (30.0, 32), (20.0, 64))]
    assert [each.ratio for each in compare(before, after).moved] == [3.0, 2.0, 0.5]


def test_rows_are_matched_by_what_was_measured_not_by_where():
    moved = compare([of(10.0)], [of(10.0, device="another", date="2027-01-01", source="code x", kind="live")])
    assert moved.within == 1
    for other in ({"clock": "host"}, {"cache": "warm"}, {"dtype": "float16"}, {"direction": "backward"}):
        found = compare([of(10.0)], [of(10.0, **other)])
        assert (len(found.only_before), len(found.only_after)) == (1, 1)


def test_gaps_that_come_and_go_are_named():
    before = [gap(width=16), of(10.0, width=32), gap(width=64), of(1.0, width=128)]
    after = [of(10.0, width=16), gap(width=32), gap(width=64), of(1.0, width=256)]
    found = compare(before, after)
    assert bench_compare.summary(found) == [
        "0 of 0 rows moved beyond their spread: 0 slower, 0 faster.",
        "No time any more: suite, labkit, forward, float32, batch 2, width 32: CUDA out of memory",
        "A time now: suite, labkit, forward, float32, batch 2, width 16",
        "1 rows have a time in neither file.",
        "1 rows are only in the first file.",
        "1 rows are only in the second file.",
    ]


def test_the_command_names_the_machines_and_the_rows_that_moved(files):
    files([of(10.0), of(10.0, width=32)], [of(20.0, device="NVIDIA L4"), of(10.2, width=32)])
    result = labkit("a.jsonl", "b.jsonl")
    assert result.exit_code == 0
    assert "a.jsonl: NVIDIA H200, driver unknown" in result.output
    assert "b.jsonl: NVIDIA L4, driver unknown, torch unknown, triton unknown; NVIDIA H200" in result.output
    assert "1 of 2 rows moved beyond their spread: 1 slower, 0 faster." in result.output


def test_a_line_says_both_times_and_the_spread():
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(bench_compare.table(compare([of(10.0)], [of(20.0)])))
    line = next(line for line in console.export_text().splitlines() if "labkit" in line)
    assert re.split(r" *│ *", line.strip("│ ")) == [
        "suite", "labkit", "forward", "float32", "batch 2, width 16", "10 µs", "20 µs", "2×", "1 µs",
    ]  # fmt: skip


def test_nothing_moved_is_a_sentence_without_a_table(files):
    files([of(10.0)], [of(10.0)])
    assert "│" not in labkit("a.jsonl", "b.jsonl").output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"suite": "affine"}\n', "b.jsonl: not a row of the schema"),
        ("[1]\n", "b.jsonl: not a row of the schema"),
        ("no JSON\n", "b.jsonl: not a row of the schema"),
        ("", "b.jsonl: holds no rows"),
        (b"\xff\xfe\n", "b.jsonl: "),
    ],
)
def test_a_file_of_another_schema_is_a_mistake(files, tmp_path, text, says):
    files([of(10.0)], [])
    (tmp_path / "b.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = labkit("a.jsonl", "b.jsonl")
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_a_mistake(files, us):
    files([of(us)], [of(10.0)])
    result = labkit("a.jsonl", "b.jsonl")
    assert result.exit_code == 2 and f"batch 2, width 16: {us} µs is no time" in result.output


def test_a_folder_or_one_file_alone_is_a_mistake(files, tmp_path):
    files([of(10.0)], [of(10.0)])
    (tmp_path / "folder").mkdir()
    assert labkit("a.jsonl", "folder").exit_code == 2
    assert labkit("a.jsonl").exit_code == 2
