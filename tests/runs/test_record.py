"""Recording: outputs, stamp and tape into the tree, what goes on, what is stale, what a failure leaves."""

import json
import shutil
from dataclasses import asdict, dataclass, replace

import nbformat
import pytest
import stage
import taped
from nbformat.v4 import new_output

from labkit import paths
from labkit.lessons import notebooks, stamps
from labkit.measure import rows
from labkit.runs import record
from labkit.widgets import banner


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
    return taped.recorded(width=width, **{"kind": "live", **asdict(Machine()), **changes})


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
    "from labkit import paths\nfrom labkit.widgets import claim\nfrom labkit.widgets.banner import banner\n"
    "paths.NOTEBOOKS = paths.Path('.')\nbanner('01_toy')",
    MEASURE,
    "# NBVAL_CHECK_OUTPUT\nprint('bytes', 3)",
    "claim('{value} bytes', 3, True)",
]


BOTH = ["32", "64"]


class Course:
    """A folder of lessons with its tapes."""

    def __init__(self, root):
        self.root, self.notebooks = root, root / "notebooks"
        self.tapes, self.work = root / "recorded", root / "build" / "record"
        self.path = self.notebooks / "01_toy.ipynb"

    def lesson(self, *cells):
        stage.lesson(self.root, *cells)

    def record(self, machine=None, **options):
        return record.record(self.path, machine or Machine(), tapes=self.tapes, **options)

    def tape(self, device="nvidia-h200", lesson="toy"):
        return self.tapes / device / f"{lesson}.jsonl"

    def measured(self):
        file = self.notebooks / "measured"
        return file.read_text().split() if file.exists() else []

    def statuses(self):
        found = [stamps.recording_state(path) for path in notebooks.find()]
        found += record.tape_states(self.tapes).values()
        return {state.name: state.status for state in found}

    def edit(self, number, source=None, **changes):
        notebook = notebooks.read(self.path)
        cell = dict(notebooks.code_cells(notebook))[number]
        cell.update(changes, source=cell.source if source is None else source)
        nbformat.write(notebook, self.path)


