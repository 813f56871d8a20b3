"""The full run that is kept: listed, stale when its code has changed, stripped together with the table."""

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
OURS = Contender("labkit", lambda x: x + x, DOUBLING)
PEER = Contender("Peer", lambda x: 2 * x, DOUBLING, peer="a-peer")
CODE = {one.name: sweeps.code(one) for one in (OURS, PEER)}
VERSIONS = {"driver": "570.1", "torch": "2.13.0", "triton": "3.7.1", "date": "2026-01-02T03:04:05+00:00"}


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    """Two suites, no lessons, and a README with a place for the table."""
    parts = {"affine": [Part((OURS, PEER), SHAPES, "bench/affine")]}
    parts["linear"] = [Part((OURS,), SHAPES, "bench/linear")]
    monkeypatch.setattr(suites, "NAMES", tuple(parts))
    monkeypatch.setattr(suites, "parts", lambda name, *, peers: parts[name])
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(places, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(bench_table, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"before\n{bench_table.BEGIN}{bench_table.END}after\n")


def of(contender="labkit", suite="bench/affine", **columns):
    return recorded(contender, **{"suite": suite, "source": CODE[contender], **VERSIONS, **columns})


FULL = [of(), of("Peer", peer="a-peer", peer_version="1.2"), of(suite="bench/linear")]


def keep(measured, device="nvidia-h200"):
    path = places.RECORDED / device / bench_record.FILE
    rows.write(path, measured)
    return path


def labkit(*arguments, code=0):
    result = CliRunner().invoke(cli.cli, ["record", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_of_what_was_measured_twice_on_one_kind_of_device_the_first_is_kept_and_listed():
    again = [replace(row, median_us=99.0) for row in FULL]
    paths = bench_record.keep([*FULL, *again, *(replace(row, device="Toy") for row in FULL)])
    assert len(paths) == 2
    for path in paths:
        assert [row.median_us for row in rows.read(path)] == [row.median_us for row in FULL]
    versions = "driver 570.1, torch 2.13.0, triton 3.7.1, a-peer 1.2, 2026-01-02"
    assert re.search(
        rf"^recorded +nvidia-h200/bench.jsonl  NVIDIA H200, {versions}$", labkit("--check"), re.M
    )


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ([], "holds no rows"),
        ([replace(FULL[0], source="code x"), *FULL[1:]], "other code: labkit of bench/affine"),
        ([*FULL, replace(FULL[0], contender="gone")], "other code: gone of bench/affine"),
        ([replace(row, source="") for row in FULL], "labkit of bench/affine and 1 more"),
        (FULL[:2], "has no rows of bench/linear"),
        ("[1]\n", "not a row of the schema.*"),
    ],
)
def test_a_run_of_other_code_or_not_of_all_suites_is_stale_until_it_is_stripped(measured, says):
    path = keep(FULL if isinstance(measured, str) else measured)
    if isinstance(measured, str):
        path.write_text(measured)
        with pytest.raises(ValueError, match=says):
            bench_table.write()
    assert re.search(rf"^stale +nvidia-h200/bench.jsonl  .*{says}$", labkit("--check", code=1), re.MULTILINE)
    kept = keep(FULL, "nvidia-l4")
    assert "Stripped: nvidia-h200/bench.jsonl\n" in labkit("--strip-stale", "--check")
    readme = bench_table.README.read_text()
    assert readme == bench_table.renew(readme, FULL, bench_table.roofs_of(FULL)) and "| affine |" in readme
    assert not path.exists() and kept.exists() and "Stripped: nothing" in labkit("--strip-stale")
    keep([], "nvidia-l4")
    labkit("--strip-stale")
    assert bench_table.NOTHING in bench_table.README.read_text()


def test_a_readme_without_marks_or_a_lesson_that_does_not_load_is_a_sentence(monkeypatch):
    def broken(name, *, peers):
        raise ValueError("01_launch_overhead, cell 3: a cell tagged kernel has to be plain Python")

    path = keep(FULL[:1])
    bench_table.README.write_text("# damaged\n")
    assert "README.md has not one line" in labkit("--strip-stale", code=2) and path.exists()
    monkeypatch.setattr(suites, "parts", broken)
    for option in ("--check", "--strip-stale"):
        assert "Error: 01_launch_overhead, cell 3" in labkit(option, code=2)


def test_where_no_run_is_kept_no_lesson_is_loaded(monkeypatch):
    code = (
        "import sys; from pathlib import Path; from labkit import bench_record\n"
        "assert bench_record.states(Path('nowhere')) == {}\n"
        "assert 'torch' not in sys.modules and 'labkit.suites' not in sys.modules"
    )
    monkeypatch.setenv("PYTHONPATH", places.python_path())
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_in_the_tree_is_of_the_present_code(monkeypatch):
    monkeypatch.undo()
    stale = [state for state in bench_record.states(places.RECORDED).values() if state.status == "stale"]
    assert not stale, "record it again with `labkit bench --peers --record`, or `labkit record --strip-stale`"
