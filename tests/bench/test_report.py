"""Ours beside the best other: cases, the page and the README's lines; what is kept of a full run."""

import re
import runpy
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import stage
from simulated import DOUBLING
from taped import recorded

from labkit import paths
from labkit.bench import recorded_benchmark, report, suites
from labkit.bench.suite_part import SuitePart
from labkit.measure import roofline, rows, sweeps
from labkit.measure.contender import Contender
from labkit.measure.roofline import Roofs

ROOFS = Roofs(
    kind="recorded", device="NVIDIA H200", date="2026-01-02", copy=((2**30, 2**30 / 100.0),),
    matmul={"float32": 1e9, "bfloat16": 4e9}, node_us=1.0, host_us=5.0,
)  # fmt: skip
"""1000 operations a microsecond in float32."""
DOCS = SimpleNamespace(**runpy.run_path(str(paths.CHECKOUT / "docs" / "benchmark.py")))


@pytest.fixture(autouse=True)
def roofs(monkeypatch):
    monkeypatch.setattr(roofline, "roofs_of", lambda table: ROOFS)


def of(us, contender="labkit", **columns):
    given = {"suite": "bench/affine", "min_bytes": 500, "flops": 10, "copy_us": 5.0, **columns}
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
    gap("Liger", width=64),
    of(40.0, "labkit, one launch", suite="bench/graphs/host", clock="host"),
    of(30.0, suite="bench/graphs/host", clock="host"),
    of(60.0, "a*b | c", suite="bench/graphs/host", clock="host"),
    of(7.0, suite="bench/alone"),
]


def test_the_fastest_of_ours_stands_beside_the_best_other_of_the_same_work_the_worst_first():
    found = report.cases(MEASURED)
    assert found["suite"].tolist() == ["affine", "affine", "graphs/host", "alone"]
    assert found["ratio"].tolist()[:3] == pytest.approx([5 / 4, 10 / 15, 0.5])
    assert found["contender_other"].tolist()[:3] == ["eager", "Liger", "a*b | c"]
    assert found["ratio"].isna().tolist() == [False, False, False, True], "nobody else does it"
    ways = ({}, {"direction": "backward"}, {"dtype": "bfloat16"}, {"clock": "events"}, {"device": "L4"})
    strange = [of(1.0, "eager", suite="bench/other")]
    assert len(report.cases([*(of(1.0, **way) for way in ways), *strange])) == 5
    assert report.cases([]).empty and report.groups(report.cases([])).empty


def test_a_share_is_of_the_copy_or_of_the_operations_at_cublas_rate_and_none_on_the_host(monkeypatch):
    def share(**columns):
        return report.cases([of(10.0, **columns)])["share"].item()

    assert share() == 0.5 and share(flops=8000) == 0.8
    assert share(copy_us=None, flops=8000) == 0.8 and share(clock="host") != share(clock="host")
    monkeypatch.setattr(roofline, "roofs_of", lambda table: None)
    assert share(flops=8000) == 0.5


def test_the_page_has_a_line_for_each_group_and_who_has_no_time():
    text = report.page(MEASURED)
    versions = "torch , triton , liger-kernel 0.8.5"
    assert text.startswith(f"Measured on an NVIDIA H200 (2026-01-02, {versions}), 12 rows.")
    assert "| affine | forward | float32 | 2 | 0.958 | 1.25 | 0.75 | 0.5 |" in text
    assert "| graphs/host | forward | float32 | 1 | 0.5 | 0.5 |  |  |" in text
    assert "- labkit, 1 of bench/affine: why\n- Liger, 1 of bench/affine: why\n" in text
    alt = report.picture(report.cases(MEASURED)).alt
    assert "The worst: affine, forward, float32 1.25; graphs/host" in alt and "alone" not in alt
    lines = DOCS.summary(MEASURED).splitlines()
    assert len(lines) == 5 and lines[2] == "- The worst: affine, forward, float32, batch 2, width 32: 1.25×."
    assert "median of 3 cases: 0.667×; above 1.02 in 1." in lines[1]
    assert len(DOCS.summary([of(1.0)]).splitlines()) == 1


# --- what is kept of a full run -------------------------------------------------------------------

SHAPES = ({"batch": 2, "width": 16},)
WHO = {
    "labkit": Contender("labkit", lambda x: x + x, DOUBLING),
    "Peer": Contender("Peer", lambda x: 2 * x, DOUBLING, peer="a-peer"),
}
CODE = {name: sweeps.source_label(one) for name, one in WHO.items()}
FULL = [
    of(10.0, source=CODE["labkit"], torch="2.13.0", triton="3.7.1"),
    of(20.0, "Peer", source=CODE["Peer"], peer="a-peer", peer_version="1.2", torch="2.13.0", triton="3.7.1"),
    of(10.0, suite="bench/linear", source=CODE["labkit"], torch="2.13.0", triton="3.7.1"),
]


