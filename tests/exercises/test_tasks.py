"""A learner's session: verdicts, hints, what is kept, accidents, a notebook from end to end."""

import json
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit import notebooks, paths
from labkit.exercises import learner as learners
from labkit.exercises import tasks
from labkit.measure.correctness import CHECK_MIME
from labkit.run import execute

LESSON = "01_launch_overhead"
ATTEMPTS = "attempts/launch_overhead"
SOLUTIONS = notebooks.solution_cells(notebooks.resolve(LESSON))
MASK = SOLUTIONS["mask"]


def masked(mask):
    """The cell of the exercise, with this mask."""
    return MASK.replace("at < count", mask) + '\n\ntasks.check("mask", double_kernel)'


@pytest.fixture(autouse=True)
def kept(own_folders):
    """What is kept of the learner's answers, beside the notebooks; never in the cache."""
    yield own_folders / ".labkit"
    assert not (own_folders / "cache" / "attempts").exists()


@pytest.fixture
def learner(monkeypatch):
    """Makes a session that runs cells as a notebook's kernel would; the process that judges is shared."""

    class Session:
        def __init__(self, **options):
            self.tasks = tasks.Tasks(LESSON, **options)

        def run(self, source, answer=None, name="mask"):
            """What the verdict shows, by type."""
            shown = []
            monkeypatch.setattr(tasks, "_current_cell", lambda: source)
            monkeypatch.setattr(tasks, "display", shown.append)
            self.tasks.check(name, answer)
            return shown[0]._repr_mimebundle_()

    return Session


def hints(bundle):
    return re.findall(r"Hint (\d)</summary>", bundle["text/html"])


def attempts(kept):
    return sorted(path.name for path in (kept / ATTEMPTS / "mask").glob("*.py"))


def of_mask():
    """State and tries of the exercise that these tests are about."""
    return learners.table().set_index(["lesson", "exercise"]).loc[(LESSON, "mask")]


@pytest.mark.parametrize("name", tasks.judge.find(LESSON))
def test_the_untouched_cell_is_not_attempted_and_nothing_runs(learner, kept, monkeypatch, name):
    cells = [cell["source"] for cell in notebooks.read_json(notebooks.resolve(LESSON))["cells"]]
    (scaffold,) = [source for source in cells if f'tasks.check("{name}"' in source]
    monkeypatch.setattr(tasks.Tasks, "_judge", lambda *_: pytest.fail("a process was asked"))
    bundle = learner().run(f"# my notes\n\n{scaffold}\n", name=name)
    assert "not attempted" in bundle["text/plain"] and CHECK_MIME not in bundle
    assert not kept.exists()


def test_a_right_answer_is_kept_and_wins_over_the_solution_until_it_is_wrong(learner):
    one = learner()
    solution = one.tasks.answer("mask")
    assert one.run(masked("count > at"), "mine")[CHECK_MIME] == {"name": "mask", "passed": 7}
    assert one.tasks.answer("mask") == "mine"
    assert "✗" in one.run(masked("at <= count"), "broken")["text/plain"]
    assert one.tasks.answer("mask") is solution and one.tasks.answer("affine") is not None


def test_every_hint_is_there_to_unfold_and_the_solution_after_three_answers(learner, kept):
    one = learner()
    assert hints(one.run(masked("True"))) == ["1", "2"]
    assert hints(one.run(masked("at < cuont"))) == ["1", "2"], "a typo has hints of its own"
    assert "Solution</summary>" not in one.run(masked("True  # again"))["text/html"], "it was tried before"
    assert "Solution</summary>" in one.run(masked("at > -1"))["text/html"]
    assert "right" in one.run(masked("at < count"))["text/plain"]
    assert len(attempts(kept)) == 4, "each attempt's source is kept, and one that is run again counts once"


def test_progress_counts_tries_and_outlives_the_session_and_a_spoilt_file(learner, kept):
    one = learner()
    for mask in ("at <= count", "True", "at < count"):
        one.run(masked(mask))
    table = learners.table().set_index(["lesson", "exercise"])
    assert list(table.loc[LESSON, "mask"]) == ["✓ solved", 3]
    assert list(table.loc[LESSON, "affine"]) == ["○ open", 0]
    assert list(table.index.unique("lesson")) == [
        notebooks.name_of(path) for path in notebooks.find() if path.parent.name != notebooks.ASIDES
    ]
    one.run(masked("at <= count"))
    assert list(of_mask()) == ["✓ solved", 3], "it was solved, and this answer was tried before"
    file = kept / ATTEMPTS / "verdicts.json"
    file.write_text("{")
    assert "✓" in learner().run(masked("at < count"))["text/plain"]


def test_answers_go_into_the_folder_that_the_session_works_in(learner, kept, monkeypatch):
    inner = kept.parent / "images"
    inner.mkdir()
    kept.mkdir()
    monkeypatch.chdir(inner)
    learner().run(masked("at < count"))
    assert attempts(kept) == ["0001.py"] and not (inner / ".labkit").exists()


