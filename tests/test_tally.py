"""`labkit tally`: what a class guessed, from folders and archives that may hold anything."""

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit import cli, tally
from labkit.widgets import guesses
from labkit.widgets.guesses import Guess, Question

RATIO = Question("ratio at 160", "How many times faster?", 0.1, 1000, "x")
WIDTH = Question("a crossover", "From which width on?", 8, 16384, axis="width")
PLACE = "predictions/ratio-at-160.json"


@pytest.fixture(autouse=True)
def class_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def text(asked=RATIO, *, value=3.0, minute=0, seen=False, **other):
    """A file as `guesses.keep` writes it, or with something else in it."""
    guess = {"value": value, "sealed": f"2026-11-21T10:{minute:02}:00+01:00", "seen": seen, "revealed": False}
    content = {"name": asked.name, "question": asked.text, "guess": guess}
    return json.dumps(content | {"unit": asked.unit, "axis": asked.axis} | other)


def put(learner, content, slug=RATIO.slug):
    path = Path(learner) / "predictions" / f"{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def seal(learner, asked=RATIO, **other):
    """A sealed guess in a learner's folder."""
    return put(learner, text(asked, **other), asked.slug)


def member(name, content="", **changes):
    data = content if isinstance(content, bytes) else content.encode()
    info = tarfile.TarInfo(name)
    for key, value in {"size": len(data), **changes}.items():
        setattr(info, key, value)
    return info, data


