"""Two files of rows: what moved beyond its spread, and what is only in one."""

import pytest
import stage
from taped import recorded

from labkit.bench.compare import compare
from labkit.measure import rows


def of(us, spread=1.0, **columns):
    return recorded(us=us, p20_us=us - spread / 2, p80_us=us + spread / 2, **columns)


def gap(**columns):
    return recorded(median_us=None, p20_us=None, p80_us=None, note="CUDA out of memory", **columns)


def moved(before, after):
    return compare(before, after)["moved"].tolist()


@pytest.fixture
def labkit(tmp_path, monkeypatch):
    """A function that compares the files a.jsonl and b.jsonl of these rows by the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")

    def command(before, after, *names, code=0):
        rows.write(tmp_path / "a.jsonl", before)
        if isinstance(after, bytes):
            (tmp_path / "b.jsonl").write_bytes(after)
        else:
            rows.write(tmp_path / "b.jsonl", after)
        result = stage.labkit("bench", "--compare", *(names or ("a.jsonl", "b.jsonl")))
        assert result.exit_code == code and "Traceback" not in result.output
        return result.output

    return command


@pytest.mark.parametrize(
    ("before", "after", "does"),
    [
        (of(10.0), of(11.0), False),
        *((of(10.0), of(us), True) for us in (11.1, 8.9)),
        *((one, other, False) for one, other in ((of(10.0, 3.0), of(12.0)), (of(10.0), of(12.0, 3.0)))),
        (recorded(us=10.0, p20_us=None, p80_us=None), recorded(us=10.1, p20_us=None, p80_us=None), True),
    ],
)
def test_a_row_moves_when_the_medians_differ_by_more_than_the_larger_spread(before, after, does):
    assert moved([before], [after]) == [does]


def test_rows_are_matched_by_what_was_measured_not_by_where_and_the_slowest_comes_first():
    before = [of(10.0, width=width) for width in (16, 32, 64)]
    after = [of(us, width=width) for us, width in ((5.0, 16), (30.0, 32), (20.0, 64))]
    assert compare(before, after)["ratio"].tolist() == [3.0, 2.0, 0.5]
    elsewhere = of(10.0, device="another", date="2027-01-01", source="code x", kind="live")
    assert moved([of(99.0), of(10.0)], [elsewhere]) == [False], "the last one counts"
    for other in ({"clock": "host"}, {"cache": "warm"}, {"dtype": "float16"}, {"direction": "backward"}):
        assert moved([of(10.0)], [of(10.0, **other)]) == []


def test_rows_without_a_time_and_of_one_file_only_are_counted(labkit):
    before = [gap(width=16), of(10.0, width=32), of(2.0, width=64), of(1.0, width=128)]
    after = [of(10.0, width=16), gap(width=32), of(2.0, width=64)]
    assert labkit(before, after).splitlines()[2:] == [
        "0 of 1 rows moved beyond their spread: 0 slower, 0 faster.",
        "a.jsonl: 3 rows more, without a time or not in the other file.",
        "b.jsonl: 2 rows more, without a time or not in the other file.",
    ]


def test_the_command_names_the_machines_and_the_rows_that_moved(labkit):
    output = labkit([of(10.0), of(10.0, width=32)], [of(20.0, device="NVIDIA L4"), of(10.2, width=32)])
    assert "a.jsonl: NVIDIA H200, driver unknown" in output
    assert "b.jsonl: NVIDIA L4, driver unknown, torch unknown, triton unknown; NVIDIA H200" in output
    assert "1 of 2 rows moved beyond their spread: 1 slower, 0 faster." in output
    (line,) = (line for line in output.splitlines() if "labkit" in line)
    said = ["suite", "labkit", "forward", "float32", "batch 2, width 16", "10 µs", "20 µs", "2×", "1 µs"]
    assert [cell.strip() for cell in line.strip("│").split("│")] == said
    assert "│" not in labkit([of(10.0)], [of(10.0)]), "nothing moved is a sentence without a table"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "not a row of the schema") for text in (b'{"suite": "affine"}\n', b"[1]\n", b"no JSON\n")),
        *((b"", "holds no rows"), (b"\xff\xfe\n", "")),
    ],
)
def test_a_file_of_another_schema_and_no_file_are_mistakes(labkit, text, says):
    assert f"b.jsonl: {says}" in labkit([of(10.0)], text, code=2)
    labkit([of(10.0)], [of(10.0)], "a.jsonl", code=2)