def test_a_cell_may_show_the_solution_or_take_an_answer_above_its_check(learner):
    above = 'tasks.solution("mask")\nassert tasks.answer("affine") is not None\n\n'
    assert "✓" in learner().run(above + masked("at < count"))["text/plain"]


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (masked("at < count").replace("tasks.check", "print"), "error", "without its last line"),
        (masked("at < ("), "error", "SyntaxError"),
        ("while True:\n    pass", "stopped", "\nline "),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("raise SystemExit(3)", "error", "SystemExit"),
        (masked("at < count").replace("y + at", "y + at + 10**12"), "crashed", "tl.store"),
        ("x = bytearray(10**15)", "error", "MemoryError"),
    ],
)
def test_accidents_are_verdicts_with_the_learners_line(learner, source, status, said):
    bundle = learner(limit_s=4.0).run(source)
    assert status in bundle["text/plain"].splitlines()[0] and said in bundle["text/plain"]
    assert "own cells of kernels" not in bundle["text/plain"], "the lesson is not to blame"


def test_an_exception_is_told_with_its_line_and_the_names_at_hand(learner):
    text = learner().run(masked("at < cuont"))["text/plain"]
    assert "name 'cuont' is not defined" in text and re.search(r"line \d: inside = at < cuont", text)
    assert "that the line sees: x, y, count, BLOCK, at?" in text


def test_what_an_answer_prints_is_shown_and_limited(learner, capsys):
    learner().run("print('seen')\nprint('x' * 10**6)\n" + masked("at < count"))
    said = capsys.readouterr().out
    assert said.startswith("seen") and len(said) < 30_000


def test_unknown_names_are_refused(learner):
    with pytest.raises(ValueError, match=r"name: .*'maks'"):
        learner().tasks.solution("maks")
    with pytest.raises(ValueError, match="99_nothing"):
        tasks.Tasks("99_nothing")


def test_in_a_notebook_a_cell_shows_its_verdict(tmp_path):
    cells = [
        "import labkit",
        f"tasks = labkit.lesson({LESSON!r})",
        "import torch, triton\nimport triton.language as tl",
        masked("at < count"),
        "tasks.progress()",
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "lesson.ipynb")
    execute.execute(tmp_path / "lesson.ipynb", tmp_path / "out.ipynb", 600)
    verdict, table = (cell.outputs for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells[-2:])
    assert len(verdict) == 1 and verdict[0].data[CHECK_MIME]["passed"] == 7
    assert "solved" in table[0].data["text/html"]


def test_attempts_are_whole_or_not_there(learner, kept, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    one = learner()
    monkeypatch.setattr(paths, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        one.run(masked("at < count"))
    assert attempts(kept) == []


def test_a_way_has_the_learners_name_where_it_is_right_and_runs_on_a_gpu(learner, monkeypatch):
    one = tasks.Tasks(LESSON)
    answer = lambda x, weight, bias: x * weight + bias  # noqa: E731 - what stands for it is compared
    monkeypatch.setattr("labkit.gpu.available", lambda: True)
    assert list(one.way("affine")) == ["the solution"]
    one._right["affine"] = answer, paths.CHECKOUT
    assert one.way("affine") == {"your kernel": answer} and one.way("affine", "mine") == {"mine": answer}
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    assert list(one.way("affine")) == ["the solution"], "interpreted, it is not timed"


def test_reset_forgets_the_verdict_and_puts_the_cell_as_the_lesson_has_it_below(learner, monkeypatch):
    one, inputs = learner(), []
    one.run(masked("at <= count"))
    shell = type("Shell", (), {"set_next_input": lambda self, cell, replace: inputs.append((cell, replace))})
    monkeypatch.setattr(tasks, "get_ipython", shell)
    one.tasks.reset("mask")
    ((cell, replaces),) = inputs
    assert "inside = ...  # for each place of the block" in cell and not replaces
    assert list(of_mask()) == ["○ open", 1]


def test_a_cell_that_hands_in_twice_or_has_dots_left_is_not_judged_and_says_why(learner, kept):
    one = learner()
    twice = one.run(masked("at <= count") + '\ntasks.check("mask", double_kernel)')["text/plain"]
    assert "not attempted" in twice and "twice" in twice
    dots = one.run(masked("at < count").replace("BLOCK + ", "BLOCK + ... + "))["text/plain"]
    assert "not attempted" in dots and "Line 3 of the cell still has three dots" in dots
    assert not attempts(kept)


def test_the_learners_own_kernel_cells_count(learner, kept):
    notebook = notebooks.read_json(notebooks.resolve(LESSON))
    for cell in notebook["cells"]:
        if "kernel" in notebooks.tags(cell):
            cell["source"] = "def helper(at, count):\n    return at < count\n"
    kept.parent.joinpath(f"{LESSON}.ipynb").write_text(json.dumps(notebook))
    source = MASK.replace("at < count", "helper(at, count)").replace(
        "@triton.jit", "helper = triton.jit(helper)\n\n\n@triton.jit"
    )
    assert "right" in learner().run(f'{source}\n\ntasks.check("mask", double_kernel)')["text/plain"]
