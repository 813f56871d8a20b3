"""Recording and rendering a toy lesson: what is on its tape, what is measured again, what its pages show."""

import ast
import json
import os
import re
import shutil
import signal
from dataclasses import replace

import processes
import pytest
import stage
import torch

from labkit import notebooks, paths
from labkit.measure import tape
from labkit.run import record

SETUP = "import stage\ngpu = stage.in_lesson()\nimport labkit as lab\nimport torch, time, os"
KERNEL = """
def scaled(x, w):
    return x * w


def unused(x):
    return x
"""
WAY = """
def timed(way, x, us):
    if gpu is not None:
        stage.note(f"{way}{x.shape[1]}")
        gpu.launch(4.0, us * x.shape[1])


def fused(x, w, b):
    timed("fused", x, 1.0)
    return scaled(x, w) + b


def eager(x, w, b):
    timed("eager", x, 2.0)
    return x * w + b


def answer():
    stage.note("answer")
    return 42
"""
SHOW = """
raced = lab.race("One", {"fused": fused, "eager": eager}, lab.work.affine, batch=2, width=[4, 8, 16])
lab.claim("eager takes {value} times as long", raced.speedup("fused", "eager", width=8), lambda r: r == 2)
raced
"""
HANDED = """
def doubled(value):
    return 2 * value()
"""
NUMBERS = 'print(lab.measured("the answer", answer).value, lab.measured("twice", doubled, answer).value)'
CALLS = ["fused4", "eager4", "fused8", "eager8", "fused16", "eager16", "answer"]


@pytest.fixture
def toy(clone):
    """A lesson with two ways at three sizes, a number of a function, and one of a function with another."""
    return stage.lesson(
        clone, ("setup", SETUP), ("kernel", KERNEL), ("way", WAY), ("way", HANDED), SHOW, NUMBERS
    )


@pytest.fixture
def on_gpu(monkeypatch):
    """This process and the kernels that it starts have a simulated GPU."""
    return stage.set_up_gpu(monkeypatch.setattr, monkeypatch.setenv)


def edit(path, old, new):
    """Replace a text in a lesson's cells, or in another file."""
    whole = path.read_text()
    if path.suffix == ".ipynb":
        old, new = (json.dumps(each)[1:-1] for each in (old, new))
    assert whole.count(old) == 1, f"{whole.count(old)} times {old!r}"
    path.write_text(whole.replace(old, new))


def recorded():
    """The rows on the toy lesson's tape."""
    return tape.read(paths.RECORDED / "simulated" / "toy.jsonl")


@pytest.fixture(scope="module")
def recordings():
    """What is on the tape of a toy lesson that was recorded once, for the tests that go on from there."""
    return []


@pytest.fixture
def taped(toy, recordings):
    """The toy lesson with its tape."""
    if not recordings:
        with pytest.MonkeyPatch.context() as patch:
            stage.set_up_gpu(patch.setattr, patch.setenv)
            assert stage.labkit("record").exit_code == 0
        stage.noted()
        recordings.append(recorded())
    tape.write(paths.RECORDED / "simulated" / "toy.jsonl", recordings[0])
    return toy


# ---- recording ---------------------------------------------------------------------------------------------


