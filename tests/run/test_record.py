"""Recording and rendering a toy lesson: what is on its tape, what is measured again, what its pages show."""

import ast
import json
import os
import re
import shutil
import signal

import processes
import pytest
import stage
import torch

from labkit import notebooks, paths
from labkit.measure import stamp, tape
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
NUMBER = 'print(lab.measured("the answer", answer).value)'
CALLS = ["fused4", "eager4", "fused8", "eager8", "fused16", "eager16", "answer"]


@pytest.fixture
def toy(clone):
    """A lesson with two ways at three sizes and a number of its own."""
    return stage.lesson(clone, ("setup", SETUP), ("kernel", KERNEL), ("way", WAY), SHOW, NUMBER)


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


# ---- recording ---------------------------------------------------------------------------------------------


def test_rows_land_on_the_tape_with_what_they_use_and_only_changed_code_is_measured_again(toy, on_gpu):
    before = toy.read_bytes()
    result = stage.labkit("record")
    assert result.exit_code == 0 and "│ passed" in result.output, result.output
    assert set(stage.noted()) == set(CALLS) and toy.read_bytes() == before
    rows = {(row.way or row.title, row.axes.get("width")): row for row in recorded()}
    assert len(rows) == 7 and rows["the answer", None].value == 42
    fused = rows["fused", 8]
    assert (fused.median_us, fused.clock, fused.device) == (8.0, "graph", "Simulated")
    assert fused.uses == ("cell fused", "work affine") and rows["the answer", None].uses == ("cell answer",)
    assert all(row.stamp == stamp.stamp_of(toy, row.uses) for row in rows.values())
    assert not list(paths.BUILD.rglob("toy.jsonl")) and not list(paths.BUILD.rglob("*.before"))

    assert stage.labkit("record", "01").exit_code == 0 and stage.noted() == [] and len(recorded()) == 7
    edit(toy, "return scaled(x, w) + b", "return b + scaled(x, w)")
    assert stage.labkit("record").exit_code == 0
    # Ways are compared at one point, so a point with one stale way is measured again as a whole.
    assert set(stage.noted()) == {f"{way}{width}" for way in ("fused", "eager") for width in (4, 8, 16)}
    assert len(recorded()) == 7
    edit(toy, "width=[4, 8, 16]", "width=[8, 32]")
    assert stage.labkit("record").exit_code == 0
    assert set(stage.noted()) == {"fused32", "eager32"} and len(recorded()) == 5, "what is not asked for goes"


def test_a_number_of_a_function_that_is_handed_another_is_stale_with_either(clone, on_gpu):
    handed = "def doubled(value):\n    return 2 * value()\n"
    cell = 'print(lab.measured("twice", doubled, answer).value)'
    lesson = stage.lesson(clone, ("setup", SETUP), ("kernel", KERNEL), ("way", WAY), ("way", handed), cell)
    assert stage.labkit("record").exit_code == 0
    (row,) = recorded()
    assert row.value == 84 and row.uses == ("cell doubled", "cell answer")
    for old, new, value in (("return 42", "return 43", 86), ("2 * value()", "3 * value()", 129)):
        edit(lesson, old, new)
        assert stage.labkit("record", "--check").exit_code == 1
        assert stage.labkit("record").exit_code == 0 and recorded()[0].value == value


def test_interrupted_twice_and_continued_each_row_is_measured_once(toy, clone, monkeypatch):
    monkeypatch.setenv("STAGE_GPU", "1")
    edit(toy, "width=[4, 8, 16]", "width=[4, 8, 16, 32, 64, 128]")
    found, (unfinished, before) = (
        [],
        (paths.BUILD / "record/simulated" / f"toy.{end}" for end in ("jsonl", "before")),
    )
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = processes.python(stage.__file__, "record", env=os.environ | {"STAGE_PAUSE": "0.5"})
        known = len(tape.read(before)) + len(tape.read(unfinished))
        new = lambda known=known: len(tape.read(unfinished)) >= known + 2  # noqa: E731
        processes.wait_for(new, "rows", 60)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == code and "is kept: the same command goes on." in output, output
        found.append({row.key for row in (*tape.read(before), *tape.read(unfinished))})
        assert not list(paths.RECORDED.rglob("toy*")) and "Traceback" not in output, output
    assert found[0] < found[1]
    kept = {row.key: row.date for row in (*tape.read(before), *tape.read(unfinished))}
    stage.noted()
    process = processes.python(stage.__file__, "record")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    rows = recorded()
    assert len(rows) == len({row.key for row in rows}) == 13
    assert all(row.date == kept[row.key] for row in rows if row.key in kept)
    new = {f"{row.way}{row.axes['width']}" for row in rows if row.key not in kept and row.axes}
    assert set(stage.noted()) == new | {"answer"}, "what was measured before is not measured again"


