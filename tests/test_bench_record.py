"""The full run that is kept: listed, stale when its code has changed, stripped together with the table."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from simulated import DOUBLING
from taped import recorded

from labkit import bench_record, bench_table, cli, places, rows, suites, sweeps
from labkit.bench_plan import Part
from labkit.sweeps import Contender

SHAPES = ({"batch": 2, "width": 16},)
OURS, PEER = (
    Contender("labkit", lambda x: x + x, DOUBLING),
    Contender("Peer", lambda x: 2 * x, DOUBLING, peer="a-peer"),
)
CODE = {one.name: sweeps.code(one) for one in (OURS, PEER)}
VERSIONS = {"driver": "570.1", "torch": "2.13.0", "triton": "3.7.1", "date": "2026-01-02T03:04:05+00:00"}


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    """Two suites, no lessons, and a README with a place for the table."""
    parts = {
        "affine": [Part((OURS, PEER), SHAPES, "bench/affine")],
        "linear": [Part((OURS,), SHAPES, "bench/linear")],
    }
    monkeypatch.setattr(suites, "NAMES", tuple(parts))
    monkeypatch.setattr(suites, "parts", lambda name, *, peers: parts[name])
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(places, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(bench_table, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"before\n{bench_table.BEGIN}{bench_table.END}after\n")


def of(contender="labkit", suite="bench/affine", **columns):
    return recorded(contender, **{"suite": suite, "source": CODE[contender], **VERSIONS, **columns})


FULL = [of(), of("Peer", peer="a-peer", peer_version="1.2"), of(suite="bench/linear")]


def test_of_what_was_measured_twice_on_one_kind_of_device_the_first_is_kept():
    again = [replace(row, median_us=99.0) for row in FULL]
    other = [replace(row, device="Toy") for row in FULL]
    paths = bench_record.keep([*FULL, *again, *other])
    assert len(paths) == 2
    for path in paths:
        assert [row.median_us for row in rows.read(path)] == [row.median_us for row in FULL]


def keep(measured, device="nvidia-h200"):
    path = places.RECORDED / device / bench_record.FILE
    rows.write(path, measured)
    return path


def labkit(*arguments):
    result = CliRunner().invoke(cli.cli, ["record", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_full_run_is_listed_with_device_versions_and_date():
    keep(FULL)
    checked = labkit("--check")
    assert checked.exit_code == 0
    assert re.fullmatch(
        r"recorded +nvidia-h200/bench.jsonl  NVIDIA H200, driver 570.1, torch 2.13.0, triton 3.7.1, "
        r"a-peer 1.2, 2026-01-02\n",
        checked.output,
    )


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ([], "holds no rows"),
        ([replace(FULL[0], source="code of another day"), *FULL[1:]], "other code: labkit of bench/affine"),
        ([*FULL[:1], replace(FULL[1], source="code x"), *FULL[2:]], "other code: Peer of bench/affine"),
        ([*FULL, replace(FULL[0], contender="gone")], "other code: gone of bench/affine"),
        (
            [replace(row, source="") for row in FULL],
            "labkit of bench/affine and 1 more",
        ),
        (FULL[:2], "has no rows of bench/linear"),
    ],
)
def test_a_run_of_other_code_or_not_of_all_suites_is_stale_until_it_is_stripped(measured, says):
    path = keep(measured)
    kept = keep(FULL, "nvidia-l4")
    bench_table.write()
    checked = labkit("--check")
    assert checked.exit_code == 1
    assert re.search(rf"^stale +nvidia-h200/bench.jsonl  .*{says}$", checked.output, re.MULTILINE)
    stripped = labkit("--strip-stale", "--check")
    assert stripped.exit_code == 0 and "Stripped: nvidia-h200/bench.jsonl\n" in stripped.output
    assert not path.exists() and kept.exists()
    readme = bench_table.README.read_text()
    assert readme == bench_table.renew(readme, FULL, bench_table.roofs_of(FULL)) and "| affine |" in readme
    assert "Stripped: nothing was stale" in labkit("--strip-stale").output


def test_without_a_run_that_is_kept_the_table_says_so():
    keep([replace(row, source="") for row in FULL])
    bench_table.write()
    labkit("--strip-stale")
    assert bench_table.NOTHING in bench_table.README.read_text()


@pytest.mark.parametrize("text", ['{"suite": "affine"}\n', "[1]\n", "no JSON\nat all\n"])
def test_a_file_of_another_schema_is_stale_and_the_table_is_not_made_of_it(text):
    keep(FULL).write_text(text)
    (state,) = bench_record.states(places.RECORDED).values()
    assert state.status == "stale" and state.detail.startswith("not a row of the schema")
    with pytest.raises(ValueError, match="not a row of the schema"):
        bench_table.write()


def test_a_readme_without_marks_is_a_sentence_and_nothing_is_removed(tmp_path):
    path = keep(FULL[:1])
    bench_table.README.write_text("# damaged\n")
    result = labkit("--strip-stale")
    assert result.exit_code == 2 and "README.md has not one line" in result.output
    assert path.exists()


def test_a_lesson_that_does_not_load_is_a_sentence(monkeypatch):
    def broken(name, *, peers):
        raise ValueError("01_launch_overhead, cell 3: a cell tagged kernel has to be plain Python")

    keep(FULL)
    monkeypatch.setattr(suites, "parts", broken)
    for option in ("--check", "--strip-stale"):
        result = labkit(option)
        assert result.exit_code == 2 and "Error: 01_launch_overhead, cell 3" in result.output


def test_where_no_run_is_kept_no_lesson_is_loaded():
    code = (
        "import sys; from pathlib import Path; from labkit import bench_record\n"
        "assert bench_record.states(Path('nowhere')) == {}\n"
        "assert 'torch' not in sys.modules and 'labkit.suites' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": places.python_path()}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# In the tree


def test_what_is_in_the_tree_is_of_the_present_code(monkeypatch):
    monkeypatch.undo()
    stale = [state for state in bench_record.states(places.RECORDED).values() if state.status == "stale"]
    assert not stale, "record it again with `labkit bench --peers --record`, or `labkit record --strip-stale`"