def test_rows_land_on_the_tape_with_what_they_use_and_only_changed_code_is_measured_again(
    toy, on_gpu, recordings
):
    before = toy.read_bytes()
    result = stage.labkit("record")
    assert result.exit_code == 0 and "│ passed" in result.output, result.output
    assert set(stage.noted()) == set(CALLS) and toy.read_bytes() == before
    rows = {(row.way or row.title, row.axes.get("width")): row for row in recorded()}
    assert len(rows) == 8 and rows["the answer", None].value == 42 and rows["twice", None].value == 84
    fused = rows["fused", 8]
    assert (fused.median_us, fused.clock, fused.device) == (8.0, "graph", "Simulated")
    assert fused.uses == ("cell fused", "work affine") and rows["the answer", None].uses == ("cell answer",)
    assert rows["twice", None].uses == ("cell doubled", "cell answer")
    assert all(row.stamp == tape.stamp_of(toy, row.uses) for row in rows.values())
    assert not list(paths.BUILD.rglob("toy.jsonl")) and not list(paths.BUILD.rglob("*.before"))
    recordings.append(recorded())

    edit(toy, "return scaled(x, w) + b", "return b + scaled(x, w)")
    assert stage.labkit("record").exit_code == 0
    # Ways are compared at one point, so a point with one stale way is measured again as a whole.
    assert set(stage.noted()) == {f"{way}{width}" for way in ("fused", "eager") for width in (4, 8, 16)}
    assert len(recorded()) == 8
    edit(toy, "width=[4, 8, 16]", "width=[8, 32]")
    edit(toy, "2 * value()", "3 * value()")
    assert [line.rpartition(" ")[2] for line in record.stale()] == ["twice"]
    assert stage.labkit("record", "01").exit_code == 0
    assert set(stage.noted()) == {"fused32", "eager32", "answer"} and len(recorded()) == 6, "others go"
    assert [row.value for row in recorded() if row.title == "twice"] == [126]
    edit(toy, "return 42", "return 43")
    assert {line.rpartition(": ")[2] for line in record.stale()} == {"the answer", "twice"}


def test_what_another_version_has_measured_is_measured_again(taped, on_gpu):
    other = {("the answer", None): "torch", ("fused", 8): "triton", ("eager", 16): "driver"}
    rows = [(row, other.get((row.way or row.title, row.axes.get("width")))) for row in recorded()]
    old = [replace(row, **{column: "1.0"}) if column else row for row, column in rows]
    tape.write(paths.RECORDED / "simulated" / "toy.jsonl", old)
    assert stage.labkit("record").exit_code == 0
    assert set(stage.noted()) == {"answer", "fused8", "eager8", "fused16", "eager16"}
    assert not any("1.0" in (row.torch, row.triton, row.driver) for row in recorded())


def test_interrupted_a_second_time_and_continued_each_row_is_measured_once(taped, on_gpu):
    unfinished, before = (paths.BUILD / "record/simulated" / f"toy.{end}" for end in ("jsonl", "before"))
    earlier = recorded()[:2]
    (paths.RECORDED / "simulated" / "toy.jsonl").unlink()
    tape.write(unfinished, earlier)  # what the first interruption has left
    process = processes.python(stage.__file__, "record", env=os.environ | {"STAGE_PAUSE": "0.5"})
    processes.wait_for(lambda: len(tape.read(unfinished)) >= len(earlier) + 2, "rows", 60)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143 and "is kept: the same command goes on." in output, output
    assert not list(paths.RECORDED.rglob("toy*")) and "Traceback" not in output, output
    kept = {row.key: row.date for row in (*tape.read(before), *tape.read(unfinished))}
    assert kept.items() > {row.key: row.date for row in earlier}.items() and len(kept) < 8
    stage.noted()
    result = stage.labkit("record")
    assert result.exit_code == 0, result.output
    rows = recorded()
    assert len(rows) == len({row.key for row in rows}) == 8
    assert all(row.date == kept[row.key] for row in rows if row.key in kept)
    new = {f"{row.way}{row.axes['width']}" for row in rows if row.key not in kept and row.axes}
    assert set(stage.noted()) == new | {"answer"}, "what was measured before is not measured again"


def test_a_failing_lesson_leaves_its_tape_and_the_others_are_recorded(taped, clone, on_gpu):
    kept = recorded()
    edit(taped, "print(lab", "1 / 0; print(lab")
    stage.lesson(clone, "print('fine')", name="02_fine")
    result = stage.labkit("record")
    assert result.exit_code == 1 and recorded() == kept
    assert "01_toy failed in cell 6" in result.output and "02_fine" in result.output


