"""The learner's cell through the process that judges it: verdicts, attempts, accidents, a notebook."""

import os
import re
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from test_tasks_launch_overhead import ANSWERS, SCAFFOLDS, masked, solved

from labkit import attempt, claims, exercises, lessons, places, verdicts
from labkit.runs import execute
from labkit.tasks import Evidence, Task, Wrong
from labkit.verdicts import Verdict


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def session(monkeypatch):
    """Sessions that run cells as a notebook's kernel would, and give the verdict of each. To load the lesson
    takes seconds: the process that has done it is that of all tests."""

    class Session:
        def __init__(self, **options):
            self.tasks = exercises.of(ANSWERS.lesson, **options)

        def run(self, name, source, answer=None):
            monkeypatch.setattr(exercises, "_current_cell", lambda: source)
            shown = []
            monkeypatch.setattr(exercises, "_show", lambda verdict, _: shown.append(verdict))
            self.tasks.check(name, answer)
            (bundle,) = shown
            return bundle

    return Session


def attempts(cache, name="mask"):
    return sorted(path.name for path in (cache / "attempts" / lessons.key(ANSWERS.lesson) / name).glob("*"))


def hints(bundle):
    return re.findall(r"Hint (\d)</summary>", bundle["text/html"])


def test_the_untouched_cell_is_not_attempted_and_nothing_runs(session, cache, monkeypatch):
    monkeypatch.setattr(exercises, "judge", lambda _: pytest.fail("a process was started"))
    for name, source in SCAFFOLDS.items():
        bundle = session().run(name, f"# my notes\n\n{source}\n")
        assert "not attempted. Complete the cell and run it (Shift+Enter)" in bundle["text/plain"]
        assert "tasks.solution" not in bundle["text/plain"]
        assert verdicts.CHECK_MIME not in bundle
    assert not cache.exists()


def test_a_right_answer_is_evidence_and_data_and_kept(session, cache):
    mine = object()
    learner = session()
    bundle = learner.run("mask", solved("mask"), mine)
    assert bundle[verdicts.CHECK_MIME] == {"name": "mask", "passed": 6}
    assert (
        "right (attempt 1)" in bundle["text/plain"] and "read once and written once" in bundle["text/plain"]
    )
    assert "<details" not in bundle["text/html"]
    assert learner.tasks.answer("mask") is mine


def test_hints_grow_and_counting_goes_on(session, cache):
    learner = session()
    first = learner.run("mask", masked("True"))
    second = learner.run("mask", masked("None"))
    assert hints(first) == ["1"] and hints(second) == ["1", "2"]
    assert "wrong (attempt 1)" in first["text/plain"]
    assert verdicts.CHECK_MIME not in first
    restarted = session().run("mask", masked("at >= 0"))
    assert hints(restarted) == ["1", "2", "3"]
    assert attempts(cache) == ["0001.py", "0002.py", "0003.py"]
    assert (cache / "attempts" / lessons.key(ANSWERS.lesson) / "mask" / "0002.py").read_text() == masked(
        "None"
    )
    assert attempts(cache, "fuse") == []


def test_the_solution_is_named_at_once_and_folded_in_from_the_third_attempt_on(session):
    learner = session()
    shown = [learner.run("mask", masked(wrong)) for wrong in ("True", "at < conut", "None")]
    assert ["Solution</summary>" in bundle["text/html"] for bundle in shown] == [False, False, True]
    assert ["at &lt; count" in bundle["text/html"] for bundle in shown] == [False, False, True]
    named = "<code>tasks.solution(&quot;mask&quot;)</code> shows a solution at any time."
    assert [named in bundle["text/html"] for bundle in shown] == [True, True, False]
    assert all('tasks.solution("mask")' in bundle["text/plain"] for bundle in shown)


def test_a_cell_may_show_the_solution_or_take_an_answer_above_its_check(session):
    above = 'tasks.solution("mask")\nassert tasks.answer("fuse") is not None\n\n'
    assert "right (attempt 1)" in session().run("mask", above + solved("mask"))["text/plain"]