@pytest.fixture
def course(clone):
    return Course(clone)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """One course with one recorded lesson, for all tests that only look at it or change it afterwards."""
    course = Course(tmp_path_factory.mktemp("recording"))
    course.lesson(*CELLS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(paths, "NOTEBOOKS", course.notebooks)
        patch.setattr(paths, "BUILD", course.root / "build")
        result = course.record()
    assert result.passed, result.failure
    return course


@pytest.fixture
def recorded(recording, course):
    """A copy of the recorded course."""
    shutil.copytree(recording.root, course.root, dirs_exist_ok=True)
    return course


def test_recording_puts_outputs_stamp_and_tapes_into_the_tree(recorded):
    notebook, text = notebooks.read(recorded.path), recorded.path.read_text()
    assert [cell.source for cell in notebook.cells] == ["# 01_toy", *CELLS]
    stamp = notebook.metadata.labkit.recorded
    assert {**asdict(Machine()), "hash": notebooks.code_hash(recorded.path)}.items() <= dict(stamp).items()
    shown = [cell for _, cell in notebooks.code_cells(notebook)]
    assert [cell.execution_count for cell in shown] == [1, 2, 3, 4]
    assert "recorded on NVIDIA H200, driver 570.1" in shown[0].outputs[0].data["text/html"]
    assert shown[2].outputs[0].text == "bytes 3\n"
    expected = {"kind": "recorded", "source": f"toy@{stamp.hash}"}
    assert rows.read(recorded.tape()) == [row(32, **expected), row(64, **expected)]
    assert recorded.statuses() == {"01_toy": "recorded", "nvidia-h200/toy.jsonl": "recorded"}
    # as Jupyter writes it, without a word of papermill's or of this machine
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert "papermill" not in text and str(recorded.root.parent) not in text


def test_what_is_recorded_is_skipped_unless_asked_again_or_on_another_device(recorded):
    before = recorded.path.read_text()
    assert recorded.record() is None and recorded.measured() == BOTH
    assert recorded.record(again=True).passed and recorded.measured() == BOTH * 2
    assert recorded.path.read_text() == before, "the same outputs are written the same way"
    assert recorded.record(Machine(device="NVIDIA L4")).passed
    assert recorded.tape().exists() and recorded.tape("nvidia-l4").exists()


@pytest.mark.parametrize(
    ("kept", "measured"),
    [([row(32)], ["64"]), ([row(32, torch="2.11.0"), row(64, driver="550")], BOTH), (["damaged"], BOTH)],
)
def test_a_recording_goes_on_with_rows_of_this_code_and_this_machine(course, kept, measured):
    course.lesson(*CELLS)
    unfinished = course.work / "nvidia-h200" / f"toy@{notebooks.code_hash(course.path)}.jsonl"
    if kept == ["damaged"]:
        paths.write_text(unfinished, "{}\n")
    else:
        rows.write(unfinished, kept)
        course.edit(4, "claim('{value} bytes', 4, True)")
        course.record()
        assert course.measured() == BOTH, "rows of other code do not count"
        (course.notebooks / "measured").unlink()
        course.edit(4, CELLS[3])
    assert course.record().passed and course.measured() == measured
    assert [one.shape["width"] for one in rows.read(course.tape())] == [32, 64]


FAILURES = ["1 / 0", "claim('{value} bytes', 3, False)", "claim('{value} x', None)"]
FAILURES += ["import os; os.kill(os.getpid(), 9)"]


@pytest.mark.parametrize("last", FAILURES)
def test_a_failure_leaves_notebook_and_tape_as_they_were(recorded, last):
    recorded.edit(4, last)
    files = (recorded.path, recorded.tape())
    before = [file.read_bytes() for file in files]
    assert not recorded.record().passed
    assert [file.read_bytes() for file in files] == before
    assert len(rows.read(next(recorded.work.rglob("*@*.jsonl")))) == 2, "kept for the next try"


EDITS = "import nbformat\nnb = nbformat.read('01_toy.ipynb', 4)\nnb.cells[1].source = 'x'\n"
EDITS += "nbformat.write(nb, '01_toy.ipynb')"
SILENT = "# NBVAL_CHECK_OUTPUT\nx = 1"


@pytest.mark.parametrize(("cell", "says"), [(EDITS, "edited"), (SILENT, "shows nothing: cell 1")])
def test_what_was_edited_meanwhile_or_shows_nothing_is_refused(course, cell, says):
    course.lesson(cell)
    with pytest.raises(ValueError, match=says):
        course.record()
    assert stamps.recording_state(course.path).status == "no outputs"


def test_changed_code_makes_outputs_and_tape_stale_until_they_are_stripped(recorded):
    notebook = notebooks.read(recorded.path)
    notebook.cells[0].source = "# Toy, reworded"
    nbformat.write(notebook, recorded.path)
    assert set(recorded.statuses().values()) == {"recorded"}, "changed prose changes nothing"
    recorded.edit(4, "claim('{value} bytes', 4, True)")
    stale = ["01_toy", "nvidia-h200/toy.jsonl"]
    assert recorded.statuses() == dict.fromkeys(stale, "stale")
    assert record.strip_stale(recorded.tapes, {}) == stale
    assert recorded.statuses() == {"01_toy": "no outputs"} and not recorded.tape().exists()
    cells = [cell for _, cell in notebooks.code_cells(notebooks.read(recorded.path))]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_outputs_without_a_stamp_and_marked_cells_without_outputs_are_stale(recorded):
    recorded.edit(3, outputs=[])
    assert recorded.statuses()["01_toy"] == "stale"
    recorded.lesson("print(1)")
    recorded.edit(1, outputs=[new_output("stream", text="1")])
    assert recorded.statuses()["01_toy"] == "stale"


def test_tapes_without_a_lesson_with_foreign_rows_or_broken_are_stale(course):
    course.lesson("1")
    good = row(32, kind="recorded", source=f"toy@{notebooks.code_hash(course.path)}")
    rows.write(course.tape("a", "gone"), [good])
    for device, kept in (("b", [good, replace(good, source="toy@000000000000")]), ("c", []), ("d", [good])):
        rows.write(course.tape(device), kept)
    paths.write_text(course.tape("e"), "{}\n")
    stale = dict.fromkeys(["a/gone.jsonl", "b/toy.jsonl", "c/toy.jsonl", "e/toy.jsonl"], "stale")
    assert course.statuses() == {"01_toy": "no outputs", "d/toy.jsonl": "recorded", **stale}


def test_the_banner_says_where_saved_outputs_are_from(recorded):
    said = "recorded on NVIDIA H200, driver 570.1, torch 2.13.0, triton 3.7.1, 20"
    assert said in banner.banner("01_toy").data
    recorded.edit(4, "2")
    assert "No recorded outputs" in banner.banner("01_toy").data


def test_nothing_stale_is_in_the_tree():
    states = [stamps.recording_state(path) for path in notebooks.find()] + list(record.tape_states().values())
    stale = [f"{state.name}: {state.detail}" for state in states if state.status == "stale"]
    assert not stale, f"run `labkit record --strip-stale`: {stale}"