def test_what_cannot_be_stamped_is_refused_by_name(toy, on_gpu):
    edit(toy, '"eager": eager}', '"eager": lambda x, w, b: x * w + b}')
    result = stage.labkit("record")
    assert result.exit_code == 1 and "way 'eager': '<lambda>' has to be a function of a cell" in result.output


def test_what_torch_compile_makes_of_a_lessons_function_is_that_function(toy, monkeypatch):
    def eager(x, w, b):
        return x * w + b

    compiled = torch.compile(eager)
    for in_the_notebook in (eager, compiled):
        monkeypatch.setattr("__main__.eager", in_the_notebook, raising=False)
        assert tape.uses_of(toy, "compiled", compiled) == ("cell eager",)
    monkeypatch.delattr("__main__.eager")
    with pytest.raises(ValueError, match="way 'compiled': 'eager' has to be a function of a cell"):
        tape.uses_of(toy, "compiled", compiled)


# ---- what is stale -----------------------------------------------------------------------------------------

SOLUTION = "# %% [mine]\ndef mine(x, w, b):\n    return kernels.affine(x, w, b)\n"
LESSON = (
    ("setup", "import labkit as lab\nfrom labkit import kernels"),
    ("kernel", "def scaled(x, w):\n    return x * w  # elementwise\n\n\ndef unused(x):\n    return x"),
    (
        "way",
        "def fused(x, w, b):\n    return scaled(x, w) + b\n\ndef normed(x):\n    return kernels.rms_norm(x)",
    ),
    'idle = lab.guess("How many?", low=1, high=9)',
    'raced = lab.race("One", {"fused": fused}, lab.work.affine, batch=2, width=4)\nraced',
)
ROWS = {
    "fused": ("cell fused", "work affine"),
    "normed": ("cell normed",),
    "mine": ("solution mine", "work affine"),
    "labkit": ("labkit.kernels affine", "work affine"),
    "linear": ("work linear",),
}
AFFINE = {"fused", "mine", "labkit"}


@pytest.fixture
def course(clone, monkeypatch):
    """Copies of all that a stamp may reach, and a tape that is not stale."""
    for name, original in (("KERNELS", tape.KERNELS), ("WORK", tape.WORK)):
        shutil.copytree(original, clone / name)
        monkeypatch.setattr(tape, name, clone / name)
    shutil.copy(tape.CLOCK[0], clone / "clocks.py")
    monkeypatch.setattr(tape, "CLOCK", (clone / "clocks.py",))
    path = stage.lesson(clone, *LESSON)
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["source"] = "# 1. A toy\n\nProse."
    path.write_text(json.dumps(notebook, indent=1))
    paths.write_text(notebooks.solutions_file(path), SOLUTION)
    made = [tape.Row("One", way, uses=uses, stamp=tape.stamp_of(path, uses)) for way, uses in ROWS.items()]
    tape.write(paths.RECORDED / "simulated" / "toy.jsonl", made)
    return clone


def add(path, statement):
    path.write_text(path.read_text() + f"\n{statement}\n")


def cell(old, new):
    return lambda folder, lesson: edit(lesson, old, new)


def file(name, statement="A = 1"):
    return lambda folder, lesson: add(folder / name, statement)


def work(old, new):
    return lambda folder, lesson: edit(folder / "WORK" / "pointwise.py", old, new)