def test_a_failing_lesson_leaves_its_tape_and_the_others_are_recorded(toy, clone, on_gpu):
    stage.labkit("record")
    kept = recorded()
    edit(toy, "print(lab", "1 / 0; print(lab")
    stage.lesson(clone, "print('fine')", name="02_fine")
    result = stage.labkit("record")
    assert result.exit_code == 1 and recorded() == kept
    assert "01_toy failed in cell 5" in result.output and "02_fine" in result.output


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
        assert stamp.uses_of(toy, "compiled", compiled) == ("cell eager",)
    monkeypatch.delattr("__main__.eager")
    with pytest.raises(ValueError, match="way 'compiled': 'eager' has to be a function of a cell"):
        stamp.uses_of(toy, "compiled", compiled)


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
    for name, original in (("KERNELS", stamp.KERNELS), ("WORK", stamp.WORK)):
        shutil.copytree(original, clone / name)
        monkeypatch.setattr(stamp, name, clone / name)
    shutil.copy(stamp.CLOCK[0], clone / "clocks.py")
    monkeypatch.setattr(stamp, "CLOCK", (clone / "clocks.py",))
    path = stage.lesson(clone, *LESSON)
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["source"] = "# 1. A toy\n\nProse."
    path.write_text(json.dumps(notebook, indent=1))
    paths.write_text(notebooks.solutions_file(path), SOLUTION)
    made = [tape.Row("One", way, uses=uses, stamp=stamp.stamp_of(path, uses)) for way, uses in ROWS.items()]
    tape.write(paths.RECORDED / "simulated" / "toy.jsonl", made)
    return clone


def add(path, statement):
    path.write_text(path.read_text() + f"\n{statement}\n")


def cell(old, new):
    return lambda folder, lesson: edit(lesson, old, new)


def file(name, statement="A = 1"):
    return lambda folder, lesson: add(folder / name, statement)


EDITS = {
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
    "the work": (file("WORK/affine.py"), AFFINE),
    "the clock": (file("clocks.py"), set(ROWS)),
}


@pytest.mark.parametrize("change", EDITS)
def test_an_edit_makes_exactly_the_rows_stale_that_reach_it(course, change):
    fresh = stage.labkit("record", "--check")
    assert fresh.exit_code == 0 and "Nothing is stale." in fresh.output
    make, wanted = EDITS[change]
    make(course, notebooks.resolve("01"))
    found = {line.rpartition(" ")[2] for line in record.stale()}
    assert found == wanted
    checked = stage.labkit("record", "--check")
    assert checked.exit_code == bool(wanted)
    assert all(f"01_toy on simulated: One, {way}" in checked.output for way in wanted)


def test_a_row_of_a_way_that_is_gone_is_stale(course):
    edit(notebooks.resolve("01"), "def normed(", "def normal(")
    assert [line.rpartition(" ")[2] for line in record.stale()] == ["normed"]
    edit(notebooks.solutions_file(notebooks.resolve("01")), "def mine(", "def yours(")
    (course / "WORK" / "linear.py").unlink()
    assert [line.rpartition(" ")[2] for line in record.stale()] == ["normed", "mine", "linear"]


# ---- rendering ---------------------------------------------------------------------------------------------


def test_render_shows_the_tape_and_writes_the_same_bytes_twice(toy):
    with pytest.MonkeyPatch.context() as patch:
        stage.set_up_gpu(patch.setattr, patch.setenv)
        assert stage.labkit("record").exit_code == 0
    stage.noted()
    sources = [cell["source"] for cell in notebooks.read_json(toy)["cells"]]
    found = []
    for _ in range(2):
        result = stage.labkit("render")
        assert result.exit_code == 0 and "01_toy: rendered in" in result.output, result.output
        found.append(toy.read_bytes())
    assert found[0] == found[1] and stage.noted() == [], "nothing is measured"
    notebook = notebooks.read(toy)
    assert [cell.source for cell in notebook.cells] == sources and "widgets" not in notebook.metadata
    claim, raced = (output.data for output in notebook.cells[-2].outputs)
    assert re.fullmatch(r"✓ held: eager takes 2 times as long \(recorded .*Simulated\)", claim["text/plain"])
    assert re.search("Recorded on .*Simulated", raced["text/plain"])
    assert notebook.cells[-1].outputs[0].text == "42.0\n"
    assert str(paths.BUILD.parent) not in toy.read_text()


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
    plus, minus, spaced = (stamp.dump(ast.parse(code)) for code in ("a + b", "a - b", "(a\n + b)  # c"))
    assert plus == spaced != minus