def test_attempts_of_a_lesson_that_had_another_number_are_carried_over(session, cache):
    old = cache / "attempts" / "88_launch_overhead" / "mask"
    old.mkdir(parents=True)
    (old / "0001.py").write_text("x")
    session()
    assert attempts(cache) == ["0001.py"] and not old.exists()


def test_an_answer_is_the_learners_only_while_its_last_verdict_is_right(session):
    learner = session()
    before = learner.tasks.answer("mask")
    learner.run("mask", solved("mask"), "mine")
    assert learner.tasks.answer("mask") == "mine"
    learner.run("mask", masked("True"), "broken")
    assert learner.tasks.answer("mask") is before
    assert before.fn.__module__.startswith("labkit_solutions")


def test_an_exception_is_told_with_the_learners_line(session):
    bundle = session().run("mask", masked("at < conut"))
    text = bundle["text/plain"]
    assert "error (attempt 1)" in text and "name 'conut' is not defined" in text
    assert re.search(r"line \d: mask = at < conut", text)
    assert "Hint 1: The line sees x, y, count, BLOCK, at. Is one of these what you call `conut`?" in text
    assert hints(bundle) == ["1"] and "Hints left, one for each attempt: 1" in bundle["text/html"]


def test_an_endless_loop_is_ended_and_prints_are_shown(session, cache, capsys):
    endless = "print('before', flush=True)\nwhile True: pass\n"
    bundle = session(limit_s=1).run("mask", endless + solved("mask"))
    assert "still running after 1 s" in bundle["text/plain"]
    assert "Hint 1: Does a loop never end?" in bundle["text/plain"]
    assert "line 2: while True: pass" in bundle["text/plain"]
    assert capsys.readouterr().out == "before\n"
    assert attempts(cache) == ["0001.py"]


def test_a_crash_takes_nothing_along(session, cache, capsys):
    learner = session()
    bundle = learner.run("mask", "print('before')\nimport ctypes\nctypes.string_at(0)\n" + solved("mask"))
    assert "SIGSEGV" in bundle["text/plain"] and "crashed" in bundle["text/plain"]
    assert "Hint 1: Did a load or store go to a wild address?" in bundle["text/plain"]
    assert "line 3: ctypes.string_at(0)" in bundle["text/plain"]
    assert "before" in capsys.readouterr().out
    assert "right (attempt 2)" in learner.run("mask", solved("mask"))["text/plain"]
    assert attempts(cache) == ["0001.py", "0002.py"]


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("import os; os._exit(3)\n", "status 3"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
        ("get_ipython()\n", "% and ! lines"),
    ],
)
def test_other_endings_are_a_sentence_too(session, ending, told):
    assert told in session().run("mask", ending + solved("mask"))["text/plain"]


def test_a_cell_that_skips_its_check_is_told(session):
    bundle = session().run("mask", "x = 1")
    assert "without calling its check" in bundle["text/plain"] and hints(bundle) == ["1"]


def test_an_interrupt_is_a_verdict(session):
    # The stop button's signal, sent to the waiting process once the loop has begun.
    endless = "import os, signal, threading\n"
    endless += f"threading.Timer(0.5, os.kill, ({os.getpid()}, signal.SIGINT)).start()\nwhile True: pass\n"
    learner = session()
    bundle = learner.run("mask", endless + solved("mask"))
    assert "interrupted" in bundle["text/plain"] and "You stopped it" in bundle["text/plain"]
    assert "line 3: while True: pass" in bundle["text/plain"]
    assert "right (attempt 2)" in learner.run("mask", solved("mask"))["text/plain"]


def test_a_flood_of_prints_is_cut(session, capsys):
    session().run("mask", "print('x' * 10**6)\n" + solved("mask"))
    out = capsys.readouterr().out
    assert len(out) < 21_000 and "was left out" in out


def test_an_answer_changes_nothing_for_the_next_one(session, capsys):
    changes = (
        "assert not hasattr(torch, 'left')\ntorch.left = 'by an attempt'\nimport os\nprint(os.getpid())\n"
    )
    for _ in range(2):
        assert "right" in session().run("mask", changes + solved("mask"))["text/plain"]
    assert len(set(capsys.readouterr().out.split())) == 2


