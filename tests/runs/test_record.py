import json
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import device, lessons, rows
from labkit.runs import record


@dataclass
class Machine:
    device: str = "NVIDIA H200"
    driver: str = "570.1"
    torch: str = "2.13.0"
    triton: str = "3.7.1"

    @property
    def slug(self):
        return self.device.lower().replace(" ", "-")


def row(width, **changes):
    return rows.Row(
        **{
            "suite": "toy",
            "contender": "labkit",
            "direction": "forward",
            "dtype": "float32",
            "shape": {"width": width},
            "clock": "graph",
            "cache": "cold",
            "median_us": 1.5,
            "p20_us": 1.4,
            "p80_us": 1.6,
            "runs": 9,
            "min_bytes": 8,
            "flops": 0,
            "copy_us": 1.4,
            "relative_error": 0.0,
            "device": "NVIDIA H200",
            "driver": "570.1",
            "torch": "2.13.0",
            "triton": "3.7.1",
            **changes,
        }
    )


# Stands in for a sweep: measures the widths that its tape lacks.
MEASURE = f"""
import os
had = open(os.environ["LABKIT_TAPE"]).read() if os.path.exists(os.environ["LABKIT_TAPE"]) else ""
with open(os.environ["LABKIT_TAPE"], "a") as tape:
    for line, width in [({row(32).to_json()!r}, 32), ({row(64).to_json()!r}, 64)]:
        if f'"width": {{width}}' not in had:
            open("measured", "a").write(f"{{width}} ")
            tape.write(line + "\\n")
"""
CELLS = [
    "from pathlib import Path\nfrom labkit.claims import claim\nfrom labkit.runs.record import banner\n"
    "banner('01_toy', Path('.'))",
    MEASURE,
    "# NBVAL_CHECK_OUTPUT\nprint('bytes', 3)",
    "claim('{value} bytes', 3, True)",
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # decided, so that nothing here imports torch


class Course:
    """A folder of lessons with its tapes."""

    def __init__(self, root):
        self.notebooks, self.tapes, self.work = root / "notebooks", root / "recorded", root / "work"
        self.notebooks.mkdir(exist_ok=True)

    def lesson(self, *cells, name="01_toy"):
        notebook = new_notebook(cells=[new_markdown_cell("# Toy"), *map(new_code_cell, cells)])
        path = self.notebooks / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    def record(self, path, machine=None, **options):
        return record.record(path, machine or Machine(), tapes=self.tapes, work=self.work, **options)

    @property
    def path(self):
        return self.notebooks / "01_toy.ipynb"

    def tape(self, device="nvidia-h200", lesson="toy"):
        return self.tapes / device / f"{lesson}.jsonl"

    def measured(self):
        file = self.notebooks / "measured"
        return file.read_text().split() if file.exists() else []

    def statuses(self):
        found = [record.state(path) for path in lessons.find(self.notebooks)]
        found += record.tape_states(self.notebooks, self.tapes).values()
        return {state.name: state.status for state in found}


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """One course with one recorded lesson, for all tests that only look at it or change it afterwards."""
    course = Course(tmp_path_factory.mktemp("recording"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        result = course.record(course.lesson(*CELLS))
    assert result.passed, result.failure
    return course


@pytest.fixture
def recorded(recording, tmp_path):
    """A copy of the recorded course."""
    shutil.copytree(recording.notebooks.parent, tmp_path, dirs_exist_ok=True)
    return Course(tmp_path)


def edit(path, number, source):
    notebook = lessons.read(path)
    dict(lessons.code_cells(notebook))[number].source = source
    nbformat.write(notebook, path)


def test_recording_puts_outputs_stamp_and_tapes_into_the_tree(recorded):
    course, path = recorded, recorded.path
    notebook = lessons.read(path)
    assert [cell.source for cell in notebook.cells] == ["# Toy", *CELLS]
    stamp = notebook.metadata.labkit.recorded
    assert stamp.hash == lessons.code_hash(path)
    assert (stamp.device, stamp.driver, stamp.torch, stamp.triton) == (
        "NVIDIA H200",
        "570.1",
        "2.13.0",
        "3.7.1",
    )
    assert [cell.execution_count for _, cell in lessons.code_cells(notebook)] == [1, 2, 3, 4]
    shown = dict(lessons.code_cells(notebook))
    assert "recorded on NVIDIA H200, driver 570.1" in shown[1].outputs[0].data["text/html"]
    assert shown[3].outputs[0].text == "bytes 3\n"
    expected = {"kind": "recorded", "source": f"toy@{stamp.hash}"}
    assert rows.read(course.tape()) == [row(32, **expected), row(64, **expected)]
    assert course.statuses() == {"01_toy": "recorded", "nvidia-h200/toy.jsonl": "recorded"}
    assert not list(course.work.rglob("*@*"))


def test_a_recorded_notebook_is_written_as_jupyter_writes_it(recording):
    text = recording.path.read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert "papermill" not in text and "widget" not in text and str(recording.notebooks) not in text


def test_what_is_recorded_is_skipped_unless_asked_again(recorded):
    before = recorded.path.read_text()
    assert recorded.record(recorded.path) is None
    assert recorded.measured() == ["32", "64"]
    assert recorded.record(recorded.path, again=True).passed
    assert recorded.measured() == ["32", "64"] * 2
    assert recorded.path.read_text() == before, "the same outputs are written the same way"


def test_another_device_is_recorded_beside(recorded):
    course, path = recorded, recorded.path
    assert course.record(path, Machine(device="NVIDIA L4")).passed
    assert lessons.read(path).metadata.labkit.recorded.device == "NVIDIA L4"
    assert course.tape().exists() and course.tape("nvidia-l4").exists()


def unfinished(course, path, *kept):
    folder = course.work / "nvidia-h200"
    rows.write(folder / f"{lessons.key(path.stem)}@{lessons.code_hash(path)}.jsonl", kept)


def test_a_recording_goes_on_where_it_was_cut_short(course):
    path = course.lesson(*CELLS)
    unfinished(course, path, row(32))
    course.record(path)
    assert course.measured() == ["64"]
    assert [r.shape["width"] for r in rows.read(course.tape())] == [32, 64]


def test_rows_of_other_versions_or_other_code_are_measured_anew(course):
    path = course.lesson(*CELLS)
    unfinished(course, path, row(32, torch="2.11.0"), row(64, driver="550"))
    course.record(path)
    assert course.measured() == ["32", "64"]
    unfinished(course, path, row(32))
    edit(path, 4, "claim('{value} bytes', 4, True)")
    course.record(path)
    assert course.measured() == ["32", "64"] * 2


@pytest.mark.parametrize("last", ["1 / 0", "claim('{value} bytes', 3, False)", "claim('{value} x', None)"])
def test_a_failure_leaves_notebook_and_tape_as_they_were(recorded, last):
    course, path = recorded, recorded.path
    edit(path, 4, last)
    files = (path, course.tape())
    before = [file.read_bytes() for file in files]
    assert not course.record(path).passed
    assert [file.read_bytes() for file in files] == before
    assert len(list(course.work.rglob("*@*.jsonl"))) == 1, "what was measured is kept for the next try"


def test_a_lesson_edited_meanwhile_is_refused(course):
    path = course.lesson(
        "import nbformat\nnb = nbformat.read('01_toy.ipynb', 4)\nnb.cells[1].source = 'x'", "1"
    )
    edit(path, 2, "nbformat.write(nb, '01_toy.ipynb')")
    with pytest.raises(ValueError, match="edited while it was recorded"):
        course.record(path)
    assert record.state(path).status == "no outputs"


def test_a_marked_cell_that_shows_nothing_is_refused(course):
    path = course.lesson("# NBVAL_CHECK_OUTPUT\nx = 1")
    with pytest.raises(ValueError, match="shows nothing: cell 1"):
        course.record(path)
    assert record.state(path).status == "no outputs"


def test_widgets_are_not_recorded(course):
    view = '{"text/plain": "a widget", "%s": {"model_id": "m"}}' % record.WIDGET_VIEW  # noqa: UP031
    path = course.lesson(f"display({view}, raw=True)\ndisplay(3)")
    course.record(path)
    assert [o.data for o in lessons.read(path).cells[1].outputs] == [{"text/plain": "3"}]


def test_changed_code_makes_outputs_and_tape_stale_until_they_are_stripped(recorded):
    course, path = recorded, recorded.path
    edit(path, 4, "claim('{value} bytes', 4, True)")
    stale = ["01_toy", "nvidia-h200/toy.jsonl"]
    assert course.statuses() == dict.fromkeys(stale, "stale")
    assert record.strip_stale(course.notebooks, course.tapes) == stale
    assert not course.tape().exists()
    assert course.statuses() == {"01_toy": "no outputs"}
    stripped = lessons.read(path)
    assert "recorded" not in stripped.metadata.labkit
    assert all(c.outputs == [] and c.execution_count is None for _, c in lessons.code_cells(stripped))
    assert record.strip_stale(course.notebooks, course.tapes) == []


def test_changed_prose_makes_nothing_stale(recorded):
    course, path = recorded, recorded.path
    notebook = lessons.read(path)
    notebook.cells[0].source = "# Toy, reworded"
    nbformat.write(notebook, path)
    assert set(course.statuses().values()) == {"recorded"}


def test_outputs_without_a_stamp_are_stale(course):
    path = course.lesson("print(1)")
    notebook = lessons.read(path)
    notebook.cells[1].outputs = [new_output("stream", text="1")]
    nbformat.write(notebook, path)
    assert course.statuses() == {"01_toy": "stale"}
    record.strip_stale(course.notebooks, course.tapes)
    assert course.statuses() == {"01_toy": "no outputs"}


def test_a_marked_cell_stripped_by_hand_is_stale(recorded):
    path = recorded.path
    notebook = lessons.read(path)
    notebook.cells[3].outputs = []
    nbformat.write(notebook, path)
    assert record.state(path).status == "stale"


def test_tapes_without_a_lesson_with_foreign_rows_or_broken_are_stale(course):
    path = course.lesson("1")
    current = f"toy@{lessons.code_hash(path)}"
    good = row(32, kind="recorded", source=current)
    rows.write(course.tape("a", "gone"), [good])
    rows.write(course.tape("b"), [good, replace(good, source="toy@000000000000")])
    rows.write(course.tape("c"), [])
    rows.write(course.tape("d"), [good])
    course.tape("e").parent.mkdir()
    course.tape("e").write_text("{}\n")
    assert course.statuses() == {
        "01_toy": "no outputs",
        "a/gone.jsonl": "stale",
        "b/toy.jsonl": "stale",
        "c/toy.jsonl": "stale",
        "d/toy.jsonl": "recorded",
        "e/toy.jsonl": "stale",
    }


def test_banner_says_where_saved_outputs_are_from(recorded):
    shown = record.banner("01_toy", recorded.notebooks).data
    assert "recorded on NVIDIA H200, driver 570.1, torch 2.13.0, triton 3.7.1, 20" in shown
    assert "GPUs" not in shown
    edit(recorded.path, 4, "2")
    assert "No recorded outputs" in record.banner("01_toy", recorded.notebooks).data
    recorded.lesson(*CELLS)
    assert "No recorded outputs" in record.banner("01_toy", recorded.notebooks).data


def test_banner_says_that_a_recording_went_on_upon_another_machine(recorded, monkeypatch, tmp_path):
    tape, shown = recorded.tape(), ", on 2 GPUs of this kind one after the other; cells that you run"
    monkeypatch.setattr(record.places, "RECORDED", recorded.tapes)
    rows.write(tape, [replace(each, card=card) for each in rows.read(tape) for card in ("a", "b")])
    assert shown in record.banner("01_toy", recorded.notebooks).data
    stamp = record.read_stamp(lessons.look(recorded.path))
    monkeypatch.setenv(record.STAMP_VARIABLE, json.dumps(asdict(stamp)))
    monkeypatch.setenv(rows.TAPE, str(tmp_path / "toy@0.jsonl"))
    monkeypatch.setattr(device, "card", lambda: "b")
    assert "GPUs" not in record.banner("01_toy", recorded.notebooks).data, "before its first row"
    rows.write(tmp_path / "toy@0.jsonl", [replace(rows.read(tape)[0], card="a")])
    assert shown in record.banner("01_toy", recorded.notebooks).data


def test_roofs_are_kept_as_recorded(course, tmp_path):
    measured = tmp_path / "roofs.jsonl"
    rows.write(measured, [row(1, suite="roofs/copy")])
    record.record_roofs(measured, Machine(), course.tapes)
    assert rows.read(course.tape(lesson="roofs")) == [
        row(1, suite="roofs/copy", kind="recorded", source="labkit/machine.py")
    ]
    assert course.statuses() == {}, "roofs belong to no lesson, and do not go stale with one"


def test_roofs_stay_for_what_was_cut_short_with_them(course, tmp_path):
    """A recording that goes on upon another machine keeps its rows."""
    measured, unfinished = (
        tmp_path / "roofs.jsonl",
        course.work / Machine().slug / "toy@0123456789ab.jsonl",
    )
    for hour in (10, 12):
        rows.write(measured, [row(1, suite="roofs/copy", date=f"2026-01-01T{hour}:00:00+00:00")])
        record.record_roofs(measured, Machine(), course.tapes, course.work)
        if hour == 10:
            rows.write(unfinished, [row(1, date="2026-01-01T11:00:00+00:00")])
    assert len(rows.read(course.tape(lesson="roofs"))) == 2


def test_a_damaged_unfinished_tape_is_measured_again(course):
    path = course.lesson(*CELLS)
    unfinished(course, path)
    next(course.work.rglob("*.jsonl")).write_text("{}\n")
    assert course.record(path).passed
    assert course.measured() == ["32", "64"]


def test_nothing_stale_is_in_the_tree():
    states = [record.state(path) for path in lessons.find()] + list(record.tape_states().values())
    stale = [f"{state.name}: {state.detail}" for state in states if state.status == "stale"]
    assert not stale, f"run `labkit record --strip-stale`: {stale}"


def test_tapes_in_the_tree_are_not_ignored_by_git():
    ignored = subprocess.run(
        ["git", "check-ignore", "labkit/data/recorded/nvidia-h200/x.jsonl"],
        cwd=record.places.CHECKOUT,
        capture_output=True,
    )
    if ignored.returncode == 128:
        pytest.skip("this copy of the course is not a git checkout")
    assert ignored.returncode == 1
