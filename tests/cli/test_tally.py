"""`labkit tally`: what a class guessed and solved, from folders that may hold anything."""

import json
import os
from pathlib import Path

import pytest
import stage

from labkit.cli import tally
from labkit.widgets import guesses
from labkit.widgets.guesses import Question, SealedGuess

RATIO = Question("ratio at 160", "How many times faster?", 0.1, 1000, "x")
WIDTH = Question("a crossover", "From which width on?", 8, 16384, "width")
PLACE = "predictions/ratio-at-160.json"


@pytest.fixture(autouse=True)
def class_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def text(asked=RATIO, *, value=3.0, minute=0, seen=False, **other):
    """A file as `guesses.save_guess` writes it, or with something else in it."""
    guess = {"value": value, "sealed": f"2026-11-21T10:{minute:02}:00+01:00", "seen": seen, "revealed": False}
    content = {"name": asked.name, "question": asked.text, "guess": guess}
    return json.dumps(content | {"unit": asked.unit} | other)


def put(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def seal(learner, asked=RATIO, **other):
    """A sealed guess in a learner's folder."""
    return put(f"{learner}/predictions/{asked.slug}.json", text(asked, **other))


def run(*sources):
    return stage.labkit("tally", *map(str, sources))


def row(result, words=RATIO.text):
    """The cells of a line."""
    (line,) = (line for line in result.output.splitlines() if words in line and "│" in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_learners_own_guesses_with_their_units(class_room, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(class_room / "cache"))
    for asked, value, minute in ((RATIO, 12.0, 15), (WIDTH, 1200.0, 5)):
        guesses.save_guess(asked, SealedGuess(value, f"2026-11-21T10:{minute:02}:00+01:00"))
    result = run("cache")
    assert row(result) == [RATIO.text, "1", "0", "12", "12", "12", "×"]
    assert row(result, WIDTH.text) == [WIDTH.text, "1", "0", "1200", "1200", "1200", "width"]
    assert result.output.index(WIDTH.text) < result.output.index(RATIO.text), "as the class met them"


def test_folders_that_overlap_are_counted_once(class_room):
    for number, value in enumerate((1, 2, 4, 8, 16)):
        seal(f"class/group {number % 2}/{number}", value=value)
    result = run("class", "class/group 0", class_room / "class")
    assert row(result)[1:] == ["5", "0", "4", "1.74", "9.19", "×"]
    assert "Skipped" not in result.output
    assert row(run("class/group 0/0/predictions"))[1:4] == ["1", "0", "1"]


def test_who_had_seen_the_answer_is_counted_but_not_in_the_median(class_room):
    for number, value in enumerate((2, 8)):
        seal(f"fresh {number}", value=value)
    for number in range(3):
        seal(f"seen {number}", value=1.02, seen=True)
        seal(f"seen {number}", WIDTH, value=900, seen=True)
    seal("a", Question(RATIO.name, "How many times slower?", 0.1, 10, "x"))
    result = run(class_room)
    assert row(result)[1:4] == ["5", "3", "4"], "another text is another question"
    assert row(result, WIDTH.text)[1:4] == ["3", "3", "none"]


def test_exercises_are_counted_by_learner_with_the_median_of_their_tries(class_room):
    for learner, status, tries in (("ada", "right", 1), ("ben", "wrong", 5), ("eve", "right", 2)):
        home = f"class/{learner}/attempts/launch_overhead"
        put(f"{home}/verdicts.json", json.dumps({"floor": {"status": status, "wrong": [], "when": ""}}))
        for number in range(tries):
            put(f"{home}/floor/{number:04}.py", "never run")
    put("class/zoe/attempts/launch_overhead/clock/0001.py", "")
    result = run("class", "class/ada")
    assert row(result, "floor") == ["launch_overhead", "floor", "3", "2", "2"]
    assert row(result, "clock") == ["launch_overhead", "clock", "1", "0", "1"]
    put("class/eve/attempts/launch_overhead/verdicts.json", '{"floor": 3}')
    result = run("class")
    assert (
        row(result, "floor")[2:4] == ["3", "1"]
        and "eve/attempts/launch_overhead/verdicts.json: not what labkit writes there" in result.output
    )


# --- what is skipped ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"[" * 60_000, b'{"guess": {}}', b"\xff\xfe\x00"),
        *(text(value=value) for value in ("3", True, float("nan"), float("inf"), 0, -3)),
        *(text(value=int("7" * 400)), text(question=3), text(unit=["x"]), text(seen="no")),
        text() + " " * tally.MAX_FILE_BYTES,
    ],
)
def test_a_file_that_is_no_guess_is_named_and_the_rest_is_counted(content):
    seal("ada")
    put(f"eve/{PLACE}", content)
    result = run("ada", "eve")
    assert result.exit_code == 0 and row(result)[1] == "1" and "Skipped: 1.\n" in result.output
    assert f"  eve/{PLACE}: not what labkit writes there\n" in result.output


def test_links_and_pipes_are_not_followed(class_room):
    kept, own = seal("outside", value=500), seal("class/ada").parent
    for link, target in (("class/ben", class_room / "outside"), ("class/again", class_room / "class")):
        Path(link).symlink_to(target)
    for name, target in (("link", kept.absolute()), ("passwd", Path("/etc/passwd"))):
        (own / f"{name}.json").symlink_to(target)
    os.mkfifo(own / "pipe.json")
    result = run("class")
    assert row(result)[1:4] == ["1", "0", "3"] and "Skipped: 3." in result.output


def test_no_control_character_and_no_markup_reaches_the_terminal():
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m[bold red]hi[/] [link=http://x]y[/link]\r\n\u202e :skull: \ud800 \\"
    put("ada/predictions/x.json", text(question=evil, unit="\x1b[31m[red]" + "z" * 500))
    record = json.dumps({evil: {"status": "right"}})
    put("ada/attempts/x/verdicts.json", record)
    put("eve/\x1b[2J[red]\udcff/predictions/x.json", "no guess")
    result = run("ada", "eve")
    assert result.exit_code == 0 and len(result.output) < 9000
    assert not [sign for sign in result.output if not (sign.isprintable() or sign == "\n")]
    assert "[bold red]hi[/] [link=http://x]y[/link]" in " ".join(result.output.split())
    assert "  eve/ [2J[red] /predictions/x.json: " in result.output


def test_without_a_guess_a_sentence_says_where_they_are():
    put("folder/ratio-at-160.json", text())  # not in predictions/
    put("damaged/predictions/x.json", "{")
    for source in ("folder", "damaged"):
        result = run(source)
        assert result.exit_code == 1 and f"Error: {tally.NOTHING}" in result.output
    put("archive.tar.gz", "no folder")
    for source in ("nowhere", "archive.tar.gz"):
        result = run(source)
        assert result.exit_code == 2 and f"{source}: there is no such folder" in result.output