def test_an_answer_that_ends_its_judge_costs_one_verdict(session):
    learner = session()
    fatal = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)\n"
    assert "crashed (attempt 1)" in learner.run("mask", fatal + solved("mask"))["text/plain"]
    exercises.judge(ANSWERS.lesson).close()
    assert "right (attempt 2)" in learner.run("mask", solved("mask"))["text/plain"]


def test_an_answer_is_told_how_much_memory_it_may_have(session):
    bundle = session().run("mask", "x = bytes(10**11)\n" + solved("mask"))
    assert "MemoryError: it needed more memory than the 8 GB that it may have" in bundle["text/plain"]
    assert "line 1: x = bytes" in bundle["text/plain"]


def test_a_lesson_that_does_not_load_is_a_finding(tmp_path):
    finding = exercises.Tasks("99_nothing", {}, False, 10.0)._finding("mask", tmp_path / "x.py")
    assert finding["status"] == "raised"
    assert "no lesson is called '99_nothing'" in finding["observed"]


def test_an_unknown_name_is_refused(session):
    with pytest.raises(ValueError, match="has no exercise 'maks'; it has mask, fuse, benchmark"):
        session().tasks.check("maks", None)
    with pytest.raises(ValueError, match="has no exercise"):
        session().tasks.solution("maks")
    with pytest.raises(ValueError, match="has no exercise"):
        session().tasks.answer("maks")


def test_outside_a_notebook_a_check_says_where_it_belongs(session):
    with pytest.raises(RuntimeError, match="run it in a notebook"):
        session().tasks.check("mask", None)


def test_the_digest_forgets_comments_and_white_space_only():
    given = SCAFFOLDS["mask"]
    same = [
        "\n\n# note\n" + given,
        given.replace("    ", "        "),
        given.replace(" = ", "  =  "),
        given + "\n",
    ]
    assert {exercises.digest(source) for source in same} == {exercises.digest(given)}
    assert exercises.digest(given.replace("...", "None")) != exercises.digest(given)
    assert exercises.digest("") != exercises.digest("x")
    assert len(exercises.digest(given)) == 12


# --- the judge itself, in this process


def check(answer):
    if answer == "wrong":
        raise Wrong("by-name", "It was wrong.", ("one", "two"))
    if answer == "broken":
        raise KeyError("in the checker")
    return Evidence("It is so.", 3)


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("tasks.check('toy', given)", {"status": "right", "evidence": "It is so.", "passed": 3}),
        (
            "tasks.check('toy', 'wrong')",
            {"status": "wrong", "reason": "by-name", "observed": "It was wrong.", "hints": ["one", "two"]},
        ),
        ("tasks.check('another', 'wrong')\ntasks.check('toy', 1)", {"status": "right"}),
        ("try:\n    tasks.check('toy', 1)\nexcept Exception:\n    pass", {"status": "right"}),
        ("tasks.check('toy', 1)\n1 / 0", {"status": "right"}),
        ("x = 1", {"status": "unchecked"}),
        (
            "x = 1\n1 / 0",
            {"status": "raised", "observed": "ZeroDivisionError: division by zero", "where": "line 2: 1 / 0"},
        ),
        ("x = (", {"status": "raised", "where": "line 1: x = ("}),
        (
            "tasks.check('toy', 'broken')",
            {
                "status": "raised",
                "observed": "KeyError: 'in the checker'",
                "where": "",
            },
        ),
    ],
)
def test_judge(tmp_path, source, finding):
    file = tmp_path / "cell.py"
    file.write_text(source)
    namespace = {"given": 5, "__name__": "a_lesson"}
    found = attempt.judge("01_toy", namespace, "toy", Task("Toy", check, "x", ""), file)
    assert found | finding == found
    assert namespace == {"given": 5, "__name__": "a_lesson"}
    assert sys.modules["labkit_attempt_toy"].given == 5 and "a_lesson" not in sys.modules