@pytest.fixture
def course(own_folders, tmp_path, monkeypatch):
    """Two suites and no lessons."""
    made = {
        "affine": lambda: [SuitePart(tuple(WHO.values()), SHAPES)],
        "linear": lambda: [SuitePart((WHO["labkit"],), SHAPES)],
    }
    monkeypatch.setattr(suites, "SUITES", made)
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)


def put(measured, device="nvidia-h200"):
    path = paths.RECORDED / device / recorded_benchmark.FILE
    rows.write(path, measured)
    return path


def labkit(*arguments, code=0):
    result = stage.labkit("record", *arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_of_what_was_measured_twice_on_one_kind_of_device_the_first_is_kept_and_listed(course):
    again = [replace(row, median_us=99.0) for row in FULL]
    paths = recorded_benchmark.keep([*FULL, *again, *(replace(row, device="Toy") for row in FULL)])
    assert len(paths) == 2
    for path in paths:
        assert [row.median_us for row in rows.read(path)] == [row.median_us for row in FULL]
    said = r"Measured on an NVIDIA H200 \(2026-01-02, torch 2.13.0, triton 3.7.1, a-peer 1.2\), 3 rows."
    assert re.search(rf"^recorded +nvidia-h200/bench.jsonl  {said}$", labkit("--check"), re.M)


def test_what_a_run_that_is_kept_lacks_is_said_and_what_it_has_stays(course):
    put(FULL[:2])
    assert "2 rows. Not measured: bench/linear." in labkit("--check")
    assert recorded_benchmark.not_measured(FULL, recorded_benchmark.present_code()) == ""


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ([], "holds no rows"),
        ([replace(FULL[0], source="code x"), *FULL[1:]], "other code: labkit of bench/affine"),
        ([*FULL, replace(FULL[0], contender="gone")], "other code: gone of bench/affine"),
        ("[1]\n", "not a row of the schema"),
    ],
)
def test_a_run_of_other_code_is_stale_until_it_is_stripped(course, measured, says):
    path = put(FULL if isinstance(measured, str) else measured)
    if isinstance(measured, str):
        path.write_text(measured)
    assert re.search(rf"^stale +nvidia-h200/bench.jsonl  .*{says}", labkit("--check", code=1), re.MULTILINE)
    kept = put(FULL, "nvidia-l4")
    assert "Stripped: nvidia-h200/bench.jsonl\n" in labkit("--strip-stale", "--check")
    assert not path.exists() and kept.exists() and "Stripped: nothing" in labkit("--strip-stale")


def test_a_suite_that_does_not_load_is_a_sentence(course, monkeypatch):
    def broken():
        raise ValueError("01_launch_overhead, cell 3: a cell tagged kernel has to be plain Python")

    put(FULL[:1])
    monkeypatch.setitem(suites.SUITES, "affine", broken)
    for option in ("--check", "--strip-stale"):
        assert "Error: 01_launch_overhead, cell 3" in labkit(option, code=2)


def test_where_no_run_is_kept_neither_torch_nor_a_lesson_is_loaded(monkeypatch):
    code = (
        "import sys; from pathlib import Path; from labkit.bench import recorded_benchmark\n"
        "assert recorded_benchmark.states(Path('nowhere')) == {}\n"
        "assert 'torch' not in sys.modules and 'labkit.bench.suites' not in sys.modules"
    )
    monkeypatch.setenv("PYTHONPATH", paths.python_path())
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_in_the_tree_is_of_the_present_code_and_what_the_pages_say(monkeypatch):
    monkeypatch.undo()
    stale = [state for state in recorded_benchmark.states(paths.RECORDED).values() if state.status == "stale"]
    assert not stale, "record it again with `labkit bench --peers --record`, or `labkit record --strip-stale`"
    for path, text in DOCS.pages().items():
        assert path.read_text() == text, "run `python -m docs.benchmark`"


def test_pages_say_what_a_run_found_and_lack_no_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{DOCS.BEGIN}old\n{DOCS.END}after\n")
    assert DOCS.renewed(page, "new\n") == f"before\n{DOCS.BEGIN}new\n{DOCS.END}after\n"
    for text in (DOCS.BEGIN, DOCS.END + DOCS.BEGIN, f"{DOCS.BEGIN[:-1]} x\n{DOCS.END}"):
        page.write_text(text)
        with pytest.raises(ValueError, match="has not one line <!-- made by"):
            DOCS.renewed(page, "")
    monkeypatch.setattr(paths, "RECORDED", tmp_path / "recorded")
    put(FULL)
    readme, benchmark = DOCS.pages().values()
    assert DOCS.summary(FULL) in readme and report.page(FULL) in benchmark