def archive(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return path


def run(*sources):
    result = CliRunner().invoke(cli.cli, ["tally", *map(str, sources)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def row(result, question=RATIO):
    """The cells of a question's line."""
    (line,) = (line for line in result.output.splitlines() if question.text in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


# --- what is counted ------------------------------------------------------------------------------


def test_a_learners_own_guesses_with_their_units(class_room, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(class_room / "cache"))
    for asked, value, minute in ((RATIO, 12.0, 15), (WIDTH, 1200.0, 5)):
        guesses.keep(asked, Guess(value, f"2026-11-21T10:{minute:02}:00+01:00"))
    result = run("cache")
    assert row(result) == [RATIO.text, "1", "0", "12×", "12 to 12×"]
    assert row(result, WIDTH) == [WIDTH.text, "1", "0", "width 1200", "1200 to 1200"]
    assert "Guesses: 2; learners' folders that hold them: 1." in result.output
    assert result.output.index(WIDTH.text) < result.output.index(RATIO.text), "as the class met them"


def test_folders_of_folders_and_archives_are_counted_once_and_nothing_is_unpacked(class_room):
    files = []
    for number, value in enumerate((1, 2, 4, 8, 16)):
        seal(f"class/group {number % 2}/{number}", value=value)
        files.append(member(f"{number}/labkit/results/{PLACE}", text(value=value)))
        archive(f"{number}.tar.gz", files[-1])
    files.append(member("3/labkit/results/attempts/x.json", text(value=99)))
    archive("all.tar", *files, mode="w")
    there = sorted(class_room.rglob("*"))
    every = [f"{number}.tar.gz" for number in range(5)]
    for sources in (["class", "class/group 0", class_room / "class"], ["all.tar"], every):
        result = run(*sources)
        assert row(result) == [RATIO.text, "5", "0", "4×", "1.74 to 9.19×"], sources
        assert "learners' folders that hold them: 5." in result.output and "Skipped" not in result.output
    assert row(run("class/group 0/0/predictions"))[1:4] == ["1", "0", "1×"]
    assert sorted(class_room.rglob("*")) == there


def test_who_had_seen_the_answer_is_counted_but_not_in_the_median(class_room):
    for number, value in enumerate((2, 8)):
        seal(f"fresh {number}", value=value)
    for number in range(3):
        seal(f"seen {number}", value=1.02, seen=True)
        seal(f"seen {number}", WIDTH, value=900, seen=True)
    seal("a", Question(RATIO.name, "How many times slower?", 0.1, 10, "x"))
    result = run(class_room)
    assert row(result)[1:4] == ["5", "3", "4×"], "another text is another question"
    assert row(result, WIDTH)[1:] == ["3", "3", "none", ""]


# --- what is skipped ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"[" * 60_000, b'{"guess": {}}', b"\xff\xfe\x00"),
        *(text(value=value) for value in ("3", True, float("nan"), float("inf"), 0, -3, 1e300, 1e-300)),
        *(text(value=int("7" * 400)), text(name="?"), text(question=3), text(question="\x1b\x07")),
        *(text(unit=["x"]), text(seen="no"), text().replace("2026-11-21T", "soon ")),
        text().replace("2026-11-21T10:00:00+01:00", "0001-01-01T00:00:00"),
        text() + " " * tally.MOST_BYTES,
    ],
)
def test_a_file_that_is_no_guess_is_named_and_the_rest_is_counted(content):
    seal("ada")
    content = content if isinstance(content, bytes) else content.encode()
    put("eve", "").write_bytes(content)
    archive("ben.tar.gz", member(PLACE, content))
    result = run("ada", "eve", "ben.tar.gz")
    assert result.exit_code == 0 and row(result)[1] == "1" and "Skipped: 2.\n" in result.output
    why = "larger than 64 KiB" if len(content) > tally.MOST_BYTES else "no guess"
    assert all(f"  {name}/{PLACE}: {why}\n" in result.output for name in ("eve", "ben.tar.gz"))


def test_links_and_pipes_are_not_followed(class_room):
    kept, own = seal("outside", value=500), seal("class/ada").parent
    for link, target in (("class/ben", class_room / "outside"), ("class/again", class_room / "class")):
        Path(link).symlink_to(target)
    for name, target in (("link", kept.absolute()), ("passwd", Path("/etc/passwd"))):
        (own / f"{name}.json").symlink_to(target)
    os.mkfifo(own / "pipe.json")
    result = run("class")
    assert row(result)[1:4] == ["1", "0", "3×"] and "Skipped: 3." in result.output
    for name in ("link", "passwd", "pipe"):
        assert f"  class/ada/predictions/{name}.json: no regular file" in result.output
    with pytest.raises(OSError, match="symbolic link"):  # which has taken the file's place meanwhile
        tally._read(str(own / "link.json"))
    assert tally._read(str(own / "pipe.json")) == b"", "and nobody is waited for"


def test_no_control_character_and_no_markup_reaches_the_terminal():
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m[bold red]hi[/] [link=http://x]y[/link]\r\n\u202e :skull: \ud800 \\"
    put("ada", text(question=evil, unit="\x1b[31m[red]" + "z" * 500, axis="\x07[/]"))
    archive("eve.tar", member("\x1b[2J[red]\udcff/predictions/x.json", "no guess"), mode="w")
    result = run("ada", "eve.tar")
    assert result.exit_code == 0 and len(result.output) < 5000
    assert not [sign for sign in result.output if not (sign.isprintable() or sign == "\n")]
    said = "]0;owned[2J31m[bold red]hi[/] [link=http://x]y[/link] :skull: \\ "
    assert said in " ".join(result.output.split())
    assert "  eve.tar/[2J[red]/predictions/x.json: no guess" in result.output


# --- archives that lie ----------------------------------------------------------------------------


def test_members_that_are_no_files_or_lead_elsewhere(class_room):
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE)
    odd = [
        member(f"a/predictions/{n}.json", type=kind, linkname=f"b/{PLACE}") for n, kind in enumerate(kinds)
    ]
    names = (f"../../../ada/{PLACE}", f"/ada/{PLACE}", f"//ada/./{PLACE}", f"{class_room}/ada/{PLACE}")
    ways_up = [member(name, text(value=500)) for name in names]
    archive("eve.tar.gz", *odd, *ways_up, member(f"b/{PLACE}", text(value=3)))
    seal("ada", value=3)
    result = run("ada", "eve.tar.gz")
    assert row(result)[1] == "4", "one name for a file twice is one file, and no other learner's"
    assert "Skipped: 5." in result.output and result.output.count("no regular file") == 5


def header(kind, size, name="x"):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


FIRST = header(tarfile.REGTYPE, len(text()), f"a/{PLACE}") + text().encode().ljust(512, b"\0")


LIES = [
    (header(tarfile.XHDTYPE, 2**40), f"{2**40} bytes more in a header"),
    (header(tarfile.REGTYPE, 2**40), f"byte {2**40 + 1535} is behind, or beyond the limit"),
    (header(tarfile.REGTYPE, -512), ""),  # each version of Python finds something else wrong
    (header(tarfile.GNUTYPE_LONGNAME, 512) * 3000, "512 bytes more in a header"),
    (header(tarfile.XHDTYPE, 60_000) + b"1" * 60_000, "digits without an end in a header"),
]
DAMAGED = [
    (FIRST[:800], "unexpected end of data"),
    (FIRST, "it ends too early"),
    (gzip.compress(FIRST + os.urandom(9000))[:-300], ""),
    *((gzip.compress(FIRST + blocks + bytes(10240)), why) for blocks, why in LIES),
]


@pytest.mark.parametrize(("data", "why"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_lying_archive_is_named_and_the_rest_is_counted(data, why):
    Path("eve.tar").write_bytes(data)
    seal("ada")
    result = run("eve.tar", "ada")
    assert result.exit_code == 0 and row(result)[1] in ("1", "2") and "Skipped: 1." in result.output
    assert f"  eve.tar: no tar archive, or damaged ({why}" in result.output


def test_what_is_looked_at_has_limits(monkeypatch):
    for number in range(30):
        seal(f"class/{number}")
        seal(f"class/{number}", Question(f"q {number}", f"Question {number}?", 1, 10))
    monkeypatch.setattr(tally, "MOST_ROWS", 5)
    result = run("class")
    assert row(result)[1] == "30" and result.output.count("Question ") == 4
    monkeypatch.setattr(tally, "MOST_GUESSES", 10)
    result = run("class")
    assert "Guesses: 10;" in result.output and "Skipped: 50." in result.output
    assert result.output.count("there are 10 guesses before it") == tally.MOST_NAMED
    monkeypatch.setattr(tally, "MOST_ENTRIES", 30)
    result = run("class")
    assert result.exit_code == 1 and "  class: only its first 30 entries were looked at\n" in result.output


def test_without_a_guess_a_sentence_says_where_they_are():
    Path("folder").mkdir()
    Path("folder/ratio-at-160.json").write_text(text())  # not in predictions/
    put("damaged", "{")
    for source in ("folder", archive("empty.tar.gz"), "damaged"):
        result = run(source)
        assert result.exit_code == 1 and f"Error: {tally.NOTHING}" in result.output
    assert run("nowhere").exit_code == 2