# --- the verdict as a page


def test_a_verdict_escapes_what_the_learner_wrote():
    bundle = Verdict(
        "m", "T", "error", "<b>", where="line 1: <i>", hints=("<u>",), solution="a < b"
    ).mimebundle()
    assert not re.search(r"<(b|i|u)>", bundle["text/html"])
    assert "a &lt; b" in bundle["text/html"]


def test_code_in_a_sentence_is_marked():
    assert "<code>at &lt; n</code>" in Verdict("m", "T", "wrong", "Not `at < n`.").mimebundle()["text/html"]


def test_an_endless_kernel_is_ended_at_its_own_line(session):
    endless = masked("at < count").replace(
        "    tl.store", "    while count > 0:\n        count += 1\n    tl.store"
    )
    text = session(limit_s=4).run("mask", endless)["text/plain"]
    assert re.search(r"line \d: (while count > 0:|count \+= 1)", text)


def test_every_status_has_a_symbol_and_its_word():
    for status, (symbol, _) in verdicts.LOOK.items():
        bundle = Verdict("m", "Title", status, "So it is.").mimebundle()
        assert symbol in bundle["text/html"] and f"<strong>{status}</strong>" in bundle["text/html"]
        assert bundle["text/plain"].startswith(f"{symbol} Title: {status}. So it is.")
    assert verdicts.LOOK["right"] == claims.LOOK[claims.HELD]


def test_what_counts_checks_reads_the_same_name():
    assert verdicts.CHECK_MIME == execute.CHECK_MIME


# --- in a notebook


def executed(folder, cells, **parameters):
    setup = new_code_cell(
        "import torch\nimport triton\nimport triton.language as tl\nfrom torch import Tensor\n"
        "from labkit import exercises",
        metadata={"tags": ["setup"]},
    )
    declared = new_code_cell("solve: bool = False  # run the solutions", metadata={"tags": ["parameters"]})
    begin = new_code_cell(f'tasks = exercises.of("{ANSWERS.lesson}", solve=solve)')
    path = folder / "01_tasks.ipynb"
    nbformat.write(new_notebook(cells=[setup, declared, begin, *map(new_code_cell, cells)]), path)
    result = execute.execute(path, folder / "out" / path.name, parameters)
    outputs = [cell.outputs for _, cell in lessons.code_cells(lessons.read(result.notebook_path))]
    return result, outputs[-len(cells) :]


def test_a_notebook_of_scaffolds_and_wrong_answers_runs_to_its_end(tmp_path):
    cells = [*SCAFFOLDS.values(), masked("True"), 'tasks.solution("fuse")', 'tasks.answer("mask").__name__']
    result, outputs = executed(tmp_path, cells)
    assert result.passed, result.failure
    assert result.checks_passed == 0
    texts = ["".join(o.data["text/plain"] for o in of_cell) for of_cell in outputs]
    assert ["not attempted" in text for text in texts] == [True, True, True, False, False, False]
    assert "wrong (attempt 1)" in texts[3]
    assert "tl.maximum" in texts[4] and texts[5] == "'double_kernel'"


def test_with_solve_the_solutions_run_and_the_learners_attempts_are_left_alone(tmp_path, cache):
    result, outputs = executed(tmp_path, list(SCAFFOLDS.values()), solve="true")
    assert result.passed, result.failure
    assert result.checks_passed == 6 + 69 + 6
    assert all("right" in of_cell[0].data["text/plain"] for of_cell in outputs)
    assert [attempts(cache, name) for name in SCAFFOLDS] == [["solution.py"]] * 3


def test_with_solve_a_solution_that_is_not_right_is_an_error(session, monkeypatch):
    monkeypatch.setattr(exercises, "solution_cells", lambda _: {"mask": masked("True").split("\n\n\n")[0]})
    with pytest.raises(AssertionError, match=r"the solution of .* has to be right: .*wrong"):
        session(solve=True).run("mask", SCAFFOLDS["mask"])


def test_the_cache_is_where_attempts_are_kept(cache):
    assert places.cache() == cache