EDITS = {
    "nothing": (lambda folder, lesson: None, set()),
    "a comment": (cell("  # elementwise", "  # each with each"), set()),
    "a docstring": (cell("    return scaled", '    """Says."""\n    return scaled'), set()),
    "prose": (cell("Prose.", "Better prose."), set()),
    "a guess": (cell("How many?", "How few?"), set()),
    "a plot": (cell("\nraced", "\nraced.axes"), set()),
    "a kernel cell": (cell("return x * w", "return w * x"), {"fused"}),
    "a kernel that nothing uses": (cell("(x):\n    return x", "(x):\n    return 1 * x"), set()),
    "a way": (cell("kernels.rms_norm(x)", "1 * kernels.rms_norm(x)"), {"normed"}),
    "a solution": (file("notebooks/solutions/01_toy.py", "    A = 1"), {"mine"}),
    "a kernels file": (file("KERNELS/rms_norm.py"), {"normed"}),
    "its comment": (file("KERNELS/rms_norm.py", "# A = 1"), set()),
    "what it imports": (file("KERNELS/affine.py"), {"normed", "mine", "labkit"}),
    "an unused kernels file": (file("KERNELS/gru.py"), set()),
    "the work": (work("    return x * w + b\n", "    return b + x * w\n"), AFFINE),
    "another work of its file": (work("copy_inputs, torch.clone", "copy_inputs, torch.detach_copy"), set()),
    "the clock": (file("clocks.py"), set(ROWS)),
}


@pytest.mark.parametrize("change", EDITS)
def test_an_edit_makes_exactly_the_rows_stale_that_reach_it(course, change):
    make, wanted = EDITS[change]
    make(course, notebooks.resolve("01"))
    checked = stage.labkit("record", "--check")
    *found, summary = checked.output.splitlines()
    assert set(found) == {f"01_toy on simulated: One, {way}" for way in wanted}
    assert checked.exit_code == bool(wanted) and ("Nothing is stale." in summary) == (not wanted)


def test_a_row_of_a_way_that_is_gone_is_stale(course):
    edit(notebooks.resolve("01"), "def normed(", "def normal(")
    assert [line.rpartition(" ")[2] for line in record.stale()] == ["normed"]
    edit(notebooks.solutions_file(notebooks.resolve("01")), "def mine(", "def yours(")
    edit(course / "WORK" / "__init__.py", " linear, linear_gelu", " linear_gelu")
    assert [line.rpartition(" ")[2] for line in record.stale()] == ["normed", "mine", "linear"]


# ---- rendering ---------------------------------------------------------------------------------------------


def test_render_shows_the_tape_and_measures_nothing(taped):
    """That it writes the same bytes again is told with the real lessons, whose outputs it has saved."""
    sources = [cell["source"] for cell in notebooks.read_json(taped)["cells"]]
    result = stage.labkit("render")
    assert result.exit_code == 0 and "01_toy: rendered in" in result.output, result.output
    assert stage.noted() == []
    notebook = notebooks.read(taped)
    assert [cell.source for cell in notebook.cells] == sources and "widgets" not in notebook.metadata
    claim, raced = (output.data for output in notebook.cells[-2].outputs)
    assert re.fullmatch(r"✓ held: eager takes 2 times as long \(recorded .*Simulated\)", claim["text/plain"])
    assert re.search("Recorded on .*Simulated", raced["text/plain"])
    assert notebook.cells[-1].outputs[0].text == "42.0 84.0\n"
    assert str(paths.BUILD.parent) not in taped.read_text()


def test_a_lesson_that_fails_is_not_rendered_and_a_damaged_tape_is_a_sentence(toy, clone):
    damaged = paths.RECORDED / "simulated" / "toy.jsonl"
    paths.write_text(damaged, '{"title": "One"\n{"title": "Two"}\n')
    before = toy.read_bytes()
    result = stage.labkit("render")
    assert result.exit_code == 1 and toy.read_bytes() == before
    sentence = f"{damaged} is damaged or of another version of labkit"
    assert sentence in result.output and "`git restore`" in result.output
    result = stage.labkit("record", "--check")
    assert result.exit_code == 2 and sentence in result.output and "Traceback" not in result.output
    with damaged.open("w") as cut:
        cut.write('{"title": "One"}\n{"titl')
    assert [row.title for row in tape.read(damaged)] == ["One"], "a last line that was cut off is left out"


def test_another_operator_is_another_stamp_and_another_layout_is_none():
    plus, minus, spaced = (tape.dump(ast.parse(code)) for code in ("a + b", "a - b", "(a\n + b)  # c"))
    assert plus == spaced != minus
